"""The one order: what goes out at once, what is held, and what releases it."""

import pytest

from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.controller_driver import Driver, Operation, dispatched, of_type

FOUR = Topology(2, 2, 2, "cpu")
ALL = (0, 1, 2, 3)


@pytest.fixture
def driver():
    return Driver(FOUR, max_launches_in_flight=2).start()


def test_an_operation_that_waits_for_nothing_goes_out_at_once(driver):
    session = driver.attach()
    operation = Operation(session, 1, ALL, writes=(10,))
    out = driver.send(ev.OperationsSubmitted(1, (operation,), driver.now_ns))
    assert [type(i) for i in out] == [ins.Dispatch, ins.ReportDispatched]
    assert (out[0].seq, out[0].group.hosts, out[0].submission) == (1, ALL, operation)
    assert out[1] == ins.ReportDispatched(1, session, 1)


def test_at_most_the_limit_of_launches_is_in_flight_per_host(driver):
    s = driver.attach()
    launches = [Operation(s, n, ALL) for n in range(1, 6)]
    assert driver.submit(*launches) == [1, 2]
    assert driver.waiting() == {
        f"launch {n} of session {s}": "launches in flight on hosts 0, 1, 2, 3" for n in (3, 4, 5)
    }
    # Every host must have credit: a gang goes out to all or to none.
    assert driver.acknowledge(0, 2) == driver.acknowledge(1, 2) == driver.acknowledge(2, 1) == []
    assert driver.waiting()[f"launch 3 of session {s}"] == "launches in flight on hosts 3"
    assert driver.acknowledge(3, 2) == [3]
    assert driver.acknowledge(2, 1) == [4]


def test_what_waits_for_credit_does_not_hold_back_other_hosts_or_other_kinds(driver):
    s = driver.attach()
    left = [Operation(s, n, (0, 1), writes=(n,)) for n in (1, 2, 3)]
    assert driver.submit(*left) == [1, 2]
    right = Operation(s, 4, (2, 3), writes=(4,))
    make = Operation(s, 5, (0, 1), is_launch=False, writes=(5,))
    use_of_held = Operation(s, 6, (0,), is_launch=False, reads=(3,))
    assert driver.submit(right, make, use_of_held) == [4, 5]
    assert driver.waiting()[f"operation 6 of session {s}"] == "operations 3"
    assert driver.acknowledge(0, 1) == []
    assert driver.acknowledge(1, 1) == [3, 6]


def test_a_deletion_waits_for_readers_and_makers_that_are_held(driver):
    s = driver.attach()
    driver.submit(Operation(s, 1, ALL), Operation(s, 2, ALL))
    maker = Operation(s, 3, ALL, writes=(30,))
    reader = Operation(s, 4, ALL, reads=(30, 7), writes=(40,))
    delete_early = Operation(s, 5, ALL, is_launch=False, consumes=(7,))
    delete = Operation(s, 6, ALL, is_launch=False, consumes=(30, 40))
    unrelated = Operation(s, 7, ALL, is_launch=False, consumes=(8,))
    assert driver.submit(maker, reader, delete_early, delete, unrelated) == [7]
    assert driver.waiting()[f"operation 6 of session {s}"] == "operations 3, 4"
    for host in ALL:
        out = driver.acknowledge(host, 1)
    assert out == [3]
    for host in ALL:
        out = driver.acknowledge(host, 1)
    assert out == [4, 5, 6]


def test_a_handle_read_after_it_is_donated_in_a_held_launch_keeps_its_place(driver):
    """Donation is a write: whoever names the handle later comes later."""
    s = driver.attach()
    driver.submit(Operation(s, 1, ALL), Operation(s, 2, ALL))
    donating = Operation(s, 3, ALL, reads=(5,), consumes=(5,), writes=(6,))
    late = Operation(s, 4, ALL, is_launch=False, reads=(5,))
    assert driver.submit(donating, late) == []
    assert driver.waiting()[f"operation 4 of session {s}"] == "operations 3"


def test_a_launch_waits_until_every_sender_has_its_transfer_under_way(driver):
    s = driver.attach()
    transfer = Operation(s, 1, ALL, is_launch=False, is_transfer=True, senders=(0, 1), writes=(10,))
    user = Operation(s, 2, (2, 3), reads=(10,), writes=(20,), after_transfers=(1,))
    follower = Operation(s, 3, (2, 3), reads=(20,), writes=(30,))
    other = Operation(s, 4, (2, 3), writes=(40,))
    assert driver.submit(transfer, user, follower, other) == [1, 4]
    assert driver.waiting() == {
        f"launch 2 of session {s}": "transfer 1 to be under way on hosts 0, 1",
        f"launch 3 of session {s}": "operations 2",
    }
    assert driver.acknowledge(0, transfers=((s, 1),)) == []
    assert driver.acknowledge(0, transfers=((s, 1),)) == []
    assert driver.acknowledge(1, transfers=((s, 1),)) == [2]
    driver.acknowledge(2, 1)
    assert driver.acknowledge(3, 1) == [3]


def test_a_transfer_within_hosts_is_under_way_as_soon_as_it_is_dispatched(driver):
    s = driver.attach()
    transfer = Operation(s, 1, (0,), is_launch=False, is_transfer=True, writes=(10,))
    assert driver.submit(transfer, Operation(s, 2, (0,), reads=(10,), after_transfers=(1,))) == [1, 2]


def test_a_launch_waits_for_a_transfer_that_is_itself_held(driver):
    s = driver.attach()
    driver.submit(Operation(s, 1, ALL), Operation(s, 2, ALL))
    maker = Operation(s, 3, (0, 1), writes=(30,))
    transfer = Operation(s, 4, ALL, is_launch=False, is_transfer=True, senders=(0,), reads=(30,), writes=(40,))
    user = Operation(s, 5, (2, 3), is_launch=False, after_transfers=(4,), reads=(40,))
    assert driver.submit(maker, transfer, user) == []
    assert driver.waiting()[f"operation 5 of session {s}"] == "operations 4"
    driver.acknowledge(0, 1)
    assert driver.acknowledge(1, 1) == [3, 4]
    assert driver.acknowledge(0, transfers=((s, 4),)) == [5]


def test_the_failure_of_a_sender_releases_its_receivers(driver):
    s = driver.attach()
    transfer = Operation(s, 1, (0, 2), is_launch=False, is_transfer=True, senders=(0,), writes=(10,))
    assert driver.submit(transfer, Operation(s, 2, (2,), reads=(10,), after_transfers=(1,))) == [1]
    failure = Status(Code.INTERNAL, "no")
    out = driver.send(ev.MemberFailed(1000, s, 1, (10,), failure))
    assert of_type(out, ins.ReportFailed) == [ins.ReportFailed(1, s, 1, (10,), failure)]
    assert dispatched(out) == [2]


def test_streams_of_two_sessions_agree_on_every_host_they_share(driver):
    a, b = driver.attach(1), driver.attach(2)
    driver.submit(Operation(a, 1, (0, 1, 2)), Operation(a, 2, (1, 2)))
    driver.submit(Operation(b, 1, (2, 3)), Operation(b, 2, (0, 1, 2, 3)), peer=2)
    for _ in range(4):
        for host in ALL:
            if driver.core.report(0)["queues"][host]["launches_in_flight"]:
                driver.acknowledge(host, 1)
    orders = [[(o.session, o.op_id) for _, o in driver.streams[host]] for host in ALL]
    assert sorted(orders[2]) == [(a, 1), (a, 2), (b, 1), (b, 2)]
    for order in orders:
        assert order == [gang for gang in orders[2] if gang in order]


def test_sessions_take_turns_however_much_one_has_waiting(driver):
    greedy, modest = driver.attach(1), driver.attach(2)
    driver.submit(*(Operation(greedy, n, ALL) for n in range(1, 40)))
    driver.submit(*(Operation(modest, n, ALL) for n in range(1, 4)), peer=2)
    for _ in range(10):
        for host in ALL:
            driver.acknowledge(host, 1)
    order = [o.session for _, o in driver.streams[0]]
    assert order[:2] == [greedy, greedy]
    assert order[2:9].count(modest) == 3, order


def test_a_stream_on_one_host_cannot_starve_a_gang_that_needs_it_with_others(driver):
    narrow, wide = driver.attach(1), driver.attach(2)
    driver.submit(*(Operation(narrow, n, (0,)) for n in range(1, 4)))
    driver.submit(*(Operation(wide, n, (1,)) for n in (1, 2)), Operation(wide, 3, ALL), peer=2)
    for n in range(4, 12):
        assert driver.acknowledge(0, 1) in ([], [3])
        driver.submit(Operation(narrow, n, (0,)))
    assert (wide, 3) not in [(o.session, o.op_id) for _, o in driver.streams[0]]
    # Host 0 has kept its free credit for the gang, which now gets the last one that it needs.
    driver.acknowledge(1, 1)
    assert (wide, 3) in [(o.session, o.op_id) for _, o in driver.streams[0]]


@pytest.mark.parametrize(
    "operations, complaint",
    [
        ([Operation(1, 1, (0,)), Operation(1, 1, (0,))], "operation 1 comes after operation 1"),
        ([Operation(1, 1, (0, 9))], "not all among the 4"),
        ([Operation(1, 1, (1, 0))], "must ascend"),
        ([Operation(2, 1, (0,))], "has no session 2"),
    ],
)
def test_a_proxy_that_breaks_the_protocol_is_refused_and_loses_its_sessions(driver, operations, complaint):
    assert driver.attach() == 1
    out = driver.send(ev.OperationsSubmitted(1, operations, driver.now_ns))
    refusals = of_type(out, ins.Refuse)
    assert len(refusals) == 1 and refusals[0].peer == 1 and complaint in refusals[0].reason
    assert [i.session for i in of_type(out, ins.CloseSession)] == [1]
    assert driver.core.report(0)["sessions"] == []


def test_an_executor_that_completes_more_than_it_was_given_is_refused(driver):
    out = driver.send(ev.Acknowledged(1002, 1, ()))
    assert [(i.peer, i.reason) for i in of_type(out, ins.Refuse)] == [
        (1002, "host 2 completed 1 launches of 0 in flight")
    ]


def test_a_session_that_ends_takes_what_it_holds_with_it_and_makes_room(driver):
    a, b = driver.attach(1), driver.attach(2)
    driver.submit(*(Operation(a, n, (0, 1), writes=(n,)) for n in range(1, 6)))
    driver.submit(Operation(b, 1, (0,)), peer=2)
    driver.submit(Operation(a, 6, (0,), is_launch=False, reads=(5,)))
    driver.acknowledge(0, 1)
    out = driver.send(ev.SessionDetached(1, a))
    # Launches in flight of a still count, but its launches that waited are not in the way of b's any more.
    assert [(i.submission.session, i.submission.op_id) for i in of_type(out, ins.Dispatch)] == [(b, 1)]
    assert of_type(out, ins.CloseSession) == [ins.CloseSession((1000, 1001, 1002, 1003), a)]
    assert of_type(out, ins.EndSession) == [ins.EndSession(1, a, None)]
    assert driver.waiting() == {}
    assert [q["launches_in_flight"] for q in driver.core.report(0)["queues"]] == [2, 2, 0, 0]
    driver.acknowledge(0, 2)
    driver.acknowledge(1, 2, transfers=((a, 3),))


def test_a_free_credit_is_kept_for_the_gang_whose_turn_it_is(driver):
    wide, narrow, other = driver.attach(1), driver.attach(2), driver.attach(3)
    assert driver.submit(Operation(wide, 1, (1,)), Operation(wide, 2, (1,)), Operation(wide, 3, ALL)) == [1, 2]
    # Host 0 is idle, and this session holds nothing; still the gang came first.
    assert driver.submit(Operation(narrow, 1, (0,)), peer=2) == []
    assert driver.waiting()[f"launch 1 of session {narrow}"] == "its turn among launches that share its hosts"
    # Hosts of which the gang is not a part would not wait; what frees them must not let anybody pass.
    assert driver.submit(*(Operation(other, n, (3,)) for n in (1, 2, 3)), peer=3) == []
    driver.acknowledge(1, 1)
    assert [o.session for _, o in driver.streams[0]] == [wide, narrow]


def test_hosts_that_become_free_elsewhere_let_nobody_pass_the_gang():
    driver = Driver(FOUR, max_launches_in_flight=1).start()
    wide, narrow, other = driver.attach(1), driver.attach(2), driver.attach(3)
    assert driver.submit(Operation(wide, 1, (1,)), Operation(wide, 2, (0, 1))) == [1]
    assert driver.submit(Operation(other, 1, (3,)), Operation(other, 2, (3,)), peer=3) == [1]
    assert driver.submit(Operation(narrow, 1, (0,)), peer=2) == []
    assert driver.acknowledge(3, 1) == [2]
    assert driver.streams[0] == []
    assert driver.acknowledge(1, 1) == [2]
    assert driver.acknowledge(0, 1) == [1]


def test_a_set_of_hosts_that_has_a_name_is_the_set(driver):
    s = driver.attach()
    assert driver.send(ev.HostsNamed(1, 7, (1, 2, 3))) == []
    out = driver.send(ev.OperationsSubmitted(1, [Operation(s, 1, (), host_set=7)], driver.now_ns))
    assert [i.group.hosts for i in of_type(out, ins.Dispatch)] == [(1, 2, 3)]
    out = driver.send(ev.OperationsSubmitted(1, [Operation(s, 2, (), host_set=8)], driver.now_ns))
    assert [i.reason for i in of_type(out, ins.Refuse)] == ["this proxy has not named hosts 8"]
