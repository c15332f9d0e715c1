"""An IFRT proxy client for tests: says exactly what it is told, in what order, and hands back what comes."""

import asyncio
import itertools
from typing import Any, Self

import grpc
import grpc.aio

from pathways_runtime.proxy.frontend import HOST_BUFFER_METADATA_KEY, SESSION_METADATA_KEY
from pathways_runtime.wire.ifrt import schema
from pathways_runtime.wire.ifrt.schema import SERVICE

ANSWER_DEADLINE_S = 20.0


class IfrtClient:
    """One session. Use: ``async with IfrtClient("unix:/path") as client: await client.ask("init_request")``."""

    def __init__(self, address: str, metadata: Any = None) -> None:
        self._address = address
        self._op_ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session_metadata = metadata or version_metadata(25, 3)
        self.session_id = 0
        #: Every response, in the order of arrival.
        self.responses: list[Any] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._address, options=(("grpc.max_receive_message_length", -1),))
        self._stream = self._channel.stream_stream(f"/{SERVICE}/IfrtSession")(
            metadata=((SESSION_METADATA_KEY, self._session_metadata.SerializeToString()),)
        )
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.disconnect()

    async def disconnect(self) -> None:
        """Cancel the stream, as a client does that is destroyed."""
        self._stream.cancel()
        await asyncio.wait_for(self._reader, ANSWER_DEADLINE_S)
        await self._channel.close()

    async def send(self, request: Any, op_id: int | None = None) -> "asyncio.Future[Any]":
        """Send an IfrtRequest; the future is its response."""
        op_id = next(self._op_ids) if op_id is None else op_id
        request.request_metadata.op_id = op_id
        response = self._answers[op_id] = asyncio.get_running_loop().create_future()
        # The answer may be there before this returns.
        await self._stream.write(request.SerializeToString())
        return response

    async def send_bytes(self, message: bytes) -> None:
        """Send whatever."""
        await self._stream.write(message)

    async def ask(self, kind: str, user_context_id: int = 0, **fields: Any) -> Any:
        """Send a request and wait for its response, errors included."""
        return await answer(await self.send(request(kind, user_context_id, **fields)))

    async def init(self) -> Any:
        """InitRequest; remembers the session id."""
        response = (await self.ask("init_request")).init_response
        self.session_id = response.session_id
        return response

    async def store(
        self, handle: int, content: bytes, announced_bytes: int | None = None, chunk: int = 1 << 20
    ) -> None:
        """HostBufferStore."""
        metadata = schema.HostBufferStoreMetadata(
            session_id=self.session_id,
            handle=handle,
            buffer_size=len(content) if announced_bytes is None else announced_bytes,
        )
        messages = [
            schema.HostBufferStoreRequest(data=content[at : at + chunk]).SerializeToString()
            for at in range(0, len(content), chunk)
        ]
        call = self._channel.stream_unary(f"/{SERVICE}/HostBufferStore")
        await call(iter(messages), metadata=((HOST_BUFFER_METADATA_KEY, metadata.SerializeToString()),))

    async def lookup(self, handle: int) -> list[bytes]:
        """HostBufferLookup: the chunks."""
        request = schema.HostBufferLookupRequest(session_id=self.session_id, handle=handle)
        call = self._channel.unary_stream(f"/{SERVICE}/HostBufferLookup")(request.SerializeToString())
        return [schema.HostBufferLookupResponse.FromString(message).data async for message in call]

    async def delete(self, handle: int) -> None:
        """HostBufferDelete."""
        request = schema.HostBufferDeleteRequest(session_id=self.session_id, handle=handle)
        await self._channel.unary_unary(f"/{SERVICE}/HostBufferDelete")(request.SerializeToString())

    async def get_version(self, oldest: tuple[int, int], newest: tuple[int, int]) -> tuple[int, int]:
        """GetVersion: (protocol, serdes)."""
        request = schema.GetVersionRequest()
        for proto, versions in ((request.min_version, oldest), (request.max_version, newest)):
            proto.protocol_version, proto.ifrt_serdes_version_number = versions
        raw = await self._channel.unary_unary(f"/{SERVICE}/GetVersion")(request.SerializeToString())
        version = schema.GetVersionResponse.FromString(raw).version
        return version.protocol_version, version.ifrt_serdes_version_number

    async def _read(self) -> None:
        how = "in good order"
        try:
            while (message := await self._stream.read()) is not grpc.aio.EOF:
                response = schema.IfrtResponse.FromString(message)
                self.responses.append(response)
                waiting = self._answers.pop(response.response_metadata.op_id, None)
                if waiting is not None:
                    waiting.set_result(response)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as failure:
            how = f"{failure!r}"
        if not self.ended.done():
            self.ended.set_result(how)


def version_metadata(protocol: int, serdes: int) -> Any:
    """GrpcIfrtSessionMetadata of a version."""
    metadata = schema.SessionMetadata()
    metadata.version.protocol_version = protocol
    metadata.version.ifrt_serdes_version_number = serdes
    return metadata


def request(kind: str, user_context_id: int = 0, **fields: Any) -> Any:
    """An IfrtRequest of a kind."""
    proto = schema.IfrtRequest()
    proto.request_metadata.user_context_id = user_context_id
    body = getattr(proto, kind)
    body.SetInParent()
    body.MergeFrom(type(body)(**fields))
    return proto


async def answer(future: "asyncio.Future[Any]") -> Any:
    """Wait for a response, with a deadline."""
    return await asyncio.wait_for(future, ANSWER_DEADLINE_S)


def status_of(response: Any) -> tuple[int, str]:
    """Code and message of a response."""
    status = response.response_metadata.status
    return status.code, status.message
