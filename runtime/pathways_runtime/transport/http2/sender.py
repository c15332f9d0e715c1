"""What one connection sends: control frames at once, answers as the peer's windows allow, streams taking turns."""

import struct

from pathways_runtime.transport.frames import Buffer
from pathways_runtime.transport.http2 import frames, headers
from pathways_runtime.transport.http2.frames import ConnectionFault, ErrorCode, StreamFault
from pathways_runtime.transport.http2.streams import Stream

_U32 = struct.Struct(">I")

# How many bytes of one stream go out before it is another's turn.
_TURN_BYTES = 1 << 18


class Sender:
    """The sending half of a connection: the peer's windows and settings, and the streams with something to send."""

    def __init__(self) -> None:
        #: Frames without flow control, in order; they go before all DATA.
        self.control: list[Buffer] = []
        #: The send window of new streams, and the longest frame that the peer takes.
        self.initial_window = frames.DEFAULT_WINDOW_BYTES
        self.max_frame_bytes = frames.MIN_FRAME_BYTES
        # What may be sent on the connection.
        self._window = frames.DEFAULT_WINDOW_BYTES
        # Streams with something that their own windows let go, in turn.
        self._ready: dict[Stream, None] = {}
        self._is_first_block = True

    def enlist(self, stream: Stream) -> None:
        """Something of the stream may have become ready to go."""
        if (
            stream.opening_block is not None
            or (stream.queue.num_bytes and stream.send_window > 0)
            or (stream.closing_block is not None and not stream.queue.num_bytes)
        ):
            self._ready[stream] = None

    def forget(self, stream: Stream) -> None:
        """Send nothing more of the stream."""
        self._ready.pop(stream, None)

    def close_now(self, stream: Stream, block: bytes) -> None:
        """End the stream with a header block, in front of all DATA."""
        self._ready.pop(stream, None)
        self._close(stream, block, self.control)

    def take(self, limit_bytes: int, closed: list[Stream]) -> list[Buffer]:
        """What goes next, in order: control frames, and answers up to about ``limit_bytes``; empty: nothing may go.

        Streams whose answer is complete thereby are appended to ``closed``.
        """
        out, self.control = self.control, []
        ready = self._ready
        while ready and limit_bytes > 0:
            progress = False
            for stream in tuple(ready):
                taken = self._take_turn(stream, out, closed)
                limit_bytes -= taken
                progress = progress or taken > 0
                if limit_bytes <= 0:
                    break
            if not progress:
                break
        return out

    def handle_window_update(self, stream: Stream | None, payload: bytes) -> None:
        """The peer gives credit: to a stream, or (None) to the connection.

        Raises:
            ConnectionFault, StreamFault: it is 0, or too much.
        """
        increment = _U32.unpack(payload)[0] & frames.MAX_WINDOW_BYTES
        if stream is None:
            if not increment:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0 bytes")
            self._window += increment
            if self._window > frames.MAX_WINDOW_BYTES:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window overflows")
            return
        if not increment:
            raise StreamFault(stream.id, ErrorCode.PROTOCOL_ERROR, "a WINDOW_UPDATE of 0 bytes")
        stream.send_window += increment
        if stream.send_window > frames.MAX_WINDOW_BYTES:
            raise StreamFault(stream.id, ErrorCode.FLOW_CONTROL_ERROR, "the stream's window overflows")
        self.enlist(stream)

    def handle_settings(self, payload: bytes, streams: dict[int, Stream]) -> None:
        """The peer's settings. We use no header table, open no streams and send short headers: not all bind us.

        Raises:
            ConnectionFault: a value is not allowed.
        """
        for setting, value in frames.parse_settings(payload):
            if setting == frames.INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW_BYTES:
                    raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
                self._change_initial_window(value, streams)
            elif setting == frames.MAX_FRAME_SIZE:
                if not frames.MIN_FRAME_BYTES <= value <= frames.MAX_FRAME_BYTES:
                    raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a longest frame of {value} bytes")
                self.max_frame_bytes = value
            elif setting == frames.ENABLE_PUSH and value > 1:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")
        self.control.append(frames.SETTINGS_ACK)

    def _change_initial_window(self, value: int, streams: dict[int, Stream]) -> None:
        """Applies to open streams too, whose windows may become negative (RFC 9113, section 6.9.2)."""
        change = value - self.initial_window
        self.initial_window = value
        for stream in streams.values():
            stream.send_window += change
            if stream.send_window > frames.MAX_WINDOW_BYTES:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"the window of stream {stream.id} overflows")
            self.enlist(stream)

    def _take_turn(self, stream: Stream, out: list[Buffer], closed: list[Stream]) -> int:
        """Output of one stream, up to a turn's bytes; how many. Unlists it, or puts it behind the others."""
        del self._ready[stream]
        taken = 0
        if stream.opening_block is not None:
            taken += self._send_block(stream.id, stream.opening_block, False, out)
            stream.opening_block = None
        queue = stream.queue
        max_frame_bytes = min(self.max_frame_bytes, _TURN_BYTES)
        while queue.num_bytes:
            length = min(queue.num_bytes, max_frame_bytes, self._window, stream.send_window)
            if length <= 0 or taken >= _TURN_BYTES:
                # Without a window of its own, WINDOW_UPDATE will list it again.
                if stream.send_window > 0:
                    self._ready[stream] = None
                return taken
            out.append(frames.frame_header(length, frames.DATA, 0, stream.id))
            queue.take(length, out)
            self._window -= length
            stream.send_window -= length
            taken += length
        if stream.closing_block is not None:
            taken += self._close(stream, stream.closing_block, out)
            closed.append(stream)
        return taken

    def _close(self, stream: Stream, block: bytes, out: list[Buffer]) -> int:
        taken = self._send_block(stream.id, block, True, out)
        if not stream.is_ended_by_client:
            # The client need not send the rest (RFC 9113, section 8.1).
            out.append(frames.rst_stream(stream.id, ErrorCode.NO_ERROR))
        return taken

    def _send_block(self, stream_id: int, block: bytes, end_stream: bool, out: list[Buffer]) -> int:
        if self._is_first_block:
            block = headers.NO_TABLE + block
            self._is_first_block = False
        out.append(frames.header_block(stream_id, block, end_stream, self.max_frame_bytes))
        return len(block)
