"""The proxy's relay of callbacks, between executors that are lists and clients at a real socket."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pathways_runtime.core.ids import Handle, HostIndex, SessionId
from pathways_runtime.core.status import Code
from pathways_runtime.proxy.callback_server import CallbackServer
from pathways_runtime.transport import streams
from pathways_runtime.transport.frames import AsyncChannel, FrameCodec
from pathways_runtime.wire.callbacks import (
    CALLBACKS_VERSION,
    AnyCallbackMessage,
    CallbackCall,
    CallbackResult,
    CallbacksDropped,
    CallbacksHello,
    CallbacksUnused,
    Functions,
    callbacks_address,
)

from .turns import DEADLINE_S, until

ONE, TWO = SessionId(1), SessionId(2)
HOST = HostIndex(3)


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))

    return run


class Relay:
    """A server, what it answered executors, and its clients."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: list[tuple[int, int, CallbackResult, bytes]] = []
        self.dropped: list[CallbacksDropped] = []
        self.executors: set[tuple[SessionId, HostIndex]] = set()
        self.server = CallbackServer(
            address, lambda s, h, m, p: self.answers.append((s, h, m, bytes(p))), self._tell_all
        )

    def _tell_all(self, message: CallbacksDropped) -> set[tuple[SessionId, HostIndex]]:
        self.dropped.append(message)
        return set(self.executors)

    async def client(self, name: str, version: int = CALLBACKS_VERSION) -> "Client":
        client = Client()
        await streams.connect(self.address, lambda: client.channel, DEADLINE_S)
        client.channel.send(CallbacksHello(name, version))
        return client


class Client:
    def __init__(self) -> None:
        self.calls: list[tuple[CallbackCall, bytes]] = []
        self.is_closed = False
        self.channel: AsyncChannel[AnyCallbackMessage] = AsyncChannel(
            FrameCodec(AnyCallbackMessage), self._on_frames, self._on_closed
        )

    def _on_frames(self, _: Any, frames: Any) -> None:
        self.calls += [(frame.message, bytes(frame.payload)) for frame in frames]

    def _on_closed(self, *_: Any) -> None:
        self.is_closed = True


@contextlib.asynccontextmanager
async def relay_in(folder: Path) -> AsyncIterator[Relay]:
    relay = Relay(callbacks_address(f"unix:{folder}/proxy.sock"))
    await relay.server.start()
    yield relay
    await relay.server.stop()
    assert list(folder.iterdir()) == []


async def called(relay: Relay, client: Client, name: str, session: SessionId = ONE, call: int = 5) -> CallbackCall:
    """A call that has reached its client."""
    before = len(client.calls)

    def try_it() -> bool:
        # The client may not be known yet; then the call is cancelled at once.
        relay.server.said(session, HOST, CallbackCall(call, name, 9, ((11, (2,)),)), b"operands")
        return not relay.answers or bool(relay.answers.clear())

    await until(try_it, "the client is known")
    await until(lambda: len(client.calls) > before, "the call reaches its client")
    message, payload = client.calls[-1]
    assert (message.client, message.number, message.operands, payload) == (name, 9, ((11, (2,)),), b"operands")
    return message


def test_the_address_is_beside_the_proxys() -> None:
    assert callbacks_address("unix:/a/proxy-0.sock") == "unix:/a/proxy-0.cb"
    assert callbacks_address("unix:/a/proxy") == "unix:/a/proxy.cb"


@on_loop
async def test_calls_reach_their_client_and_answers_their_executor(tmp_path: Path) -> None:
    async with relay_in(tmp_path) as relay:
        mine, yours = await relay.client("mine"), await relay.client("yours")
        first = await called(relay, mine, "mine", ONE, call=5)
        second = await called(relay, yours, "yours", TWO, call=5)
        yours.channel.send(CallbackResult(second.call, None, ((11, (1,)),)), b"two")
        await until(lambda: len(relay.answers) == 1, "the executor is answered")
        mine.channel.send(CallbackResult(first.call, None, ()), b"")
        await until(lambda: len(relay.answers) == 2, "the executor is answered again")
        assert relay.answers == [
            (TWO, HOST, CallbackResult(5, None, ((11, (1,)),)), b"two"),
            (ONE, HOST, CallbackResult(5, None, ()), b""),
        ]


@on_loop
async def test_calls_of_a_client_that_is_gone_are_cancelled(tmp_path: Path) -> None:
    async with relay_in(tmp_path) as relay:
        client = await relay.client("mine")
        await called(relay, client, "mine", call=5)
        client.channel.close()
        await until(lambda: relay.answers, "the executor is answered")
        relay.server.said(ONE, HOST, CallbackCall(6, "mine", 9, ()), b"")
        assert [(answer[2].call, answer[2].failure.code) for answer in relay.answers if answer[2].failure] == [
            (5, Code.CANCELLED),
            (6, Code.CANCELLED),
        ]


@pytest.mark.parametrize("what", ["session", "host"])
@on_loop
async def test_answers_that_nobody_waits_for_are_dropped(tmp_path: Path, what: str) -> None:
    async with relay_in(tmp_path) as relay:
        client = await relay.client("mine")
        message = await called(relay, client, "mine")
        if what == "session":
            relay.server.session_over(ONE)
        else:
            relay.server.forget_host(HOST)
        client.channel.send(CallbackResult(message.call, None, ()))
        later = await called(relay, client, "mine", TWO, call=8)
        client.channel.send(CallbackResult(later.call, None, ()))
        await until(lambda: relay.answers, "the executor is answered")
        assert [answer[2].call for answer in relay.answers] == [8]


@on_loop
async def test_another_version_and_a_second_client_of_a_name_are_refused(tmp_path: Path) -> None:
    async with relay_in(tmp_path) as relay:
        first = await relay.client("mine")
        await called(relay, first, "mine")
        for refused in (await relay.client("yours", CALLBACKS_VERSION + 1), await relay.client("mine")):
            await until(lambda refused=refused: refused.is_closed, "the connection is closed")
        assert not first.is_closed


@on_loop
async def test_a_client_hears_of_functions_that_no_executor_calls_any_more(tmp_path: Path) -> None:
    async with relay_in(tmp_path) as relay:
        client = await relay.client("c0de")
        await called(relay, client, "c0de")
        client.calls.clear()
        others = HostIndex(4), HostIndex(5)
        relay.executors = {(ONE, HOST), (ONE, others[0]), (TWO, others[1])}
        for program in (1, 2, 3):
            relay.server.compiles(ONE, Handle(program), Functions("c0de", (2 * program, 2 * program + 1)))
        relay.server.compiles(TWO, Handle(1), Functions("c0de", (8,)))
        relay.server.deleted(ONE, Handle(7))
        for program in (1, 2):
            relay.server.deleted(ONE, Handle(program))
        first, second = CallbacksUnused("c0de", (2, 3)), CallbacksUnused("c0de", (4, 5))
        assert relay.dropped == [CallbacksDropped("c0de", (2, 3)), CallbacksDropped("c0de", (4, 5))]
        for session, host in ((ONE, HOST), (TWO, others[1])):
            relay.server.said(session, host, first, b"")
            relay.server.said(session, host, second, b"")
        relay.server.said(ONE, others[0], second, b"")
        await until(lambda: client.calls == [(second, b"")], "the client hears of the second program")
        # What is gone calls nothing.
        relay.server.forget_host(others[0])
        await until(lambda: client.calls == [(second, b""), (first, b"")], "the client hears of the first program")
        relay.server.session_over(ONE)
        await until(lambda: client.calls[2:] == [(CallbacksUnused("c0de", (6, 7)), b"")], "the client hears of its end")
