"""The coordination services that the controller has started, one process per world."""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from pathways_runtime.core.ids import WorldId
from pathways_runtime.transport.addresses import UnixAddress
from pathways_runtime.transport.lifeline import Child, spawn
from pathways_runtime.transport.network import Network

logger = logging.getLogger(__name__)

#: A service starts in 0.2 s; a machine that pages or starts hundreds of processes needs longer.
START_TIMEOUT_S = 60.0
_STOP_GRACE_S = 2.0


class _Service:
    def __init__(self, child: Child, socket_path: Path) -> None:
        self.child = child
        self.socket_path = socket_path
        self.events_fd = child.take_events_fd()
        self.received = b""
        self.timeout: asyncio.TimerHandle | None = None


class Coordinators:
    """Starts and stops services on the running event loop.

    Args:
        on_started: called with a world and its service's address.
        on_failed: called with a world and a reason, once, when its service did not start or ended unasked.
        folder: this user's alone, for their sockets.
        network: where members of other hosts come in, and the job's credentials; None: all are on this host.
    """

    def __init__(
        self,
        on_started: Callable[[WorldId, str], None],
        on_failed: Callable[[WorldId, str], None],
        folder: Path,
        network: Network | None = None,
    ) -> None:
        self._folder = folder
        self._network = network
        self._on_started = on_started
        self._on_failed = on_failed
        self._services: dict[WorldId, _Service] = {}
        self._loop = asyncio.get_running_loop()

    def start(self, world: WorldId, num_members: int) -> None:
        """Start a world's service."""
        argv = [sys.executable, "-P", "-m", "pathways_runtime.controller.coordination"]
        socket_path = self._folder / f"world-{world}.sock"
        argv += ["--num-members", str(num_members), "--listen", str(UnixAddress(str(socket_path)))]
        if self._network is not None:
            argv += self._network.as_options()
        # One thread for numpy, which jaxlib imports and which nothing here uses.
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            child = spawn(argv, name=f"coordination of world {world}", env=env, log_path=None, with_events=True)
        except OSError as failure:
            self._on_failed(world, f"it could not be started: {failure}")
            return
        service = _Service(child, socket_path)
        self._services[world] = service
        self._loop.add_reader(service.events_fd, self._readable, world, service)
        self._loop.add_reader(child.pidfd, self._ended, world, service)
        service.timeout = self._loop.call_later(START_TIMEOUT_S, self._too_late, world, service)

    def stop(self, world: WorldId) -> None:
        """End a world's service at once; nobody is told."""
        service = self._services.pop(world, None)
        if service is not None:
            self._forget(service)
            _reap(service)

    def pids(self) -> list[int]:
        """Of the services that run."""
        return [service.child.pid for service in self._services.values()]

    async def close(self) -> None:
        """End all services, in good order as far as they do."""
        services, self._services = list(self._services.values()), {}
        for service in services:
            self._forget(service)
            service.child.release_lifeline()
        await asyncio.gather(*(service.child.stop_on_loop(_STOP_GRACE_S) for service in services))
        for service in services:
            _reap(service)

    def _forget(self, service: _Service) -> None:
        self._loop.remove_reader(service.child.pidfd)
        if service.events_fd >= 0:
            self._loop.remove_reader(service.events_fd)
            os.close(service.events_fd)
            service.events_fd = -1
        if service.timeout is not None:
            service.timeout.cancel()

    def _readable(self, world: WorldId, service: _Service) -> None:
        received = os.read(service.events_fd, 4096)
        if not received:
            # It has ended, or ends; ``_ended`` says so.
            self._loop.remove_reader(service.events_fd)
            os.close(service.events_fd)
            service.events_fd = -1
            return
        service.received += received
        line, newline, service.received = service.received.partition(b"\n")
        if not newline:
            service.received = line
            return
        if service.timeout is not None:
            service.timeout.cancel()
        self._on_started(world, json.loads(line)["address"])

    def _ended(self, world: WorldId, service: _Service) -> None:
        self._services.pop(world, None)
        self._forget(service)
        returncode = _reap(service)
        self._on_failed(world, f"its process ended with {returncode}")

    def _too_late(self, world: WorldId, service: _Service) -> None:
        self._services.pop(world, None)
        self._forget(service)
        _reap(service)
        self._on_failed(world, f"it did not listen within {START_TIMEOUT_S:g} s")


def _reap(service: _Service) -> int:
    """End it, if it has not, and leave nothing of it; its exit code."""
    returncode = service.child.reap()
    service.socket_path.unlink(missing_ok=True)
    return returncode
