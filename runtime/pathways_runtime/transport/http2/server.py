"""gRPC calls on an event loop: ``ServerConnection`` on asyncio's transports.

All methods are for the loop's thread. A service answers each call through its ``Call``; what is sent within one turn of
the loop leaves in one write, and messages of one read are handed over in one call.
"""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, cast

from pathways_runtime.core.status import Code
from pathways_runtime.transport.frames import Buffer
from pathways_runtime.transport.http2.connection import Limits, ServerConnection
from pathways_runtime.transport.http2.events import (
    AnyEvent,
    ConnectionFailed,
    GoAwayReceived,
    MessagesReceived,
    RequestEnded,
    RequestReceived,
    StreamCancelled,
)
from pathways_runtime.transport.http2.grpc_messages import Metadata
from pathways_runtime.transport.http2.streams import Message

logger = logging.getLogger(__name__)

# What the socket has not taken is at most this and one turn's output.
_HIGH_WATER_BYTES = 1 << 20
_OUTPUT_BYTES = 1 << 20
# Pieces of output up to this size are joined into one.
_JOINED_BYTES = 1 << 15


# The kernel's struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("iII")


class CallHandler(Protocol):
    """What a service does with one call. An exception from a method ends the call with status INTERNAL."""

    def messages_received(self, messages: list[Buffer]) -> None:
        """The next messages of the call, in order; the handler's own."""

    def request_ended(self) -> None:
        """The client sends no more messages."""

    def cancelled(self, reason: str) -> None:
        """The call is over before ``finish``: reset, spoilt, or the connection is gone. Nothing else will be called."""


class Call:
    """One call as its service sees it. Everything sent after the call's end is dropped."""

    __slots__ = ("_protocol", "handler", "metadata", "path", "stream_id")

    def __init__(self, protocol: "_Http2Protocol", stream_id: int, path: str, metadata: Metadata) -> None:
        self._protocol = protocol
        self.stream_id = stream_id
        self.path = path
        self.metadata = metadata
        #: None once the call is over: handlers know their calls, and what they hold must not wait for the collector.
        self.handler: CallHandler | None = None

    def receive_into(self, allocate: Callable[[int], memoryview | None]) -> None:
        """Have long messages received into memory of the service's; see ``ServerConnection.receive_into``."""
        self._protocol.connection.receive_into(self.stream_id, allocate)

    def send(self, messages: Iterable[Message], metadata: Metadata = ()) -> None:
        """Answer with messages, in order; they must not change later. ``metadata`` goes only with the first."""
        self._protocol.connection.send_messages(self.stream_id, messages, metadata)
        self._protocol.schedule_flush()

    def send_all(self, messages: Iterator[Message]) -> None:
        """Answer with messages that are asked for one by one as the client takes them; then finish with OK.

        An exception from the iterator ends the call with status INTERNAL. It is dropped when the call is over.
        """
        if self.stream_id in self._protocol.calls:
            self._protocol.producers[self.stream_id] = (self, messages)
            self._protocol.schedule_flush()

    def finish(self, code: int = Code.OK, message: str = "", metadata: Metadata = ()) -> None:
        """End the call with a status, behind the messages."""
        self._protocol.forget(self.stream_id)
        self._protocol.connection.finish(self.stream_id, code, message, metadata)
        self._protocol.schedule_flush()

    def pause(self) -> None:
        """Take no more messages after those handed over; the client is held back once its window is used up."""
        self._protocol.connection.pause(self.stream_id)

    def resume(self) -> None:
        """Undo ``pause``. What has come meanwhile is handed over before this returns, or until it is paused again."""
        connection = self._protocol.connection
        connection.resume(self.stream_id)
        while (event := connection.next_held(self.stream_id)) is not None:
            self._protocol.dispatch([event])
        self._protocol.schedule_flush()

    @property
    def peer(self) -> str:
        """The client's name for the log."""
        return self._protocol.peer

    def unsent_bytes(self) -> int:
        """How much of the answer waits for the client to give room."""
        return self._protocol.connection.unsent_bytes(self.stream_id)


#: Starts to serve a call: its handler, or None for a method that does not exist. The call may be answered at once.
Service = Callable[[Call], CallHandler | None]


class _Http2Protocol(asyncio.BufferedProtocol):
    """One client's connection."""

    def __init__(self, service: Service, limits: Limits, on_lost: "Callable[[_Http2Protocol], None]") -> None:
        self._service = service
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.connection = ServerConnection(limits)
        self.calls: dict[int, Call] = {}
        self.producers: dict[int, tuple[Call, Iterator[Message]]] = {}
        self.peer = "unknown"
        self._is_write_paused = False
        self._is_flush_due = False
        self._is_closing = False
        self._has_ended = False

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self.peer = _peer_name(self._transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.connection.writable()

    def buffer_updated(self, nbytes: int) -> None:
        # What the service sends now waits for the flush below.
        self._is_flush_due = True
        self.dispatch(self.connection.advance(nbytes))
        self._flush()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._cancel_calls("the connection is gone" if exc is None else f"the connection broke: {exc}")
        self._on_lost(self)

    # For calls and the server.

    def dispatch(self, events: list[AnyEvent]) -> None:
        """Hand events to the calls' handlers."""
        for event in events:
            kind = type(event)
            if kind is MessagesReceived:
                call = self.calls.get(event.stream_id)  # type: ignore[union-attr]
                if call is not None and call.handler is not None:
                    try:
                        call.handler.messages_received(event.messages)  # type: ignore[union-attr]
                    except Exception:
                        self._fail_call(call)
            else:
                self._dispatch_rare(event)

    def _dispatch_rare(self, event: AnyEvent) -> None:
        match event:
            case RequestReceived():
                self._begin_call(event)
            case RequestEnded():
                call = self.calls.get(event.stream_id)
                if call is not None and call.handler is not None:
                    try:
                        call.handler.request_ended()
                    except Exception:
                        self._fail_call(call)
            case StreamCancelled():
                self._cancel(event.stream_id, event.reason)
            case GoAwayReceived():
                logger.debug("a client opens no more calls: code=%d %s", event.code, event.reason)
            case ConnectionFailed():
                logger.warning(
                    "a connection is closed, its client broke the protocol: %s %s", event.code.name, event.reason
                )
                self._cancel_calls(f"the connection failed: {event.reason}")
                self.close()
            case _:
                raise AssertionError(f"unknown event {event!r}")

    def schedule_flush(self) -> None:
        """Write what may be written before the loop waits again."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def go_away(self) -> None:
        """Refuse new calls; end once those that run are over. The client closes then."""
        self.connection.go_away()
        self._is_closing = True
        self._flush()

    def close(self) -> None:
        """Write what may be written, and close. The calls that run are cancelled."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once, unwritten output or not."""
        if self._transport is not None:
            self._transport.abort()

    def _begin_call(self, event: RequestReceived) -> None:
        call = Call(self, event.stream_id, event.path, event.metadata)
        self.calls[event.stream_id] = call
        try:
            handler = self._service(call)
        except Exception:
            self._fail_call(call)
            return
        if handler is None:
            call.finish(Code.UNIMPLEMENTED, f"there is no method {event.path}")
        elif event.stream_id in self.calls:
            # Not answered already.
            call.handler = handler

    def _fail_call(self, call: Call) -> None:
        logger.exception("call ended, its handler failed: path=%s", call.path)
        self.connection.finish(call.stream_id, Code.INTERNAL, "the server failed; see its log")
        self._cancel(call.stream_id, "its handler failed")
        self.schedule_flush()

    def forget(self, stream_id: int) -> CallHandler | None:
        """A call is over; its handler, if it was not over before."""
        self.producers.pop(stream_id, None)
        call = self.calls.pop(stream_id, None)
        if call is None:
            return None
        handler, call.handler = call.handler, None
        return handler

    def _cancel(self, stream_id: int, reason: str) -> None:
        handler = self.forget(stream_id)
        if handler is not None:
            try:
                handler.cancelled(reason)
            except Exception:
                logger.exception("a handler failed when its call was cancelled: %s", reason)

    def _cancel_calls(self, reason: str) -> None:
        for stream_id in tuple(self.calls):
            self._cancel(stream_id, reason)

    def _flush(self) -> None:
        # Stays due while output is gathered: what producers finish meanwhile leaves with it.
        transport = self._transport
        if transport is None or transport.is_closing() or self._has_ended:
            self._is_flush_due = False
            return
        self._is_flush_due = True
        while not self._is_write_paused:
            if self.producers:
                self._produce()
            output = self.connection.take_output(_OUTPUT_BYTES)
            if not output:
                break
            _write(transport, output)
        self._is_flush_due = False
        if self._is_closing and not self.connection.open_streams():
            # Not closed yet: a client that is just writing would see a broken connection, not what was sent last.
            self._has_ended = True
            transport.write_eof()

    def _produce(self) -> None:
        """Ask producers for as much as may soon be sent."""
        for stream_id, (call, messages) in tuple(self.producers.items()):
            try:
                while self.connection.unsent_bytes(stream_id) < _OUTPUT_BYTES:
                    message = next(messages, None)
                    if message is None:
                        call.finish()
                        break
                    self.connection.send_messages(stream_id, (message,))
            except Exception:
                self._fail_call(call)


def _peer_name(transport: asyncio.Transport) -> str:
    """The process at the other end of a Unix socket."""
    peer_socket = transport.get_extra_info("socket")
    if peer_socket is None or peer_socket.family != socket.AF_UNIX:
        return str(transport.get_extra_info("peername"))
    pid, uid, _gid = _CREDENTIALS.unpack(
        peer_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return f"pid {pid} of uid {uid}"


def _write(transport: asyncio.Transport, output: list[Buffer]) -> None:
    """Write the pieces, small neighbours joined, large ones as they are."""
    if len(output) == 1:
        transport.write(output[0])
        return
    joined: list[Buffer] = []
    small: list[Buffer] = []
    for piece in output:
        if len(piece) > _JOINED_BYTES:
            if small:
                joined.append(b"".join(small))
                small = []
            joined.append(piece)
        else:
            small.append(piece)
    if small:
        joined.append(b"".join(small))
    if len(joined) == 1:
        transport.write(joined[0])
    else:
        transport.writelines(joined)


class Http2Server:
    """Listens on a Unix socket and serves its clients' calls."""

    def __init__(self, service: Service, limits: Limits = Limits()) -> None:  # noqa: B008
        self._service = service
        self._limits = limits
        self._server: asyncio.AbstractServer | None = None
        self._protocols: set[_Http2Protocol] = set()
        self._all_lost = asyncio.Event()

    async def start(self, path: str) -> None:
        """Listen on the socket ``path``.

        Raises:
            OSError: it cannot be bound.
        """
        self._server = await asyncio.get_running_loop().create_unix_server(self._make_protocol, path)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let those that run end for at most ``grace_s``, then close everything."""
        if self._server is not None:
            self._server.close()
        for protocol in tuple(self._protocols):
            protocol.go_away()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_all_lost(), grace_s)
        for protocol in tuple(self._protocols):
            protocol.abort()
        await self._wait_all_lost()

    async def _wait_all_lost(self) -> None:
        while self._protocols:
            self._all_lost.clear()
            await self._all_lost.wait()

    def _make_protocol(self) -> _Http2Protocol:
        protocol = _Http2Protocol(self._service, self._limits, self._lose)
        self._protocols.add(protocol)
        return protocol

    def _lose(self, protocol: _Http2Protocol) -> None:
        self._protocols.discard(protocol)
        self._all_lost.set()
