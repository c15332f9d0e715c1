"""The reference front end: gRPC's own Python server on a Unix socket, with handlers on raw bytes."""

import asyncio
import logging
from collections import deque
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pathways_runtime.core.status import Code, Status, StatusError
from pathways_runtime.proxy.frontend import HOST_BUFFER_METADATA_KEY, SESSION_METADATA_KEY, Backend, Session
from pathways_runtime.transport.addresses import parse_unix
from pathways_runtime.wire.ifrt.schema import SERVICE

logger = logging.getLogger(__name__)

_UNLIMITED = -1
_OPTIONS = (
    # Programs travel as one message of the session.
    ("grpc.max_receive_message_length", _UNLIMITED),
    ("grpc.max_send_message_length", _UNLIMITED),
    ("grpc.so_reuseport", 0),
)
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcFrontend:
    """Serves a backend at ``address`` (``unix:/path``)."""

    def __init__(self, address: str, backend: Backend) -> None:
        self._address = address
        self._backend = backend
        self._server: Any = None

    async def start(self) -> None:
        """See ``frontend.Frontend``."""
        path = Path(parse_unix(self._address).path)
        path.unlink(missing_ok=True)
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((_Service(self._backend),))
        try:
            self._server.add_insecure_port(self._address)
        except RuntimeError as failure:
            raise OSError(f"cannot listen at {self._address}: {failure}") from failure
        await self._server.start()
        path.chmod(0o600)

    async def stop(self, grace_s: float) -> None:
        """See ``frontend.Frontend``."""
        if self._server is not None:
            await self._server.stop(grace_s)
            Path(parse_unix(self._address).path).unlink(missing_ok=True)


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The methods of GrpcIfrtService."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._methods = {
            f"/{SERVICE}/GetVersion": grpc.unary_unary_rpc_method_handler(self._get_version),
            f"/{SERVICE}/IfrtSession": grpc.stream_stream_rpc_method_handler(self._ifrt_session),
            f"/{SERVICE}/HostBufferStore": grpc.stream_unary_rpc_method_handler(self._host_buffer_store),
            f"/{SERVICE}/HostBufferLookup": grpc.unary_stream_rpc_method_handler(self._host_buffer_lookup),
            f"/{SERVICE}/HostBufferDelete": grpc.unary_unary_rpc_method_handler(self._host_buffer_delete),
        }

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a method; gRPC answers UNIMPLEMENTED to those that have none."""
        return self._methods.get(handler_call_details.method)

    async def _get_version(self, request: bytes, context: Any) -> bytes:
        try:
            return self._backend.get_version(request)
        except StatusError as failure:
            await _abort(context, failure.status)
            raise

    async def _ifrt_session(self, _requests: Any, context: Any) -> None:
        connection = _GrpcConnection(context)
        try:
            session = self._backend.open_session(
                connection, _metadata(context, SESSION_METADATA_KEY), str(context.peer())
            )
        except StatusError as failure:
            await _abort(context, failure.status)
            raise
        try:
            await connection.run(session)
        finally:
            session.disconnected()
        if connection.failure is not None:
            await _abort(context, connection.failure)

    async def _host_buffer_store(self, _messages: Any, context: Any) -> bytes:
        try:
            upload = self._backend.open_upload(_metadata(context, HOST_BUFFER_METADATA_KEY))
        except StatusError as failure:
            await _abort(context, failure.status)
            raise
        flow = _GrpcFlow()
        upload.begin(flow)
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                upload.write(message)
                await flow.may_read.wait()
            return upload.finish()
        except StatusError as failure:
            await _abort(context, failure.status)
            raise
        finally:
            upload.cancel()

    async def _host_buffer_lookup(self, request: bytes, context: Any) -> None:
        try:
            messages = self._backend.lookup_host_buffer(request)
        except StatusError as failure:
            await _abort(context, failure.status)
            raise
        for message in messages:
            await context.write(b"".join(message) if isinstance(message, tuple) else bytes(message))

    async def _host_buffer_delete(self, request: bytes, context: Any) -> bytes:
        try:
            return self._backend.delete_host_buffer(request)
        except StatusError as failure:
            await _abort(context, failure.status)
            raise


class _GrpcFlow:
    """One upload's stream; see ``frontend.Flow``."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.may_read.set()

    def pause_reading(self) -> None:
        self.may_read.clear()

    def resume_reading(self) -> None:
        self.may_read.set()


class _GrpcConnection:
    """One IfrtSession stream; see ``frontend.Connection``."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._outgoing: deque[bytes] = deque()
        self._has_outgoing = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._is_closing = False
        self.failure: Status | None = None

    def send(self, response: bytes) -> None:
        if not self._is_closing:
            self._outgoing.append(response)
            self._has_outgoing.set()

    def close(self, status: Status | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.failure = status
            self._has_outgoing.set()

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    async def run(self, session: Session) -> None:
        """Read and write until the client ends the stream, or it is closed and all is written."""
        reading = asyncio.create_task(self._read(session), name="IfrtSession read")
        writing = asyncio.create_task(self._write(), name="IfrtSession write")
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_closing = True
            reading.cancel()
            writing.cancel()
            for outcome in await asyncio.gather(reading, writing, return_exceptions=True):
                if isinstance(outcome, Exception):
                    logger.info("an IFRT session's stream broke: %r", outcome)

    async def _read(self, session: Session) -> None:
        while True:
            await self._may_read.wait()
            message = await self._context.read()
            if message is grpc.aio.EOF:
                return
            session.request(message)

    async def _write(self) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            while self._outgoing:
                await self._context.write(self._outgoing.popleft())
            if self._is_closing:
                return


def _metadata(context: Any, key: str) -> bytes | None:
    for name, value in context.invocation_metadata():
        if name == key:
            return bytes(value)
    return None


async def _abort(context: Any, status: Status) -> None:
    """End an RPC with a failure; raises."""
    code = _CODES[int(status.code) if status.code is not Code.OK else int(Code.INTERNAL)]
    await context.abort(code, status.message)
