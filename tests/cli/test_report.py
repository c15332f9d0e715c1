"""``slurm-pathways report``: accounting and records joined, as values and as text."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from slurm_pathways.cli.main import main
from slurm_pathways.config import RECORDS_VARIABLE, RuntimeSpec
from slurm_pathways.launch import records
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent
from slurm_pathways.launch.history import History
from slurm_pathways.launch.records import RUN, RUNTIME, Record, SlurmPlace
from slurm_pathways.report import device_seconds, job_report
from slurm_pathways.report_text import as_text
from slurm_pathways.slurm import accounting

SAMPLE = (Path(__file__).parents[1] / "slurm" / "unit" / "samples" / "sacct_22.05.txt").read_text()
ROWS = accounting.parse(SAMPLE)
#: Of the sample's job 9: four workers (steps 0, 2, 3, 4), a controller (step 1).
STEPS = {"worker-2": 0, "controller": 1, "worker-0": 2, "worker-3": 3, "worker-1": 4}
START_S = 1795976879.0
NODES = tuple(f"node{n}" for n in range(4))


def _history(**changes: Any) -> History:
    usual: dict[str, Any] = {
        "record_id": "ab12",
        "spec": RuntimeSpec(num_slices=3, devices_per_host=4, num_spares=1),
        "argv": ("python", "train.py"),
        "launcher_host": "node0",
        "launcher_pid": 7,
        "slurm": SlurmPlace(9, NODES, cluster="c"),
        "started_at_unix_s": START_S,
    }
    return History(**{**usual, **changes})


def _usage(worker: int, busy_s: float, waiting_s: float = 0.0) -> dict[str, Any]:
    program = {"name": "jit_step", "devices": "0-11", "executions": 5, "busy_s": busy_s, "waiting_s": waiting_s}
    usage = {"busy_s": busy_s, "waiting_s": waiting_s, "devices": [{"id": n} for n in range(4)], "programs": [program]}
    place = {"id": worker, "name": NODES[worker], "host": worker, "slice_index": worker}
    return {**place, "usage": usage, "bytes_moved": {"socket": 1 << 20}}


def _run_of_job_9() -> Record:
    """3 slices and a spare; ready after 10 s, busy 30, 20 and 0 device-s; node1 lost after 60 s; 110 s long."""
    history = _history()
    history.runtime_id = "run-1"
    for name, step in STEPS.items():
        node = "node0" if name == "controller" else f"node{name[-1]}"
        fields = {"step_id": str(step), "place": {"node": node, "address": "", "machine": ""}}
        history.note(ComponentEvent(name, "node_ready", fields), START_S + 1)
    for worker in range(4):
        fields = {"worker": worker, "name": NODES[worker]}
        history.note(ComponentEvent("controller", "host_ready", fields), START_S + 5)
        if worker < 3:
            history.note(ComponentEvent("controller", "bound", {**fields, "host": worker}), START_S + 6)
    history.ready(START_S + 10)
    history.answered({"workers": [_usage(0, 10.0), _usage(1, 20.0), _usage(2, 0.0)]}, START_S + 50)
    lost = {"worker": 1, "name": "node1", "host": 1, "cause": "its executor has been silent for 30.0 s"}
    history.note(ComponentEvent("controller", "host_lost", lost), START_S + 60)
    history.note(ComponentEnded("worker-1", 0, was_asked=False), START_S + 70)
    history.answered({"workers": [_usage(0, 30.0, 2.5), _usage(2, 0.0)]}, START_S + 100)
    history.program_ended(0, START_S + 100)
    for name in ("controller", "worker-0", "worker-2", "worker-3"):
        history.note(ComponentEnded(name, 0, was_asked=True), START_S + 105)
    history.ended(0, None, START_S + 110)
    return history.record(START_S + 110)


def _rows(job: str) -> list[accounting.Record]:
    return [row for row in ROWS if row.job == job]


def _job(job: str | None, *runs: Record, now_s: float = START_S + 200, is_alive: bool | None = None) -> dict[str, Any]:
    rows = [] if job is None else _rows(job)
    report = job_report(job, rows, runs, now_s, lambda _: is_alive)
    json.dumps(report)
    return report


def test_where_the_device_seconds_of_a_run_went() -> None:
    assert device_seconds(_run_of_job_9()) == {
        # 4 hosts of 4 devices for 110 s.
        "allocated": 1760.0,
        # 12 devices that serve, for 10 s.
        "startup": 120.0,
        "busy": 50.0,
        # Slices 0 and 2: 90 s of 4 devices; slice 1 until its last words after 40 s; less what was busy.
        "idle": 360.0 - 30.0 + 160.0 - 20.0 + 360.0,
        "waiting": 2.5,
        "other": 1760.0 - 120.0 - 50.0 - 830.0,
    }


def test_accounting_and_records_of_a_job_are_joined_by_step() -> None:
    report = _job("9", _run_of_job_9())
    assert (report["job"], report["name"], report["state"], report["state_detail"]) == (
        "9",
        "workers",
        "CANCELLED",
        "by 0",
    )
    assert (report["elapsed_s"], report["nodes"], report["exit_status"]) == (115, list(NODES), {"code": 0, "signal": 0})
    assert {row["step"]: (row["run"], row["component"]) for row in report["steps"]} == {
        "batch": (None, None),
        **{str(step): ("ab12", name) for name, step in STEPS.items()},
    }
    (run,) = report["runs"]
    assert (run["state"], run["startup_s"]) == ("ended", 10.0)
    parts = {part["name"]: part for part in run["components"]}
    assert parts["worker-1"]["accounting"] == {
        "state": "CANCELLED",
        "exit_status": {"code": 0, "signal": 15},
        "elapsed_s": 114,
        "cpu_s": 0.001,
        "max_rss_bytes": 1624 << 10,
    }
    assert (parts["worker-1"]["cause"], parts["worker-1"]["node"]) == (
        "its executor has been silent for 30.0 s",
        "node1",
    )
    assert parts["client"]["accounting"] is None
    totals = report["totals"]
    assert totals["allocated_by_slurm"] == {"cpu": 32 * 115, "gres/tpu:v5p": 16 * 115, "gres/tpu": 16 * 115}
    assert totals["device_seconds"] == run["device_seconds"]
    assert (totals["bytes_moved"], totals["failures"], totals["recovery_s"]) == ({"socket": 3 << 20}, 1, 0.0)


def test_the_text_for_people() -> None:
    text = as_text({"jobs": [_job("9", _run_of_job_9())], "notes": ["something"]})
    assert text.splitlines()[:8] == [
        "job 9 workers: CANCELLED by 0, exit 0, on node[0-3], 115 s",
        "  allocated by Slurm: cpu 1.0 h, gres/tpu 1840 s",
        "",
        "run ab12: python train.py: exit 0",
        "  started 2026-11-29 18:27:59 UTC, ready after 10.0 s, served for 90.0 s",
        "  29.3 device-min: start-up 2.0 device-min (7 %), busy 50.0 device-s (3 %), idle 13.8 device-min (47 %) of "
        "which waiting 2.5 device-s, other 12.7 device-min (43 %)",
        "  moved: socket 3.0 MiB",
        "  failure at 2026-11-29 18:28:59 UTC: worker 1 (node1): its executor has been silent for 30.0 s; not served "
        "again",
    ]
    assert "  1      node1  4        20.0    12      140.0   0.0\n" in text
    assert "  jit_step  0-11     5           50.000  2.500\n" in text
    assert "  worker-1   node1  exit 0  its executor has been silent for 30.0 s\n" in text
    # srun has ended with 0, as it does when Slurm gives up a node: the worker has not.
    assert "  4      worker-1    node1  CANCELLED  killed by signal 15  114        0.0    1.6 MiB   ab12\n" in text
    assert text.endswith("\n\nnote: something")


def test_steps_that_a_lost_node_has_cut_off_have_no_exit_status_in_accounting() -> None:
    rows = [dataclasses.replace(row, state="RESIZING") if row.step == "4" else row for row in _rows("9")]
    report = job_report("9", rows, [_run_of_job_9()], START_S + 200, lambda _: None)
    (step,) = [row for row in report["steps"] if row["step"] == "4"]
    assert (step["state"], step["exit_status"]) == ("RESIZING", None)


def test_a_job_that_grew_smaller_was_allocated_all_its_rows() -> None:
    job, *steps = _rows("9")
    smaller = dataclasses.replace(job, state="RUNNING", elapsed_s=10, nodes=NODES[:3], tres={"cpu": 24, "gres/tpu": 12})
    rows = [dataclasses.replace(job, state="RESIZING"), smaller, *steps]
    report = job_report("9", rows, [], START_S + 200, lambda _: None)
    assert (report["state"], report["exit_status"], report["elapsed_s"]) == ("RUNNING", None, 125)
    assert report["totals"]["allocated_by_slurm"]["gres/tpu"] == 16 * 115 + 12 * 10


def test_programs_of_several_runs_are_told_apart_by_the_order_of_steps() -> None:
    job, *_ = _rows("9")

    def step(number: int, name: str, start_s: float) -> accounting.Record:
        return dataclasses.replace(job, step=str(number), name=name, started_at_unix_s=int(start_s))

    def run(record_id: str, start_s: float, controller: int | None, **changes: Any) -> Record:
        history = _history(record_id=record_id, started_at_unix_s=start_s, **changes)
        if controller is not None:
            fields = {"step_id": str(controller), "place": {"node": "node0", "address": "", "machine": ""}}
            history.note(ComponentEvent("controller", "node_ready", fields), start_s)
        history.ended(0, None, start_s + 2)
        return history.record(start_s + 2)

    starts = {2: 0, 5: 1, 7: 20, 8: 22}
    rows = [job, *(step(number, "pathways-client", START_S + s) for number, s in starts.items())]
    rows += [step(number, "pathways-controller", START_S) for number in (1, 4, 6)]
    runs = [
        run("first", START_S, 1),
        run("second", START_S + 1, 4),
        run("keeper", START_S + 19, 6, kind=RUNTIME, argv=()),
        run("warm1", START_S + 20, None, is_warm=True),
        run("warm2", START_S + 22, None, is_warm=True),
    ]
    report = job_report("9", rows, runs, START_S + 200, lambda _: None)
    owners = {row["step"]: (row["run"], row["component"]) for row in report["steps"]}
    assert {step: run for step, (run, component) in owners.items() if component == "client"} == {
        "2": "first",
        "5": "second",
        "7": "warm1",
        "8": "warm2",
    }
    assert owners["6"] == ("keeper", "controller")
    # What runs on the warm runtime used is the keeper's already.
    owned = [entry for entry in report["runs"] if not entry["is_warm"]]
    assert report["totals"]["device_seconds"]["allocated"] == sum(r["device_seconds"]["allocated"] for r in owned) > 0
    assert "(on the warm runtime None)" in as_text({"jobs": [report], "notes": []})


def test_a_step_whose_tasks_are_the_runtime() -> None:
    history = _history(slurm=SlurmPlace(9, NODES, step_id=3))
    report = _job("9", history.record(START_S + 10))
    assert [row["step"] for row in report["steps"] if row["run"] == "ab12"] == ["3"]


@pytest.mark.parametrize(
    ("job", "is_alive", "age_s", "state"),
    [
        (None, True, 1000, "running"),
        (None, False, 1, "lost"),
        (None, None, 60, "running"),
        (None, None, 1000, "lost"),
        ("9", None, 1, "lost"),
    ],
)
def test_a_run_whose_launcher_is_gone(job: str | None, is_alive: bool | None, age_s: float, state: str) -> None:
    record = _history().record(START_S + 10)
    report = _job(job, record, now_s=START_S + 10 + age_s, is_alive=is_alive)
    assert report["runs"][0]["state"] == state
    text = as_text({"jobs": [report], "notes": []})
    words = "was last heard of at" if state == "lost" else "running, as of"
    assert f"{words} 2026-11-29 18:28:09 UTC" in text


def test_a_run_that_did_not_start() -> None:
    history = _history(slurm=None)
    history.ended(125, "the runtime did not start\nwhy", START_S + 3)
    text = as_text({"jobs": [_job(None, history.record(START_S + 3))], "notes": []})
    assert text.splitlines()[:4] == [
        "run ab12: python train.py: exit 125",
        "  | the runtime did not start",
        "  | why",
        "  started 2026-11-29 18:27:59 UTC, was never ready",
    ]


def test_records_of_an_earlier_job_with_the_same_id_are_not_this_ones() -> None:
    old = _history(record_id="old", started_at_unix_s=START_S - 86400).record(START_S - 86000)
    assert [run["id"] for run in _job("9", old, _run_of_job_9())["runs"]] == ["ab12"]


# The command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "records"
    monkeypatch.setenv(RECORDS_VARIABLE, str(path))
    return path


@pytest.fixture
def sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """No sacct, until this makes one that answers for ``job``."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(job: str, answer: str) -> None:
        (tmp_path / "answer").write_text(answer)
        path = tmp_path / "sacct"
        path.write_text(f'#!/bin/sh\ncase "$*" in *--jobs={job}\\ *) /bin/cat {tmp_path}/answer ;; *) exit 9 ;; esac\n')
        path.chmod(0o755)

    return make


def _sample(*jobs: str) -> str:
    header, *lines = SAMPLE.splitlines()
    kept = [line for line in lines if line.split(accounting.DELIMITER)[0].split(".")[0] in jobs]
    return "\n".join([header, *kept, ""])


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments])


def _json(*arguments: str) -> Any:
    result = _invoke("--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_a_job_with_accounting_and_records(folder: Path, sacct: Callable[[str, str], None]) -> None:
    records.write(folder, _run_of_job_9())
    sacct("9", _sample("9"))
    report = _json("9")
    assert (report["schema_version"], report["notes"]) == (1, [])
    assert [(job["job"], len(job["runs"]), len(job["steps"])) for job in report["jobs"]] == [("9", 1, 6)]
    assert "job 9 workers: CANCELLED" in _invoke("9").output
    # The last run of all is this one, and belongs to a job.
    assert _json()["jobs"][0]["job"] == "9"
    assert _json("--run-id", "ab12")["jobs"][0]["steps"] == report["jobs"][0]["steps"]


def test_an_array_and_one_of_its_tasks(folder: Path, sacct: Callable[[str, str], None]) -> None:
    place = SlurmPlace(12, ("rack0n08",), cluster="c", array_job_id=10, array_task_id=3)
    records.write(folder, _history(slurm=place).record(START_S + 10))
    sacct("10", _sample("10_1", "10_2", "10_3"))
    report = _json("10")
    assert [(job["job"], len(job["runs"])) for job in report["jobs"]] == [("10_1", 0), ("10_2", 0), ("10_3", 1)]
    sacct("10_3", _sample("10_3"))
    assert [job["job"] for job in _json("10_3")["jobs"]] == ["10_3"]


def test_without_records_accounting_is_shown_and_the_lack_is_said(
    folder: Path, sacct: Callable[[str, str], None]
) -> None:
    sacct("17", _sample("17"))
    result = _invoke("17")
    assert result.exit_code == 0
    assert "job 17 bad: FAILED, exit 3" in result.output
    assert f"note: there is no record of a run in this job (in {folder})" in result.output


def test_without_accounting_records_are_shown_and_the_lack_is_said(
    folder: Path, sacct: Callable[[str, str], None]
) -> None:
    records.write(folder, _run_of_job_9())
    report = _json("9")
    (job,) = report["jobs"]
    assert (job["job"], job["steps"], [run["id"] for run in job["runs"]]) == ("9", [], ["ab12"])
    assert "state" not in job
    (note,) = report["notes"]
    assert note.startswith("Slurm's accounting was not read: sacct is not found in PATH=")
    assert _invoke("9").output.startswith("job 9\n\nrun ab12: python train.py: exit 0\n")


def test_unknown_jobs_and_wrong_use(
    folder: Path, sacct: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sacct("5", _sample())
    unknown = _invoke("5")
    assert unknown.exit_code == 1
    assert unknown.output == (
        f"Error: there is no record of a run in job 5 (in {folder}); sacct knows no such job either\n"
    )
    sacct("none", "")
    assert "Slurm's accounting was not read: sacct ended with exit code 9" in _invoke("5").output
    assert _invoke("--run-id", "zz").output == f"Error: there is no record of a run zz (in {folder})\n"
    assert _invoke("--run-id", "zz").exit_code == _invoke().exit_code == 1
    for wrong in (["nine"], ["9.0"], ["9", "--run-id", "x"]):
        assert _invoke(*wrong).exit_code == 2
    monkeypatch.setenv(RECORDS_VARIABLE, "none")
    assert _invoke().output == "Error: there is no record of any run (no folder of records is set)\n"


def test_kinds_of_records() -> None:
    assert _history().record(START_S).kind == RUN
    text = as_text({"jobs": [_job(None, _history(kind=RUNTIME, argv=(), slurm=None).record(START_S))], "notes": []})
    assert text.startswith("run ab12: warm runtime: ")
