"""The proxy as a process: its events, and everything that ends it."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pathways_runtime.core.topology import Topology

from .conftest import TWO_SLICES
from .fake_cluster import DEADLINE_S, FakeCluster
from .ifrt_client import IfrtClient


class ProxyProcess:
    """``python -m pathways_runtime.proxy`` with its events and its lifeline."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.listen = f"unix:{folder}/proxy"

    async def __aenter__(self) -> "ProxyProcess":
        lifeline, self.lifeline = os.pipe()
        events, events_write = os.pipe()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pathways_runtime.proxy", "--connect-timeout-s", "0.2"),
            *("--controller", f"unix:{self._folder}/control"),
            *("--listen", self.listen, "--links", f"unix:{self._folder}/links"),
            *("--events-fd", str(events_write), "--lifeline-fd", str(lifeline)),
            pass_fds=(lifeline, events_write),
            stderr=asyncio.subprocess.PIPE,
        )
        os.close(lifeline)
        os.close(events_write)
        self._events = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._events), os.fdopen(events, "rb")
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()
        self._transport.close()
        if self.lifeline is not None:
            os.close(self.lifeline)

    async def event(self) -> dict[str, Any]:
        """The next one."""
        line = await asyncio.wait_for(self._events.readline(), DEADLINE_S)
        assert line, f"no more events; {await self._stderr()}"
        return dict(json.loads(line))

    async def ends(self) -> int:
        """Its exit code."""
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)

    async def _stderr(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()


def run(tmp_path: Path, body: Any, topology: Topology = TWO_SLICES) -> None:
    async def main() -> None:
        async with FakeCluster(f"unix:{tmp_path}/control", topology) as cluster, ProxyProcess(tmp_path) as proxy:
            assert await proxy.event() == {"event": "listening", "address": proxy.listen}
            await body(cluster, proxy)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_sessions_are_told(tmp_path: Path) -> None:
    async def body(cluster: FakeCluster, proxy: ProxyProcess) -> None:
        async with IfrtClient(proxy.listen) as client:
            assert len((await client.init()).all_devices) == 4
            attached = await proxy.event()
            assert (attached["event"], attached["id"], attached["state"]) == ("session", 1, "attached")
        over = await proxy.event()
        assert (over["event"], over["id"], over["state"]) == ("session", 1, "over")

    run(tmp_path, body)


def test_it_ends_with_its_launcher(tmp_path: Path) -> None:
    async def body(cluster: FakeCluster, proxy: ProxyProcess) -> None:
        os.close(proxy.lifeline)
        proxy.lifeline = None
        assert await proxy.event() == {"event": "ended", "reason": "the launcher is gone", "is_failure": False}
        assert await proxy.ends() == 0
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_socket()) == ["control"]

    run(tmp_path, body)


def test_it_ends_when_asked_to_and_tells_its_client(tmp_path: Path) -> None:
    async def body(cluster: FakeCluster, proxy: ProxyProcess) -> None:
        async with IfrtClient(proxy.listen) as client:
            await client.init()
            await proxy.event()
            proxy.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(client.ended, DEADLINE_S)
        assert (await proxy.event())["state"] == "over"
        assert await proxy.event() == {"event": "ended", "reason": "asked to end by SIGTERM", "is_failure": False}
        assert await proxy.ends() == 0

    run(tmp_path, body)


def test_it_fails_when_the_controller_is_lost(tmp_path: Path) -> None:
    async def body(cluster: FakeCluster, proxy: ProxyProcess) -> None:
        await cluster.until(lambda: cluster.control is not None, "the proxy says hello")
        cluster.close_control()
        ended = await proxy.event()
        assert ended["event"] == "ended" and ended["is_failure"]
        assert f"the controller at {cluster.address} is lost" in ended["reason"]
        assert await proxy.ends() == 1

    run(tmp_path, body)


def test_it_fails_when_the_controller_is_not_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with ProxyProcess(tmp_path) as proxy:
            ended = await proxy.event()
            assert ended["event"] == "ended" and ended["is_failure"]
            assert f"no controller: cannot connect to unix:{tmp_path}/control (tried for 0.2 s)" in ended["reason"]
            assert await proxy.ends() == 1

    asyncio.run(asyncio.wait_for(main(), 60))
