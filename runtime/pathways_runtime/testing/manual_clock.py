"""Time that passes only when a test says so."""

import heapq
from collections.abc import Callable
from typing import Protocol


class Mortal(Protocol):
    """Who may be dead when the time comes."""

    is_dead: bool


class _Nobody:
    is_dead = False


_NOBODY = _Nobody()


class ManualClock:
    """Calls back in the order of time; calls for the same moment in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._calls: list[tuple[int, int, Mortal, Callable[[], None]]] = []
        self._num_calls = 0

    def call_at(self, when_ns: int, callback: Callable[[], None], receiver: Mortal = _NOBODY) -> None:
        """Call back at a time; at once, but not from within, if that is over.

        Args:
            receiver: if it is dead by then, nothing is called.
        """
        self._num_calls = number = self._num_calls + 1
        if when_ns < self.now_ns:
            when_ns = self.now_ns
        heapq.heappush(self._calls, (when_ns, number, receiver, callback))

    def call_later(self, delay_ns: int, callback: Callable[[], None]) -> None:
        """Call back after a delay."""
        self.call_at(self.now_ns + delay_ns, callback)

    def run(self, until_ns: int | None = None) -> None:
        """Let time pass until nothing is left to be called, or until a time."""
        calls, pop = self._calls, heapq.heappop
        while calls and (until_ns is None or calls[0][0] <= until_ns):
            self.now_ns, _, receiver, callback = pop(calls)
            if not receiver.is_dead:
                callback()
        if until_ns is not None:
            self.now_ns = max(self.now_ns, until_ns)
