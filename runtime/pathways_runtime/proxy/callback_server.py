"""The proxy's part in callbacks (``wire.callbacks``): it relays between executors' session links and clients."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pathways_runtime.core.ids import Handle, HostIndex, SessionId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.transport import streams
from pathways_runtime.transport.frames import AsyncChannel, Buffer, Frame, FrameCodec, FrameError
from pathways_runtime.wire.callbacks import (
    CALLBACKS_VERSION,
    AnyCallbackMessage,
    CallbackCall,
    CallbackResult,
    CallbacksDropped,
    CallbacksHello,
    CallbacksUnused,
    Functions,
)

logger = logging.getLogger(__name__)

CallbackChannel = AsyncChannel[AnyCallbackMessage]
#: Sends an answer to an executor.
Answer = Callable[[SessionId, HostIndex, CallbackResult, Buffer], None]
#: Tells all executors that a program with callbacks is deleted; returns whom it has told.
TellAll = Callable[[CallbacksDropped], set[tuple[SessionId, HostIndex]]]


class _Call(NamedTuple):
    """A call that a client has not answered."""

    session: SessionId
    host: HostIndex
    #: Its name at the executor.
    call: int
    client: str


class CallbackServer:
    """All on one event loop.

    Args:
        address: where clients connect; a Unix socket.
        answer: see ``Answer``. What it is given for a session or host that is gone comes to nothing.
        tell_all: see ``TellAll``.
    """

    def __init__(self, address: str, answer: Answer, tell_all: TellAll) -> None:
        self._address = address
        self._answer = answer
        self._tell_all = tell_all
        self._codec: FrameCodec[AnyCallbackMessage] = FrameCodec(AnyCallbackMessage)
        self._server: streams.Server | None = None
        self._clients: dict[str, CallbackChannel] = {}
        self._calls: dict[int, _Call] = {}
        self._last_call = 0
        #: The programs of sessions that have callbacks.
        self._programs: dict[tuple[SessionId, Handle], Functions] = {}
        #: Which executors have not said yet that nothing there calls the functions of a deleted program.
        self._using: dict[CallbacksUnused, set[tuple[SessionId, HostIndex]]] = {}

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            AddressError, OSError: it cannot.
        """
        self._server = await streams.serve(self._address, lambda: _Client(self).channel)

    async def stop(self) -> None:
        """Close all connections and listen no more."""
        for channel in list(self._clients.values()):
            channel.close()
        if self._server is not None:
            self._server.close()

    def said(
        self, session: SessionId, host: HostIndex, message: CallbackCall | CallbacksUnused, payload: Buffer
    ) -> None:
        """An executor calls a client's function, or can call some no more."""
        if isinstance(message, CallbacksUnused):
            self._using.get(message, set()).discard((session, host))
            self._tell_unused()
            return
        channel = self._clients.get(message.client)
        if channel is None:
            self._cancel(session, host, message.call)
            return
        self._last_call += 1
        self._calls[self._last_call] = _Call(session, host, message.call, message.client)
        channel.send(CallbackCall(self._last_call, message.client, message.number, message.operands), payload)

    def compiles(self, session: SessionId, program: Handle, functions: Functions) -> None:
        """A program of a session calls these functions, which no other does."""
        self._programs[session, program] = functions

    def deleted(self, session: SessionId, program: Handle) -> None:
        """The client has deleted a program. Executions that were asked for before may go on."""
        functions = self._programs.pop((session, program), None)
        if functions is not None:
            self._using[CallbacksUnused(*functions)] = self._tell_all(CallbacksDropped(*functions))
            self._tell_unused()

    def session_over(self, session: SessionId) -> None:
        """Nobody waits for the session's calls any more, and there will be none."""
        for key in [key for key in self._programs if key[0] == session]:
            self._using[CallbacksUnused(*self._programs.pop(key))] = set()
        self._forget(lambda of_session, host: of_session == session)

    def forget_host(self, host: HostIndex) -> None:
        """The executor that waits is gone."""
        self._forget(lambda session, of_host: of_host == host)

    def _forget(self, is_meant: Callable[[SessionId, HostIndex], bool]) -> None:
        for number in [number for number, call in self._calls.items() if is_meant(call.session, call.host)]:
            del self._calls[number]
        for users in self._using.values():
            users -= {user for user in users if is_meant(*user)}
        self._tell_unused()

    def _tell_unused(self) -> None:
        for unused in [unused for unused, users in self._using.items() if not users]:
            del self._using[unused]
            if (channel := self._clients.get(unused.client)) is not None:
                channel.send(unused, b"")

    def _cancel(self, session: SessionId, host: HostIndex, call: int) -> None:
        failure = Status(Code.CANCELLED, "the program whose Python function this calls is gone")
        self._answer(session, host, CallbackResult(call, failure, ()), b"")

    def _received(self, client: "_Client", frame: Frame[AnyCallbackMessage]) -> None:
        message = frame.message
        if isinstance(message, CallbacksHello):
            if client.name is not None or message.client in self._clients:
                raise FrameError(f"a second CallbacksHello of {message.client}")
            if message.version != CALLBACKS_VERSION:
                raise FrameError(f"callbacks of version {message.version} are not {CALLBACKS_VERSION}, which we speak")
            client.name = message.client
            self._clients[message.client] = client.channel
        elif client.name is None or not isinstance(message, CallbackResult):
            raise FrameError(f"{type(message).__name__} has no place here on a connection for callbacks")
        else:
            call = self._calls.get(message.call)
            # A call whose session or executor is gone is forgotten here.
            if call is not None and call.client == client.name:
                del self._calls[message.call]
                answer = CallbackResult(call.call, message.failure, message.results)
                self._answer(call.session, call.host, answer, frame.payload)

    def _lost(self, client: "_Client", failure: Exception | None) -> None:
        if client.name is None:
            return
        if failure is not None:
            logger.warning("connection for callbacks of client %s lost: %s", client.name, failure)
        del self._clients[client.name]
        for number in [number for number, call in self._calls.items() if call.client == client.name]:
            call = self._calls.pop(number)
            self._cancel(call.session, call.host, call.call)


class _Client:
    """One connection of a client."""

    def __init__(self, server: CallbackServer) -> None:
        self._server = server
        self.name: str | None = None
        self.channel: CallbackChannel = AsyncChannel(server._codec, self._on_frames, self._on_closed)

    def _on_frames(self, channel: CallbackChannel, frames: Sequence[Frame[AnyCallbackMessage]]) -> None:
        for frame in frames:
            self._server._received(self, frame)

    def _on_closed(self, channel: CallbackChannel, failure: Exception | None) -> None:
        self._server._lost(self, failure)
