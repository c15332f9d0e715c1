"""The record of a run, as ``report`` shows it: what devices did, counted and bounded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_pathways.config import RECORDS_VARIABLE

COMMAND = str(Path(sys.executable).with_name("slurm-pathways"))
DEADLINE_S = 120.0

pytestmark = pytest.mark.usefixtures("no_leaks")

PROGRAM = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
first, second = jax.devices()[:2], jax.devices()[2:]

@jax.jit
def step(x):
    return x @ x / 100

@jax.jit
def total(x):
    return x.sum()

def on(devices):
    return jax.device_put(np.ones((200, 100), np.float32)[:100], NamedSharding(Mesh(np.array(devices), ("x",)), P("x")))

x, y = on(first), on(second)
for _ in range(7):
    x = step(x)
for _ in range(3):
    y = step(y)
print(float(total(x)), float(total(y)))
jax.block_until_ready(step(y))
sys.exit(4)
"""


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state" / "records"
    monkeypatch.setenv(RECORDS_VARIABLE, str(folder))
    return folder


def _report(*arguments: str) -> Any:
    done = subprocess.run([COMMAND, "report", "--json", *arguments], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_executions_are_counted_and_busy_time_is_within_the_time_that_passed(records: Path) -> None:
    shape = ["--slices", "2", "--hosts-per-slice", "2"]
    argv = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        [COMMAND, "run", "--local", *shape, "--", *argv], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout) == (4, "10000.0 10000.0\n"), done.stderr
    report = _report()
    assert (report["schema_version"], report["notes"]) == (1, [])
    (job,) = report["jobs"]
    (run,) = job["runs"]
    assert (job["job"], run["slurm"], run["state"], run["exit_code"], run["argv"]) == (None, None, "ended", 4, argv)
    executions = {(row["name"], row["devices"]): row["executions"] for row in run["usage"]["programs"]}
    assert executions == {
        ("jit_step", "0-1"): 7,
        ("jit_step", "2-3"): 4,
        ("jit_total", "0-1"): 1,
        ("jit_total", "2-3"): 1,
    }
    served_s = run["program_ended_at_unix_s"] - run["ready_at_unix_s"]
    for part, nodes in zip(run["usage"]["slices"], (["host-0", "host-1"], ["host-2", "host-3"]), strict=True):
        assert (part["nodes"], part["num_devices"], part["without_usage"]) == (nodes, 2, [])
        assert 0 < part["busy_s"] <= part["device_s"]
        assert part["busy_s"] + part["idle_s"] == pytest.approx(part["device_s"], abs=0.01)
        assert 0 <= part["waiting_s"] <= part["idle_s"] + 0.01
        # One clock sees the program's end, another one was asked after it.
        assert part["device_s"] <= 2 * (served_s + 5.0)
        assert sum(row["busy_s"] for row in part["programs"]) == pytest.approx(part["busy_s"], abs=0.001)
    found = run["device_seconds"]
    assert found["allocated"] == pytest.approx(4 * (run["ended_at_unix_s"] - run["started_at_unix_s"]), abs=0.1)
    parts = sum(found[name] for name in ("startup", "busy", "idle", "other"))
    assert parts == pytest.approx(found["allocated"], abs=0.1)
    assert found["startup"] > 0 and found["busy"] > 0
    assert run["usage"]["bytes_moved"]["host_buffers"] >= 2 * 100 * 100 * 4
    assert [host["slice_index"] for host in run["hosts"]] == [0, 0, 1, 1]
    assert all(0 < host["ready_after_s"] <= run["startup_s"] for host in run["hosts"])
    ends = {part["name"]: (part["exit_code"], part["signal"], part["cause"]) for part in run["components"]}
    assert ends == {
        **dict.fromkeys(("controller", "proxy-0", *(f"worker-{n}" for n in range(4))), (0, None, None)),
        "client": (4, None, None),
    }
    assert (run["failures"], job["totals"]["failures"]) == ([], 0)
    (path,) = records.glob("*.json")
    assert (path.stat().st_mode & 0o777, records.stat().st_mode & 0o777) == (0o600, 0o700)
    assert _report("--run-id", run["id"])["jobs"][0]["runs"] == [run]
    assert _report("--run-id", run["runtime_id"])["jobs"][0]["runs"] == [run]
    secrets = [value for name, value in os.environ.items() if name.startswith("PYTEST_")]
    assert not any(value in path.read_text() for value in secrets)


def test_a_run_whose_records_cannot_be_kept_is_as_good_as_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(RECORDS_VARIABLE, str(tmp_path / "file" / "records"))
    done = subprocess.run(
        [COMMAND, "run", "--local", "-q", "--", "sh", "-c", "exit 5"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 5
    (line,) = done.stderr.splitlines()
    assert line.startswith("slurm-pathways: no record of this run can be kept (File exists: ")
    asked = subprocess.run([COMMAND, "report"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert asked.returncode == 1
    assert asked.stderr == f"Error: there is no record of any run (in {tmp_path}/file/records)\n"
