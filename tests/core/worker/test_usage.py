"""Busy and waiting time of a host's devices, from times that the tests say."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.worker.usage import MAX_PROGRAMS, OTHERS, Running, Usage, device_ranges

D0, D1 = DeviceId(4), DeviceId(5)
START_S = 100.0


@pytest.fixture
def usage() -> Usage:
    return Usage([D0, D1], START_S)


def _devices(usage: Usage, now_s: float, *running: Running) -> list[tuple[float, float]]:
    return [(device["busy_s"], device["waiting_s"]) for device in usage.report(now_s, running)["devices"]]


def test_nothing_has_run(usage: Usage) -> None:
    assert usage.report(103.5) == {
        "elapsed_s": 3.5,
        "busy_s": 0.0,
        "waiting_s": 0.0,
        "devices": [{"id": 4, "busy_s": 0.0, "waiting_s": 0.0}, {"id": 5, "busy_s": 0.0, "waiting_s": 0.0}],
        "programs": [],
    }


def test_a_program_on_both_devices_counts_device_seconds(usage: Usage) -> None:
    step = usage.program("jit_step", "0-7")
    usage.count(step, (D0, D1), received_s=101.0, launched_s=101.0, ended_s=103.0)
    assert usage.report(104.0)["programs"] == [
        {"name": "jit_step", "devices": "0-7", "executions": 1, "busy_s": 4.0, "waiting_s": 0.0}
    ]
    assert _devices(usage, 104.0) == [(2.0, 0.0), (2.0, 0.0)]


def test_executions_behind_one_another_share_no_time(usage: Usage) -> None:
    """The second was launched while the first ran: it has the device from the end of the first."""
    first, second = usage.program("first", "4"), usage.program("second", "4")
    usage.count(first, (D0,), received_s=101.0, launched_s=101.0, ended_s=103.0)
    usage.count(second, (D0,), received_s=101.0, launched_s=101.5, ended_s=103.25)
    assert [program["busy_s"] for program in usage.report(104.0)["programs"]] == [2.0, 0.25]
    assert _devices(usage, 104.0) == [(2.25, 0.0), (0.0, 0.0)]


def test_a_device_waits_while_it_is_idle_and_a_launch_is_here(usage: Usage) -> None:
    step = usage.program("step", "4")
    # Here at 101, and its input came at 102.
    usage.count(step, (D0,), received_s=101.0, launched_s=102.0, ended_s=103.0)
    # Here while the one before ran until 103, and its input came at 104.5.
    usage.count(step, (D0,), received_s=102.5, launched_s=104.5, ended_s=105.0)
    assert _devices(usage, 106.0) == [(1.5, 2.5), (0.0, 0.0)]
    assert usage.report(106.0)["programs"][0]["waiting_s"] == 2.5


def test_an_end_that_is_seen_after_a_later_one_adds_nothing(usage: Usage) -> None:
    both, one = usage.program("both", "4-5"), usage.program("one", "4")
    usage.count(both, (D0, D1), received_s=100.0, launched_s=100.0, ended_s=102.0)
    usage.count(one, (D0,), received_s=100.0, launched_s=100.0, ended_s=101.0)
    assert _devices(usage, 102.0) == [(2.0, 0.0), (2.0, 0.0)]
    assert [row["executions"] for row in usage.report(102.0)["programs"]] == [1, 1]


def test_what_runs_counts_so_far_once_and_is_no_execution(usage: Usage) -> None:
    step, other = usage.program("step", "4-5"), usage.program("other", "4")
    running = [Running(step, (D0, D1), 101.0), Running(other, (D0,), 101.5)]
    assert _devices(usage, 104.0, *running) == [(3.0, 0.0), (3.0, 0.0)]
    rows = {row["name"]: row for row in usage.report(104.0, running)["programs"]}
    assert (rows["step"]["busy_s"], rows["step"]["executions"], rows["other"]["busy_s"]) == (6.0, 0, 0.0)
    assert _devices(usage, 104.0) == [(0.0, 0.0), (0.0, 0.0)]


def test_programs_of_one_name_on_the_same_devices_share_a_row_and_made_up_names_fill_no_memory(usage: Usage) -> None:
    assert usage.program("a", "4") is usage.program("a", "4")
    assert usage.program("a", "4") is not usage.program("a", "5")
    rows = {usage.program(f"p{number}", "4") for number in range(2 * MAX_PROGRAMS)}
    assert len(rows) == MAX_PROGRAMS - 2 + 1
    assert usage.program("new", "5").name == OTHERS


_LAUNCHES = st.lists(st.tuples(st.sets(st.sampled_from([D0, D1]), min_size=1), *[st.floats(0, 3)] * 3), max_size=20)


@example([({D0}, 0.0, 1.0, 0.0), ({D0}, 0.0, 0.0, 1.0)])
@given(_LAUNCHES)
def test_busy_and_waiting_never_exceed_the_time_that_passed(
    launches: list[tuple[set[DeviceId], float, float, float]],
) -> None:
    usage = Usage([D0, D1], START_S)
    step = usage.program("step", "4-5")
    now_s = START_S
    for devices, until_received_s, until_launched_s, until_ended_s in launches:
        launched_s = now_s + until_received_s + until_launched_s
        ended_s = launched_s + until_ended_s
        usage.count(step, tuple(devices), now_s + until_received_s, launched_s, ended_s)
        now_s = max(now_s, ended_s - 1.0)
    end_s = now_s + 1.0
    report = usage.report(end_s)
    assert report["programs"][0]["executions"] == len(launches)
    for device in report["devices"]:
        assert device["busy_s"] >= 0 and device["waiting_s"] >= 0
        assert device["busy_s"] + device["waiting_s"] <= report["elapsed_s"] + 1e-5
    total = report["programs"][0]["busy_s"]
    assert total == pytest.approx(sum(device["busy_s"] for device in report["devices"]), abs=1e-4)


@pytest.mark.parametrize(
    ("devices", "text"), [([], ""), ([3], "3"), ([3, 1, 2, 1], "1-3"), ([0, 1, 8, 4, 5], "0-1,4-5,8")]
)
def test_device_ranges(devices: list[int], text: str) -> None:
    assert device_ranges(map(DeviceId, devices)) == text
