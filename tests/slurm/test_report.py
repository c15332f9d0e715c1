"""``slurm-pathways report`` and the job's comment on a real cluster."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_pathways.config import RECORDS_VARIABLE
from slurm_pathways.sandbox.cluster import Sandbox
from tests.waiting import until

from .jobs import COMMAND, COMMAND_TIMEOUT_S, JOB_TIMEOUT_S, POLL_INTERVAL_S, Job, Submit, kill_worker, remove_kept_logs

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(180)]

#: On the first device of each of two slices; the second one's host may be lost once it has said so.
PROGRAM = """
import sys, time, jax, numpy as np
from pathlib import Path

@jax.jit
def step(x):
    return x + 1

x, y = (jax.device_put(np.float32(0), jax.devices()[index]) for index in (0, 2))
for _ in range(5):
    x = step(x)
for _ in range(3):
    y = step(y)
print("computed", float(x), float(y), flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
sys.exit(3)
"""

EXECUTIONS = {("jit_step", "0"): 5, ("jit_step", "2"): 3}


def _report(job: Job) -> Any:
    done = job.sandbox.run([str(COMMAND), "report", "--json", str(job.job_id)], COMMAND_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["jobs"][0]


def _executions(report: Any) -> dict[tuple[str, str], int]:
    (run,) = report["runs"]
    return {(row["name"], row["devices"]): row["executions"] for row in run["usage"]["programs"]}


def _comment(job: Job) -> str:
    return job.sandbox.run(["squeue", "-h", "-j", str(job.job_id), "-o", "%k"], COMMAND_TIMEOUT_S).stdout.strip()


def test_a_job_that_loses_a_worker_is_accounted_for(
    submit: Submit, sandbox: Sandbox, runs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORDS_VARIABLE, str(tmp_path / "records"))
    program, go = tmp_path / "program.py", tmp_path / "go"
    program.write_text(PROGRAM)
    job = submit(
        3,
        '#SBATCH --comment="a user\'s own | words"',
        f"exec {COMMAND} run -q --slices 2 --devices-per-host 2 -- {sys.executable} {program} {go}",
    )
    job.until_said("computed 5.0 3.0")
    # How busy they are is said as soon as it is known, which may be before the first comment.
    busy = r"(busy \d+ % of [\d.]+ device-(?:s|min), 0 failures, )?"
    wanted = rf"a user's own \| words \| pathways: 4 devices in 2 slices, {busy}running "
    job.until(lambda: re.match(wanted, _comment(job)), "has not the comment of a running job", JOB_TIMEOUT_S)
    job.until(lambda: _executions(_report(job)) == EXECUTIONS, "has no usage on record", JOB_TIMEOUT_S)
    running = _report(job)
    assert (running["state"], running["exit_status"], running["runs"][0]["state"]) == ("RUNNING", None, "running")
    kill_worker(sandbox, 1)

    def is_served_again() -> bool:
        return any(failure["served_again_by"] for failure in _report(job)["runs"][0]["failures"])

    job.until(is_served_again, "has no loss on record that was mended", JOB_TIMEOUT_S)
    go.touch()
    assert job.wait() == "3:0", job.said()
    shown = job.sandbox.run(["scontrol", "show", "job", str(job.job_id)], COMMAND_TIMEOUT_S).stdout
    (comment,) = (line.strip() for line in shown.splitlines() if line.strip().startswith("Comment="))
    assert comment.startswith("Comment=a user's own | words | pathways: exit 3, busy ")
    assert re.search(r" device-(s|min), 1 failure$", comment), comment
    _check(_until_accounted(job), job)
    text = job.sandbox.run([str(COMMAND), "report", str(job.job_id)], COMMAND_TIMEOUT_S).stdout
    assert re.search(r"killed by signal 9 \(SIGKILL\).*; served again after \d+\.\d s by node\d", text), text
    [log] = (tmp_path / "records").glob(f"*.{job.job_id}.events.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    told = [line["what"] for line in lines if line["what"] not in ("host_ready", "bound", "world", "process_ended")]
    assert told == ["run_started", "ready", "host_lost", "host_back", "program_ended", "run_ended"], lines
    [back] = [line for line in lines if line["what"] == "host_back"]
    assert (back["host"], back["worker"]) == (1, 2) and back["took_s"] > 0
    remove_kept_logs(runs_root)


def _until_accounted(job: Job) -> Any:
    """Accounting lags by seconds."""

    def whole() -> Any:
        report = _report(job)
        ended = [step["exit_status"] is not None for step in report["steps"]]
        return report if len(ended) == 6 and all(ended) and report["exit_status"] is not None else None

    return until(whole, lambda: _report(job), COMMAND_TIMEOUT_S, POLL_INTERVAL_S)


def _check(report: Any, job: Job) -> None:
    assert (report["job"], report["exit_status"]) == (str(job.job_id), {"code": 3, "signal": 0})
    (run,) = report["runs"]
    nodes = report["nodes"]
    assert (run["state"], run["exit_code"], run["slurm"]["job_id"]) == ("ended", 3, job.job_id)
    assert [(host["node"], host["slice_index"]) for host in run["hosts"]] == list(zip(nodes, (0, 1, 1), strict=True))
    # What the lost host has used is known from before.
    assert _executions(report) == EXECUTIONS
    for part in run["usage"]["slices"]:
        assert 0 < part["busy_s"] <= part["device_s"]
    steps = {step["component"]: step for step in report["steps"]}
    assert {step["run"] for name, step in steps.items() if name is not None} == {run["id"]}
    assert {name: steps[name]["name"] for name in steps if name is not None} == {
        name: f"pathways-{name}" for name in ("controller", "client", "worker-0", "worker-1", "worker-2")
    }
    assert steps["client"]["exit_status"] == {"code": 3, "signal": 0}
    ends = {part["name"]: (part["node"], part["exit_code"], part["signal"]) for part in run["components"]}
    assert ends == {
        "controller": (nodes[0], 0, None),
        # Of several components in one step, only the end of the first is told.
        "proxy-0": (nodes[0], None, None),
        "client": (nodes[0], 3, None),
        "worker-0": (nodes[0], 0, None),
        # It was started again, and was there until the end.
        "worker-1": (nodes[1], 0, None),
        "worker-2": (nodes[2], 0, None),
    }
    (failure,) = run["failures"]
    assert (failure["worker"], failure["node"], failure["slice_index"]) == (1, nodes[1], 1)
    assert "its supervisor was killed by signal 9 (SIGKILL)" in failure["cause"]
    assert failure["served_again_by"] == nodes[2] and failure["served_again_after_s"] > 0
    assert {part["name"]: part["restarts"] for part in run["components"] if part["restarts"]} == {"worker-1": 1}
    totals = report["totals"]
    assert (totals["failures"], totals["recovery_s"]) == (1, failure["served_again_after_s"])
    assert totals["allocated_by_slurm"]["gres/tpu"] == 3 * 4 * report["elapsed_s"]
    assert totals["device_seconds"] == run["device_seconds"]
