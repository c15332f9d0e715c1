"""Who keeps records and the job's comment while a run goes on: what is called when, and what a failure does."""

import threading
from pathlib import Path
from typing import Any

import pytest

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch import recorder, records
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent
from slurm_pathways.launch.controller_status import NoAnswer, Report
from slurm_pathways.launch.recorder import RunRecorder
from slurm_pathways.launch.records import Record
from tests.waiting import until

DEADLINE_S = 30.0
SPEC = RuntimeSpec(num_slices=2)
JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_CLUSTER_NAME": "c"}


class Cluster:
    """Stand-ins for Slurm's commands: they keep one comment and a list of the calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.comment_file, self.calls_file = folder / "comment", folder / "calls"
        self.comment_file.write_text("theirs")
        self.calls_file.touch()
        self.make("squeue", f"echo squeue >> {self.calls_file}; cat {self.comment_file}")
        self.make(
            "scontrol",
            f'echo scontrol >> {self.calls_file}; printf "%s\\n" "${{3#comment=}}" > {self.comment_file}.new; '
            f"mv {self.comment_file}.new {self.comment_file}",
        )

    def make(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        path.chmod(0o755)

    @property
    def comment(self) -> str:
        return self.comment_file.read_text().strip()

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().split()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "bin").mkdir()
    return Cluster(tmp_path / "bin")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "records"


@pytest.fixture
def environ(folder: Path, cluster: Cluster) -> dict[str, str]:
    return {**JOB, "SLURM_PATHWAYS_RECORDS": str(folder), "PATH": str(cluster.folder)}


@pytest.fixture(autouse=True)
def no_comment_while_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, these runs are over before one is due."""
    monkeypatch.setattr(recorder, "FIRST_COMMENT_AFTER_S", 3600.0)


class Controller:
    """Answers with these reports in turn; the last one again and again. None: no answer."""

    def __init__(self, *answers: Report | None) -> None:
        self.answers = list(answers)
        self.num_asked = 0

    def ask(self, timeout_s: float) -> Report:
        assert timeout_s == recorder.ANSWER_TIMEOUT_S
        self.num_asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise NoAnswer("does not answer")
        return answer


def _report(busy_s: float, executions: int, in_flight: int = 0) -> Report:
    program = {"name": "step", "devices": "0", "executions": executions, "busy_s": busy_s, "waiting_s": 0.0}
    usage = {"busy_s": busy_s, "waiting_s": 0.0, "devices": [{"id": 0}], "programs": [program]}
    worker = {"id": 0, "name": "n0", "host": 0, "slice_index": 0, "usage": usage, "bytes_moved": {}}
    return {"workers": [worker], "queues": [{"host": 0, "launches_in_flight": in_flight}], "failures": []}


def _only(folder: Path) -> Record:
    (path,) = folder.glob("*.json")
    record = records.by_id(folder, path.stem.rpartition(".")[2])
    assert record is not None
    return record


def test_a_run_from_start_to_end(environ: dict[str, str], folder: Path, cluster: Cluster) -> None:
    run = RunRecorder(environ, SPEC, ("python", "train.py"))
    controller = Controller(_report(0.25, 3, in_flight=2), _report(0.5, 4))
    run.begin("run-1", controller.ask)
    until(lambda: folder.exists() and bool(list(folder.glob("*.json"))), "the first write", DEADLINE_S)
    assert (_only(folder).runtime_id, _only(folder).ready_at_unix_s) == ("run-1", None)
    run.ready()
    until(lambda: _only(folder).ready_at_unix_s is not None, "the write at ready", DEADLINE_S)
    run.program_ended(3)
    # Asked again as long as launches were in flight.
    assert controller.num_asked == 2
    run.note(ComponentEnded("controller", 0, was_asked=True))
    run.close(3)
    record = _only(folder)
    assert (record.exit_code, record.problem) == (3, None)
    assert record.slurm is not None
    assert (record.slurm.job_id, record.slurm.nodes, record.slurm.cluster) == (12, ("n0", "n1"), "c")
    assert [(row.executions, row.busy_s) for row in record.usage.programs] == [(4, 0.5)]
    assert {part.name: part.exit_code for part in record.components}["controller"] == 0
    assert record.ended_at_unix_s is not None
    # Over before a comment was due: one read and one write.
    assert cluster.calls == ["squeue", "scontrol"]
    assert cluster.comment.startswith("theirs | pathways: exit 3, busy ")
    assert cluster.comment.endswith(" device-s, 0 failures")


def test_the_comment_of_a_job_arrays_task_is_its_own(environ: dict[str, str], cluster: Cluster) -> None:
    """Its number alone may mean the whole array."""
    cluster.make("scontrol", f'echo "$2" > {cluster.comment_file}')
    environ |= {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    run = RunRecorder(environ, SPEC, ("true",))
    run.begin("run-1", Controller(None).ask)
    run.close(0)
    assert cluster.comment == "jobid=12_3"


def test_comments_while_it_runs_and_writes_in_between(
    environ: dict[str, str], folder: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "FIRST_COMMENT_AFTER_S", 0.0)
    monkeypatch.setattr(recorder, "_FIRST_WRITES_AFTER_S", (0.05,))
    run = RunRecorder(environ, SPEC, ("python", "train.py"))
    run.begin("run-1", Controller(_report(0.5, 3)).ask)
    run.ready()
    until(
        lambda: cluster.comment == "theirs | pathways: 2 devices in 2 slices, running python train.py",
        "the comment",
        DEADLINE_S,
    )
    until(lambda: bool(_only(folder).usage.programs), "the periodic write", DEADLINE_S)
    assert _only(folder).ended_at_unix_s is None
    run.note(ComponentEnded("worker-1", -9, was_asked=False))
    until(lambda: any(part.signal == 9 for part in _only(folder).components), "the write at a loss", DEADLINE_S)
    run.program_ended(0)
    run.close(0)
    assert cluster.calls == ["squeue", "scontrol"] * 2
    assert cluster.comment.startswith("theirs | pathways: exit 0, busy ")


def test_a_controller_that_does_not_answer(environ: dict[str, str], folder: Path, cluster: Cluster) -> None:
    run = RunRecorder(environ, SPEC, ("true",))
    run.begin("run-1", Controller(None).ask)
    run.ready()
    run.program_ended(0)
    run.close(0)
    assert _only(folder).usage.problem == "the controller does not answer"
    assert cluster.comment == "theirs | pathways: exit 0"


def test_a_warm_runtime_is_asked_before_the_program(environ: dict[str, str], folder: Path) -> None:
    run = RunRecorder(environ, SPEC, ("true",), is_warm=True)
    run.begin("run-1", Controller(_report(1.0, 10), _report(1.5, 12)).ask)
    run.ready()
    run.program_ended(0)
    run.close(0)
    assert [(row.executions, row.busy_s) for row in _only(folder).usage.programs] == [(2, 0.5)]


def test_a_runtime_that_did_not_start(environ: dict[str, str], folder: Path, cluster: Cluster) -> None:
    run = RunRecorder(environ, SPEC, ("true",))
    controller = Controller(None)
    run.begin("run-1", controller.ask)
    run.close(125, "worker-0 is missing")
    assert (_only(folder).exit_code, _only(folder).problem) == (125, "worker-0 is missing")
    assert cluster.comment == "theirs | pathways: did not start, exit 125"
    assert controller.num_asked == 0


def test_nothing_is_done_where_nothing_is_wanted(environ: dict[str, str], folder: Path, cluster: Cluster) -> None:
    off = {**environ, "SLURM_PATHWAYS_RECORDS": "none"}
    before = threading.active_count()
    run = RunRecorder(off, RuntimeSpec(job_comment=False), ("true",))
    controller = Controller(_report(1.0, 1))
    run.begin("run-1", controller.ask)
    assert threading.active_count() == before
    run.ready()
    run.program_ended(0)
    run.close(0)
    assert (controller.num_asked, cluster.calls, folder.exists()) == (0, [], False)


def test_no_comment_outside_of_a_job(folder: Path, cluster: Cluster) -> None:
    environ = {"SLURM_PATHWAYS_RECORDS": str(folder), "PATH": str(cluster.folder)}
    run = RunRecorder(environ, SPEC, ("true",))
    run.begin("run-1", Controller(_report(1.0, 1)).ask)
    run.ready()
    run.program_ended(0)
    run.close(0)
    assert (_only(folder).slurm, cluster.calls) == (None, [])


@pytest.mark.parametrize("broken", ["missing", "failing", "refusing"])
def test_a_comment_that_cannot_be_set_harms_nothing(
    environ: dict[str, str], folder: Path, cluster: Cluster, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    if broken == "missing":
        (cluster.folder / "squeue").unlink()
    else:
        said = "Job has already finished for job 12" if broken == "refusing" else "no way"
        cluster.make("scontrol", f"echo {said} >&2; exit 1")
    run = RunRecorder(environ, SPEC, ("true",))
    run.begin("run-1", Controller(_report(1.0, 1)).ask)
    run.ready()
    run.program_ended(0)
    run.close(0)
    assert _only(folder).exit_code == 0
    levels = [entry.levelname for entry in caplog.records if "comment is not set" in entry.message]
    # What is no news, or nobody's to mend, is not shown to the user.
    assert levels == (["WARNING"] if broken == "failing" else [])


def test_records_that_cannot_be_written_are_complained_of_once(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "records").write_text("a file")
    said: list[str] = []
    run = RunRecorder(
        {**environ, "SLURM_PATHWAYS_RECORDS": f"{tmp_path}/records/deep"}, SPEC, ("true",), warn=said.append
    )
    run.begin("run-1", Controller(_report(1.0, 1)).ask)
    run.ready()
    run.program_ended(0)
    run.close(0)
    (words,) = said
    assert words.startswith("no record of this run can be kept (")
    assert f"{tmp_path}/records/deep" in words


def test_an_event_that_is_not_understood_does_not_reach_who_tells_of_it(environ: dict[str, str]) -> None:
    run = RunRecorder(environ, SPEC, ("true",))
    fields: dict[str, Any] = {"name": "n0"}
    run.note(ComponentEvent("controller", "host_ready", fields))
    run.close(0)
