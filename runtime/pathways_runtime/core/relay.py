"""What a relay knows: what its children have said since it last spoke for them.

Executors of large clusters are *children* of a relay, which stands between them and the controller. Downwards it passes
bytes on and thinks nothing. Upwards, what gangs say is nearly the same from every child at nearly the same time; said
once for all, it costs the controller the same for 1 child and for 64.
"""

import msgspec

from pathways_runtime.core import bitmaps
from pathways_runtime.core.ids import OpId, SessionId, WaitId

#: How long completed launches may wait to be told with others. Credits cover it: 24 launches are in flight.
LAUNCHES_HELD_NS = 1_000_000
#: The same for what somebody waits for: transfers that are under way, arrays that are ready.
NEWS_HELD_NS = 100_000


class Aggregate(msgspec.Struct, frozen=True):
    """What several children have said, as bitmaps of their numbers.

    Attributes:
        completed: per count of launches completed, above 0, whose count that is; no child in two of them.
        transfers_started: per transfer, which senders have started it.
        ready: per wait, on whom its arrays are ready, without a failure.
    """

    completed: tuple[tuple[bytes, int], ...]
    transfers_started: tuple[tuple[SessionId, OpId, bytes], ...]
    ready: tuple[tuple[SessionId, WaitId, bytes], ...]


class Aggregation:
    """Adds up what children say until ``take``. Exact: counts are sums, sets are unions.

    What is pending is *due* when every child has said something, since then waiting longer gathers nothing more that
    belongs to this round; else at ``due_ns``.
    """

    def __init__(self) -> None:
        self._children = 0
        self._launches: dict[int, int] = {}
        self._transfers: dict[tuple[SessionId, OpId], int] = {}
        self._ready: dict[tuple[SessionId, WaitId], int] = {}
        #: Bit per child: who has said something since the last ``take``.
        self._spoken = 0
        self.due_ns: int | None = None

    def add_child(self, child: int) -> None:
        """A child is there, and counts among those who are waited for."""
        self._children |= 1 << child

    def remove_child(self, child: int) -> None:
        """A child is gone. What it has said stands."""
        self._children &= ~(1 << child)

    def acknowledge(
        self, child: int, launches_completed: int, transfers_started: tuple[tuple[SessionId, OpId], ...], now_ns: int
    ) -> None:
        """A child has completed launches and started transfers.

        Raises:
            ValueError: a negative count, which would pass unseen in a sum.
        """
        if launches_completed < 0:
            raise ValueError(f"child {child} completed {launches_completed} launches")
        if launches_completed:
            self._launches[child] = self._launches.get(child, 0) + launches_completed
        for transfer in transfers_started:
            self._transfers[transfer] = self._transfers.get(transfer, 0) | 1 << child
        self._note(child, now_ns + (NEWS_HELD_NS if transfers_started else LAUNCHES_HELD_NS))

    def arrays_ready(self, child: int, session: SessionId, wait_id: WaitId, now_ns: int) -> None:
        """A child's part of an Await is done."""
        key = (session, wait_id)
        self._ready[key] = self._ready.get(key, 0) | 1 << child
        self._note(child, now_ns + NEWS_HELD_NS)

    def is_due(self, now_ns: int) -> bool:
        """Whether to ``take`` now."""
        return self.due_ns is not None and (now_ns >= self.due_ns or not self._children & ~self._spoken)

    def take(self) -> Aggregate:
        """What was said since the last such call."""
        children_by_count: dict[int, int] = {}
        for child, count in self._launches.items():
            children_by_count[count] = children_by_count.get(count, 0) | 1 << child
        aggregate = Aggregate(
            tuple((bitmaps.to_bytes(mask), count) for count, mask in children_by_count.items()),
            tuple((*transfer, bitmaps.to_bytes(mask)) for transfer, mask in self._transfers.items()),
            tuple((*wait, bitmaps.to_bytes(mask)) for wait, mask in self._ready.items()),
        )
        self._launches, self._transfers, self._ready = {}, {}, {}
        self._spoken = 0
        self.due_ns = None
        return aggregate

    def _note(self, child: int, due_ns: int) -> None:
        self._spoken |= 1 << child
        if self.due_ns is None or due_ns < self.due_ns:
            self.due_ns = due_ns
