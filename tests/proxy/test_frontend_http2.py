"""Both front ends against the same backend, with gRPC's own client: what they must have in common.

The backend is scripted: it says what it is called with, and holds what the test wants held.
"""

import asyncio
import contextlib
import gc
import os
import socket
import time
import weakref
from pathlib import Path

import grpc
import grpc.aio
import pytest
import uvloop

from pathways_runtime.core.status import Code, Status, error
from pathways_runtime.proxy.frontend import HOST_BUFFER_METADATA_KEY, SESSION_METADATA_KEY
from pathways_runtime.proxy.frontend_grpc import GrpcFrontend
from pathways_runtime.proxy.frontend_http2 import Http2Frontend
from pathways_runtime.transport.http2 import frames
from pathways_runtime.wire.ifrt.schema import SERVICE

DEADLINE_S = 20.0
FRONTENDS = {"grpc": GrpcFrontend, "http2": Http2Frontend}
MIB = 1 << 20


class ScriptedSession:
    """Answers each message with ``on_request``; by default with the message itself."""

    def __init__(self, connection):
        self.connection = connection
        self.requests = []
        self.num_disconnected = 0
        self.disconnected_event = asyncio.Event()
        self.arrived = asyncio.Event()
        self.on_request = self.connection.send

    def request(self, message):
        assert type(message) is bytes
        self.requests.append(message)
        self.arrived.set()
        self.on_request(message)

    def disconnected(self):
        self.num_disconnected += 1
        self.disconnected_event.set()

    async def wait_for_requests(self, count):
        async with asyncio.timeout(DEADLINE_S):
            while len(self.requests) < count:
                self.arrived.clear()
                await self.arrived.wait()


class ScriptedUpload:
    def __init__(self, backend, metadata):
        self.backend = backend
        self.metadata = metadata
        self.content = []

    def begin(self, flow):
        pass

    def cancel(self):
        pass

    def allocate(self, num_bytes):
        return None

    def write(self, message):
        if message == b"bad":
            raise error(Code.DATA_LOSS, "a bad chunk")
        self.content.append(bytes(message))

    def finish(self):
        self.backend.stored.append((self.metadata, b"".join(self.content)))
        return b"stored"


class ScriptedBackend:
    def __init__(self):
        self.sessions = []
        self.opened = asyncio.Event()
        self.peers = []
        self.stored = []
        self.lookups = {}
        self.prepare = lambda session: None

    def get_version(self, request):
        if request == b"old":
            raise error(Code.FAILED_PRECONDITION, "no version: 100% — sorry")
        return b"version of " + request

    def open_session(self, connection, metadata, peer):
        if metadata is None:
            raise error(Code.INVALID_ARGUMENT, "no metadata")
        session = ScriptedSession(connection)
        self.prepare(session)
        self.sessions.append(session)
        self.peers.append(peer)
        self.opened.set()
        return session

    def open_upload(self, metadata):
        if metadata is None:
            raise error(Code.INVALID_ARGUMENT, "no metadata")
        return ScriptedUpload(self, metadata)

    def lookup_host_buffer(self, request):
        if request not in self.lookups:
            raise error(Code.NOT_FOUND, "no such buffer")
        return iter(self.lookups[request])

    def delete_host_buffer(self, request):
        if self.lookups.pop(request, None) is None:
            raise error(Code.NOT_FOUND, "no such buffer")
        return b""


class Client:
    """gRPC's own."""

    def __init__(self, path):
        self.path = path
        self._channel = grpc.aio.insecure_channel(
            f"unix:{path}",
            options=(("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)),
        )

    async def close(self):
        await self._channel.close()

    def session(self, metadata=b"\0meta"):
        key_values = () if metadata is None else ((SESSION_METADATA_KEY, metadata),)
        return self._channel.stream_stream(f"/{SERVICE}/IfrtSession")(metadata=key_values, timeout=DEADLINE_S)

    async def store(self, messages, metadata=b"\xffhandle"):
        key_values = () if metadata is None else ((HOST_BUFFER_METADATA_KEY, metadata),)
        call = self._channel.stream_unary(f"/{SERVICE}/HostBufferStore")
        return await call(iter(messages), metadata=key_values, timeout=DEADLINE_S)

    async def unary(self, method, request):
        return await self._channel.unary_unary(f"/{SERVICE}/{method}")(request, timeout=DEADLINE_S)

    def lookup(self, request):
        return self._channel.unary_stream(f"/{SERVICE}/HostBufferLookup")(request, timeout=DEADLINE_S)


@contextlib.asynccontextmanager
async def serving(frontend_class, tmp_path):
    backend = ScriptedBackend()
    frontend = frontend_class(f"unix:{tmp_path}/s", backend)
    await frontend.start()
    client = Client(f"{tmp_path}/s")
    try:
        yield backend, client, frontend
    finally:
        await client.close()
        await frontend.stop(0.0)


@pytest.fixture(
    params=[("grpc", asyncio), ("http2", asyncio), ("http2", uvloop)], ids=["grpc", "http2", "http2-uvloop"]
)
def run(request, tmp_path):
    """Runs a scenario ``scenario(backend, client, frontend)`` with a deadline."""
    frontend, loops = request.param

    def run_scenario(scenario):
        async def with_deadline():
            async with asyncio.timeout(60), serving(FRONTENDS[frontend], tmp_path) as served:
                await scenario(*served)

        with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
            runner.run(with_deadline())

    return run_scenario


@contextlib.contextmanager
def fails_with(code, message):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert (caught.value.code(), caught.value.details()) == (code, message)


def test_unary_calls_and_their_failures(run):
    async def scenario(backend, client, _):
        assert await client.unary("GetVersion", b"25") == b"version of 25"
        with fails_with(grpc.StatusCode.FAILED_PRECONDITION, "no version: 100% — sorry"):
            await client.unary("GetVersion", b"old")
        backend.lookups[b"h"] = [b""]
        assert await client.unary("HostBufferDelete", b"h") == b""
        with fails_with(grpc.StatusCode.NOT_FOUND, "no such buffer"):
            await client.unary("HostBufferDelete", b"h")

    run(scenario)


@pytest.mark.parametrize("method", ["HostBufferReadFromDisk", "NoSuchMethod"])
def test_methods_that_do_not_exist(run, method):
    async def scenario(backend, client, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.unary(method, b"x")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED

    run(scenario)


def test_a_session_answers_in_order_and_ends_when_the_client_ends_it(run):
    async def scenario(backend, client, _):
        call = client.session()
        messages = [b"%d" % number * (number % 7) for number in range(300)]
        for message in messages:
            await call.write(message)
        assert [await call.read() for _ in messages] == messages
        (session,) = backend.sessions
        assert session.requests == messages
        assert session.num_disconnected == 0
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK
        await asyncio.wait_for(session.disconnected_event.wait(), DEADLINE_S)
        session.connection.send(b"late")
        session.connection.close(None)
        await asyncio.sleep(0)
        assert session.num_disconnected == 1

    run(scenario)


def test_a_session_that_is_refused(run):
    async def scenario(backend, client, _):
        call = client.session(metadata=None)
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "no metadata"

    run(scenario)


def test_a_session_that_is_cancelled_is_told_once(run):
    async def scenario(backend, client, _):
        call = client.session()
        await call.write(b"x")
        assert await call.read() == b"x"
        call.cancel()
        (session,) = backend.sessions
        await asyncio.wait_for(session.disconnected_event.wait(), DEADLINE_S)
        session.connection.close(Status(Code.INTERNAL, "late"))
        await asyncio.sleep(0)
        assert session.num_disconnected == 1

    run(scenario)


@pytest.mark.parametrize("status", [None, Status(Code.ABORTED, "that is enough")])
def test_a_session_that_the_server_ends(run, status):
    async def scenario(backend, client, _):
        def answer_and_close(message):
            session.connection.send(b"last words")
            session.connection.close(status)
            session.connection.close(Status(Code.INTERNAL, "the first counts"))
            assert session.num_disconnected == 0, "not from within"

        call = client.session()
        await asyncio.wait_for(backend.opened.wait(), DEADLINE_S)
        (session,) = backend.sessions
        session.on_request = answer_and_close
        await call.write(b"x")
        assert await call.read() == b"last words"
        assert await call.code() == (grpc.StatusCode.OK if status is None else grpc.StatusCode.ABORTED)
        assert await call.details() == ("" if status is None else status.message)
        await asyncio.wait_for(session.disconnected_event.wait(), DEADLINE_S)
        assert session.num_disconnected == 1

    run(scenario)


def test_a_session_that_reads_no_more_holds_the_client_back(run):
    async def scenario(backend, client, _):
        def prepare(session):
            session.on_request = lambda message: session.connection.pause_reading()

        backend.prepare = prepare
        call = client.session()
        message = bytes(MIB)
        num_messages = 64
        writing = asyncio.create_task(write_all(call, [message] * num_messages))
        await asyncio.wait_for(backend.opened.wait(), DEADLINE_S)
        (session,) = backend.sessions
        await session.wait_for_requests(1)
        # Other calls go on, also large ones on the same connection.
        assert await client.store([message] * 32) == b"stored"
        assert not writing.done()
        assert len(session.requests) < num_messages // 2
        session.on_request = lambda message: None
        session.connection.resume_reading()
        await writing
        await session.wait_for_requests(num_messages)
        assert await call.code() == grpc.StatusCode.OK

    run(scenario)


def test_pausing_again_before_the_loop_turns_counts(run):
    async def scenario(backend, client, _):
        call = client.session()
        await asyncio.wait_for(backend.opened.wait(), DEADLINE_S)
        (session,) = backend.sessions
        session.connection.pause_reading()
        session.connection.resume_reading()
        session.connection.pause_reading()
        session.connection.resume_reading()
        await call.write(b"x")
        assert await call.read() == b"x"
        call.cancel()

    run(scenario)


async def write_all(call, messages):
    for message in messages:
        await call.write(message)
    await call.done_writing()


def test_answers_to_a_client_that_does_not_read_wait(run):
    async def scenario(backend, client, _):
        call = client.session()
        await call.write(b"start")
        assert await call.read() == b"start"
        (session,) = backend.sessions
        answers = [bytes([number]) * MIB for number in range(32)]
        for answer in answers:
            session.connection.send(answer)
        assert await client.unary("GetVersion", b"25") == b"version of 25"
        assert [await call.read() for _ in answers] == answers
        call.cancel()

    run(scenario)


@pytest.mark.parametrize("sizes", [[], [0], [5], [MIB] * 20 + [17], [40] * 3000, [9 * MIB, 3]])
def test_uploads(run, sizes):
    async def scenario(backend, client, _):
        messages = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
        assert await client.store(messages) == b"stored"
        ((metadata, content),) = backend.stored
        assert metadata == b"\xffhandle"
        assert content == b"".join(messages)

    run(scenario)


def test_uploads_that_are_refused(run):
    async def scenario(backend, client, _):
        with fails_with(grpc.StatusCode.INVALID_ARGUMENT, "no metadata"):
            await client.store([b"x"], metadata=None)
        with fails_with(grpc.StatusCode.DATA_LOSS, "a bad chunk"):
            await client.store([b"x", b"bad", b"y"])
        assert backend.stored == []
        assert await client.store([b"x"]) == b"stored"

    run(scenario)


@pytest.mark.parametrize("sizes", [[0], [5], [MIB] * 20 + [17]])
def test_lookups(run, sizes):
    async def scenario(backend, client, _):
        messages = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
        backend.lookups[b"h"] = messages
        assert [message async for message in client.lookup(b"h")] == messages
        with fails_with(grpc.StatusCode.NOT_FOUND, "no such buffer"):
            [message async for message in client.lookup(b"other")]

    run(scenario)


def test_lookups_are_made_as_the_client_takes_them(run):
    async def scenario(backend, client, _):
        made = []

        def make():
            for number in range(64):
                made.append(number)
                yield bytes(MIB)

        backend.lookups[b"h"] = make()
        call = client.lookup(b"h")
        assert len(await call.read()) == MIB
        for _ in range(20):
            assert await client.unary("GetVersion", b"25") == b"version of 25"
        assert len(made) < 40
        for _ in range(63):
            assert len(await call.read()) == MIB
        assert await call.read() is grpc.aio.EOF

    run(scenario)


def test_many_calls_at_once(run):
    async def scenario(backend, client, _):
        calls = [client.store([b"%d" % number] * 3) for number in range(200)]
        calls += [client.unary("GetVersion", b"%d" % number) for number in range(200)]
        answers = await asyncio.gather(*calls)
        assert answers == [b"stored"] * 200 + [b"version of %d" % number for number in range(200)]
        assert sorted(content for _, content in backend.stored) == sorted(b"%d" % n * 3 for n in range(200))

    run(scenario)


def test_clients_do_not_disturb_each_other(run):
    async def scenario(backend, client, _):
        other = Client(client.path)
        call = client.session()
        await call.write(b"x")
        assert await call.read() == b"x"
        other_call = other.session()
        await other_call.write(b"y")
        assert await other_call.read() == b"y"
        await other.close()
        await asyncio.wait_for(backend.sessions[1].disconnected_event.wait(), DEADLINE_S)
        # One that speaks nonsense is cut off, alone.
        nonsense = socket.socket(socket.AF_UNIX)
        nonsense.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(nonsense, client.path)
        await loop.sock_sendall(nonsense, frames.PREFACE + frames.settings({}) + b"\0\0\1\6\0\0\0\0\0x")
        with contextlib.suppress(ConnectionResetError):
            while await asyncio.wait_for(loop.sock_recv(nonsense, 1 << 16), DEADLINE_S):
                pass
        nonsense.close()
        await call.write(b"still here")
        assert await call.read() == b"still here"
        assert backend.sessions[0].num_disconnected == 0
        call.cancel()

    run(scenario)


def test_stopping_ends_sessions_after_the_grace(run):
    async def scenario(backend, client, frontend):
        call = client.session()
        await call.write(b"x")
        assert await call.read() == b"x"
        began = time.monotonic()
        await frontend.stop(0.2)
        assert 0.1 < time.monotonic() - began < 10
        (session,) = backend.sessions
        await asyncio.wait_for(session.disconnected_event.wait(), DEADLINE_S)
        assert session.num_disconnected == 1
        assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

    run(scenario)


def test_stopping_waits_for_what_ends_by_itself(run):
    async def scenario(backend, client, frontend):
        call = client.session()
        await call.write(b"x")
        assert await call.read() == b"x"
        (session,) = backend.sessions
        stopping = asyncio.create_task(frontend.stop(DEADLINE_S))
        session.connection.send(b"goodbye")
        session.connection.close(Status(Code.UNAVAILABLE, "the runtime ends"))
        assert await call.read() == b"goodbye"
        assert await call.details() == "the runtime ends"
        await asyncio.wait_for(stopping, DEADLINE_S / 2)

    run(scenario)


def test_only_the_user_may_connect(run):
    async def scenario(backend, client, _):
        assert Path(client.path).stat().st_mode & 0o777 == 0o600

    run(scenario)


def test_a_folder_that_is_not_there(tmp_path):
    for frontend_class in FRONTENDS.values():

        async def start(frontend_class=frontend_class):
            await frontend_class(f"unix:{tmp_path}/no/s", ScriptedBackend()).start()

        with pytest.raises(OSError):
            asyncio.run(start())


def test_a_handler_that_fails_ends_its_call_alone(tmp_path):
    async def scenario():
        async with asyncio.timeout(60), serving(Http2Frontend, tmp_path) as (backend, client, _):

            def fail(message):
                raise RuntimeError("a bug")

            backend.prepare = lambda session: setattr(session, "on_request", fail)
            call = client.session()
            await call.write(b"x")
            assert await call.code() == grpc.StatusCode.INTERNAL
            (session,) = backend.sessions
            assert session.num_disconnected == 1
            assert await client.unary("GetVersion", b"25") == b"version of 25"

    asyncio.run(scenario())


def test_the_peer_is_named(tmp_path):
    async def scenario():
        async with asyncio.timeout(60), serving(Http2Frontend, tmp_path) as (backend, client, _):
            client.session()
            await asyncio.wait_for(backend.opened.wait(), DEADLINE_S)
            assert backend.peers == [f"pid {os.getpid()} of uid {os.getuid()}"]

    asyncio.run(scenario())


def test_what_a_call_holds_is_free_at_its_end(tmp_path):
    """Host buffers are large: reference cycles would keep several until the collector comes by."""

    async def scenario():
        async with asyncio.timeout(60), serving(Http2Frontend, tmp_path) as (backend, client, _):
            uploads, contents = weakref.WeakSet(), weakref.WeakSet()
            make_upload = backend.open_upload

            def open_upload(metadata):
                upload = make_upload(metadata)
                uploads.add(upload)
                return upload

            backend.open_upload = open_upload
            assert await client.store([b"x"]) == b"stored"
            with contextlib.suppress(grpc.aio.AioRpcError):
                await client.store([b"bad"])

            class Messages:
                def __iter__(self):
                    return self

                def __next__(self):
                    return bytes(MIB)

            endless = Messages()
            contents.add(endless)
            backend.lookups[b"h"] = endless
            call = client.lookup(b"h")
            await call.read()
            del endless, backend.lookups[b"h"]
            call.cancel()
            session = client.session()
            await session.write(b"x")
            await session.read()
            assert list(uploads) == [] and list(contents) == []

    gc.collect()
    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
