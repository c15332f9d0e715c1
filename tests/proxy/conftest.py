"""Fixtures: every session test runs with every front end."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pathways_runtime.core.topology import Topology
from pathways_runtime.proxy.frontend_grpc import GrpcFrontend
from pathways_runtime.proxy.frontend_http2 import Http2Frontend
from pathways_runtime.proxy.shell import FrontendFactory

from .rig import Rig

FRONTENDS: dict[str, FrontendFactory] = {"grpc": GrpcFrontend, "http2": Http2Frontend}

#: Two slices of one host of two devices.
TWO_SLICES = Topology(2, 1, 2, "cpu")

RunWithRig = Callable[..., None]


@pytest.fixture(params=sorted(FRONTENDS))
def frontend(request: pytest.FixtureRequest) -> str:
    """Every front end behaves the same."""
    return str(request.param)


@pytest.fixture
def run(tmp_path: Path, frontend: str) -> RunWithRig:
    """Runs a test's coroutine function with a rig: ``run(test, max_undispatched=...)``."""

    def run_with_rig(
        body: Callable[[Rig], Awaitable[None]],
        max_undispatched: int = 1000,
    ) -> None:
        async def main() -> None:
            async with Rig(tmp_path, TWO_SLICES, FRONTENDS[frontend], max_undispatched) as rig:
                await body(rig)

        asyncio.run(asyncio.wait_for(main(), 60))

    return run_with_rig
