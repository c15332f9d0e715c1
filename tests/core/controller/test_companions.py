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
