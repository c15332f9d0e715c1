"""A proxy in the test's own event loop, between a fake cluster and clients that do what they are told."""

import asyncio
from pathlib import Path
from typing import Any

from pathways_runtime.core.topology import Topology
from pathways_runtime.proxy.shell import Ending, FrontendFactory, Proxy, ProxyAddresses
from pathways_runtime.transport.lifeline import EventWriter

from .fake_cluster import DEADLINE_S, FakeCluster
from .ifrt_client import IfrtClient


class RecordedEvents(EventWriter):
    """Keeps events instead of writing them."""

    def __init__(self, listening: asyncio.Event) -> None:
        super().__init__(None)
        self.events: list[dict[str, Any]] = []
        self._listening = listening

    def write(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})
        if event == "listening":
            self._listening.set()


class Rig:
    """``cluster`` and ``proxy`` up and connected; ``client()`` makes clients."""

    def __init__(self, folder: Path, topology: Topology, make_frontend: FrontendFactory, max_undispatched: int) -> None:
        self._address = lambda name: f"unix:{folder}/{name}"
        self._make_frontend = make_frontend
        self.cluster = FakeCluster(self._address("control"), topology, max_undispatched)
        self.listen = self._address("proxy")

    async def __aenter__(self) -> "Rig":
        await self.cluster.__aenter__()
        listening = asyncio.Event()
        self.events = RecordedEvents(listening)
        where = ProxyAddresses(self._address("control"), self.listen, self._address("links"))
        self.proxy = Proxy(where, self._make_frontend, self.events)
        self.running = asyncio.create_task(self.proxy.run())
        await asyncio.wait(
            (self.running, waiter := asyncio.create_task(listening.wait())),
            timeout=DEADLINE_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert waiter.done(), f"the proxy does not listen: {self.running}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.proxy.end(Ending("the test is over", is_failure=False))
        await asyncio.wait_for(self.running, DEADLINE_S)
        await self.cluster.__aexit__()

    def client(self, metadata: Any = None) -> IfrtClient:
        """A client of this proxy, to be entered."""
        return IfrtClient(self.listen, metadata)
