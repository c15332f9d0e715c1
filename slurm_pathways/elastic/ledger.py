"""Which snapshot is where, and which are complete. Pure: places go out, what became of copies comes in."""

import dataclasses
import enum


class Copy(enum.Enum):
    """Legal changes: UNDER_WAY -> COMPLETE | LOST; COMPLETE -> LOST."""

    UNDER_WAY = "under way"
    COMPLETE = "complete"
    LOST = "lost"


@dataclasses.dataclass(slots=True)
class Snapshot:
    """The state of one step.

    Attributes:
        number: snapshots are numbered as they are begun; two may be of one step.
        copies: by slice. Each is the whole state.
    """

    number: int
    step: int
    copies: dict[int, Copy]

    @property
    def is_settled(self) -> bool:
        """Whether no copy is under way."""
        return Copy.UNDER_WAY not in self.copies.values()

    @property
    def is_usable(self) -> bool:
        """Whether some copy has all its shards."""
        return Copy.COMPLETE in self.copies.values()


class Ledger:
    """The snapshots there are, the oldest first.

    A copy is complete when all its shards are there, and is of no use before. Older snapshots go when ``keep`` newer
    ones are settled and usable: until then, each may be the one that is needed.
    """

    def __init__(self, replicas: int, keep: int) -> None:
        self._replicas = replicas
        self._keep = keep
        self._num_begun = 0
        self._snapshots: list[Snapshot] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a snapshot is being made."""
        return any(not snapshot.is_settled for snapshot in self._snapshots)

    def numbers(self) -> frozenset[int]:
        """The snapshots that are to be kept."""
        return frozenset(snapshot.number for snapshot in self._snapshots)

    def begin(self, step: int, live: tuple[int, ...]) -> Snapshot:
        """A snapshot of this step, and the slices that it goes to: others each time, so that they share the load.

        Raises:
            ValueError: one is under way, or there is no slice.
        """
        if self.is_under_way or not live:
            raise ValueError(f"a snapshot of step {step} cannot be begun: {self._snapshots}, slices {live}")
        first = self._num_begun % len(live)
        places = (live[first:] + live[:first])[: self._replicas]
        self._num_begun += 1
        snapshot = Snapshot(self._num_begun, step, dict.fromkeys(places, Copy.UNDER_WAY))
        self._snapshots.append(snapshot)
        return snapshot

    def complete(self, number: int, slice_index: int) -> None:
        """A copy has all its shards."""
        self._settle(number, slice_index, Copy.COMPLETE)

    def lose(self, number: int, slice_index: int) -> None:
        """A copy cannot be made, or cannot be read any more."""
        self._settle(number, slice_index, Copy.LOST)

    def usable(self) -> list[tuple[Snapshot, int]]:
        """What can be continued from, the best first: each snapshot with each slice that has a complete copy."""
        newest_first = sorted(self._snapshots, key=lambda snapshot: (snapshot.step, snapshot.number), reverse=True)
        return [
            (snapshot, place)
            for snapshot in newest_first
            for place, copy in snapshot.copies.items()
            if copy is Copy.COMPLETE
        ]

    def check_invariants(self) -> None:
        """What must hold between events."""
        numbers = [snapshot.number for snapshot in self._snapshots]
        assert numbers == sorted(set(numbers)), numbers
        assert len(self._snapshots) <= self._keep + 1, self._snapshots
        assert sum(not snapshot.is_settled for snapshot in self._snapshots) <= 1
        for snapshot in self._snapshots:
            assert snapshot.is_usable or not snapshot.is_settled, "it is of no use, and is kept"
            assert 1 <= len(snapshot.copies) <= self._replicas

    def _settle(self, number: int, slice_index: int, became: Copy) -> None:
        found = [snapshot for snapshot in self._snapshots if snapshot.number == number]
        if not found:
            return  # it has been dropped meanwhile
        (snapshot,) = found
        before = snapshot.copies[slice_index]
        if before is not Copy.UNDER_WAY and became is not Copy.LOST:
            raise ValueError(f"the copy of {snapshot} on slice {slice_index} is {before.value}")
        snapshot.copies[slice_index] = became
        if snapshot.is_settled and not snapshot.is_usable:
            self._snapshots.remove(snapshot)
        good = [one.number for one in self._snapshots if one.is_settled and one.is_usable]
        for dropped in good[: -self._keep]:
            self._snapshots = [one for one in self._snapshots if one.number != dropped]
