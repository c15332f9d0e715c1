"""A session with numpy workers behind it, and a client of it."""

from collections.abc import Iterator

import pytest

from pathways_runtime.testing.session_client import TOPOLOGY, Client
from pathways_runtime.testing.session_driver import SessionDriver


@pytest.fixture
def session() -> Iterator[SessionDriver]:
    """A driver; after the test no request is left open, and the core's invariants hold."""
    driver = SessionDriver(TOPOLOGY)
    yield driver
    driver.core.check_invariants()
    assert not driver.open_requests, f"never answered: {driver.open_requests}"


@pytest.fixture
def client(session: SessionDriver) -> Client:
    """A client of ``session``."""
    return Client(session)
