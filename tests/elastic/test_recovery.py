"""What to do on a loss: scripts of what is seen, and what follows."""

import pytest

from slurm_pathways.elastic.policy import Grow, Policy
from slurm_pathways.elastic.recovery import GiveUp, LookAgain, Recovery, Train

ALL = frozenset({0, 1, 2})
TWO = frozenset({0, 2})


def begun(policy: Policy, step: int = 0) -> Recovery:
    """At 100 s, all slices are there, and training has its state."""
    recovery = Recovery(policy, ALL, 100.0)
    assert recovery.look(ALL, 100.0) == Train((0, 1, 2))
    recovery.begin(step)
    return recovery


def test_it_waits_for_a_spare_and_goes_on_in_the_same_shape() -> None:
    recovery = begun(Policy(wait_s=5, look_every_s=1))
    assert recovery.lose(f"host 1 at {200.0}", 200.0) is None
    assert recovery.look(TWO, 200.0) == LookAgain(1.0)
    assert recovery.look(TWO, 201.0) == LookAgain(1.0)
    assert recovery.look(ALL, 202.0) == Train((0, 1, 2))
    assert recovery.missing == frozenset()


def test_it_shrinks_when_nobody_comes() -> None:
    recovery = begun(Policy(wait_s=5, look_every_s=2))
    recovery.lose(f"host 1 at {200.0}", 200.0)
    assert recovery.look(TWO, 204.0) == LookAgain(1.0)
    assert recovery.look(TWO, 205.0) == Train((0, 2))
    assert recovery.missing == {1}


def test_it_shrinks_at_once() -> None:
    recovery = begun(Policy(wait_s=0))
    recovery.lose(f"host 1 at {200.0}", 200.0)
    assert recovery.look(TWO, 200.0) == Train((0, 2))


def test_too_few_slices_are_waited_for_longer_and_then_given_up() -> None:
    recovery = begun(Policy(wait_s=1, min_slices=3, give_up_after_s=60, look_every_s=7))
    recovery.lose(f"host 1 at {200.0}", 200.0)
    assert recovery.look(TWO, 202.0) == LookAgain(7.0)
    assert recovery.look(TWO, 259.0) == LookAgain(1.0)
    decision = recovery.look(TWO, 260.0)
    assert isinstance(decision, GiveUp)
    assert "2 of 3 slices are there after 60 s; training needs 3" in decision.reason


def test_at_the_start_slices_are_waited_for_too() -> None:
    recovery = Recovery(Policy(wait_s=10), ALL, 0.0)
    assert recovery.look(frozenset(), 1.0) == LookAgain(0.5)
    assert recovery.look(TWO, 10.0) == Train((0, 2))


def test_slices_that_were_never_there_are_not_waited_for_and_are_grown_into() -> None:
    recovery = Recovery(Policy(wait_s=10, look_every_s=1, grow=Grow.AT_ONCE), ALL, 0.0)
    absent = frozenset({1})
    assert recovery.look(frozenset({0}), 0.0, absent) == LookAgain(1.0)
    assert recovery.look(TWO, 1.0, absent) == Train((0, 2))
    assert recovery.missing == absent
    assert recovery.should_grow(absent, has_snapshot=False)
    recovery.grow(50.0)
    assert recovery.look(ALL, 50.0) == Train((0, 1, 2))
    # From then on it is a slice like the others.
    recovery.lose("host 1", 60.0)
    assert recovery.look(TWO, 60.0) == LookAgain(1.0)
    few = Recovery(Policy(wait_s=0, min_slices=3, give_up_after_s=60, look_every_s=1), ALL, 0.0)
    assert few.look(TWO, 0.0, absent) == LookAgain(1.0)


@pytest.mark.parametrize(
    ("grow", "has_snapshot", "expected"),
    [
        (Grow.AT_ONCE, False, True),
        (Grow.AT_SNAPSHOT, False, False),
        (Grow.AT_SNAPSHOT, True, True),
        (Grow.NEVER, True, False),
    ],
)
def test_when_it_grows(grow: Grow, has_snapshot: bool, expected: bool) -> None:
    recovery = begun(Policy(wait_s=0, grow=grow))
    recovery.lose(f"host 1 at {200.0}", 200.0)
    recovery.look(TWO, 200.0)
    assert recovery.should_grow(frozenset({1}), has_snapshot) is expected
    assert not recovery.should_grow(frozenset(), has_snapshot)


def test_what_grows_waits_for_nobody_who_is_gone_again() -> None:
    recovery = begun(Policy(wait_s=30, grow=Grow.AT_ONCE))
    recovery.lose(f"host 1 at {200.0}", 200.0)
    recovery.look(frozenset({0}), 230.0)
    assert recovery.should_grow(frozenset({1, 2}), False)
    recovery.grow(300.0)
    assert recovery.look(TWO, 300.0) == Train((0, 2))


def test_losses_at_one_step_come_to_an_end() -> None:
    recovery = begun(Policy(wait_s=0, max_losses_at_one_step=3), step=20)
    for second in (1, 2):
        assert recovery.lose(f"host 1 at {200.0 + second}", 200.0 + second) is None
        recovery.look(ALL, 200.0 + second)
        recovery.begin(20)
    decision = recovery.lose(f"host 1 at {203.0}", 203.0)
    assert isinstance(decision, GiveUp)
    assert "3 times in a row after step 20" in decision.reason


def test_the_same_loss_again_is_not_counted_but_paused_for_and_given_up_in_the_end() -> None:
    """Programs are loaded behind a new host while the slices are there already."""
    recovery = begun(Policy(wait_s=0, max_losses_at_one_step=2, give_up_after_s=60))
    assert recovery.lose("host 1", 200.0) is None
    assert recovery.look(ALL, 200.0) == Train((0, 1, 2))
    for second in range(1, 6):
        assert recovery.lose("host 1", 200.0 + second) is None
        pause = recovery.look(ALL, 200.0 + second)
        assert isinstance(pause, LookAgain)
        assert recovery.look(ALL, 200.0 + second + pause.after_s) == Train((0, 1, 2))
    decision = recovery.lose("host 1", 260.0)
    assert isinstance(decision, GiveUp)
    assert "still training is lost after 60 s: host 1" in decision.reason


def test_progress_forgets_losses() -> None:
    recovery = begun(Policy(wait_s=0, max_losses_at_one_step=2))
    for step in range(1, 6):
        assert recovery.lose(f"host 1 at {200.0 + step}", 200.0 + step) is None
        recovery.look(ALL, 200.0 + step)
        recovery.begin(step)


@pytest.mark.parametrize(
    ("field", "value"), [("wait_s", -1), ("min_slices", 0), ("look_every_s", 0), ("give_up_after_s", float("nan"))]
)
def test_a_policy_that_makes_no_sense(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}; it must be"):
        Policy(**{field: value})  # type: ignore[arg-type]


def test_more_slices_than_there_are() -> None:
    with pytest.raises(ValueError, match="min_slices is 4, but there are 3 slices"):
        Recovery(Policy(min_slices=4), ALL, 0.0)
