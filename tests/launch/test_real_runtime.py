"""The command as a user types it, with the real processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slurm_pathways.launch.run_folder import live_runs

COMMAND = [str(Path(sys.executable).parent / "slurm-pathways"), "run", "--local"]
#: Several starts side by side on a small, busy machine.
DEADLINE_S = 120.0

pytestmark = pytest.mark.usefixtures("no_leaks")

LOOK = """
import json, subprocess, sys, jax
report = subprocess.run([sys.argv[1], "status", "--json"], capture_output=True, text=True, check=True).stdout
print(json.dumps({
    "ids": [device.id for device in jax.devices()],
    "slices": [device.slice_index for device in jax.devices()],
    "processes": jax.process_count(),
    "backend": jax.default_backend(),
    "sum": float(jax.jit(lambda x: x.sum())(jax.numpy.arange(16.0))),
    "report": json.loads(report),
}))
sys.exit(3)
"""


def test_a_program_sees_the_devices_and_nothing_is_left(tmp_path: Path) -> None:
    # Files called like modules of ours, as users have them.
    for name in ("queue", "msgspec", "jax"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user was imported by the runtime')")
    shape = ["--slices", "2", "--hosts-per-slice", "2", "--devices-per-host", "2"]
    done = subprocess.run(
        [*COMMAND, *shape, "--", sys.executable, "-P", "-c", LOOK, COMMAND[0]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 3, done.stderr
    seen = json.loads(done.stdout)
    assert seen["ids"] == list(range(8))
    assert seen["slices"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (seen["processes"], seen["backend"], seen["sum"]) == (1, "cpu", 120.0)
    assert [device["slice_index"] for device in seen["report"]["devices"]] == seen["slices"]
    assert [worker["state"] for worker in seen["report"]["workers"]] == ["bound"] * 4
    # Progress, and no noise from the program's jaxlib.
    assert [line for line in done.stderr.splitlines() if not line.startswith("slurm-pathways: ")] == []


WAIT = """
import sys, jax
print(jax.device_count(), flush=True)
sys.stdin.read()
print(float(jax.jit(lambda x: x + 1)(1.0)), flush=True)
"""


@pytest.fixture
def process() -> Iterator["subprocess.Popen[str]"]:
    """A run of one host whose program has its device and waits for its standard input to end."""
    with subprocess.Popen(
        [*COMMAND, "--failure-grace-s", "5", "--", sys.executable, "-c", WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "1\n", started.stderr and started.stderr.read()
        yield started
        started.kill()


def _processes(runs_root: Path, launcher: int) -> dict[str, int]:
    [(_, record)] = live_runs(runs_root)
    assert record.program is not None
    pids = {component.name: component.pid for component in record.components}
    [executor] = psutil.Process(pids["worker-0"]).children()
    return {**pids, "executor": executor.pid, "program": record.program.pid, "run": launcher}


@pytest.mark.parametrize("victim", ["program", "run", "controller", "proxy-0", "worker-0", "executor"])
def test_whatever_is_killed_nothing_is_left(
    process: "subprocess.Popen[str]", runs_root: Path, tmp_path: Path, victim: str
) -> None:
    pids = _processes(runs_root, process.pid)
    os.kill(pids[victim], signal.SIGKILL)
    if victim == "run":
        process.wait(timeout=DEADLINE_S)
        _, alive = psutil.wait_procs(
            [psutil.Process(pid) for pid in pids.values() if psutil.pid_exists(pid)], timeout=DEADLINE_S
        )
        assert not alive
        return
    if victim != "program":
        _read_until(process, "was killed by signal 9 (SIGKILL)")
    out, err = process.communicate(timeout=DEADLINE_S)
    if victim == "program":
        assert process.returncode == 128 + signal.SIGKILL
        assert "the logs are in" not in err
        return
    # The program gets its error through JAX and ends by itself.
    assert (process.returncode, out) == (1, "")
    assert "JaxRuntimeError" in err
    match = re.search(r"the logs are in (\S+)", err)
    assert match is not None, err
    shutil.move(match[1], tmp_path / "logs")
    Path(match[1]).parent.rmdir()


def _read_until(process: "subprocess.Popen[str]", words: str) -> None:
    assert process.stderr is not None
    said = ""
    while words not in said:
        line = process.stderr.readline()
        assert line, f"{words!r} was not said, but:\n{said}"
        said += line
