"""The proxy's end of the session links (``wire.links``): executors connect to it, one link per session and host."""

import logging
from collections.abc import Callable, Sequence

from pathways_runtime.core.ids import HostIndex, SessionId
from pathways_runtime.proxy.host_memory import HostMemory
from pathways_runtime.transport import streams
from pathways_runtime.transport.frames import AsyncChannel, Buffer, Frame, FrameCodec, FrameError
from pathways_runtime.transport.network import Network
from pathways_runtime.wire.callbacks import CallbackCall, CallbackResult, CallbacksDropped, CallbacksUnused
from pathways_runtime.wire.links import AnyLinkMessage, ArraysReady, Fetched, HostBuffer, LinkHello

logger = logging.getLogger(__name__)

LinkChannel = AsyncChannel[AnyLinkMessage]
#: Called with what a host sends over the link of a session.
Receiver = Callable[[HostIndex, ArraysReady | Fetched, bytearray], None]
#: Called with what an executor asks of a client's Python functions, and says of them.
OnCall = Callable[[SessionId, HostIndex, CallbackCall | CallbacksUnused, Buffer], None]


class LinkServer:
    """Links by session and host.

    A link may come up before its session is known here, and what is sent may come before its link is up: both are kept.
    What was meant for an executor that is gone is dropped with it (``forget_host``).

    Args:
        address: where to listen.
        memory: what comes lies in it.
        on_call: see ``OnCall``.
        network: needed for TCP.

    Attributes:
        address: where executors connect; of TCP, the real port is known once it listens.
    """

    def __init__(self, address: str, memory: HostMemory, on_call: OnCall, network: Network | None = None) -> None:
        self.address = address
        self._network = network
        self.memory = memory
        self._on_call = on_call
        self._codec: FrameCodec[AnyLinkMessage] = FrameCodec(AnyLinkMessage)
        self._server: streams.Server | None = None
        self._receivers: dict[SessionId, Receiver] = {}
        self._links: dict[tuple[SessionId, HostIndex], _Link] = {}
        self._waiting: dict[tuple[SessionId, HostIndex], list[tuple[HostBuffer, Buffer]]] = {}
        #: The last change by which a host was lost.
        self._lost_at: dict[HostIndex, int] = {}

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            AddressError, OSError: it cannot.
        """
        self._server = await streams.serve(self.address, lambda: _Link(self).channel, self._network)
        self.address = self._server.address

    async def stop(self) -> None:
        """Close all links and listen no more."""
        for link in list(self._links.values()):
            link.channel.close()
        if self._server is not None:
            self._server.close()

    def open(self, session: SessionId, receiver: Receiver) -> None:
        """Take what the links of a session bring, also what came before."""
        self._receivers[session] = receiver
        for (owner, host), link in list(self._links.items()):
            if owner == session:
                link.deliver_early(host, receiver)

    def close(self, session: SessionId) -> None:
        """The session is over."""
        self._receivers.pop(session, None)
        for key in [key for key in self._links if key[0] == session]:
            self._links.pop(key).channel.close()
        for key in [key for key in self._waiting if key[0] == session]:
            del self._waiting[key]

    def send(self, session: SessionId, host: HostIndex, header: HostBuffer, payload: Buffer) -> None:
        """Send now, or once the link is up."""
        link = self._links.get((session, host))
        if link is None:
            self._waiting.setdefault((session, host), []).append((header, payload))
        else:
            link.channel.send(header, payload)

    def answer_call(self, session: SessionId, host: HostIndex, result: CallbackResult, payload: Buffer) -> None:
        """Answer what ``on_call`` was told; nobody waits any more where there is no link."""
        link = self._links.get((session, host))
        if link is not None:
            link.channel.send(result, payload)

    def callbacks_dropped(self, message: CallbacksDropped) -> set[tuple[SessionId, HostIndex]]:
        """Tell the executors behind all links, which answer by ``on_call``; returns whom."""
        for link in self._links.values():
            link.channel.send(message, b"")
        return set(self._links)

    def unsent_bytes(self, session: SessionId) -> int:
        """What the session's links that are up have not taken yet."""
        return sum(link.channel.unsent_bytes() for key, link in self._links.items() if key[0] == session)

    def forget_host(self, host: HostIndex, change: int) -> None:
        """The executor behind a host is gone, by the change of hosts of that number, and what was meant for it too.

        Its links may not have noticed yet, or come up late, and must not swallow what is meant for the next one, whose
        links may be up already.
        """
        self._lost_at[host] = change
        for key in [key for key in self._waiting if key[1] == host]:
            del self._waiting[key]
        for key, link in list(self._links.items()):
            if key[1] == host and link.hello is not None and link.hello.change < change:
                self._links.pop(key).channel.close()

    def _registered(self, link: "_Link", hello: LinkHello) -> None:
        key = (hello.session, hello.host)
        if hello.change < self._lost_at.get(hello.host, 0):
            link.channel.close()
            return
        former = self._links.get(key)
        if former is not None:
            former.channel.close()
        self._links[key] = link
        for header, payload in self._waiting.pop(key, ()):
            link.channel.send(header, payload)

    def _received(self, link: "_Link", frame: Frame[AnyLinkMessage]) -> None:
        message = frame.message
        if isinstance(message, LinkHello):
            if link.hello is not None:
                raise FrameError("a second LinkHello on one link")
            link.hello = message
            self._registered(link, message)
            return
        if link.hello is not None and isinstance(message, CallbackCall | CallbacksUnused):
            self._on_call(link.hello.session, link.hello.host, message, frame.payload)
            return
        if link.hello is None or not isinstance(message, ArraysReady | Fetched):
            raise FrameError(f"{type(message).__name__} has no place here on a session link")
        receiver = self._receivers.get(link.hello.session)
        if receiver is None:
            link.early.append((message, frame.payload))
        else:
            receiver(link.hello.host, message, frame.payload)

    def _lost(self, link: "_Link", failure: Exception | None) -> None:
        if link.hello is None:
            return
        key = (link.hello.session, link.hello.host)
        if self._links.get(key) is link:
            del self._links[key]
            if failure is not None:
                logger.warning("session_id=%d host=%d: session link lost: %s", *key, failure)


class _Link:
    """One connection of an executor."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self.channel: LinkChannel = AsyncChannel(server._codec, self._on_frames, self._on_closed, server.memory.take)
        self.hello: LinkHello | None = None
        #: What came before the session was known.
        self.early: list[tuple[ArraysReady | Fetched, bytearray]] = []

    def deliver_early(self, host: HostIndex, receiver: Receiver) -> None:
        early, self.early = self.early, []
        for message, payload in early:
            receiver(host, message, payload)

    def _on_frames(self, channel: LinkChannel, frames: Sequence[Frame[AnyLinkMessage]]) -> None:
        for frame in frames:
            self._server._received(self, frame)

    def _on_closed(self, channel: LinkChannel, failure: Exception | None) -> None:
        self._server._lost(self, failure)
