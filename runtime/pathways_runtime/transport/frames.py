"""Frames on stream sockets: how control messages and link messages travel.

A frame is ``<header bytes: u32> <payload bytes: u64> <header> <payload>``, little-endian. The header is one msgpack
value of a closed union of message types; the payload is raw bytes, empty for control messages. ``FrameReader`` parses
without I/O; ``Channel`` is for threads, ``AsyncChannel`` for an event loop. Both send in the order of the calls.
"""

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from pathways_runtime.transport.tls_socket import Connection

logger = logging.getLogger(__name__)

_PREFIX = struct.Struct("<IQ")
MAX_HEADER_BYTES = 1 << 30
MAX_PAYLOAD_BYTES = 1 << 40
_RECEIVE_BYTES = 1 << 18

MessageT = TypeVar("MessageT")
Buffer = bytes | bytearray | memoryview


class FrameError(Exception):
    """The peer sent something that is not a frame of this protocol; the connection cannot go on."""


class Frame(Generic[MessageT]):
    """One received message with its payload: a bytearray, or the memory that the reader's ``allocate`` gave."""

    __slots__ = ("message", "payload")

    def __init__(self, message: MessageT, payload: Any) -> None:
        self.message = message
        self.payload = payload


class FrameCodec(Generic[MessageT]):
    """Encodes and decodes one closed union of message types."""

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(union)

    def encode(self, message: MessageT, payload_bytes: int = 0) -> bytes:
        """Prefix and header; the caller sends ``payload_bytes`` of payload behind it."""
        header = self._encoder.encode(message)
        return _PREFIX.pack(len(header), payload_bytes) + header

    def decode(self, header: Buffer) -> MessageT:
        """A header's message.

        Raises:
            FrameError: it is no message of the union.
        """
        try:
            return self._decoder.decode(header)
        except msgspec.MsgspecError as failure:
            raise FrameError(f"not a message of this protocol: {failure}") from failure


class FrameReader(Generic[MessageT]):
    """Turns received bytes into frames; large payloads are received straight into their place.

    Use: ask ``writable()`` for memory, receive into it, report with ``advance(n)``, which returns the frames completed.

    Args:
        allocate: gives the memory for a large payload of so many bytes; for readers who want it aligned, say.
    """

    def __init__(
        self, codec: FrameCodec[MessageT], allocate: Callable[[int], bytearray | memoryview] = bytearray
    ) -> None:
        self._codec = codec
        self._allocate = allocate
        self._small = bytearray(_RECEIVE_BYTES)
        self._start = 0
        self._end = 0
        # A payload too large for the small buffer, being filled; with its message.
        self._payload: bytearray | memoryview | None = None
        self._payload_filled = 0
        self._payload_message: MessageT | None = None

    def writable(self) -> memoryview:
        """Memory to receive into; valid until ``advance``."""
        if self._payload is not None:
            return memoryview(self._payload)[self._payload_filled :]
        return memoryview(self._small)[self._end :]

    def advance(self, num_bytes: int) -> list[Frame[MessageT]]:
        """``num_bytes`` were received into the memory that ``writable`` gave.

        Raises:
            FrameError: what came is no frame.
        """
        frames: list[Frame[MessageT]] = []
        if self._payload is not None:
            self._payload_filled += num_bytes
            if self._payload_filled == len(self._payload):
                assert self._payload_message is not None
                frames.append(Frame(self._payload_message, self._payload))
                self._payload = self._payload_message = None
            return frames
        self._end += num_bytes
        while self._end - self._start >= _PREFIX.size:
            header_bytes, payload_bytes = _PREFIX.unpack_from(self._small, self._start)
            if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
                raise FrameError(f"a frame of {header_bytes} + {payload_bytes} bytes is beyond any message")
            header_at = self._start + _PREFIX.size
            payload_at = header_at + header_bytes
            if self._end < payload_at:
                self._make_room(_PREFIX.size + header_bytes)
                break
            # A copy, because a message may keep views of its header (msgspec.Raw) and this buffer is overwritten.
            with memoryview(self._small) as received:
                header = bytes(received[header_at:payload_at])
            message = self._codec.decode(header)
            if self._end < payload_at + payload_bytes:
                payload = self._allocate(payload_bytes)
                arrived = self._end - payload_at
                payload[:arrived] = self._small[payload_at : self._end]
                self._payload, self._payload_filled, self._payload_message = payload, arrived, message
                self._start = self._end = 0
                return frames
            frames.append(Frame(message, self._small[payload_at : payload_at + payload_bytes]))
            self._start = payload_at + payload_bytes
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._small) > _RECEIVE_BYTES:
                self._small = bytearray(_RECEIVE_BYTES)
        elif len(self._small) - self._end < _RECEIVE_BYTES // 4:
            self._make_room(0)
        return frames

    def close(self) -> None:
        """Let go of memory; nothing is received any more."""
        self._small, self._start, self._end = bytearray(), 0, 0
        self._payload = self._payload_message = None

    def _make_room(self, needed: int) -> None:
        """Move what is unread to the front of a buffer that holds at least ``needed`` bytes and room to receive."""
        unread = self._small[self._start : self._end]
        size = max(_RECEIVE_BYTES, needed + _RECEIVE_BYTES // 4, len(unread) + _RECEIVE_BYTES // 4)
        fresh = bytearray(size)
        fresh[: len(unread)] = unread
        self._small, self._start, self._end = fresh, 0, len(unread)


class ConnectionClosed(Exception):
    """The peer closed the connection, or it broke; the message says how."""


class Channel(Generic[MessageT]):
    """Frames on a blocking socket. Any thread may send; one thread receives. ``allocate``: see FrameReader."""

    def __init__(
        self,
        sock: Connection,
        codec: FrameCodec[MessageT],
        allocate: Callable[[int], bytearray | memoryview] = bytearray,
    ) -> None:
        self._sock = sock
        self._codec = codec
        self._reader = FrameReader(codec, allocate)
        self._send_lock = threading.Lock()

    def send(self, message: MessageT, payload: Buffer = b"") -> None:
        """Send one frame, whole, before any other of this channel.

        Raises:
            ConnectionClosed: the connection is gone.
        """
        view = memoryview(payload).cast("B") if len(payload) else memoryview(b"")
        head = self._codec.encode(message, view.nbytes)
        with self._send_lock:
            try:
                if view.nbytes <= 1 << 16:
                    self._sock.sendall(head + view)
                else:
                    self._sock.sendall(head)
                    self._sock.sendall(view)
            except OSError as failure:
                raise ConnectionClosed(f"sending failed: {failure}") from failure

    def receive(self) -> list[Frame[MessageT]]:
        """Block until at least one frame is there; return all that have arrived.

        Raises:
            ConnectionClosed: the peer is gone. FrameError: it does not speak this protocol.
        """
        while True:
            try:
                count = self._sock.recv_into(self._reader.writable())
            except OSError as failure:
                raise ConnectionClosed(f"receiving failed: {failure}") from failure
            if count == 0:
                raise ConnectionClosed("closed by the peer")
            if frames := self._reader.advance(count):
                return frames

    def close(self) -> None:
        """Close, and wake a thread that receives."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class AsyncChannel(asyncio.BufferedProtocol, Generic[MessageT]):
    """Frames on an event loop. Sends of one loop turn leave in one write.

    Args:
        on_frames: called with the frames of each read, in order, on the loop. An exception from it closes the channel.
        on_closed: called once, with the failure or None for an orderly end.
        allocate: see FrameReader.
    """

    def __init__(
        self,
        codec: FrameCodec[MessageT],
        on_frames: "Callable[[AsyncChannel[MessageT], Sequence[Frame[MessageT]]], None]",
        on_closed: "Callable[[AsyncChannel[MessageT], Exception | None], None]",
        allocate: Callable[[int], bytearray | memoryview] = bytearray,
    ) -> None:
        self._codec = codec
        self._reader = FrameReader(codec, allocate)
        self._on_frames = on_frames
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[Buffer] = []
        self._failure: Exception | None = None
        self._is_closed = False

    def send(self, message: MessageT, payload: Buffer = b"") -> None:
        """Queue one frame; dropped when the channel is closed (``on_closed`` tells)."""
        if self._is_closed:
            return
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        size = len(payload) if isinstance(payload, bytes | bytearray) else payload.nbytes
        self._outgoing.append(self._codec.encode(message, size))
        if size:
            self._outgoing.append(payload)

    def send_header(self, header: bytes) -> None:
        """Queue one frame without payload whose header is encoded already; several channels may share it."""
        if self._is_closed:
            return
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(_PREFIX.pack(len(header), 0))
        self._outgoing.append(header)

    def unsent_bytes(self) -> int:
        """What the socket has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Stop reading: the peer is held back once the socket's buffers are full."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Undo ``pause_reading``."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """Flush what was sent, then close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if not outgoing or self._transport is None or self._transport.is_closing():
            if outgoing and self._transport is None and not self._is_closed:
                self._outgoing = outgoing
            return
        small: list[Buffer] = []
        for part in outgoing:
            if len(part) > 1 << 16:
                if small:
                    self._transport.write(b"".join(small))
                    small = []
                self._transport.write(part)
            else:
                small.append(part)
        if small:
            self._transport.write(b"".join(small))

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.writable()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if frames := self._reader.advance(nbytes):
                self._on_frames(self, frames)
        except Exception as failure:
            self._failure = failure
            logger.exception("a connection is closed because its message could not be handled")
            if self._transport is not None:
                self._transport.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._outgoing = []
        # Transport, channel and whoever follows it refer to each other, and are freed when the collector comes round:
        # in a process that makes little garbage, hundreds of connections later.
        self._transport = None
        self._reader.close()
        self._on_closed(self, self._failure or exc)
