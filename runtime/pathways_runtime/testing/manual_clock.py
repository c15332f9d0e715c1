"""Time that passes only when a test says so."""

import heapq
from collections.abc import Callable


class ManualClock:
    """Calls back in the order of time; calls for the same moment in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._calls: list[tuple[int, int, Callable[[], None]]] = []
        self._num_calls = 0

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> None:
        """Call back at a time; at once, but not from within, if that is over."""
        self._num_calls += 1
        heapq.heappush(self._calls, (max(when_ns, self.now_ns), self._num_calls, callback))

    def call_later(self, delay_ns: int, callback: Callable[[], None]) -> None:
        """Call back after a delay."""
        self.call_at(self.now_ns + delay_ns, callback)

    def run(self, until_ns: int | None = None) -> None:
        """Let time pass until nothing is left to be called, or until a time."""
        while self._calls and (until_ns is None or self._calls[0][0] <= until_ns):
            self.now_ns, _, callback = heapq.heappop(self._calls)
            callback()
        if until_ns is not None:
            self.now_ns = max(self.now_ns, until_ns)
