"""One HTTP/2 connection that carries gRPC calls, the server's side, without I/O.

The shell receives into ``writable()``, reports with ``advance(n)`` and gets events; it answers with ``send_messages``,
``finish``, ``reset``; and it writes what ``take_output`` gives. Nothing here blocks or raises for what a peer does: a
connection that the peer has broken says so in its last event, and answers in a stream that is gone are dropped.

Flow control, receiving: bytes are credited when they arrive, to the connection always and to their stream unless it is
paused. So a paused stream holds its client back after ``stream_window_bytes``, and holds back no other stream.
Flow control, sending: answers wait per stream for both windows, and streams take turns.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pathways_runtime.core.status import Code
from pathways_runtime.transport.frames import Buffer
from pathways_runtime.transport.http2 import frames, grpc_messages, headers
from pathways_runtime.transport.http2.events import (
    AnyEvent,
    ConnectionFailed,
    GoAwayReceived,
    MessagesReceived,
    RequestEnded,
    RequestReceived,
    StreamCancelled,
)
from pathways_runtime.transport.http2.frames import ConnectionFault, ErrorCode, StreamFault
from pathways_runtime.transport.http2.grpc_messages import (
    CallFault,
    MalformedRequest,
    Metadata,
    NotGrpc,
    Request,
)
from pathways_runtime.transport.http2.receiving import EndedStreams, HeaderBlocks, ReceiveWindows
from pathways_runtime.transport.http2.sender import Sender
from pathways_runtime.transport.http2.streams import Message, Stream

# A frame's header and, where it is DATA at a message's start, the message's prefix.
_HEADER_AND_PREFIX = struct.Struct(">IBIBI")
_U32 = struct.Struct(">I")

_BUFFER_BYTES = 1 << 18
# What is read at once. Some hundred small messages: enough to share the cost of a read, few enough that their answers,
# and what else happens on the loop, do not wait long.
_READ_BYTES = 1 << 15
# A DATA frame longer than this is taken piece by piece; shorter frames are parsed once they are complete.
_WHOLE_FRAME_BYTES = 1 << 16
# Memory of a message is received into directly where at least this much of it is missing.
_MIN_DIRECT_BYTES = 1 << 14
# A peer that reads so few of the answers to its frames is cut off.
_MAX_UNSENT_CONTROL_FRAMES = 10_000


class Limits(NamedTuple):
    """What a client may do.

    Attributes:
        stream_window_bytes: how far a client may run ahead of a paused stream; also bounds the speed of one stream.
        connection_window_bytes: what may be under way on the connection.
        max_frame_bytes: longest frame; a client that cuts its messages into fewer frames spares both sides work.
        max_streams: calls at once.
        max_header_list_bytes: names and values of a call's headers, 32 bytes added for each.
        max_message_bytes: one message.
    """

    stream_window_bytes: int = 1 << 22
    connection_window_bytes: int = 1 << 24
    max_frame_bytes: int = 1 << 22
    max_streams: int = 1024
    max_header_list_bytes: int = 1 << 16
    max_message_bytes: int = (1 << 31) - 1


class ServerConnection:
    """The server's state of one connection. See the module for how it is used."""

    def __init__(self, limits: Limits = Limits()) -> None:  # noqa: B008
        self._limits = limits
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._needs_preface = True
        self._needs_settings = True
        self._is_failed = False

        # A DATA frame that is taken piece by piece: its bytes to come, padding after them, its stream if that is open.
        self._data_left = 0
        self._padding_left = 0
        self._data_stream: Stream | None = None
        self._data_ends_stream = False
        # Memory of a message that writable() gave out instead of the buffer.
        self._receives_into_message = False

        self._blocks = HeaderBlocks()
        self._header_decoder: headers.HeaderDecoder[Request] = headers.HeaderDecoder(
            limits.max_header_list_bytes, grpc_messages.parse_request
        )

        self._streams: dict[int, Stream] = {}
        self._last_stream_id = 0
        self._ended = EndedStreams()
        self._refuses_streams = False
        self._events: list[AnyEvent] = []
        self._batched: list[Stream] = []

        self._sender = Sender()
        self._sender.control += (
            frames.settings(
                {
                    frames.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    frames.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                    frames.MAX_FRAME_SIZE: limits.max_frame_bytes,
                    frames.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
                }
            ),
            frames.window_update(0, limits.connection_window_bytes - frames.DEFAULT_WINDOW_BYTES),
        )
        self._windows = ReceiveWindows(limits.stream_window_bytes, limits.connection_window_bytes, self._sender)

    # Receiving.

    def writable(self) -> memoryview:
        """Memory to receive into, never empty; valid until ``advance``."""
        if self._data_left and self._start == self._end and self._data_stream is not None:
            vacant = self._data_stream.reader.vacant()
            if min(len(vacant), self._data_left) >= _MIN_DIRECT_BYTES:
                self._receives_into_message = True
                return vacant[: self._data_left]
        self._receives_into_message = False
        if self._start == self._end:
            self._start = self._end = 0
        elif _BUFFER_BYTES - self._end < _BUFFER_BYTES >> 1:
            # What is unread is less than a frame.
            unread = self._end - self._start
            self._view[:unread] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, unread
        return self._view[self._end : self._end + _READ_BYTES]

    def advance(self, num_bytes: int) -> list[AnyEvent]:
        """``num_bytes`` were received into the memory that ``writable`` gave; what has happened thereby.

        After ConnectionFailed, which is the last event, nothing is read any more.
        """
        if self._is_failed:
            return []
        events: list[AnyEvent] = []
        self._events = events
        try:
            if self._receives_into_message:
                self._receives_into_message = False
                self._advance_in_message(num_bytes)
            else:
                self._end += num_bytes
                self._parse()
        except ConnectionFault as fault:
            self._fail(fault)
        self._end_batches()
        if len(self._sender.control) > _MAX_UNSENT_CONTROL_FRAMES and not self._is_failed:
            self._fail(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "the peer does not read the answers to its frames"))
        self._events = []
        return events

    def receive_into(self, stream_id: int, allocate: Callable[[int], memoryview | None]) -> None:
        """Ask where long messages of this stream shall lie.

        Args:
            allocate: called with the length of a message of which not all is there yet, when its consumer has been
                given all messages before it. Gives the memory, which comes back as the message; or None.
        """
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.reader.allocate = allocate

    def pause(self, stream_id: int) -> None:
        """Give out no more events of this stream (but StreamCancelled), and hold its client back."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.is_paused = True

    def resume(self, stream_id: int) -> None:
        """Undo ``pause``. What has happened on the stream meanwhile is to be had from ``next_held``, all of it."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.is_paused:
            stream.is_paused = False
            self._windows.credit(stream)

    def next_held(self, stream_id: int) -> AnyEvent | None:
        """The oldest event that waits; None if there is none or the stream is paused (again)."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.is_paused or not stream.held:
            return None
        return stream.held.popleft()

    # Sending.

    def send_messages(self, stream_id: int, messages: Iterable[Message], metadata: Metadata = ()) -> None:
        """Answer with these, in order. They must not change until they are sent.

        ``metadata`` goes in front of the first message of the call; later it is ignored.

        Raises:
            ValueError: metadata that cannot be a header.
        """
        stream = self._streams.get(stream_id)
        if stream is None or stream.closing_block is not None:
            return
        if not stream.has_answered:
            stream.opening_block = grpc_messages.response_block(metadata)
            stream.has_answered = True
        append = stream.queue.append
        for message in messages:
            append(message)
        self._sender.enlist(stream)

    def send_metadata(self, stream_id: int, metadata: Metadata = ()) -> None:
        """Begin the answer with headers alone, so that the client knows that the call is being served."""
        self.send_messages(stream_id, (), metadata)

    def finish(self, stream_id: int, code: int = Code.OK, message: str = "", metadata: Metadata = ()) -> None:
        """End the call with a status, after the messages that were sent.

        Raises:
            ValueError: metadata that cannot be a header.
        """
        stream = self._streams.get(stream_id)
        if stream is None or stream.closing_block is not None:
            return
        is_only = not stream.has_answered
        stream.closing_block = grpc_messages.trailers_block(code, message, metadata, is_only=is_only)
        stream.reader.discard()
        stream.held.clear()
        self._sender.enlist(stream)

    def reset(self, stream_id: int, code: ErrorCode = ErrorCode.CANCEL) -> None:
        """End the call at once; what waits to be sent is dropped."""
        if (stream := self._streams.get(stream_id)) is not None:
            self._reset(stream, code)

    def unsent_bytes(self, stream_id: int) -> int:
        """Bytes of this call's answer that wait for windows or for ``take_output``; 0 for a stream that is gone."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.queue.num_bytes

    def go_away(self) -> None:
        """Refuse new calls, and say so; those that run go on."""
        if not self._refuses_streams and not self._is_failed:
            self._refuses_streams = True
            self._sender.control.append(frames.goaway(self._last_stream_id, ErrorCode.NO_ERROR, "shutting down"))

    def open_streams(self) -> Sequence[int]:
        """The streams whose calls are not over, in the order of their beginning."""
        return tuple(self._streams)

    def take_output(self, limit_bytes: int) -> list[Buffer]:
        """What to write next, in order: control frames, answers up to about ``limit_bytes``; empty: nothing may go."""
        closed: list[Stream] = []
        output = self._sender.take(limit_bytes, closed)
        for stream in closed:
            self._forget_closed(stream)
        return output

    # Parsing.

    def _parse(self) -> None:
        """Handle all frames that the buffer holds. Ends with _start at the first byte that waits for more."""
        if self._needs_preface and not self._take_preface():
            return
        if self._data_left or self._padding_left:
            self._take_data()
            if self._data_left or self._padding_left:
                return
        buffer = self._buffer
        streams = self._streams
        unpack = _HEADER_AND_PREFIX.unpack_from
        position, end = self._start, self._end
        try:
            while True:
                # What most frames are: DATA that is one whole message of a stream at a message's start.
                if end - position >= 14:
                    length_and_kind, flags, stream_id, compressed, message_bytes = unpack(buffer, position)
                    if (
                        length_and_kind == (message_bytes + 5) << 8
                        and not (flags or compressed)
                        and message_bytes < _WHOLE_FRAME_BYTES
                        and stream_id in streams
                        and not self._blocks.stream_id
                    ):
                        frame_end = position + 14 + message_bytes
                        if frame_end > end:
                            return
                        stream = streams[stream_id]
                        if stream.reader.is_at_boundary and not stream.is_ended_by_client:
                            self._windows.debit(stream, message_bytes + 5)
                            batch = stream.batch
                            if batch is None:
                                batch = self._begin_batch(stream)
                            batch.append(bytes(self._view[position + 14 : frame_end]))
                            position = frame_end
                            continue
                elif end - position < frames.HEADER_BYTES:
                    return
                length_and_kind, flags, stream_id = frames.HEADER.unpack_from(buffer, position)
                length, kind = length_and_kind >> 8, length_and_kind & 0xFF
                if length > self._limits.max_frame_bytes:
                    raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
                # The highest bit is reserved, and ignored.
                stream_id &= frames.MAX_STREAM_ID
                self._check_sequence(kind, flags, stream_id)
                frame_end = position + frames.HEADER_BYTES + length
                if length > _WHOLE_FRAME_BYTES:
                    if kind != frames.DATA:
                        raise ConnectionFault(
                            ErrorCode.ENHANCE_YOUR_CALM, f"a frame of type {kind} with {length} bytes"
                        )
                    if flags & frames.PADDED and end - position <= frames.HEADER_BYTES:
                        return
                    position += frames.HEADER_BYTES
                    self._start = position
                    self._begin_data(stream_id, flags, length)
                    self._take_data()
                    position = self._start
                    if self._data_left or self._padding_left:
                        return
                    continue
                if frame_end > end:
                    return
                self._handle_frame(kind, flags, stream_id, position + frames.HEADER_BYTES, frame_end)
                position = frame_end
        finally:
            self._start = position

    def _take_preface(self) -> bool:
        """Whether the connection preface is there; it is consumed."""
        received = self._view[self._start : min(self._end, self._start + len(frames.PREFACE))]
        if received != frames.PREFACE[: len(received)]:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2 with prior knowledge")
        if len(received) < len(frames.PREFACE):
            return False
        self._start += len(frames.PREFACE)
        self._needs_preface = False
        return True

    def _check_sequence(self, kind: int, flags: int, stream_id: int) -> None:
        """Frames that may not come now, whatever they hold."""
        if self._needs_settings:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._needs_settings = False
        if self._blocks.stream_id and (kind != frames.CONTINUATION or stream_id != self._blocks.stream_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame of type {kind} within a header block")

    def _handle_frame(self, kind: int, flags: int, stream_id: int, at: int, end: int) -> None:
        try:
            if kind == frames.DATA:
                self._start = at
                self._begin_data(stream_id, flags, end - at)
                self._take_data()
            elif kind == frames.HEADERS:
                self._handle_headers(flags, stream_id, bytes(self._view[at:end]))
            elif kind == frames.CONTINUATION:
                self._handle_continuation(flags, stream_id, bytes(self._view[at:end]))
            elif kind == frames.WINDOW_UPDATE:
                self._handle_window_update(stream_id, bytes(self._view[at:end]))
            elif kind == frames.PING:
                self._handle_ping(flags, stream_id, bytes(self._view[at:end]))
            elif kind == frames.SETTINGS:
                self._handle_settings(flags, stream_id, bytes(self._view[at:end]))
            elif kind == frames.RST_STREAM:
                self._handle_rst_stream(stream_id, bytes(self._view[at:end]))
            elif kind == frames.GOAWAY:
                self._handle_goaway(stream_id, bytes(self._view[at:end]))
            elif kind == frames.PRIORITY:
                if not stream_id or end - at != 5:
                    raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a PRIORITY frame of no stream or a wrong size")
            elif kind == frames.PUSH_PROMISE:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
            # Others are extensions, which are ignored (RFC 9113, section 5.5).
        except StreamFault as fault:
            stream = self._streams.get(fault.stream_id)
            if stream is not None:
                self._events.append(StreamCancelled(fault.stream_id, str(fault)))
                self._reset(stream, fault.code)
            else:
                self._sender.control.append(frames.rst_stream(fault.stream_id, fault.code))
                self._ended.cut(fault.stream_id)

    # DATA.

    def _begin_data(self, stream_id: int, flags: int, length: int) -> None:
        """A DATA frame's payload begins at _start; its padding length, where it has one, is in the buffer."""
        if not stream_id or stream_id > self._last_stream_id or not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"DATA on stream {stream_id}, which is idle")
        padding = 0
        if flags & frames.PADDED:
            if not length:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without a padding length")
            padding = self._buffer[self._start] + 1
            if padding > length:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame that is shorter than its padding")
            self._start += 1
        stream = self._streams.get(stream_id)
        if stream is None:
            self._ended.check(stream_id)
            self._windows.debit_connection(length)
        else:
            if stream.is_ended_by_client:
                raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"DATA on stream {stream_id} after its end")
            self._windows.debit(stream, length)
        self._data_left = length - padding
        self._padding_left = max(0, padding - 1)
        self._data_stream = stream
        self._data_ends_stream = bool(flags & frames.END_STREAM)
        if not self._data_left and not self._padding_left:
            self._end_data()

    def _take_data(self) -> None:
        """Hand on what the buffer holds of the DATA frame's payload."""
        if self._data_left:
            taken = min(self._data_left, self._end - self._start)
            if taken:
                with self._view[self._start : self._start + taken] as piece:
                    self._feed(piece)
                self._start += taken
                self._data_left -= taken
                if not self._data_left and not self._padding_left:
                    self._end_data()
        if not self._data_left and self._padding_left:
            skipped = min(self._padding_left, self._end - self._start)
            self._start += skipped
            self._padding_left -= skipped
            if not self._padding_left:
                self._end_data()

    def _feed(self, piece: memoryview) -> None:
        stream = self._data_stream
        if stream is None:
            return
        messages: list[Buffer] = []
        try:
            stream.reader.feed(piece, messages, is_up_to_date=stream.batch is None and not stream.held)
        except CallFault as fault:
            self._give_out(stream, messages)
            self._spoil(stream, fault)
            return
        self._give_out(stream, messages)

    def _advance_in_message(self, num_bytes: int) -> None:
        """Bytes of the DATA frame went straight into the message."""
        stream = self._data_stream
        assert stream is not None
        messages: list[Buffer] = []
        stream.reader.filled(num_bytes, messages)
        self._give_out(stream, messages)
        self._data_left -= num_bytes
        if not self._data_left and not self._padding_left:
            self._end_data()

    def _end_data(self) -> None:
        stream, self._data_stream = self._data_stream, None
        if stream is not None and self._data_ends_stream:
            self._end_request(stream)

    def _give_out(self, stream: Stream, messages: list[Buffer]) -> None:
        if messages:
            batch = stream.batch
            if batch is None:
                batch = self._begin_batch(stream)
            batch.extend(messages)

    def _begin_batch(self, stream: Stream) -> list[Buffer]:
        """The list for the stream's messages of this read, in an event."""
        batch: list[Buffer] = []
        stream.batch = batch
        self._batched.append(stream)
        self._emit(stream, MessagesReceived(stream.id, batch))
        return batch

    def _end_batches(self) -> None:
        if self._batched:
            for stream in self._batched:
                stream.batch = None
            self._batched.clear()

    def _emit(self, stream: Stream, event: AnyEvent) -> None:
        if stream.is_paused or stream.held:
            stream.held.append(event)
        else:
            self._events.append(event)

    def _end_request(self, stream: Stream) -> None:
        if not stream.reader.is_at_boundary and not stream.reader.is_discarding:
            stream.is_ended_by_client = True
            self._spoil(stream, CallFault(Code.INTERNAL, "the request ended within a message"))
            return
        stream.is_ended_by_client = True
        if not stream.reader.is_discarding:
            self._emit(stream, RequestEnded(stream.id))

    # HEADERS.

    def _handle_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}, which is no client's")
        block = self._blocks.begin(flags, stream_id, payload)
        if block is not None:
            self._handle_block(stream_id, self._blocks.ends_stream, block)

    def _handle_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._blocks.go_on(flags, payload)
        if block is not None:
            self._handle_block(stream_id, self._blocks.ends_stream, block)

    def _handle_block(self, stream_id: int, ends_stream: bool, block: bytes) -> None:
        """A complete header block: a new call, or what a client adds at its end."""
        if stream_id <= self._last_stream_id:
            # Also of streams that are gone: every block may change the table.
            self._header_decoder.decode(block)
            stream = self._streams.get(stream_id)
            if stream is None:
                self._ended.check(stream_id)
            elif stream.is_ended_by_client:
                raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"HEADERS on stream {stream_id} after its end")
            elif not ends_stream:
                raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, "headers twice")
            else:
                self._end_request(stream)
            return
        self._last_stream_id = stream_id
        try:
            request = self._header_decoder.parsed(block)
        except MalformedRequest as failure:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, str(failure)) from failure
        except (NotGrpc, CallFault) as failure:
            self._refuse(self._open(stream_id, ends_stream), failure)
            return
        if self._refuses_streams or len(self._streams) >= self._limits.max_streams:
            raise StreamFault(stream_id, ErrorCode.REFUSED_STREAM, "no more streams")
        stream = self._open(stream_id, ends_stream)
        self._events.append(RequestReceived(stream_id, request.path, request.metadata))
        if ends_stream:
            self._events.append(RequestEnded(stream_id))

    def _open(self, stream_id: int, is_ended_by_client: bool) -> Stream:
        stream = Stream(
            stream_id, self._limits.stream_window_bytes, self._sender.initial_window, self._limits.max_message_bytes
        )
        stream.is_ended_by_client = is_ended_by_client
        self._streams[stream_id] = stream
        return stream

    def _spoil(self, stream: Stream, fault: CallFault) -> None:
        """A call that has begun cannot go on."""
        self._events.append(StreamCancelled(stream.id, str(fault)))
        self._refuse(stream, fault)

    def _refuse(self, stream: Stream, failure: CallFault | NotGrpc) -> None:
        """End, at once, a call that its client has spoilt."""
        is_only = not stream.has_answered or stream.opening_block is not None
        if isinstance(failure, NotGrpc):
            block = grpc_messages.http_error_block(failure.http_status, str(failure))
        else:
            block = grpc_messages.trailers_block(failure.code, failure.message, is_only=is_only)
        self._sender.close_now(stream, block)
        self._forget_closed(stream)

    # The other frames.

    def _handle_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a WINDOW_UPDATE of a wrong size")
        if not stream_id:
            self._sender.handle_window_update(None, payload)
            return
        if stream_id > self._last_stream_id or not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE on stream {stream_id}, which is idle")
        stream = self._streams.get(stream_id)
        # For a stream that is gone it may have been under way already.
        if stream is not None:
            self._sender.handle_window_update(stream, payload)

    def _handle_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a PING in a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a PING of a wrong size")
        if not flags & frames.ACK:
            self._sender.control.append(frames.ping(payload, is_ack=True))

    def _handle_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS in a stream")
        if len(payload) % 6 or (flags & frames.ACK and payload):
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong size")
        if flags & frames.ACK:
            return
        self._sender.handle_settings(payload, self._streams)

    def _handle_rst_stream(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a RST_STREAM of a wrong size")
        if not stream_id & 1 or stream_id > self._last_stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on stream {stream_id}, which is idle")
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        self._ended.reset_by_peer()
        self._forget(stream)
        code = _U32.unpack(payload)[0]
        self._events.append(StreamCancelled(stream_id, f"reset by the client with code {code}"))

    def _handle_goaway(self, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY in a stream")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a GOAWAY of a wrong size")
        self._events.append(GoAwayReceived(_U32.unpack_from(payload, 4)[0], payload[8:].decode("utf-8", "replace")))

    # Streams' ends.

    def _reset(self, stream: Stream, code: ErrorCode) -> None:
        self._sender.control.append(frames.rst_stream(stream.id, code))
        self._ended.cut(stream.id)
        self._forget(stream)

    def _forget_closed(self, stream: Stream) -> None:
        """The answer is complete."""
        self._forget(stream)
        if stream.is_ended_by_client:
            self._ended.completed()
        else:
            self._ended.cut(stream.id)

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.id]
        self._sender.forget(stream)
        if self._data_stream is stream:
            self._data_stream = None

    def _fail(self, fault: ConnectionFault) -> None:
        self._is_failed = True
        for stream in self._streams.values():
            self._sender.forget(stream)
        self._streams.clear()
        self._data_stream = None
        self._sender.control.append(frames.goaway(self._last_stream_id, fault.code, fault.reason))
        self._events.append(ConnectionFailed(fault.code, fault.reason))
