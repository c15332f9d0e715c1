"""Membership, worlds, programs and sessions as exact instructions."""

import pytest

from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.operations import FUNCTION_OPTIONS
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.controller_driver import SECOND_NS, Driver, Operation, of_type

TWO_BY_TWO = Topology(2, 2, 2, "cpu")


def announced(out, event):
    return [i.fields for i in of_type(out, ins.Announce) if i.event == event]


def compiled(driver, worker, session, handle, metadata=None, failure=None):
    return driver.send(ev.MemberCompiled(1000 + worker, session, handle, metadata, failure))


def request(driver, session, handle, devices, peer=1):
    return driver.send(ev.ProgramRequested(peer, session, handle, b"program", b"options", devices, driver.now_ns))


# binding


def test_services_of_the_slices_start_before_anybody_is_there():
    driver = Driver(TWO_BY_TWO)
    assert driver.out == [ins.StartCoordination(1, 2), ins.StartCoordination(2, 2)]


def test_hosts_are_bound_by_worker_id_whatever_the_order_in_which_they_come():
    driver = Driver(TWO_BY_TWO, num_spares=1)
    for worker in (4, 2, 0, 3, 1):
        out = driver.register_worker(worker)
        assert of_type(out, ins.StartExecutor) == [ins.StartExecutor(10000 + worker, 1)]
    for worker in (3, 1, 0, 4):
        assert of_type(driver.register_executor(worker), ins.BindExecutors) == []
    (bind,) = of_type(driver.register_executor(2), ins.BindExecutors)
    assert [(b.host, b.worker, b.peer, b.data_address) for b in bind.executors] == [
        (n, n, 1000 + n, f"unix:/data-{n}") for n in range(4)
    ]
    states = {w["id"]: w["state"] for w in driver.core.report(driver.now_ns)["workers"]}
    assert states == {0: "bound", 1: "bound", 2: "bound", 3: "bound", 4: "spare"}


def test_a_worker_lost_before_binding_is_replaced_by_a_spare():
    driver = Driver(TWO_BY_TWO, num_spares=1)
    for worker in range(5):
        driver.register_worker(worker)
    for worker in (0, 2, 3, 4):
        driver.register_executor(worker)
    out = driver.send(ev.ExecutorExited(1, 1, 1, "ImportError", driver.now_ns))
    (bind,) = of_type(out, ins.BindExecutors)
    assert [b.worker for b in bind.executors] == [0, 2, 3, 4]
    (lost,) = announced(out, "worker_lost")
    assert (lost["worker"], lost["log_tail"]) == (1, "ImportError")
    assert lost["reason"].endswith("its executor ended with exit code 1")


def test_too_few_workers_left_is_a_failure_to_start():
    driver = Driver(TWO_BY_TWO)
    driver.register_worker(0)
    out = driver.send(ev.ExecutorExited(0, 1, -9, "", driver.now_ns))
    (failed,) = announced(out, "failed")
    assert failed["reason"].startswith(
        "3 workers remain for 4 hosts: worker 0 (node-0) was lost at 2023-11-14 22:13:20"
    )


@pytest.mark.parametrize(
    "register, complaint",
    [
        (lambda d: d.register_worker(0), "worker 0 is there already (as node-0, pid 5000)"),
        (lambda d: d.register_worker(9, devices=1), "node-9 has 1 devices; each host needs 2"),
        (lambda d: d.register_executor(9), "no executor of epoch 1 of worker 9 is expected"),
        (lambda d: d.register_executor(0, epoch=2), "no executor of epoch 2 of worker 0 is expected"),
    ],
)
def test_workers_that_do_not_fit_are_refused(register, complaint):
    driver = Driver(TWO_BY_TWO)
    driver.register_worker(0)
    assert [i.reason for i in of_type(register(driver), ins.Refuse)] == [complaint]


def test_an_executor_with_other_devices_is_lost_at_once():
    driver = Driver(TWO_BY_TWO)
    driver.register_worker(0)
    out = driver.register_executor(0, num_devices=1)
    assert of_type(out, ins.Refuse)[0].reason == "its executor has 1 cpu devices, not 2 cpu devices"
    assert of_type(out, ins.StopExecutor) == [ins.StopExecutor(10000, 1)]


# loss


def test_a_closed_executor_waits_for_its_supervisors_word_and_no_longer():
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    out = driver.send(ev.PeerClosed(1001, "reset", driver.now_ns))
    assert out == []
    # Until then, operations on it wait, and others do not.
    assert driver.submit(Operation(s, 1, (0, 1), writes=(1,)), Operation(s, 2, (2, 3))) == [2]
    assert driver.waiting() == {f"launch 1 of session {s}": "word of why hosts 1 are lost"}
    assert driver.pass_time(0.25) == []
    out = driver.pass_time(0.25)
    (change,) = of_type(out, ins.ChangeHost)
    assert change.failure.message.endswith("UTC, and with it slice 0: its executor's connection is gone (reset)")
    (poison,) = of_type(out, ins.Substitute)
    assert (poison.group.hosts, poison.operation.handles, poison.operation.status) == ((0,), (1,), change.failure)
    assert of_type(out, ins.ReportFailed) == [ins.ReportFailed(1, s, 1, (1,), change.failure)]
    assert of_type(out, ins.ReportDispatched) == [ins.ReportDispatched(1, s, 1)]
    assert out.index(change) < out.index(poison)


def test_a_whole_host_that_vanishes_needs_no_word():
    driver = Driver(TWO_BY_TWO).start()
    driver.send(ev.PeerClosed(1001, "reset", driver.now_ns))
    out = driver.send(ev.PeerClosed(10001, "reset", driver.now_ns))
    assert [(i.host, i.failure.code) for i in of_type(out, ins.ChangeHost)] == [(1, Code.DATA_LOSS)]
    assert driver.send(ev.ExecutorExited(1, 1, -9, "", driver.now_ns)) == []


def test_what_a_lost_host_has_no_results_in_goes_on_without_it():
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    driver.send(ev.ExecutorExited(3, 1, -9, "", driver.now_ns))
    out = driver.send(ev.OperationsSubmitted(1, [Operation(s, 1, (2, 3), False, consumes=(5,))], driver.now_ns))
    assert [i.group.hosts for i in of_type(out, ins.Dispatch)] == [(2,)]
    launch = Operation(s, 2, (2, 3), reads=(6, 7), consumes=(7,), writes=(8,))
    out = driver.send(ev.OperationsSubmitted(1, [launch], driver.now_ns))
    assert [(type(i.operation).__name__, i.operation.handles) for i in of_type(out, ins.Substitute)] == [
        ("Poison", (8,)),
        ("Delete", (7,)),
    ]
    assert driver.core.report(0)["queues"][2]["launches_in_flight"] == 0


def test_a_transfer_that_a_lost_host_had_to_start_is_poisoned_everywhere_before_its_readers_go():
    """Else some members of a gang would have their argument, and some would not."""
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    transfer = Operation(s, 1, (0, 2, 3), False, is_transfer=True, senders=(0, 2), writes=(1,))
    driver.submit(transfer, Operation(s, 2, (2, 3), reads=(1,), after_transfers=(1,)))
    assert driver.acknowledge(2, transfers=((s, 1),)) == []
    out = driver.send(ev.ExecutorExited(0, 1, -9, "", driver.now_ns))
    (poison,) = of_type(out, ins.Substitute)
    (launch,) = of_type(out, ins.Dispatch)
    assert (poison.group.hosts, poison.operation.handles, poison.operation.op_id) == ((2, 3), (1,), 1)
    assert (launch.submission.op_id, launch.group.hosts) == (2, (2, 3))
    assert poison.seq < launch.seq
    assert [(i.op_id, i.handles) for i in of_type(out, ins.ReportFailed)] == [(1, (1,))]


def test_silence_is_loss_and_a_controller_that_slept_blames_nobody():
    driver = Driver(TWO_BY_TWO, heartbeat_timeout_ns=3 * SECOND_NS).start()
    driver.now_ns += 60 * SECOND_NS
    assert driver.send(ev.TimePassed(driver.now_ns)) == []
    assert driver.pass_time(2) == []
    for peer in (10000, 10001, 10002, 10003, 1000, 1001, 1003):
        driver.send(ev.HeartbeatsReceived((peer,), driver.now_ns))
    out = driver.pass_time(1.25)
    assert [
        (i.host, i.failure.message.partition("UTC, and with it slice ")[2]) for i in of_type(out, ins.ChangeHost)
    ] == [(2, "1: its executor has been silent for 3.2 s")]
    assert of_type(out, ins.StopExecutor) == [ins.StopExecutor(10002, 1)]
    assert [i.peer for i in of_type(out, ins.Refuse)] == [1002]


# worlds


def test_a_world_is_formed_when_service_and_hosts_are_there():
    driver = Driver(TWO_BY_TWO)
    driver.send(ev.CoordinationStarted(1, "127.0.0.1:1"))
    for worker in range(4):
        driver.register_worker(worker)
    for worker in range(3):
        assert of_type(driver.register_executor(worker), ins.FormMember) == []
    out = driver.register_executor(3)
    assert of_type(out, ins.FormMember) == [
        ins.FormMember(1000, 1, "127.0.0.1:1", 0, (0, 1)),
        ins.FormMember(1001, 1, "127.0.0.1:1", 1, (0, 1)),
    ]
    out = driver.send(ev.CoordinationStarted(2, "127.0.0.1:2"))
    assert [(i.peer, i.rank) for i in of_type(out, ins.FormMember)] == [(1002, 0), (1003, 1)]
    assert driver.send(ev.MemberFormed(1000, 1, None, driver.now_ns)) == []
    assert announced(driver.send(ev.MemberFormed(1001, 1, None, driver.now_ns)), "world")[0]["state"] == "formed"
    driver.send(ev.MemberFormed(1002, 2, None, driver.now_ns))
    assert announced(driver.send(ev.MemberFormed(1003, 2, None, driver.now_ns)), "ready") == [{}]


def test_a_slice_that_cannot_form_is_a_failure_to_start():
    driver = Driver(Topology(1, 2, 2, "cpu"))
    driver.send(ev.CoordinationStarted(1, "127.0.0.1:1"))
    for worker in range(2):
        driver.register_worker(worker)
        driver.register_executor(worker)
    out = driver.send(ev.MemberFormed(1001, 1, Status(Code.DEADLINE_EXCEEDED, "nobody came"), driver.now_ns))
    assert announced(out, "failed") == [{"reason": "slice 0 did not form: DEADLINE_EXCEEDED: host 1: nobody came"}]


def test_the_service_of_a_world_outlives_its_first_losses_only():
    driver = Driver(Topology(1, 2, 2, "cpu")).start()
    assert of_type(driver.send(ev.ExecutorExited(0, 1, -9, "", driver.now_ns)), ins.StopCoordination) == []
    out = driver.send(ev.ExecutorExited(1, 1, -9, "", driver.now_ns))
    assert of_type(out, ins.StopCoordination) == [ins.StopCoordination(1)]


# programs


def test_one_host_compiles_then_the_others_load():
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    out = request(driver, s, 9, (3, 0))
    assert out == [ins.CompileMember((1000,), s, 9, 1, b"program", b"options", (3, 0), True)]
    out = compiled(driver, 0, s, 9, metadata="what it is")
    assert [(i.peers, i.wants_metadata) for i in out] == [((1001,), False)]
    out = compiled(driver, 1, s, 9, metadata="not this")
    assert out == [ins.ReportCompiled(1, s, 9, "what it is", None)]
    assert compiled(driver, 1, s, 9) == []


def test_compilations_do_not_wait_for_one_another():
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    request(driver, s, 1, (0, 2))
    request(driver, s, 2, (4,))
    assert of_type(compiled(driver, 2, s, 2, "m"), ins.ReportCompiled) == [ins.ReportCompiled(1, s, 2, "m", None)]
    assert driver.waiting() == {f"compilation of program 1 of session {s}": "the first host to compile: hosts 0"}


@pytest.mark.parametrize("stage", ["first", "others"])
def test_a_failure_on_any_host_is_the_programs_failure(stage):
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    request(driver, s, 1, (0, 2))
    failure = Status(Code.RESOURCE_EXHAUSTED, "no memory")
    worker = 0
    if stage == "others":
        compiled(driver, 0, s, 1, "m")
        worker = 1
    out = compiled(driver, worker, s, 1, failure=failure)
    assert out == [ins.ReportCompiled(1, s, 1, None, Status(Code.RESOURCE_EXHAUSTED, f"host {worker}: no memory"))]


def test_a_lost_host_ends_its_compilations_and_later_ones():
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    request(driver, s, 1, (0, 2))
    request(driver, s, 2, (4, 6))
    out = driver.send(ev.ExecutorExited(1, 1, -6, "", driver.now_ns))
    (report,) = of_type(out, ins.ReportCompiled)
    assert (report.executable, report.failure.code) == (1, Code.DATA_LOSS)
    assert of_type(request(driver, s, 3, (2,)), ins.ReportCompiled)[0].failure == report.failure
    # The other host of that slice works on, in the world that it is in.
    assert of_type(request(driver, s, 4, (0,)), ins.CompileMember)[0].peers == (1000,)
    out = request(driver, s, 5, (0, 4))
    assert (
        "slices 0, 1 cannot form one world: host 1 (node-1) was lost"
        in of_type(out, ins.ReportCompiled)[0].failure.message
    )


def test_a_program_across_slices_waits_for_their_world_which_is_made_once():
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    assert request(driver, s, 1, (0, 4)) == [ins.StartCoordination(3, 4)]
    assert request(driver, s, 2, (5, 1)) == []
    assert driver.waiting()[f"compilation of program 2 of session {s}"] == "its world to form"
    out = driver.send(ev.CoordinationStarted(3, "127.0.0.1:3"))
    assert [(i.peer, i.rank, i.hosts) for i in out] == [(1000 + n, n, (0, 1, 2, 3)) for n in range(4)]
    out = driver.form_members(out)
    asked = of_type(out, ins.CompileMember)
    assert [(i.executable, i.world, i.peers) for i in asked] == [(1, 3, (1000,)), (2, 3, (1000,))]
    assert of_type(request(driver, s, 3, (0, 7)), ins.CompileMember)[0].world == 3


def test_functions_across_slices_form_no_world():
    driver = Driver(Topology(2, 1, 2, "tpu")).start()
    session = driver.attach()
    devices = (0, 2, 4 + 3)
    out = driver.send(ev.ProgramRequested(1, session, 7, b"pickle", FUNCTION_OPTIONS, devices, driver.now_ns))
    (first,) = of_type(out, ins.CompileMember)
    assert (first.peers, first.world, first.devices) == ((1000,), 1, devices)
    assert of_type(out, ins.StartCoordination) == []
    (second,) = of_type(compiled(driver, 0, session, 7, metadata="known"), ins.CompileMember)
    assert second.peers == (1001,)
    (told,) = of_type(compiled(driver, 1, session, 7), ins.ReportCompiled)
    assert told.failure is None


def test_a_world_that_failed_is_tried_anew_some_times_and_for_the_next_program():
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    request(driver, s, 1, (0, 4))
    for world in (3, 4):
        out = driver.send(ev.CoordinationFailed(world, "no port"))
        assert of_type(out, ins.ReportCompiled) == []
        assert of_type(out, ins.StartCoordination) == [ins.StartCoordination(world + 1, 4)]
    out = driver.send(ev.CoordinationFailed(5, "no port"))
    assert of_type(out, ins.ReportCompiled)[0].failure == Status(
        Code.INTERNAL, "the coordination service of slices 0, 1 ended: no port"
    )
    assert request(driver, s, 2, (0, 4)) == [ins.StartCoordination(6, 4)]


def test_a_host_lost_while_a_world_forms_fails_what_waits_for_it():
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    request(driver, s, 1, (0, 4))
    driver.send(ev.CoordinationStarted(3, "127.0.0.1:3"))
    out = driver.send(ev.ExecutorExited(3, 1, -6, "", driver.now_ns))
    assert [i.failure.code for i in of_type(out, ins.ReportCompiled)] == [Code.DATA_LOSS]


# sessions


def test_a_session_is_opened_on_every_executor_before_its_proxy_hears_of_it():
    driver = Driver(TWO_BY_TWO).start()
    out = driver.send(ev.SessionRequested(1, "train", 42, "unix:/links", driver.now_ns))
    assert out[0] == ins.OpenSession((1000, 1001, 1002, 1003), 1, "unix:/links", 0)
    assert (out[1].session, out[1].platform_version, out[1].device_kind, out[1].max_undispatched) == (
        1,
        "version 1",
        "cpu",
        512,
    )
    assert out[1].hosts[3] == ins.HostBinding(3, 3, "node-3", None)


def test_sessions_wait_until_the_runtime_is_ready():
    driver = Driver(Topology(1, 1, 1, "cpu"))
    assert driver.send(ev.SessionRequested(1, "early", 42, "unix:/l", driver.now_ns)) == []
    driver.send(ev.SessionRequested(2, "gone", 43, "unix:/l", driver.now_ns))
    driver.send(ev.PeerClosed(2, "closed", driver.now_ns))
    assert driver.waiting() == {"client early (pid 42)": "the runtime to be ready"}
    driver.register_worker(0)
    out = driver.register_executor(0)
    out = driver.form_members(out)
    assert [(i.peer, i.session) for i in of_type(out, ins.AcceptSession)] == [(1, 1)]


def test_a_proxy_cannot_touch_another_proxys_session():
    driver = Driver(TWO_BY_TWO).start()
    mine, theirs = driver.attach(1), driver.attach(2)
    out = driver.send(ev.SessionDetached(1, theirs))
    assert [i.reason for i in of_type(out, ins.Refuse)] == [f"this proxy has no session {theirs}"]
    assert [i.session for i in of_type(out, ins.CloseSession)] == [mine]
    assert [entry["id"] for entry in driver.core.report(0)["sessions"]] == [theirs]


def test_the_same_events_give_the_same_instructions():
    def play():
        driver = Driver(TWO_BY_TWO, num_spares=1, max_launches_in_flight=2).start()
        a, b = driver.attach(1), driver.attach(2)
        request(driver, a, 100, (0, 4))
        for n in range(1, 30):
            hosts = ((0, 1), (1, 2, 3), (0, 1, 2, 3), (2,))[n % 4]
            driver.submit(Operation(a, n, hosts, n % 3 > 0, reads=(n - 1, n - 2), writes=(n,)))
            driver.submit(Operation(b, n, hosts, writes=(n,), consumes=(n - 3,)), peer=2)
            for host in range(4):
                if (
                    driver.core.report(0)["queues"][host]["launches_in_flight"]
                    and n % 2 == host % 2
                    and (n < 20 or host != 2)
                ):
                    driver.acknowledge(host, 1)
            if n == 20:
                driver.send(ev.ExecutorExited(2, 1, -9, "", driver.now_ns))
        driver.send(ev.SessionDetached(1, a))
        return [repr(instruction) for instruction in driver.out]

    first = play()
    assert len(first) > 100
    assert play() == first


def test_an_event_of_no_known_type_is_an_error():
    class Surprise(ev.Event, frozen=True):
        pass

    with pytest.raises(TypeError, match="no event Surprise"):
        Driver(TWO_BY_TWO).core.handle(Surprise())
