"""``slurm-pathways run`` and ``srun --pathways`` on a real cluster: values, exit codes, steps, nothing left behind."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slurm_pathways.sandbox.cluster import Sandbox
from slurm_pathways.slurm.states import ENDED

COMMAND = Path(sys.executable).with_name("slurm-pathways")
TRAIN = Path(__file__).parents[2] / "examples" / "digits" / "train.py"
JOB_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 30.0
#: What was cancelled or lost its launcher is gone from all nodes by then.
GONE_TIMEOUT_S = 10.0
_POLL_INTERVAL_S = 0.2

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(180)]

PSUM = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
devices = jax.devices()
mesh = Mesh(np.array(devices), ("x",))
total = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
print("slices", [device.slice_index for device in devices], flush=True)
print("psum", float(total(jnp.arange(1.0, len(devices) + 1))[0]), flush=True)
sys.exit(int(sys.argv[1]))
"""


@dataclass(frozen=True)
class Job:
    """A batch job of the session's cluster."""

    sandbox: Sandbox
    job_id: int
    output: Path

    def fields(self) -> dict[str, str]:
        """What slurmctld says of it."""
        shown = self.sandbox.run(["scontrol", "show", "job", "--oneliner", str(self.job_id)], COMMAND_TIMEOUT_S)
        assert shown.returncode == 0, shown.stderr
        return dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)

    def wait(self) -> str:
        """Until it has ended; its exit code and signal, as in ``3:0``."""
        self.until(lambda: self.fields()["JobState"] in ENDED, "has not ended", JOB_TIMEOUT_S)
        return self.fields()["ExitCode"]

    def until_said(self, words: str) -> None:
        """Until its output has ``words``."""
        self.until(lambda: words in self.said(), f"has not said {words!r}", JOB_TIMEOUT_S)

    def until_without_steps(self) -> None:
        """Until none of its steps runs any more."""
        self.until(lambda: self.steps() == [], "has steps", GONE_TIMEOUT_S)

    def steps(self) -> list[str]:
        """The names of its running steps; the batch script is none."""
        listed = self.sandbox.run(["squeue", "-s", "-h", "-j", str(self.job_id), "-o", "%i %j"], COMMAND_TIMEOUT_S)
        return [line.split()[1] for line in listed.stdout.splitlines() if not line.split()[0].endswith(".batch")]

    def said(self) -> str:
        """Its output so far."""
        return self.output.read_text() if self.output.exists() else ""

    def until(self, is_so: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Until something is so; ``what`` says what the job does as long as it is not."""
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline_s, f"after {timeout_s:g} s job {self.job_id} {what}:\n{self.said()}"
            time.sleep(_POLL_INTERVAL_S)


Submit = Callable[..., Job]


@pytest.fixture
def submit(sandbox: Sandbox, tmp_path: Path) -> Submit:
    """Submits a batch script of these lines."""

    def submit(num_nodes: int, *lines: str) -> Job:
        number = len(list(tmp_path.glob("*.sbatch")))
        script, output = tmp_path / f"{number}.sbatch", tmp_path / f"{number}.out"
        script.write_text("\n".join(["#!/bin/bash", *lines, ""]))
        options = [f"--nodes={num_nodes}", "--exclusive", "--no-kill", "--gres=tpu:4", f"--output={output}"]
        done = sandbox.run(
            ["env", "-C", str(tmp_path), "sbatch", "--parsable", *options, str(script)], COMMAND_TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
        return Job(sandbox, int(done.stdout), output)

    return submit


@pytest.fixture
def psum(tmp_path: Path) -> Path:
    """A program that sums 1, 2, … over all devices and ends with the exit code that it is given."""
    program = tmp_path / "psum.py"
    program.write_text(PSUM)
    return program


def test_a_program_computes_on_all_nodes_and_its_exit_code_is_the_jobs(submit: Submit, psum: Path) -> None:
    job = submit(
        5, f"exec {COMMAND} run --slices 2 --hosts-per-slice 2 --devices-per-host 2 -- {sys.executable} {psum} 3"
    )
    assert job.wait() == "3:0", job.said()
    assert "slices [0, 0, 0, 0, 1, 1, 1, 1]\npsum 36.0\n" in job.said()
    assert "starting" not in job.said()  # progress goes in place, on a terminal only
    assert re.search(r"hosts ready: 5 of 5: node\d", job.said())
    _steps_are_accounted(job)


def _steps_are_accounted(job: Job) -> None:
    """Accounting lags by seconds."""
    deadline_s = time.monotonic() + COMMAND_TIMEOUT_S
    expected = {f"pathways-{name}" for name in ("controller", "client", *(f"worker-{n}" for n in range(5)))}
    while True:
        options = ["-n", "-P", "-j", str(job.job_id), "-o", "jobname%30,state,exitcode,alloctres%100"]
        rows = [line.split("|") for line in job.sandbox.run(["sacct", *options], COMMAND_TIMEOUT_S).stdout.splitlines()]
        steps = {row[0]: row for row in rows if row[0].startswith("pathways-")}
        if set(steps) == expected and not any(row[1] == "RUNNING" for row in steps.values()):
            break
        assert time.monotonic() < deadline_s, rows
        time.sleep(_POLL_INTERVAL_S)
    assert steps["pathways-client"][2] == "3:0"
    for name, row in steps.items():
        assert "cpu=8" in row[3]
        assert ("gres/tpu=4" in row[3]) == ("worker" in name), row


def test_exit_codes_are_kept(submit: Submit) -> None:
    run = f"exec {COMMAND} run -q --"
    jobs = [submit(1, f"{run} {program}") for program in ("true", "nonsuch", "sh -c 'kill -9 $$'")]
    assert [job.wait() for job in jobs] == ["0:0", "127:0", "137:0"], [job.said() for job in jobs]
    assert "nonsuch: program not found" in jobs[1].said()


def test_standard_input_reaches_the_program_and_the_nodes_are_the_jobs(submit: Submit, tmp_path: Path) -> None:
    """The environment is the user's, without what would make further steps runtimes."""
    job = submit(
        1,
        "export SLURM_SPANK__SLURM_SPANK_OPTION_pathways_pathways=slices=1 MINE='a  b'",
        "echo 'in and out' | "
        f"{COMMAND} run -q -- sh -c 'cat; echo \"$MINE\"; pwd; env | grep -c _SPANK_OPTION_; exit 0'",
    )
    assert job.wait() == "0:0"
    assert job.said() == f"in and out\na  b\n{tmp_path}\n0\n"


@pytest.mark.skipif(not TRAIN.exists(), reason="the examples are not here")
def test_the_example_learns_in_a_pipeline_over_two_slices(submit: Submit, tmp_path: Path) -> None:
    job = submit(
        5,
        f"exec {COMMAND} run --slices 2 --hosts-per-slice 2 --devices-per-host 2 -- "
        f"{sys.executable} {TRAIN} --mode pipeline --epochs 1 --losses {tmp_path}/losses.json",
    )
    assert job.wait() == "0:0", job.said()
    assert "8 cpu devices in 2 slice(s), mode pipeline" in job.said()
    assert json.loads((tmp_path / "losses.json").read_text())["accuracies"][-1] >= 0.9


def _start_sleeping(submit: Submit, *lines: str) -> Job:
    """A job whose program waits, on two nodes."""
    job = submit(2, f"{COMMAND} run -q -- sh -c 'echo started; sleep 600; exit 7'", *lines)
    job.until_said("started")
    assert sorted(job.steps()) == ["pathways-client", "pathways-controller", "pathways-worker-0", "pathways-worker-1"]
    return job


def test_scancel_leaves_nothing_on_any_node(submit: Submit, sandbox: Sandbox, runs_root: Path) -> None:
    job = _start_sleeping(submit)
    assert _processes_of(runs_root)
    assert sandbox.run(["scancel", str(job.job_id)], COMMAND_TIMEOUT_S).returncode == 0
    _until_gone(runs_root)
    job.until_without_steps()
    _remove_kept_logs(runs_root)


def test_a_killed_launcher_leaves_no_step(submit: Submit, runs_root: Path) -> None:
    job = _start_sleeping(submit, 'echo "code $?"; sleep 600')
    [launcher] = [pid for pid, argv in _commands() if str(COMMAND) in argv and "run" in argv and "srun" not in argv]
    os.kill(launcher, signal.SIGKILL)
    job.until_said("code 137")
    job.until_without_steps()
    _until_gone(runs_root)


def test_a_worker_whose_srun_is_killed_ends_and_the_program_goes_on(submit: Submit, runs_root: Path) -> None:
    job = _start_sleeping(submit)
    for pid, argv in _commands():
        if "--job-name=pathways-worker-1" in argv:
            os.kill(pid, signal.SIGKILL)
    job.until(lambda: not list(runs_root.glob("*.worker-1")), "has the worker's folder", GONE_TIMEOUT_S)
    job.until(lambda: "pathways-worker-1" not in job.steps(), "has the worker's step", GONE_TIMEOUT_S)
    assert "pathways-client" in job.steps()
    assert re.search(r"worker-1 \(node\d\) was killed by signal 9", job.said())
    job.sandbox.run(["scancel", str(job.job_id)], COMMAND_TIMEOUT_S)
    _until_gone(runs_root)
    _remove_kept_logs(runs_root)


def _commands() -> Iterator[tuple[int, list[str]]]:
    for process in psutil.process_iter():
        try:
            yield process.pid, process.cmdline()
        except psutil.NoSuchProcess:
            continue


def _processes_of(runs_root: Path) -> list[list[str]]:
    """Processes that have the folder of runs in their command line."""
    return [argv for _, argv in _commands() if str(runs_root) in " ".join(argv)]


def _until_gone(runs_root: Path) -> None:
    deadline_s = time.monotonic() + GONE_TIMEOUT_S
    while left := _processes_of(runs_root):
        assert time.monotonic() < deadline_s, f"after {GONE_TIMEOUT_S:g} s there is still {left}"
        time.sleep(_POLL_INTERVAL_S)


def _remove_kept_logs(runs_root: Path) -> None:
    """Those of a runtime that was ended from outside stay; nothing else does."""
    deadline_s = time.monotonic() + GONE_TIMEOUT_S
    while left := [path for path in runs_root.rglob("*") if path.is_file() and path.parent.name != "logs"]:
        assert time.monotonic() < deadline_s, left
        time.sleep(_POLL_INTERVAL_S)
    for path in sorted(runs_root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_working_folder_that_nodes_do_not_see(submit: Submit, sandbox: Sandbox) -> None:
    """The second node has none; the job ends at once and says so."""
    folder = f"{sandbox.local_dir}/work"
    job = submit(2, f"mkdir -p {folder} && cd {folder} || exit 9", f"exec {COMMAND} run -q -- true")
    assert job.wait() == "125:0"
    assert re.search(rf"node\d: the working folder {re.escape(folder)} is not there on this node", job.said())
    logs = re.search(r"the logs are in (\S+)", job.said())
    assert logs is not None
    _remove_kept_logs(Path(logs[1]).parents[1])


def test_a_step_with_the_option_is_a_runtime(sandbox: Sandbox, built_spank: Path, psum: Path) -> None:
    drop_in = sandbox.plugstack_dir / "pathways.conf"
    drop_in.write_text(f"optional {built_spank}/lib/slurm-pathways/pathways.so command={COMMAND}\n")
    try:
        option = "--pathways=slices=2,hosts-per-slice=2,devices-per-host=2"
        done = sandbox.run(["srun", "-N4", option, sys.executable, str(psum), "3"], JOB_TIMEOUT_S)
    finally:
        drop_in.unlink()
    assert done.returncode == 3, done.stderr
    assert done.stdout == "slices [0, 0, 0, 0, 1, 1, 1, 1]\npsum 36.0\n"
