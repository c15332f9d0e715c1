"""The fast front end: our own HTTP/2 server, which takes and sends messages in batches.

Same behaviour as ``frontend_grpc``, whose tests run against both.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from pathways_runtime.core.status import Code, Status, StatusError
from pathways_runtime.proxy.frontend import (
    HOST_BUFFER_METADATA_KEY,
    SESSION_METADATA_KEY,
    Backend,
    Buffer,
    Session,
    Upload,
)
from pathways_runtime.transport.addresses import parse_unix
from pathways_runtime.transport.http2.server import Call, CallHandler, Http2Server
from pathways_runtime.wire.ifrt.schema import SERVICE


class Http2Frontend:
    """Serves a backend at ``address`` (``unix:/path``)."""

    def __init__(self, address: str, backend: Backend) -> None:
        self._path = Path(parse_unix(address).path)
        self._server = Http2Server(_Service(backend).open)

    async def start(self) -> None:
        """See ``frontend.Frontend``."""
        self._path.unlink(missing_ok=True)
        await self._server.start(str(self._path))
        self._path.chmod(0o600)

    async def stop(self, grace_s: float) -> None:
        """See ``frontend.Frontend``."""
        await self._server.stop(grace_s)
        self._path.unlink(missing_ok=True)


class _Service:
    """The methods of GrpcIfrtService."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._methods: dict[str, Callable[[Call], CallHandler]] = {
            f"/{SERVICE}/GetVersion": lambda call: _Unary(call, backend.get_version),
            f"/{SERVICE}/IfrtSession": self._ifrt_session,
            f"/{SERVICE}/HostBufferStore": self._host_buffer_store,
            f"/{SERVICE}/HostBufferLookup": lambda call: _Lookup(call, backend),
            f"/{SERVICE}/HostBufferDelete": lambda call: _Unary(call, backend.delete_host_buffer),
        }

    def open(self, call: Call) -> CallHandler | None:
        """The handler of a call; None for a method that we do not have."""
        method = self._methods.get(call.path)
        return None if method is None else method(call)

    def _ifrt_session(self, call: Call) -> CallHandler:
        connection = _Http2Connection(call)
        try:
            connection.session = self._backend.open_session(
                connection, _metadata(call, SESSION_METADATA_KEY), call.peer
            )
        except StatusError as failure:
            _fail(call, failure.status)
        return connection

    def _host_buffer_store(self, call: Call) -> CallHandler:
        try:
            return _Store(call, self._backend.open_upload(_metadata(call, HOST_BUFFER_METADATA_KEY)))
        except StatusError as failure:
            _fail(call, failure.status)
            return _Refused()


class _Refused:
    """A call that is answered already."""

    def messages_received(self, messages: list[Buffer]) -> None:
        pass

    def request_ended(self) -> None:
        pass

    def cancelled(self, reason: str) -> None:
        pass


class _Http2Connection:
    """One IfrtSession stream; see ``frontend.Connection``. Responses of one turn of the loop go out together."""

    __slots__ = ("_call", "_is_flush_due", "_is_over", "_is_paused", "_loop", "_outgoing", "session")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[bytes] = []
        self._is_flush_due = False
        self._is_over = False
        self._is_paused = False
        self.session: Session | None = None

    def send(self, response: bytes) -> None:
        if not self._is_over:
            self._outgoing.append(response)
            if not self._is_flush_due:
                self._is_flush_due = True
                self._loop.call_soon(self._flush)

    def close(self, status: Status | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._flush()
        if status is None:
            self._call.finish()
        else:
            _fail(self._call, status)
        # Not from within: the session that closes is still at work.
        self._loop.call_soon(self._disconnect)

    def pause_reading(self) -> None:
        self._is_paused = True
        self._call.pause()

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            # Not from within: what has come meanwhile would overtake what the session is about to do.
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        if not self._is_paused:
            self._call.resume()

    # transport.http2.server.CallHandler

    def messages_received(self, messages: list[Buffer]) -> None:
        session = self.session
        if session is not None:
            self._is_flush_due = True
            for message in messages:
                session.request(message if type(message) is bytes else bytes(message))
            self._flush()

    def request_ended(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._flush()
            self._call.finish()
            self._disconnect()

    def cancelled(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._disconnect()

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            self._call.send(outgoing)

    def _disconnect(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.disconnected()


class _Store:
    """HostBufferStore; see also ``frontend.Flow``."""

    __slots__ = ("_call", "_is_paused", "_loop", "_upload")

    def __init__(self, call: Call, upload: Upload) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._upload = upload
        self._is_paused = False
        call.receive_into(upload.allocate)
        upload.begin(self)

    def pause_reading(self) -> None:
        self._is_paused = True
        self._call.pause()

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            # Not from within: who resumes several streams must not find one of them ended.
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        if not self._is_paused:
            self._call.resume()

    def messages_received(self, messages: list[Buffer]) -> None:
        try:
            for message in messages:
                self._upload.write(message)
        except StatusError as failure:
            self._upload.cancel()
            _fail(self._call, failure.status)

    def request_ended(self) -> None:
        try:
            answer = self._upload.finish()
        except StatusError as failure:
            _fail(self._call, failure.status)
        else:
            self._call.send((answer,))
            self._call.finish()

    def cancelled(self, reason: str) -> None:
        self._upload.cancel()


class _OneRequest:
    """A call with one message from the client."""

    __slots__ = ("_call", "_messages")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._messages: list[Buffer] = []

    def messages_received(self, messages: list[Buffer]) -> None:
        self._messages += messages
        if len(self._messages) > 1:
            self._call.finish(Code.INTERNAL, f"{self._call.path} takes one message")

    def request_ended(self) -> None:
        if not self._messages:
            self._call.finish(Code.INTERNAL, f"{self._call.path} takes one message, and none came")
            return
        try:
            self._answer(bytes(self._messages[0]))
        except StatusError as failure:
            _fail(self._call, failure.status)

    def cancelled(self, reason: str) -> None:
        pass

    def _answer(self, request: bytes) -> None:
        raise NotImplementedError


class _Unary(_OneRequest):
    """GetVersion, HostBufferDelete."""

    __slots__ = ("_respond",)

    def __init__(self, call: Call, respond: Callable[[bytes], bytes]) -> None:
        super().__init__(call)
        self._respond = respond

    def _answer(self, request: bytes) -> None:
        self._call.send((self._respond(request),))
        self._call.finish()


class _Lookup(_OneRequest):
    """HostBufferLookup."""

    __slots__ = ("_backend",)

    def __init__(self, call: Call, backend: Backend) -> None:
        super().__init__(call)
        self._backend = backend

    def _answer(self, request: bytes) -> None:
        self._call.send_all(self._backend.lookup_host_buffer(request))


def _metadata(call: Call, key: str) -> bytes | None:
    for name, value in call.metadata:
        if name == key:
            return value if isinstance(value, bytes) else None
    return None


def _fail(call: Call, status: Status) -> None:
    call.finish(int(status.code if status.code is not Code.OK else Code.INTERNAL), status.message)
