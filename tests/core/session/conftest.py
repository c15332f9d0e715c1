"""A session over two slices of two hosts of two devices, with numpy workers behind it."""

from collections.abc import Iterator

import pytest

from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.session_driver import SessionDriver

TOPOLOGY = Topology(num_slices=2, hosts_per_slice=2, devices_per_host=2, platform="cpu")


@pytest.fixture
def session() -> Iterator[SessionDriver]:
    """A driver; after the test no request is left open, and the core's invariants hold."""
    driver = SessionDriver(TOPOLOGY)
    yield driver
    driver.core.check_invariants()
    assert not driver.open_requests, f"never answered: {driver.open_requests}"
