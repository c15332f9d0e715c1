"""What tests of the data plane say: expect, send, and wait with a deadline."""

import threading
from collections.abc import Callable
from pathlib import Path

from pathways_runtime.transport.dataplane import DataPlane, Key, Payload
from tests.waiting import until

TIMEOUT_S = 20.0


class Arrival:
    """What became of one expectation."""

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self._payload: Payload | None = None

    def __call__(self, payload: Payload) -> None:
        assert self._payload is None, "an expectation was answered twice"
        self._payload = payload
        self._arrived.set()

    @property
    def is_there(self) -> bool:
        return self._arrived.is_set()

    def payload(self, what: object = "a payload") -> Payload:
        assert self._arrived.wait(TIMEOUT_S), f"{what} did not arrive within {TIMEOUT_S:g} s"
        assert self._payload is not None
        return self._payload


class Sending:
    """What became of one send."""

    def __init__(self) -> None:
        self._reported = threading.Event()
        self._failure: Exception | None = None

    def __call__(self, failure: Exception | None) -> None:
        assert not self._reported.is_set(), "a send was reported twice"
        self._failure = failure
        self._reported.set()

    @property
    def is_reported(self) -> bool:
        return self._reported.is_set()

    def failure(self) -> Exception | None:
        assert self._reported.wait(TIMEOUT_S), f"a send was not reported within {TIMEOUT_S:g} s"
        return self._failure


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that nothing announces."""
    until(holds, what, TIMEOUT_S, 0.002)


def expect(plane: DataPlane, key: Key, source: int | None = None) -> Arrival:
    arrival = Arrival()
    plane.expect(key, arrival, source)
    return arrival


def num_descriptors() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


MakePlane = Callable[..., DataPlane]
