"""What hosts used, added up, and losses as the status report shows them."""

from typing import Any

import pytest

from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller.usage import add_programs, add_up
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.controller_driver import SECOND_NS, Driver


def _program(name: str, devices: str, executions: int, busy_s: float, waiting_s: float = 0.0) -> dict[str, Any]:
    return {"name": name, "devices": devices, "executions": executions, "busy_s": busy_s, "waiting_s": waiting_s}


def _worker(host: int | None, slice_index: int | None, *programs: dict[str, Any]) -> dict[str, Any]:
    usage = {
        "busy_s": sum(program["busy_s"] for program in programs),
        "waiting_s": sum(program["waiting_s"] for program in programs),
        "devices": [{}, {}],
        "programs": list(programs),
    }
    return {"host": host, "slice_index": slice_index, "usage": usage}


def test_executions_of_a_gang_are_counted_once_and_its_device_seconds_add_up() -> None:
    gang = ("step", "0-7")
    added = add_up(
        [
            _worker(0, 0, _program(*gang, 3, 1.0, 0.5), _program("local", "0", 5, 0.25)),
            _worker(1, 0, _program(*gang, 2, 1.5), _program("local", "2", 7, 4.0)),
            _worker(2, 1, _program(*gang, 3, 1.0)),
            {"host": 3, "slice_index": 1},
            _worker(None, None),
        ]
    )
    assert added["programs"] == [
        _program("local", "2", 7, 4.0),
        _program(*gang, 3, 3.5, 0.5),
        _program("local", "0", 5, 0.25),
    ]
    assert [(part["index"], part["hosts"], part["num_devices"]) for part in added["slices"]] == [
        (0, [0, 1], 4),
        (1, [2, 3], 2),
    ]
    assert [(part["busy_s"], part["waiting_s"]) for part in added["slices"]] == [(6.75, 0.5), (1.0, 0.0)]
    assert added["slices"][1]["programs"] == [_program(*gang, 3, 1.0)]


def test_nobody_is_there() -> None:
    assert add_up([]) == {"slices": [], "programs": []}
    assert add_programs([[], []]) == []


def test_a_loss_says_when_where_and_why() -> None:
    driver = Driver(Topology(2, 1, 2, "cpu"))
    started = driver.core.report(driver.now_ns)
    for worker in (0, 1):
        driver.register_worker(worker)
        driver.now_ns += SECOND_NS
        driver.register_executor(worker)
    ready_after_s = [worker["ready_after_s"] for worker in driver.core.report(driver.now_ns)["workers"]]
    driver.send(ev.ExecutorExited(1, 1, -9, "", driver.now_ns))
    driver.now_ns += SECOND_NS
    report = driver.core.report(driver.now_ns)
    (failure,) = report["failures"]
    assert failure["at_unix_s"] - report["started_at_unix_s"] == pytest.approx(report["elapsed_s"] - 1.0, abs=0.01)
    del failure["at_unix_s"]
    assert failure == {
        "worker": 1,
        "name": report["workers"][1]["name"],
        "host": 1,
        "slice_index": 1,
        "companion": None,
        "cause": "its executor was killed by signal 9 (SIGKILL), perhaps by the kernel for want of memory",
        "found_after_s": 0.0,
        "served_again_after_s": None,
        "served_again_by": None,
    }
    assert (started["failures"], started["workers"]) == ([], [])
    assert ready_after_s[1] - ready_after_s[0] == pytest.approx(1.0)
    # Its next executor is not there yet.
    assert [worker["ready_after_s"] for worker in report["workers"]] == [ready_after_s[0], None]
