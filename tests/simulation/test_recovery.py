"""Simulated clusters that lose workers while clients work, and must work again in the end: random faults by seed."""

import random
from collections import Counter

import pytest

from pathways_runtime.core.controller.gang import Order
from pathways_runtime.testing.manual_clock import ManualClock
from pathways_runtime.testing.simulated_network import Cut, Network, Process
from pathways_runtime.testing.simulated_recovery import Shape, play

DIRECT = Shape(2, 4, num_spares=2, relay_fanout=64, num_faults=8)
BEHIND_RELAYS = Shape(3, 3, num_spares=1, relay_fanout=2, num_faults=8)
ONE_HOST_SLICES = Shape(4, 1, num_spares=0, relay_fanout=64, num_faults=6)


def play_all(shape, seeds):
    total = Counter()
    for seed in seeds:
        try:
            played = play(seed, shape)
        except AssertionError as violation:
            raise AssertionError(f"seed {seed} of {shape}: {violation}") from violation
        names = ("faults", "losses", "recoveries", "lent_served", "values", "checks")
        total.update({name: getattr(played, f"num_{name}") for name in names})
        total["at a stage"] += played.stages.total()
    return total


@pytest.mark.parametrize("first", range(0, 24, 6))
def test_everything_works_again_after_faults(first):
    total = play_all(DIRECT, range(first, first + 6))
    assert total["faults"] > 20 and total["at a stage"] > 5
    assert total["losses"] >= total["recoveries"] > 5
    assert total["values"] > 1000


@pytest.mark.parametrize("first", range(0, 24, 6))
def test_everything_works_again_behind_relays(first):
    total = play_all(BEHIND_RELAYS, range(first, first + 6))
    assert total["faults"] > 20 and total["losses"] >= total["recoveries"] > 10


@pytest.mark.parametrize("first", range(0, 12, 6))
def test_everything_works_again_where_slices_are_single_hosts_and_nobody_is_spare(first):
    total = play_all(ONE_HOST_SLICES, range(first, first + 6))
    assert total["faults"] > 10 and total["losses"] >= total["recoveries"] > 5


def test_everything_works_again_while_workers_are_lent_and_taken_back():
    total = play_all(Shape(2, 3, num_spares=0, relay_fanout=2, num_faults=8, num_lent=4), range(8))
    assert total["lent_served"] > 5, total
    assert total["losses"] >= total["recoveries"] > 10


def test_slices_that_are_absent_at_first_work_in_the_end():
    total = play_all(Shape(3, 2, num_spares=1, relay_fanout=2, num_faults=8, num_lent=2, num_absent_slices=1), range(8))
    assert total["losses"] >= total["recoveries"] > 10 and total["values"] > 300, total


def test_256_hosts():
    total = play_all(Shape(16, 16, num_spares=4, relay_fanout=64, num_faults=10, check_every=5_000), (1, 2))
    assert total["faults"] == 20 and total["recoveries"] > 0
    # Few are due by the number of events: it is stages of recoveries at which everything is checked.
    assert total["checks"] > 100


def test_2048_hosts():
    total = play_all(Shape(32, 64, num_spares=8, relay_fanout=32, num_faults=10, check_every=20_000), (1, 2))
    assert total["faults"] == 20 and total["recoveries"] > 0 and total["checks"] > 100


def test_a_controller_that_forgets_who_knows_what_is_found_out(monkeypatch):
    """The negative control: operations of sessions that have not heard of a loss reach who serves now."""
    submit = Order.submit

    def forgetful(self, submission, group, now_ns, out):
        self._sessions[submission.session].unaware = {}
        submit(self, submission, group, now_ns, out)

    monkeypatch.setattr(Order, "submit", forgetful)
    with pytest.raises(AssertionError, match=r"which it has not loaded|is not there"):
        play_all(DIRECT, range(12))


@pytest.mark.parametrize("shape", [DIRECT, BEHIND_RELAYS], ids=["direct", "behind relays"])
def test_the_same_seed_gives_the_same_run(shape):
    assert play(3, shape) == play(3, shape)


def test_what_is_sent_into_a_cut_arrives_when_it_is_healed_and_in_order():
    clock = ManualClock()
    network = Network(clock, random.Random(1))
    here, there, beside = Process("a", "node-1"), Process("b", "node-2"), Process("c", "node-1")
    arrived = []
    cut = Cut(node="node-1", incoming=False)
    network.cut(cut)
    for number in range(3):
        network.link(here, there).send(lambda number=number: arrived.append(number))
    network.link(there, here).send(lambda: arrived.append("back"))
    network.link(here, beside).send(lambda: arrived.append("beside"))
    clock.run()
    assert sorted(arrived, key=str) == ["back", "beside"]
    network.heal(cut)
    network.link(here, there).send(lambda: arrived.append(3))
    clock.run()
    assert arrived[2:] == [0, 1, 2, 3]
