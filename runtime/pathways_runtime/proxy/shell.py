"""The proxy process: one event loop that owns front end, sessions, control stream and session links."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pathways_runtime.core.status import Code, Status
from pathways_runtime.proxy.backend import ProxyBackend
from pathways_runtime.proxy.callback_server import CallbackServer
from pathways_runtime.proxy.controller_link import ControllerLink
from pathways_runtime.proxy.folders import Folders
from pathways_runtime.proxy.frontend import Backend, Frontend
from pathways_runtime.proxy.host_memory import DEFAULT_BUDGET_BYTES, HostMemory
from pathways_runtime.proxy.link_server import LinkServer
from pathways_runtime.proxy.session_server import SessionServer
from pathways_runtime.transport.lifeline import EventWriter
from pathways_runtime.transport.network import Network
from pathways_runtime.wire.callbacks import callbacks_address

logger = logging.getLogger(__name__)

#: How long streams may take to write what is queued when the process ends.
STOP_GRACE_S = 1.0

FrontendFactory = Callable[[str, Backend], Frontend]


@dataclass(frozen=True, slots=True)
class ProxyAddresses:
    """Where a proxy listens and whom it talks to: see ``transport.addresses``.

    Attributes:
        controller: the controller's control socket.
        listen: for the client; a Unix socket.
        links: for executors.
        network: needed when an address is of TCP.
    """

    controller: str
    listen: str
    links: str
    network: Network | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a proxy ended. ``is_failure`` unless it was asked to."""

    reason: str
    is_failure: bool


class Proxy:
    """Composition and life of the process. Made on the event loop that it runs on.

    Args:
        make_frontend: which front end listens, e.g. ``GrpcFrontend``.
        events: told ``listening`` (address), ``session`` (id, client, state) and ``ended`` (reason).
        connect_timeout_s: how long the controller may take to listen.
        host_buffers_bytes: how much memory host buffers may take before clients that run ahead are held back.
        gs_directory: see ``folders.Folders``.
    """

    def __init__(
        self,
        where: ProxyAddresses,
        make_frontend: FrontendFactory,
        events: EventWriter,
        connect_timeout_s: float = 30.0,
        host_buffers_bytes: int = DEFAULT_BUDGET_BYTES,
        gs_directory: str | None = None,
    ) -> None:
        self._where = where
        self._events = events
        self._connect_timeout_s = connect_timeout_s
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        # Links and callbacks know each other: calls go one way, answers the other.
        self._links = LinkServer(
            where.links, HostMemory(host_buffers_bytes), lambda *said: self._callbacks.said(*said), where.network
        )
        self._callbacks = CallbackServer(
            callbacks_address(where.listen), self._links.answer_call, self._links.callbacks_dropped
        )
        # The link to the controller and the backend know each other: the former's messages go to the latter.
        self._controller = ControllerLink(lambda message: self._backend.control_message(message), self._controller_lost)
        self._backend = ProxyBackend(
            self._controller, self._links, self._callbacks, self._session_changed, Folders(gs_directory)
        )
        self._frontend = make_frontend(where.listen, self._backend)

    async def run(self) -> Ending:
        """Serve until ``end`` is called or the controller is lost; then end all sessions with a status that says so.

        Raises:
            ConnectFailed: the controller was not there in time.
            AddressError, OSError: an address cannot be listened at.
        """
        try:
            await self._links.start()
            if await self._connect():
                await self._callbacks.start()
                await self._frontend.start()
                logger.info("listening at %s", self._where.listen)
                self._events.write("listening", address=self._where.listen)
            ending = await self._ending
            self._backend.end_all(Status(Code.UNAVAILABLE, ending.reason))
            (logger.error if ending.is_failure else logger.info)("ends: %s", ending.reason)
            self._events.write("ended", reason=ending.reason, is_failure=ending.is_failure)
            return ending
        finally:
            await self._frontend.stop(STOP_GRACE_S)
            self._controller.close()
            await self._callbacks.stop()
            await self._links.stop()

    async def _connect(self) -> bool:
        """Connect to the controller; False if ``end`` was called before it was there."""
        connecting = asyncio.ensure_future(
            self._controller.connect(self._where.controller, self._connect_timeout_s, self._where.network)
        )
        await asyncio.wait((connecting, self._ending), return_when=asyncio.FIRST_COMPLETED)
        if self._ending.done():
            connecting.cancel()
            await asyncio.wait((connecting,))
            return False
        await connecting
        return True

    def end(self, ending: Ending) -> None:
        """Make ``run`` return. The first reason counts."""
        if not self._ending.done():
            self._ending.set_result(ending)

    def _controller_lost(self, reason: str) -> None:
        self.end(Ending(f"the controller at {self._where.controller} is lost: {reason}", is_failure=True))

    def _session_changed(self, state: str, session: SessionServer) -> None:
        logger.info("session_id=%s client=%s: %s", session.session_id, session.peer, state)
        self._events.write("session", id=session.session_id, client=session.peer, state=state)
