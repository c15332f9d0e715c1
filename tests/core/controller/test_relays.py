"""Relays: who has which, and what the controller makes of what they say."""

import pytest

from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.controller.relays import RelayPlan
from pathways_runtime.core.status import Code
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.controller_driver import Driver, Operation, of_type


def groups_of(num_slices, hosts_per_slice, fanout):
    plan = RelayPlan(Topology(num_slices, hosts_per_slice, 1, "cpu"), fanout)
    return [plan.group_of(worker) for worker in range(num_slices * hosts_per_slice + 1)]


@pytest.mark.parametrize(
    ("num_slices", "hosts_per_slice", "fanout", "groups"),
    [
        (2, 2, 4, [None] * 4),
        (2, 3, 2, [0, 0, 0, 1, 1, 1]),
        (1, 5, 4, [0, 0, 0, 1, 1]),
        (6, 1, 2, [0, 0, 0, 1, 1, 1]),
        (3, 2, 4, [0, 0, 0, 0, 1, 1]),
    ],
)
def test_groups_are_whole_slices_or_parts_of_one(num_slices, hosts_per_slice, fanout, groups):
    # The worker beyond them is a spare and has no relay.
    assert groups_of(num_slices, hosts_per_slice, fanout) == [*groups, None]


@pytest.mark.parametrize(
    ("num_slices", "hosts_per_slice", "num_groups", "largest"),
    [(1, 32, 0, 0), (1, 33, 2, 17), (4, 32, 4, 32), (1, 1024, 32, 32), (1, 2048, 32, 64), (2048, 1, 32, 64)],
)
def test_the_controller_talks_to_32_relays_at_2048_hosts(num_slices, hosts_per_slice, num_groups, largest):
    groups = [group for group in groups_of(num_slices, hosts_per_slice, 32) if group is not None]
    assert len(set(groups)) == num_groups
    assert max((groups.count(group) for group in set(groups)), default=0) == largest


def test_up_to_32_hosts_nobody_is_told_to_be_a_relay():
    driver = Driver(Topology(4, 8, 1, "cpu")).start()
    assert of_type(driver.out, ins.StartRelay) == []
    assert {start.relay_address for start in of_type(driver.out, ins.StartExecutor)} == {""}


def test_the_first_supervisor_of_a_group_is_its_relay_and_executors_wait_for_it():
    driver = Driver(Topology(1, 4, 1, "cpu"), relay_fanout=2)

    def register(worker):
        return driver.send(ev.WorkerRegistered(10000 + worker, worker, f"node-{worker}", 1, 1, driver.now_ns))

    assert of_type(register(1), ins.StartRelay | ins.StartExecutor) == [ins.StartRelay(10001)]
    assert of_type(register(0), ins.StartRelay | ins.StartExecutor) == []
    assert driver.send(ev.RelayListening(10001, "unix:/r")) == [
        ins.StartExecutor(10001, 1, "unix:/r"),
        ins.StartExecutor(10000, 1, "unix:/r"),
    ]
    # Another group.
    assert of_type(register(2), ins.StartRelay) == [ins.StartRelay(10002)]
    # A relay that is gone before it listens is replaced by one that waits for it.
    register(3)
    out = driver.send(ev.PeerClosed(10002, "closed", driver.now_ns))
    assert of_type(out, ins.StartRelay) == [ins.StartRelay(10003)]
    assert driver.send(ev.RelayListening(10003, "unix:/q")) == [ins.StartExecutor(10003, 1, "unix:/q")]


@pytest.mark.parametrize("peer", [10001, 1])
def test_who_was_not_told_to_be_a_relay_is_refused(peer):
    driver = Driver(Topology(1, 4, 1, "cpu"), relay_fanout=2).start()
    assert of_type(driver.send(ev.RelayListening(peer, "unix:/r")), ins.Refuse)
    assert of_type(driver.send(ev.ChildrenAcknowledged(peer, ((b"\x01", 1),), (), ())), ins.Refuse)


def test_status_says_who_is_whose_relay():
    driver = Driver(Topology(1, 4, 1, "cpu"), relay_fanout=2).start()
    assert [worker["relay"] for worker in driver.core.report(0)["workers"]] == [0, 0, 2, 2]
    driver.send(ev.PeerClosed(10000, "reset", driver.now_ns))
    assert [worker["relay"] for worker in driver.core.report(0)["workers"]] == [None, None, 2, 2]


def launches(session, first, count, hosts=(0, 1, 2, 3)):
    return [Operation(session, n, hosts, writes=(n,)) for n in range(first, first + count)]


def test_credits_are_exact_behind_relays():
    driver = Driver(Topology(1, 4, 1, "cpu"), relay_fanout=2, max_launches_in_flight=3).start()
    session = driver.attach()
    assert driver.submit(*launches(session, 1, 6)) == [1, 2, 3]
    assert driver.acknowledge_through(10000, {0: 2, 1: 1}) == []
    # Host 1 and 3 have completed one each, the others two: one more launch has room everywhere.
    assert driver.acknowledge_through(10002, {2: 2, 3: 1}) == [4]
    assert driver.acknowledge_through(10000, {1: 1}) == []
    assert driver.acknowledge_through(10002, {3: 1}) == [5]
    assert [queue["launches_in_flight"] for queue in driver.core.report(0)["queues"]] == [3, 3, 3, 3]
    assert driver.waiting() == {"launch 6 of session 1": "launches in flight on hosts 0, 1, 2, 3"}


def test_a_transfer_is_under_way_once_its_senders_behind_all_relays_have_started():
    driver = Driver(Topology(1, 4, 1, "cpu"), relay_fanout=2).start()
    session = driver.attach()
    transfer = Operation(session, 1, (0, 1, 2, 3), is_launch=False, is_transfer=True, senders=(0, 1, 3), writes=(1,))
    reader = Operation(session, 2, (0, 1), reads=(1,), writes=(2,), after_transfers=(1,))
    assert driver.submit(transfer, reader) == [1]
    assert driver.acknowledge_through(10000, {}, ((session, 1, (0, 1)),)) == []
    assert driver.acknowledge_through(10002, {}, ((session, 1, (3,)),)) == [2]


def test_readiness_is_passed_on_with_virtual_hosts():
    driver = Driver(Topology(1, 4, 1, "cpu"), relay_fanout=2).start()
    session = driver.attach(7)
    out = driver.send(ev.ChildrenAcknowledged(10002, (), (), ((session, 5, b"\x03"), (99, 5, b"\x01"))))
    assert out == [ins.ReportReady(7, session, 5, (2, 3))]


def test_an_executor_that_completes_more_than_it_was_sent_is_found_at_the_next_look():
    driver = Driver(Topology(1, 4, 1, "cpu"), relay_fanout=2, max_launches_in_flight=3).start()
    session = driver.attach()
    assert driver.submit(*launches(session, 1, 2)) == [1, 2]
    driver.checks = False
    driver.acknowledge_through(10000, {0: 2, 1: 9})
    out = driver.send(ev.OperationsSubmitted(1, launches(session, 3, 2), driver.now_ns))
    assert of_type(out, ins.Refuse) == [ins.Refuse(1001, "it completed more launches than were in flight")]
    driver.core.check_invariants()


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_that_is_none_is_refused(count):
    driver = Driver(Topology(1, 4, 1, "cpu"), relay_fanout=2).start()
    out = driver.send(ev.ChildrenAcknowledged(10000, ((b"\x01", count),), (), ()))
    assert of_type(out, ins.Refuse) == [ins.Refuse(10000, f"{count} launches completed")]


def test_a_relay_that_is_gone_takes_its_executors_along_and_names_itself():
    driver = Driver(Topology(1, 4, 1, "cpu"), relay_fanout=2).start()
    session = driver.attach()
    driver.submit(*launches(session, 1, 1))
    out = driver.send(ev.PeerClosed(10000, "reset", driver.now_ns))
    changed = of_type(out, ins.ChangeHost)
    assert [change.host for change in changed] == [0, 1]
    assert changed[0].failure.message.endswith("its supervisor's connection is gone (reset)")
    assert changed[1].failure.code is Code.DATA_LOSS
    assert changed[1].failure.message.endswith("its relay, the supervisor of host 0 (node-0), is gone (reset)")
    # The child's own supervisor lives and kills what is left of the executor.
    assert ins.StopExecutor(10001, 1) in out
    # What the others can do without them goes on.
    assert driver.submit(*launches(session, 2, 1, hosts=(2, 3))) == [2]


def test_all_executors_behind_a_relay_are_told_of_at_once():
    driver = Driver(Topology(8, 4, 1, "cpu"), num_spares=1, relay_fanout=8).start()
    out = driver.send(ev.PeerClosed(10000, "reset", driver.now_ns))
    # The relay's own host, and the seven behind it; nobody is told who is lost himself.
    told = of_type(out, ins.LosePeers)
    assert [[host for host, _ in instruction.lost] for instruction in told] == [[0], list(range(1, 8))]
    assert told[-1].peers == (1032, *range(1008, 1032))
    assert {host: failure for i in told for host, failure in i.lost} == {
        change.host: change.failure for change in of_type(out, ins.ChangeHost)
    }


def test_an_executor_that_is_gone_leaves_its_supervisor_a_relay():
    driver = Driver(Topology(1, 4, 1, "cpu"), relay_fanout=2).start()
    driver.send(ev.PeerClosed(1000, "closed", driver.now_ns))
    out = driver.send(ev.ExecutorExited(0, 1, -9, "", driver.now_ns))
    assert [change.host for change in of_type(out, ins.ChangeHost)] == [0]
    session = driver.attach()
    assert driver.submit(*launches(session, 1, 3, hosts=(1, 2, 3))) == [1, 2, 3]
    assert driver.acknowledge_through(10000, {0: 3, 1: 3}) == []
    assert [queue["launches_in_flight"] for queue in driver.core.report(0)["queues"]] == [0, 0, 3, 3]


def test_a_silent_relay_is_gone():
    driver = Driver(Topology(1, 4, 1, "cpu"), relay_fanout=2, heartbeat_timeout_ns=3_000_000_000).start()
    others = [*range(10001, 10004), *range(1000, 1004)]
    lost = {}
    for _ in range(8):
        for peer in others:
            driver.send(ev.HeartbeatsReceived((peer,), driver.now_ns))
        for change in of_type(driver.pass_time(0.5), ins.ChangeHost):
            lost[change.host] = change.failure.message
    assert sorted(lost) == [0, 1]
    assert "its supervisor has been silent for 3." in lost[0]
    assert "its relay, the supervisor of host 0 (node-0), is gone (silent for 3." in lost[1]
