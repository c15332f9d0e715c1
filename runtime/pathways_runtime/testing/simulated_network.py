"""Links with random delays that keep the order of what is sent, as stream sockets do."""

import random
from collections.abc import Callable

from pathways_runtime.testing.manual_clock import ManualClock


class Link:
    """One direction of one connection."""

    def __init__(self, clock: ManualClock, rng: random.Random, longest_delay_ns: int) -> None:
        self._clock = clock
        self._rng = rng
        self._longest_delay_ns = longest_delay_ns
        self._last_arrival_ns = 0

    def send(self, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` after a random delay, and after all that was sent before."""
        arrival_ns = self._clock.now_ns + self._rng.randrange(self._longest_delay_ns)
        self._last_arrival_ns = max(self._last_arrival_ns, arrival_ns)
        self._clock.call_at(self._last_arrival_ns, deliver)


class Network:
    """Makes the links of a simulation, each with a slowness of its own."""

    def __init__(self, clock: ManualClock, rng: random.Random, longest_delay_ns: int = 200_000) -> None:
        self._clock = clock
        self._rng = rng
        self._longest_delay_ns = longest_delay_ns
        self._links: dict[tuple[str, ...], Link] = {}

    def link(self, *ends: str) -> Link:
        """The link from one end to another, the same one every time."""
        link = self._links.get(ends)
        if link is None:
            longest_ns = self._rng.randint(self._longest_delay_ns // 10, self._longest_delay_ns)
            link = self._links[ends] = Link(self._clock, self._rng, longest_ns)
        return link
