"""Hosts that are lost and served for again, as exact instructions."""

import msgspec
import pytest

from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.controller.membership import FIRST_START_TIMEOUT_NS, RETURN_NS, START_TIMEOUT_NS
from pathways_runtime.core.controller.workers import MAX_SHORT_LIVES
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.controller_driver import SECOND_NS, Driver, Operation, dispatched, of_type

TWO_BY_TWO = Topology(2, 2, 2, "cpu")


def lose(driver, worker, epoch=1):
    """The executor of a worker is killed; its supervisor says so."""
    return driver.send(ev.ExecutorExited(worker, epoch, -9, "", driver.now_ns))


def form(driver, out, world):
    """The world's service starts and its members make their clients."""
    assert [i.world for i in of_type(out, ins.StartCoordination)] == [world]
    out = driver.send(ev.CoordinationStarted(world, f"unix:/{world}"))
    return driver.form_members(out)


def announced(out, event):
    return [i.fields for i in of_type(out, ins.Announce) if i.event == event]


def states(driver):
    return {w["id"]: w["state"] for w in driver.core.report(driver.now_ns)["workers"]}


def test_a_spare_takes_the_place_of_a_lost_host():
    driver = Driver(TWO_BY_TWO, num_spares=1).start()
    s = driver.attach()
    out = lose(driver, 1)
    (change,) = of_type(out, ins.ChangeHost)
    assert (change.host, change.worker, change.change) == (1, None, 1)
    # Its worker gets another executor, which will be a spare.
    assert of_type(out, ins.StartExecutor) == [ins.StartExecutor(10001, 2)]
    (bind,) = of_type(out, ins.BindExecutors)
    assert [(b.host, b.worker, b.peer) for b in bind.executors] == [(1, 4, 1004)]
    assert [(b.host, b.worker) for b in bind.all] == [(0, 0), (1, 4), (2, 2), (3, 3)]
    (replaced,) = of_type(out, ins.ReplacePeer)
    assert (replaced.peers, replaced.bound.worker) == ((1000, 1002, 1003), 4)
    assert of_type(out, ins.LosePeers) == [ins.LosePeers((1000, 1002, 1003), ((1, change.failure),))]
    assert of_type(out, ins.LeaveWorld) == [ins.LeaveWorld((1000,), 1, change.failure)]

    out = driver.send(ev.CoordinationStarted(3, "unix:/3"))
    assert of_type(out, ins.FormMember) == [
        ins.FormMember(1000, 3, "unix:/3", 0, (0, 1)),
        ins.FormMember(1004, 3, "unix:/3", 1, (0, 1)),
    ]
    driver.now_ns += SECOND_NS
    driver.send(ev.MemberFormed(1000, 3, None, driver.now_ns))
    out = driver.send(ev.MemberFormed(1004, 3, None, driver.now_ns))
    (back,) = announced(out, "host_back")
    assert back == {"host": 1, "worker": 4, "name": "node-4", "lost_worker": 1, "took_s": 1.0}
    # The session is open there before its proxy hears that it may use it.
    opened, change = of_type(out, ins.OpenSession)[0], of_type(out, ins.ChangeHost)[0]
    assert (opened.peers, opened.session) == ((1004,), s)
    assert (change.host, change.worker, change.name, change.failure, change.change) == (1, 4, "node-4", None, 2)
    assert out.index(opened) < out.index(change)
    report = driver.core.report(driver.now_ns)
    assert [(f["host"], f["served_again_after_s"], f["served_again_by"]) for f in report["failures"]] == [
        (1, 1.0, "node-4")
    ]
    assert [d["state"] for d in report["devices"]] == ["idle"] * 8


def test_the_service_of_a_world_that_is_over_stops_when_nobody_needs_it():
    driver = Driver(TWO_BY_TWO, num_spares=1).start()
    out = lose(driver, 1)
    assert of_type(out, ins.StopCoordination) == []
    assert of_type(driver.send(ev.MemberLeft(1000, 1)), ins.StopCoordination) == [ins.StopCoordination(1)]
    assert driver.send(ev.MemberLeft(1000, 1)) == []


def test_without_a_spare_the_same_worker_serves_again_with_its_next_executor():
    driver = Driver(TWO_BY_TWO).start()
    out = lose(driver, 1)
    assert of_type(out, ins.StartExecutor) == [ins.StartExecutor(10001, 2)]
    assert of_type(out, ins.BindExecutors) == []
    assert of_type(driver.register_executor(1, epoch=1), ins.Refuse) != []
    out = driver.register_executor(1, epoch=2)
    assert [b.peer for b in of_type(out, ins.BindExecutors)[0].executors] == [101001]
    out = form(driver, out, 3)
    assert [i.worker for i in of_type(out, ins.ChangeHost)] == [1]
    assert states(driver) == {0: "bound", 1: "bound", 2: "bound", 3: "bound"}


def test_both_hosts_of_a_slice_are_back_at_once_and_not_one_without_the_other():
    driver = Driver(TWO_BY_TWO, num_spares=1).start()
    lose(driver, 0)
    out = lose(driver, 1)
    # The spare is ready to stand behind host 0, but its neighbour is missing.
    assert of_type(out, ins.FormMember) == [] and of_type(out, ins.StartCoordination) == []
    out = form(driver, driver.register_executor(0, epoch=2), 4)
    assert [(i.host, i.worker) for i in of_type(out, ins.ChangeHost)] == [(0, 4), (1, 0)]


def test_what_a_session_submits_before_it_knows_has_no_effect_on_who_serves_now():
    driver = Driver(TWO_BY_TWO, num_spares=1).start()
    s = driver.attach()
    out = form(driver, lose(driver, 1), 3)
    assert len(of_type(out, ins.ChangeHost)) == 1
    launch = Operation(s, 1, (0, 1), reads=(6, 7), consumes=(7,), writes=(8,))
    delete = Operation(s, 2, (0, 1), False, consumes=(9,))
    out = driver.send(ev.OperationsSubmitted(1, [launch, delete], driver.now_ns))
    poison, forget = of_type(out, ins.Substitute)
    assert (poison.group.hosts, poison.operation.handles) == ((0,), (8,))
    assert "host 1 (node-1) was lost" in poison.operation.status.message
    assert (forget.group.hosts, forget.operation.handles) == ((0,), (7,))
    assert [i.group.hosts for i in of_type(out, ins.Dispatch)] == [(0,)]
    # From here on it knows of the loss, then of the return.
    driver.send(ev.HostChangesSeen(1, 1))
    assert driver.submit(Operation(s, 3, (0, 1), writes=(10,))) == [3]


def test_awareness_of_one_loss_is_not_awareness_of_the_next():
    driver = Driver(TWO_BY_TWO, num_spares=2).start()
    s = driver.attach()
    form(driver, lose(driver, 1), 3)
    form(driver, lose(driver, 4), 4)
    driver.send(ev.HostChangesSeen(1, 2))
    assert driver.submit(Operation(s, 1, (0, 1), writes=(1,))) == []
    driver.send(ev.HostChangesSeen(1, 4))
    assert driver.submit(Operation(s, 2, (0, 1), writes=(2,))) == [2]
    out = driver.send(ev.HostChangesSeen(1, 5))
    assert [i.reason for i in of_type(out, ins.Refuse)] == ["there were 4 changes of hosts, not 5"]


def test_what_was_held_when_the_host_was_lost_does_not_reach_who_serves_now():
    driver = Driver(TWO_BY_TWO, num_spares=1).start()
    s = driver.attach()
    transfer = Operation(s, 1, (2, 3), False, is_transfer=True, senders=(2,), writes=(1,))
    driver.submit(transfer, Operation(s, 2, (0, 1, 2), reads=(1,), writes=(2,), after_transfers=(1,)))
    out = lose(driver, 1)
    driver.send(ev.HostChangesSeen(1, 1))
    form(driver, out, 3)
    out = driver.send(ev.Acknowledged(1002, 0, ((s, 1),)))
    (poison,) = of_type(out, ins.Substitute)
    assert (poison.group.hosts, poison.operation.handles) == ((0, 2), (2,))


def test_launches_that_died_with_their_host_give_their_credit_back():
    driver = Driver(TWO_BY_TWO, num_spares=1, max_launches_in_flight=2).start()
    s = driver.attach()
    assert driver.submit(*[Operation(s, n, (1,)) for n in (1, 2, 3)]) == [1, 2]
    out = lose(driver, 1)
    driver.send(ev.HostChangesSeen(1, 1))
    form(driver, out, 3)
    assert driver.core.report(0)["queues"][1]["launches_in_flight"] == 0
    assert driver.submit(*[Operation(s, n, (1,)) for n in (4, 5, 6)]) == [4, 5]
    # The old executor has nothing more to say.
    assert driver.send(ev.Acknowledged(1001, 1, ())) == []


def test_a_session_that_attaches_while_a_host_is_down_knows_it():
    driver = Driver(TWO_BY_TWO, num_spares=1).start()
    out = lose(driver, 1)
    s = driver.attach()
    accepted = of_type(driver.out, ins.AcceptSession)[-1]
    assert [b.worker for b in accepted.hosts] == [0, None, 2, 3]
    opened = of_type(driver.out, ins.OpenSession)[-1]
    assert opened.peers == (1000, 1002, 1003)
    out = form(driver, out, 3)
    assert of_type(out, ins.OpenSession) == [ins.OpenSession((1004,), s, "unix:/links-1", 1)]
    assert driver.submit(Operation(s, 1, (0, 1), writes=(1,))) == [1]


def test_who_is_lost_while_he_takes_a_place_leaves_it_to_the_next():
    driver = Driver(TWO_BY_TWO, num_spares=2).start()
    driver.attach()
    out = lose(driver, 1)
    driver.send(ev.CoordinationStarted(3, "unix:/3"))
    driver.send(ev.MemberFormed(1000, 3, None, driver.now_ns))
    out = lose(driver, 4)
    # Sessions know that the host is down; they are not told again.
    assert of_type(out, ins.ChangeHost) == []
    assert of_type(out, ins.LeaveWorld)[0].peers == (1000,)
    assert [b.worker for b in of_type(out, ins.BindExecutors)[0].executors] == [5]
    out = form(driver, out, 4)
    assert [(i.host, i.worker, i.failure) for i in of_type(out, ins.ChangeHost)] == [(1, 5, None)]
    assert [f["served_again_by"] for f in driver.core.report(driver.now_ns)["failures"]] == ["node-5", "node-5"]


def test_a_survivor_lost_while_the_slice_forms_is_a_loss_of_its_own():
    driver = Driver(TWO_BY_TWO, num_spares=2).start()
    lose(driver, 1)
    out = lose(driver, 0)
    assert [(i.host, i.worker) for i in of_type(out, ins.ChangeHost)] == [(0, None)]
    out = form(driver, out, 4)
    assert [(i.host, i.worker) for i in of_type(out, ins.ChangeHost)] == [(0, 5), (1, 4)]


def test_a_slice_that_does_not_form_is_tried_again_and_not_for_ever():
    driver = Driver(TWO_BY_TWO, num_spares=1).start()
    out = lose(driver, 1)
    worlds = []
    while started := of_type(out, ins.StartCoordination):
        worlds.append(started[0].world)
        out = driver.send(ev.CoordinationFailed(worlds[-1], "no socket"))
    assert worlds == [3, 4, 5]
    report = driver.core.report(driver.now_ns)
    assert [d["state"] for d in report["devices"]][2:4] == ["joining"] * 2


def test_a_program_across_slices_gets_a_new_world_after_a_loss():
    driver = Driver(TWO_BY_TWO, num_spares=1).start()
    s = driver.attach()

    def request(handle):
        return driver.send(ev.ProgramRequested(1, s, handle, b"p", b"o", (0, 4), driver.now_ns))

    form(driver, request(1), 3)
    out = lose(driver, 1)
    assert {(i.world, i.peers) for i in of_type(out, ins.LeaveWorld)} == {(1, (1000,)), (3, (1000, 1002, 1003))}
    refused = of_type(request(2), ins.ReportCompiled)
    assert "slices 0, 1 cannot form one world: host 1 (node-1) was lost" in refused[0].failure.message
    form(driver, out, 4)
    out = form(driver, request(3), 5)
    assert [(i.executable, i.world) for i in of_type(out, ins.CompileMember)] == [(3, 5)]


def test_what_names_a_program_that_is_being_loaded_waits_for_it_and_nothing_overtakes_it():
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    driver.send(ev.ProgramRequested(1, s, 100, b"p", b"o", (0, 2), driver.now_ns))
    launch = Operation(s, 1, (0, 1), reads=(100, 7), consumes=(7,), writes=(8,))
    await_it, forget = Operation(s, 2, (0, 1), False, reads=(8,)), Operation(s, 3, (0, 1), False, consumes=(8,))
    other = Operation(s, 4, (0, 1), False, reads=(9,))
    assert driver.submit(launch, await_it, forget, other) == [4]
    assert driver.waiting()[f"launch 1 of session {s}"] == "programs 100 to be loaded"
    assert dispatched(driver.send(ev.MemberCompiled(1000, s, 100, "m", None))) == []
    assert dispatched(driver.send(ev.MemberCompiled(1001, s, 100, None, None))) == [1, 2, 3]
    assert driver.submit(Operation(s, 5, (0, 1), reads=(100,), writes=(10,))) == [5]


def test_what_names_a_program_that_cannot_be_loaded_makes_nothing_until_the_program_is_deleted():
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    driver.send(ev.ProgramRequested(1, s, 100, b"p", b"o", (0, 2), driver.now_ns))
    assert driver.submit(Operation(s, 1, (0, 1), reads=(100, 7), consumes=(7,), writes=(8,))) == []
    no_room = Status(Code.RESOURCE_EXHAUSTED, "no room")
    out = driver.send(ev.MemberCompiled(1000, s, 100, None, no_room))
    poison, forget = of_type(out, ins.Substitute)
    assert (poison.group.hosts, poison.operation.handles) == ((0, 1), (8,))
    assert (forget.group.hosts, forget.operation.handles) == ((0, 1), (7,))
    (failed,) = of_type(out, ins.ReportFailed)
    assert failed.handles == (8,) and failed.failure.message == "host 0: no room"
    # What the session had sent before it heard of that.
    out = driver.send(ev.OperationsSubmitted(1, [Operation(s, 2, (0, 1), reads=(100,))], driver.now_ns))
    assert of_type(out, ins.Dispatch) == []
    assert of_type(out, ins.ReportFailed)[0].failure == failed.failure
    assert driver.submit(Operation(s, 3, (0, 1), False, consumes=(100,))) == [3]
    assert driver.submit(Operation(s, 4, (0, 1), reads=(100,))) == [4], "nothing is kept of it"


def test_what_waits_for_a_program_fails_when_its_host_is_lost_again():
    driver = Driver(TWO_BY_TWO, num_spares=1).start()
    s = driver.attach()
    driver.send(ev.ProgramRequested(1, s, 100, b"p", b"o", (0, 2), driver.now_ns))
    assert driver.submit(Operation(s, 1, (0, 1), reads=(100,), writes=(8,))) == []
    out = lose(driver, 1)
    (poison,) = of_type(out, ins.Substitute)
    assert (poison.group.hosts, poison.operation.handles) == ((0,), (8,))
    assert "host 1 (node-1) was lost" in of_type(out, ins.ReportFailed)[0].failure.message
    assert driver.waiting() == {}


def test_a_launch_without_results_is_done_by_all_its_hosts_or_by_none():
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    out = lose(driver, 1)
    driver.send(ev.HostChangesSeen(1, 1))
    out = driver.send(ev.OperationsSubmitted(1, [Operation(s, 1, (0, 1))], driver.now_ns))
    assert of_type(out, ins.Dispatch) == []
    assert of_type(out, ins.ReportFailed)[0].op_id == 1


def test_an_executor_that_ends_before_it_has_served_is_given_up_in_the_end():
    driver = Driver(TWO_BY_TWO).start()
    # The first one has served.
    for epoch in range(1, MAX_SHORT_LIVES + 1):
        assert of_type(lose(driver, 1, epoch), ins.StartExecutor) == [ins.StartExecutor(10001, epoch + 1)]
    out = lose(driver, 1, MAX_SHORT_LIVES + 1)
    assert of_type(out, ins.StartExecutor) == []
    assert announced(out, "worker_given_up") == [{"worker": 1, "name": "node-1", "num_executors": MAX_SHORT_LIVES}]


def test_one_that_lived_long_is_not_counted_among_those():
    driver = Driver(TWO_BY_TWO).start()
    for epoch in range(1, 2 * MAX_SHORT_LIVES):
        driver.now_ns += 11 * SECOND_NS
        assert len(of_type(lose(driver, 1, epoch), ins.StartExecutor)) == 1
        driver.register_executor(1, epoch + 1)


def live(driver, seconds, peers):
    """Time passes, and these go on saying that they live."""
    out = []
    for _ in range(seconds):
        for peer in peers:
            driver.send(ev.HeartbeatsReceived((peer,), driver.now_ns))
        out += driver.pass_time(1)
    return out


def test_an_executor_that_does_not_register_is_given_up_for_the_next():
    driver = Driver(TWO_BY_TWO, num_spares=1).start()
    lose(driver, 4)
    lives = [10000, 10001, 10002, 10003, 10004, 1000, 1001, 1002, 1003]
    seconds = START_TIMEOUT_NS // SECOND_NS
    assert of_type(live(driver, seconds - 1, lives), ins.StopExecutor) == []
    assert states(driver)[4] == "starting"
    out = live(driver, 1, lives)
    assert of_type(out, ins.StopExecutor) == [ins.StopExecutor(10004, 2)]
    assert of_type(out, ins.StartExecutor) == [ins.StartExecutor(10004, 3)]
    (lost,) = announced(out, "worker_lost")
    assert lost["cause"] == "its executor has not registered within 120 s"
    driver.register_executor(4, epoch=3)
    assert states(driver)[4] == "spare"


def test_first_executors_may_take_longer_to_register():
    driver = Driver(Topology(1, 2, 2, "cpu"))
    for worker in (0, 1):
        driver.register_worker(worker)
    driver.register_executor(0)
    lives = [10000, 10001, 1000]
    assert of_type(live(driver, FIRST_START_TIMEOUT_NS // SECOND_NS - 1, lives), ins.StopExecutor) == []
    assert of_type(live(driver, 1, lives), ins.StopExecutor) == [ins.StopExecutor(10001, 1)]
    (failed,) = announced(driver.out, "failed")
    assert "its executor has not registered within 600 s" in failed["reason"]


def test_time_in_which_the_controller_did_not_run_counts_for_no_start():
    driver = Driver(TWO_BY_TWO).start()
    lose(driver, 1)
    driver.now_ns += 2 * START_TIMEOUT_NS
    assert of_type(driver.pass_time(1), ins.StopExecutor) == []


@pytest.mark.parametrize("peer", [1001, 10001])
def test_a_supervisor_that_is_gone_may_come_back_as_the_same_worker(peer):
    driver = Driver(TWO_BY_TWO).start()
    driver.send(ev.PeerClosed(peer, "reset", driver.now_ns))
    driver.send(ev.PeerClosed(11002 - peer, "reset", driver.now_ns))
    assert states(driver)[1] == "lost"
    again = ev.WorkerRegistered(20001, 1, "node-1", 7001, 2, driver.now_ns)
    assert of_type(driver.send(again), ins.StartExecutor) == [ins.StartExecutor(20001, 2)]
    out = form(driver, driver.register_executor(1, epoch=2), 3)
    assert [(i.host, i.worker) for i in of_type(out, ins.ChangeHost)] == [(1, 1)]


def test_a_silent_supervisor_is_refused_so_that_it_begins_anew():
    driver = Driver(TWO_BY_TWO, heartbeat_timeout_ns=3 * SECOND_NS).start()
    driver.pass_time(2)
    for peer in (10000, 10002, 10003, 1000, 1001, 1002, 1003):
        driver.send(ev.HeartbeatsReceived((peer,), driver.now_ns))
    out = driver.pass_time(1.25)
    assert [i.peer for i in of_type(out, ins.Refuse)] == [10001, 1001]
    assert of_type(out, ins.StartExecutor) == []
    assert driver.send(ev.PeerClosed(10001, "refused", driver.now_ns)) == []
    assert states(driver)[1] == "lost"


def test_of_several_losses_each_is_served_again_as_spares_come():
    driver = Driver(Topology(3, 1, 1, "cpu"), num_spares=1).start()
    out = driver.form_members(lose(driver, 2))
    assert [(i.host, i.worker) for i in of_type(out, ins.ChangeHost)] == [(2, 3)]
    lose(driver, 0)
    lose(driver, 1)
    # The first executor to come serves for the first host that is down, its own or not.
    out = driver.form_members(driver.register_executor(2, epoch=2))
    assert [(i.host, i.worker) for i in of_type(out, ins.ChangeHost)] == [(0, 2)]
    out = driver.form_members(driver.register_executor(1, epoch=2))
    assert [(i.host, i.worker) for i in of_type(out, ins.ChangeHost)] == [(1, 1)]


def test_a_machine_that_is_cut_off_is_silent_twice_and_lost_once():
    driver = Driver(TWO_BY_TWO, heartbeat_timeout_ns=3 * SECOND_NS).start()
    driver.pass_time(2)
    for peer in (10000, 10002, 10003, 1000, 1002, 1003):
        driver.send(ev.HeartbeatsReceived((peer,), driver.now_ns))
    out = driver.pass_time(1.25)
    assert [i.peer for i in of_type(out, ins.Refuse)] == [10001, 1001]
    assert [(i.host, i.worker) for i in of_type(out, ins.ChangeHost)] == [(1, None)]


def test_of_hosts_that_are_lost_at_once_none_is_sent_anything_for_the_sake_of_another():
    driver = Driver(TWO_BY_TWO, num_spares=2, heartbeat_timeout_ns=3 * SECOND_NS, max_launches_in_flight=1).start()
    s = driver.attach()
    # Held: for bytes that host 0 has not sent, and for credit.
    transfer = Operation(s, 1, (0, 3), False, is_transfer=True, senders=(0,), writes=(1,))
    driver.submit(transfer, Operation(s, 2, (3,), reads=(1,), writes=(2,), after_transfers=(1,)))
    driver.submit(Operation(s, 3, (0, 2)), Operation(s, 4, (2, 3)))
    driver.pass_time(2)
    for peer in (10001, 10002, 10004, 10005, 1001, 1002, 1004, 1005):
        driver.send(ev.HeartbeatsReceived((peer,), driver.now_ns))
    streams = {host: len(stream) for host, stream in driver.streams.items()}
    out = driver.pass_time(1.25)
    assert [i.host for i in of_type(out, ins.ChangeHost)] == [0, 3]
    # Others stand behind both hosts now, as far as executors are told, and serve for neither yet.
    assert [b.worker for i in of_type(out, ins.BindExecutors) for b in i.executors] == [4, 5]
    assert [len(driver.streams[host]) - streams[host] for host in (0, 3)] == [0, 0]
    joined = [out.index(i) for i in of_type(out, ins.StartCoordination)]
    assert len(joined) == 2 and min(joined) > max(out.index(i) for i in of_type(out, ins.ChangeHost))


def test_a_program_whose_world_ends_is_reported_though_its_own_hosts_are_there():
    driver = Driver(Topology(1, 3, 1, "cpu"), num_spares=1).start()
    s = driver.attach()
    driver.send(ev.ProgramRequested(1, s, 9, b"p", b"o", (0, 1), driver.now_ns))
    driver.send(ev.ProgramRequested(1, s, 10, b"p", b"o", (0,), driver.now_ns))
    out = lose(driver, 2)
    (reported,) = of_type(out, ins.ReportCompiled)
    assert reported.executable == 9 and "host 2 (node-2) was lost" in reported.failure.message
    # A program of one host needs no world of several.
    out = driver.send(ev.MemberCompiled(1000, s, 10, "m", None))
    assert of_type(out, ins.ReportCompiled) == [ins.ReportCompiled(1, s, 10, "m", None)]


def test_sessions_are_opened_with_the_number_of_changes_there_were():
    driver = Driver(TWO_BY_TWO, num_spares=2).start()
    driver.attach()
    assert of_type(driver.out, ins.OpenSession)[-1].change == 0
    out = form(driver, lose(driver, 1), 3)
    assert of_type(out, ins.OpenSession)[0].change == 1
    assert [i.change for i in of_type(out, ins.ChangeHost)] == [2]
    driver.attach(peer=2)
    assert of_type(driver.out, ins.OpenSession)[-1].change == 2


def test_at_rest_nothing_is_left_of_a_loss():
    driver = Driver(TWO_BY_TWO, num_spares=1).start()
    s = driver.attach()
    driver.submit(Operation(s, 1, (0, 1)))
    out = form(driver, lose(driver, 1), 3)
    with pytest.raises(AssertionError):
        driver.core.check_at_rest()
    driver.acknowledge(0, 1)
    driver.send(ev.HostChangesSeen(1, 2))
    driver.core.check_at_rest()
    assert of_type(out, ins.Announce) != []


def test_a_world_that_forms_while_the_loss_of_a_member_is_looked_into_brings_nobody_back():
    driver = Driver(TWO_BY_TWO, num_spares=2).start()
    out = lose(driver, 1)
    driver.send(ev.CoordinationStarted(3, "unix:/3"))
    driver.send(ev.MemberFormed(1004, 3, None, driver.now_ns))
    # Worker 4, about to serve for host 1, has made its client and is gone.
    driver.send(ev.PeerClosed(1004, "closed", driver.now_ns))
    out = driver.send(ev.MemberFormed(1000, 3, None, driver.now_ns))
    assert of_type(out, ins.ChangeHost) == [] and of_type(out, ins.OpenSession) == []
    out = form(driver, driver.pass_time(0.75), 4)
    assert [(i.host, i.worker) for i in of_type(out, ins.ChangeHost)] == [(1, 5)]


def _driver_with_memory():
    """A spare, a session, and arrays in the memory of worker 1."""
    driver = Driver(TWO_BY_TWO, num_spares=1).start()
    session = driver.attach()
    driver.send(ev.MemoryRetained(1001, True))
    return driver, session


def _returns(driver, worker, epoch, *retained, host=1):
    """The next executor of a worker has found arrays."""
    return driver.send(
        msgspec.structs.replace(driver.executor(worker, epoch), retained_host=host, retained=tuple(retained))
    )


def test_a_host_waits_for_the_next_executor_where_its_memory_is():
    driver, session = _driver_with_memory()
    out = lose(driver, 1)
    assert [(c.host, c.may_return) for c in of_type(out, ins.ChangeHost)] == [(1, True)]
    assert of_type(out, ins.BindExecutors) == [], "the spare is not taken"
    assert states(driver) == {0: "bound", 1: "starting", 2: "bound", 3: "bound", 4: "spare"}
    out = _returns(driver, 1, 2, (session, (7, 8)), (99, (5,)))
    assert [(b.host, b.worker) for b in of_type(out, ins.BindExecutors)[0].executors] == [(1, 1)]
    assert of_type(out, ins.DropRetained) == []
    out = form(driver, out, 3)
    opened, dropped = of_type(out, ins.OpenSession)[0], of_type(out, ins.DropRetained)[0]
    (change,) = of_type(out, ins.ChangeHost)
    assert (opened.peers, dropped.peers) == ((101001,), (101001,))
    assert (change.host, change.worker, change.retained) == (1, 1, ((session, (7, 8)), (99, (5,))))
    assert out.index(opened) < out.index(dropped) < out.index(change)


def test_a_host_does_not_wait_for_memory_that_went_with_its_supervisor():
    driver, _ = _driver_with_memory()
    assert of_type(lose(driver, 1), ins.BindExecutors) == []
    out = driver.send(ev.PeerClosed(10001, "gone", driver.now_ns))
    assert [(b.host, b.worker) for b in of_type(out, ins.BindExecutors)[0].executors] == [(1, 4)]


def test_a_host_does_not_wait_when_nothing_is_in_memory():
    driver, _ = _driver_with_memory()
    driver.send(ev.MemoryRetained(1001, False))
    out = lose(driver, 1)
    assert [(c.host, c.may_return) for c in of_type(out, ins.ChangeHost)] == [(1, False)]
    assert [(b.host, b.worker) for b in of_type(out, ins.BindExecutors)[0].executors] == [(1, 4)]


def test_a_host_does_not_wait_for_ever():
    driver, session = _driver_with_memory()
    lose(driver, 1)
    # Supervisors and the other executors live, the next executor does not come.
    out = []
    for _ in range(int(RETURN_NS / SECOND_NS)):
        assert of_type(out, ins.BindExecutors) == []
        driver.now_ns += SECOND_NS
        alive = (1000, 1002, 1003, 1004, 10000, 10001, 10002, 10003, 10004)
        driver.send(ev.HeartbeatsReceived(alive, driver.now_ns))
        out = driver.send(ev.TimePassed(driver.now_ns))
    assert [(b.host, b.worker) for b in of_type(out, ins.BindExecutors)[0].executors] == [(1, 4)]
    # It comes too late: what it has is of no use.
    out = _returns(driver, 1, 2, (session, (7,)))
    assert of_type(out, ins.DropRetained) == [ins.DropRetained((101001,))]
    assert states(driver)[1] == "spare"


def test_a_controller_that_slept_waits_on_for_memory_and_for_verdicts():
    driver, session = _driver_with_memory()
    lose(driver, 1)
    driver.send(ev.PeerClosed(1000, "gone", driver.now_ns))
    driver.now_ns += RETURN_NS
    assert driver.send(ev.TimePassed(driver.now_ns)) == []
    assert {worker: states(driver)[worker] for worker in (0, 1, 4)} == {0: "closing", 1: "starting", 4: "spare"}
    out = _returns(driver, 1, 2, (session, (7,)))
    assert [(b.host, b.worker) for b in of_type(out, ins.BindExecutors)[0].executors] == [(1, 1)]


def test_an_executor_that_is_lost_again_is_waited_for_again():
    driver, session = _driver_with_memory()
    lose(driver, 1)
    _returns(driver, 1, 2, (session, (7,)))
    out = lose(driver, 1, epoch=2)
    assert of_type(out, ins.BindExecutors) == []
    out = _returns(driver, 1, 3, (session, (7,)))
    assert [(b.host, b.worker) for b in of_type(out, ins.BindExecutors)[0].executors] == [(1, 1)]


def test_a_worker_that_takes_the_place_of_another_is_not_behind_its_former_host_too():
    driver = Driver(Topology(1, 3, 2, "cpu")).start()
    lose(driver, 0)
    lose(driver, 1)
    out = driver.register_executor(1, epoch=2)
    (bind,) = of_type(out, ins.BindExecutors)
    assert [(b.host, b.worker) for b in bind.executors] == [(0, 1)]
    assert [(b.host, b.worker) for b in bind.all] == [(0, 1), (2, 2)]
    (replaced,) = of_type(out, ins.ReplacePeer)
    assert (replaced.peers, replaced.bound.host) == ((1002,), 0)
    out = driver.register_executor(0, epoch=2)
    (bind,) = of_type(out, ins.BindExecutors)
    assert [(b.host, b.worker) for b in bind.all] == [(0, 1), (1, 0), (2, 2)]
