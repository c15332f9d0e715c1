"""Which snapshot is complete where."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slurm_pathways.elastic.ledger import Ledger, Snapshot

SLICES = (0, 1, 2)


def whole(ledger: Ledger, step: int, live: tuple[int, ...] = SLICES) -> Snapshot:
    """A snapshot with all its copies."""
    snapshot = ledger.begin(step, live)
    for place in snapshot.copies:
        ledger.complete(snapshot.number, place)
    return snapshot


def usable(ledger: Ledger) -> list[tuple[int, int]]:
    return [(snapshot.step, place) for snapshot, place in ledger.usable()]


def test_slices_take_turns() -> None:
    ledger = Ledger(replicas=2, keep=3)
    assert [tuple(whole(ledger, step).copies) for step in (10, 20, 30)] == [(0, 1), (1, 2), (2, 0)]


def test_replicas_are_as_many_as_there_are_slices() -> None:
    ledger = Ledger(replicas=2, keep=2)
    assert tuple(ledger.begin(10, (2,)).copies) == (2,)


def test_a_copy_counts_once_it_is_whole() -> None:
    ledger = Ledger(replicas=2, keep=2)
    snapshot = ledger.begin(10, SLICES)
    assert usable(ledger) == []
    ledger.complete(snapshot.number, 1)
    assert usable(ledger) == [(10, 1)]
    assert ledger.is_under_way
    ledger.complete(snapshot.number, 0)
    assert usable(ledger) == [(10, 0), (10, 1)]
    assert not ledger.is_under_way


def test_the_newest_are_kept_and_the_newest_comes_first() -> None:
    ledger = Ledger(replicas=1, keep=2)
    for step in (10, 20, 30):
        whole(ledger, step)
    assert usable(ledger) == [(30, 2), (20, 1)]


def test_the_older_one_stays_until_the_newer_is_whole() -> None:
    ledger = Ledger(replicas=1, keep=1)
    whole(ledger, 10)
    snapshot = ledger.begin(20, SLICES)
    assert usable(ledger) == [(10, 0)]
    ledger.lose(snapshot.number, 1)
    assert usable(ledger) == [(10, 0)]
    whole(ledger, 30)
    assert usable(ledger) == [(30, 2)]


def test_a_lost_slice_loses_no_snapshot() -> None:
    ledger = Ledger(replicas=2, keep=2)
    older, newer = whole(ledger, 10), whole(ledger, 20)
    ledger.lose(older.number, 1)
    ledger.lose(newer.number, 1)
    assert usable(ledger) == [(20, 2), (10, 0)]
    ledger.lose(newer.number, 2)
    assert usable(ledger) == [(10, 0)]
    assert ledger.numbers() == {older.number}


def test_of_one_step_the_later_one_counts() -> None:
    """After a loss, the state is copied anew from where training goes on."""
    ledger = Ledger(replicas=1, keep=2)
    whole(ledger, 10)
    again = whole(ledger, 10)
    assert next(snapshot.number for snapshot, _ in ledger.usable()) == again.number


def test_word_of_a_dropped_snapshot_comes_late() -> None:
    ledger = Ledger(replicas=1, keep=1)
    dropped = whole(ledger, 10)
    whole(ledger, 20)
    ledger.lose(dropped.number, 0)
    assert usable(ledger) == [(20, 1)]


def test_what_makes_no_sense_is_loud() -> None:
    ledger = Ledger(replicas=1, keep=1)
    with pytest.raises(ValueError, match="cannot be begun"):
        ledger.begin(10, ())
    snapshot = ledger.begin(10, SLICES)
    with pytest.raises(ValueError, match="cannot be begun"):
        ledger.begin(11, SLICES)
    ledger.complete(snapshot.number, 0)
    with pytest.raises(ValueError, match="is complete"):
        ledger.complete(snapshot.number, 0)


class Machine(RuleBasedStateMachine):
    """Copies settle in any order while slices are lost; a simple model remembers which copies exist."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(replicas=2, keep=2)
        self.step = 0
        self.under_way: set[tuple[int, int]] = set()
        #: (step, number, slice) of complete copies that are kept.
        self.whole: set[tuple[int, int, int]] = set()
        self.steps: dict[int, int] = {}

    @precondition(lambda self: not self.under_way)
    @rule(live=st.sets(st.sampled_from(SLICES), min_size=1), forward=st.integers(0, 5))
    def begin(self, live: set[int], forward: int) -> None:
        self.step += forward
        snapshot = self.ledger.begin(self.step, tuple(sorted(live)))
        self.steps[snapshot.number] = self.step
        assert set(snapshot.copies) <= live
        assert len(snapshot.copies) == min(2, len(live))
        self.under_way = {(snapshot.number, place) for place in snapshot.copies}

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), is_whole=st.booleans())
    def settle(self, data: st.DataObject, is_whole: bool) -> None:
        number, place = data.draw(st.sampled_from(sorted(self.under_way)))
        self.under_way.remove((number, place))
        if is_whole:
            self.ledger.complete(number, place)
            self.whole.add((self.steps[number], number, place))
        else:
            self.ledger.lose(number, place)
        # Two newer ones that are settled and usable are enough, wherever their copies are.
        settled = sorted({number for _, number, _ in self.whole} - {number for number, _ in self.under_way})
        self.whole = {copy for copy in self.whole if copy[1] not in settled[:-2]}

    @rule(place=st.sampled_from(SLICES))
    def lose_slice(self, place: int) -> None:
        for step, number, where in sorted(self.whole):
            if where == place:
                self.ledger.lose(number, place)
                self.whole.remove((step, number, where))

    @invariant()
    def the_newest_whole_copy_is_found(self) -> None:
        self.ledger.check_invariants()
        found = self.ledger.usable()
        assert {(snapshot.step, snapshot.number, place) for snapshot, place in found} <= self.whole
        # With one under way nothing newer than it is hidden, and the newest two are never dropped.
        newest = max(self.whole, default=None, key=lambda copy: copy[:2])
        if newest is not None:
            assert (found[0][0].step, found[0][0].number) == newest[:2]


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestMachine = Machine.TestCase
