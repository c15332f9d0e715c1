"""Workers that a job of their own lends to a run: they come, serve, and go with that job."""

from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.controller_driver import SECOND_NS, Driver, Operation, of_type

from .test_recovery import announced, form, lose, states

TWO_BY_TWO = Topology(2, 2, 2, "cpu")
LENT = "job 77"


def join(driver, worker):
    driver.register_worker(worker, companion=LENT)
    return driver.register_executor(worker)


def leave(driver, worker):
    return driver.send(ev.WorkerLeaving(10000 + worker, f"{LENT} takes it back", driver.now_ns))


def test_a_lent_worker_is_a_spare_that_fills_a_slice_which_is_down_at_once():
    driver = Driver(TWO_BY_TWO).start()
    driver.attach()
    lose(driver, 1)
    out = join(driver, 4)
    (ready,) = announced(out, "host_ready")
    assert ready == {"worker": 4, "name": "node-4", "pid": 6004, "companion": LENT}
    (bind,) = of_type(out, ins.BindExecutors)
    assert [(b.host, b.worker) for b in bind.executors] == [(1, 4)]
    out = form(driver, out, 3)
    (back,) = announced(out, "host_back")
    assert (back["worker"], back["name"], back["companion"]) == (4, "node-4", LENT)
    # Who was lost is a spare when it is there again.
    driver.register_executor(1, epoch=2)
    assert states(driver) == {0: "bound", 1: "spare", 2: "bound", 3: "bound", 4: "bound"}
    report = driver.core.report(driver.now_ns)
    assert [w["companion"] for w in report["workers"]] == [None] * 4 + [LENT]
    assert report["failures"][0]["served_again_by"] == "node-4 of job 77"


def test_a_lent_spare_that_leaves_is_no_loss():
    driver = Driver(TWO_BY_TWO).start()
    join(driver, 4)
    out = leave(driver, 4)
    (left,) = announced(out, "worker_left")
    assert (left["worker"], left["companion"], left["cause"]) == (4, LENT, "job 77 takes it back")
    assert announced(out, "worker_lost") == [] and of_type(out, ins.ChangeHost) == []
    # It is not asked for another executor, and what follows says nothing new.
    assert of_type(out, ins.StartExecutor) == []
    assert driver.send(ev.ExecutorExited(4, 1, 0, "", driver.now_ns)) == []
    assert driver.send(ev.PeerClosed(10004, "closed", driver.now_ns)) == []
    assert driver.core.report(driver.now_ns)["failures"] == []
    lose(driver, 1)
    assert states(driver)[1] == "starting"


def test_a_lent_worker_that_serves_is_lost_as_any_other_and_a_spare_takes_over():
    driver = Driver(TWO_BY_TWO).start()
    s = driver.attach()
    lose(driver, 1)
    form(driver, join(driver, 4), 3)
    driver.register_executor(1, epoch=2)
    driver.send(ev.HostChangesSeen(1, 2))
    driver.now_ns += SECOND_NS
    out = leave(driver, 4)
    (change,) = of_type(out, ins.ChangeHost)
    assert change.failure.message.startswith("host 1 (node-4 of job 77) was lost at ")
    assert change.failure.message.endswith(" UTC, and with it slice 0: job 77 takes it back")
    (lost,) = announced(out, "host_lost")
    assert (lost["host"], lost["companion"]) == (1, LENT)
    (bind,) = of_type(out, ins.BindExecutors)
    assert [(b.host, b.worker) for b in bind.executors] == [(1, 1)]
    form(driver, out, 4)
    driver.send(ev.HostChangesSeen(1, 4))
    assert driver.submit(Operation(s, 1, (0, 1), writes=(10,))) == [1]
    assert [f["companion"] for f in driver.core.report(driver.now_ns)["failures"]] == [None, LENT]


def test_workers_beyond_those_that_relays_were_planned_for_connect_to_the_controller():
    driver = Driver(Topology(4, 1, 1, "cpu"), relay_fanout=2).start()
    for worker in range(4, 10):
        out = driver.register_worker(worker, companion=LENT)
        assert of_type(out, ins.StartExecutor) == [ins.StartExecutor(10000 + worker, 1)]
        driver.register_executor(worker)
    # A relay takes its children along: lent workers stand behind all of their hosts.
    driver.send(ev.PeerClosed(10000, "closed", driver.now_ns))
    assert {worker for worker, state in states(driver).items() if state == "bound"} >= {4, 5}
    assert [w["relay"] for w in driver.core.report(driver.now_ns)["workers"]][4:] == [None] * 6


def test_one_with_other_devices_is_refused_by_name():
    driver = Driver(TWO_BY_TWO).start()
    out = driver.register_worker(4, devices=8, companion=LENT)
    (refused,) = announced(out, "worker_refused")
    assert refused == {
        "worker": 4,
        "name": "node-4",
        "reason": "node-4 of job 77 has 8 devices; each host needs 2",
        "companion": LENT,
    }
    driver.register_worker(5, companion=LENT)
    out = driver.register_executor(5, num_devices=8)
    (lost,) = announced(out, "worker_lost")
    assert lost["cause"] == "its executor has 8 cpu devices, not 2 cpu devices"


# Slices that are absent at first


def absent_slice(num_spares=0):
    """Two slices of two hosts, of which the second is absent."""
    return Driver(TWO_BY_TWO, num_spares=num_spares, num_absent_slices=1).start()


def test_a_run_is_ready_without_its_absent_slices_and_they_are_down():
    driver = absent_slice()
    s = driver.attach()
    (accepted,) = of_type(driver.out, ins.AcceptSession)
    assert [(h.host, h.worker, h.name) for h in accepted.hosts] == [
        (0, 0, "node-0"),
        (1, 1, "node-1"),
        (2, None, ""),
        (3, None, ""),
    ]
    absence = accepted.hosts[2].failure
    assert absence.code.name == "DATA_LOSS"
    assert absence.message == ("no worker stands behind host 2: slice 1 is absent until there are workers for it")
    assert [d["state"] for d in driver.core.report(driver.now_ns)["devices"]] == ["idle"] * 4 + ["absent"] * 4
    # There is no service for its world, and what addresses it is poisoned on the others.
    assert [i.world for i in of_type(driver.out, ins.StartCoordination)] == [1]
    assert driver.submit(Operation(s, 1, (0, 1), writes=(6,))) == [1]
    out = driver.send(ev.OperationsSubmitted(1, [Operation(s, 2, (1, 2), writes=(7,))], driver.now_ns))
    (poison,) = of_type(out, ins.Substitute)
    assert (poison.group.hosts, poison.operation.status) == ((1,), absence)


def test_an_absent_slice_is_filled_when_there_is_a_worker_for_each_of_its_hosts():
    driver = absent_slice()
    s = driver.attach()
    assert of_type(join(driver, 2), ins.BindExecutors) == []
    assert states(driver)[2] == "spare"
    out = join(driver, 3)
    assert [(b.host, b.worker) for i in of_type(out, ins.BindExecutors) for b in i.executors] == [(2, 2), (3, 3)]
    out = form(driver, out, 2)
    there = announced(out, "host_there")
    assert [(f["host"], f["companion"]) for f in there] == [(2, LENT), (3, LENT)]
    assert [(i.host, i.failure, i.change) for i in of_type(out, ins.ChangeHost)] == [(2, None, 1), (3, None, 2)]
    driver.send(ev.HostChangesSeen(1, 2))
    assert driver.submit(Operation(s, 1, (1, 2), writes=(6,))) == [1]
    assert driver.core.report(driver.now_ns)["failures"] == []
    # Then its workers are taken back: a loss as any other, and nobody else takes these places.
    lost = [announced(leave(driver, worker), "host_lost")[0]["host"] for worker in (2, 3)]
    assert lost == [2, 3] and states(driver)[2] == "left"
    assert [d["state"] for d in driver.core.report(driver.now_ns)["devices"][4:]] == ["lost"] * 4
    again = join(driver, 4)
    assert of_type(again, ins.BindExecutors) == []
    out = form(driver, join(driver, 5), 3)
    assert len(announced(out, "host_back")) == 2


def test_losses_come_before_absent_slices_and_spares_that_were_asked_for_stay():
    driver = absent_slice(num_spares=1)
    assert states(driver)[2] == "spare"
    join(driver, 3)
    lose(driver, 0)
    # The run's own spare has taken that place.
    assert (states(driver)[2], states(driver)[3]) == ("bound", "spare")
    join(driver, 4)
    assert states(driver)[4] == "spare"
    join(driver, 5)
    assert [states(driver)[worker] for worker in (3, 4, 5)] == ["spare", "bound", "bound"]
    # One of the two is lost, and one is enough to mend that.
    driver.register_executor(0, epoch=2)
    out = lose(driver, 5)
    assert [(b.host, b.worker) for i in of_type(out, ins.BindExecutors) for b in i.executors] == [(3, 3)]
    # The last one stays for losses.
    assert states(driver)[0] == "spare"


def test_a_loss_before_anybody_is_bound_counts_without_absent_slices():
    driver = Driver(TWO_BY_TWO, num_absent_slices=1)
    driver.register_worker(0)
    driver.register_executor(0)
    out = lose(driver, 0)
    (failed,) = announced(out, "failed")
    assert failed["reason"].startswith("1 workers remain for 2 hosts: ")
