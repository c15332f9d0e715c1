"""Parts of a connection's receiving half: header blocks put together, windows, streams that have ended."""

from pathways_runtime.transport.http2 import frames
from pathways_runtime.transport.http2.frames import ConnectionFault, ErrorCode
from pathways_runtime.transport.http2.sender import Sender
from pathways_runtime.transport.http2.streams import Stream

# Beyond these, a peer is wasting our time (and is told ENHANCE_YOUR_CALM).
_MAX_HEADER_BLOCK_BYTES = 1 << 16
_MAX_CONTINUATIONS = 64
_MAX_PEER_RESETS = 10_000

_MAX_REMEMBERED_RESETS = 10_000


class HeaderBlocks:
    """Puts HEADERS and CONTINUATION frames together."""

    def __init__(self) -> None:
        #: The stream whose block is not complete; 0: none.
        self.stream_id = 0
        #: Of the block that was completed last, or is not complete: its HEADERS had END_STREAM.
        self.ends_stream = False
        self._pieces: list[bytes] = []

    def begin(self, flags: int, stream_id: int, payload: bytes) -> bytes | None:
        """A HEADERS frame; the block if that is all of it.

        Raises:
            ConnectionFault: its parts do not fit into it.
        """
        at, end = 0, len(payload)
        if flags & frames.PADDED:
            if not payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without a padding length")
            at, end = 1, end - payload[0]
        if flags & frames.PRIORITY_FLAG:
            at += 5
        if at > end:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a HEADERS frame that is shorter than its parts")
        self.ends_stream = bool(flags & frames.END_STREAM)
        block = payload[at:end]
        if flags & frames.END_HEADERS:
            return block
        self.stream_id = stream_id
        self._pieces = [block]
        return None

    def go_on(self, flags: int, payload: bytes) -> bytes | None:
        """A CONTINUATION frame of the stream ``stream_id``; the block if it is complete.

        Raises:
            ConnectionFault: no block is open, or it is too long.
        """
        if not self.stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        pieces = self._pieces
        pieces.append(payload)
        if len(pieces) > _MAX_CONTINUATIONS or sum(map(len, pieces)) > _MAX_HEADER_BLOCK_BYTES:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block of too many bytes or frames")
        if not flags & frames.END_HEADERS:
            return None
        self.stream_id = 0
        self._pieces = []
        return b"".join(pieces)


class ReceiveWindows:
    """What the peer may send: bytes are taken off as they arrive, and credited in halves of a window.

    Half a window at once means few frames, and a peer that never runs dry while we keep up.
    """

    def __init__(self, stream_window_bytes: int, connection_window_bytes: int, sender: Sender) -> None:
        self._stream_bytes = stream_window_bytes
        self._connection_bytes = connection_window_bytes
        self._sender = sender
        self._window = connection_window_bytes

    def debit(self, stream: Stream, num_bytes: int) -> None:
        """Bytes arrived on an open stream.

        Raises:
            ConnectionFault: the peer has sent more than it may.
        """
        self.debit_connection(num_bytes)
        window = stream.receive_window - num_bytes
        if window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"stream {stream.id} has sent beyond its window")
        stream.receive_window = window
        if window < self._stream_bytes >> 1:
            self.credit(stream)

    def debit_connection(self, num_bytes: int) -> None:
        """Bytes arrived, perhaps on a stream that is gone.

        Raises:
            ConnectionFault: the peer has sent more than it may.
        """
        window = self._window - num_bytes
        if window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the peer has sent beyond the connection's window")
        if window < self._connection_bytes >> 1:
            self._sender.control.append(frames.window_update(0, self._connection_bytes - window))
            window = self._connection_bytes
        self._window = window

    def credit(self, stream: Stream) -> None:
        """Fill the stream's window up where half of it is used, unless its consumer wants no more."""
        increment = self._stream_bytes - stream.receive_window
        if increment > self._stream_bytes >> 1 and not stream.is_paused and not stream.is_ended_by_client:
            stream.receive_window += increment
            self._sender.control.append(frames.window_update(stream.id, increment))


class EndedStreams:
    """Streams that are gone: what may still come of them, and how they went."""

    def __init__(self) -> None:
        # Those that we ended while the client was still sending: what comes of them is not the client's fault.
        self._cut_ids: dict[int, None] = {}
        self._excess_peer_resets = 0

    def cut(self, stream_id: int) -> None:
        """We ended a stream whose client was still sending."""
        self._cut_ids[stream_id] = None
        if len(self._cut_ids) > _MAX_REMEMBERED_RESETS:
            del self._cut_ids[next(iter(self._cut_ids))]

    def completed(self) -> None:
        """A call ended well."""
        self._excess_peer_resets = max(0, self._excess_peer_resets - 1)

    def reset_by_peer(self) -> None:
        """The client reset a stream. Calls that end well make up for it.

        Raises:
            ConnectionFault: opening and resetting streams in a row is an attack (CVE-2023-44487).
        """
        self._excess_peer_resets += 1
        if self._excess_peer_resets > _MAX_PEER_RESETS:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many streams reset")

    def check(self, stream_id: int) -> None:
        """A frame came of a stream that is gone.

        Raises:
            ConnectionFault: its client must have known.
        """
        if stream_id not in self._cut_ids:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"a frame on stream {stream_id}, which is closed")
