"""Shards of a simulated cluster: integers that come now or later, or fail."""

from collections.abc import Callable, Iterable

from pathways_runtime.core.status import Status


class Cell:
    """One shard: a value or a failure, now or later."""

    __slots__ = ("_waiting", "failure", "value")

    def __init__(self) -> None:
        self.value: int | None = None
        self.failure: Status | None = None
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_ready(self) -> bool:
        """Whether it has a value or a failure."""
        return self.value is not None or self.failure is not None

    def settle(self, value: int | None, failure: Status | None) -> None:
        """Give it a value or a failure; whoever waits is called."""
        assert not self.is_ready, "a shard has one value"
        self.value, self.failure = value, failure
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back once it is ready, perhaps at once."""
        if self.is_ready:
            callback()
        else:
            self._waiting.append(callback)


def when_all_ready(cells: Iterable[Cell], callback: Callable[[], None]) -> None:
    """Call back once all are ready, perhaps at once."""
    waiting = [cell for cell in cells if not cell.is_ready]
    if not waiting:
        callback()
        return
    left = len(waiting)

    def one_ready() -> None:
        nonlocal left
        left -= 1
        if not left:
            callback()

    for cell in waiting:
        cell.when_ready(one_ready)
