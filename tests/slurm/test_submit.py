"""``slurm-pathways submit`` on a real cluster: what it prints, what it waits for, and what it ends with."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_pathways.sandbox.cluster import Sandbox

from .jobs import COMMAND, COMMAND_TIMEOUT_S, JOB_TIMEOUT_S, Job, until_gone

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(180)]

Completed = subprocess.CompletedProcess[str]
SubmitCommand = Callable[..., Completed]


@pytest.fixture
def in_folder(sandbox: Sandbox, tmp_path: Path) -> Callable[..., list[str]]:
    """The command line that runs ``slurm-pathways submit`` in the test's folder, on the login."""

    def command(*arguments: object) -> list[str]:
        return ["env", "-C", str(tmp_path), str(COMMAND), "submit", *map(str, arguments)]

    return command


@pytest.fixture
def submit_command(sandbox: Sandbox, in_folder: Callable[..., list[str]]) -> SubmitCommand:
    """Runs ``slurm-pathways submit`` in the test's folder, to its end."""

    def run(*arguments: object) -> Completed:
        return sandbox.run(in_folder(*arguments), JOB_TIMEOUT_S)

    return run


def job_of(done: Completed, sandbox: Sandbox, tmp_path: Path) -> Job:
    assert done.stdout.strip().isdigit(), (done.stdout, done.stderr)
    job_id = int(done.stdout)
    return Job(sandbox, job_id, tmp_path / f"pathways-{job_id}.out")


def test_the_script_of_a_dry_run_is_what_runs(
    submit_command: SubmitCommand, sandbox: Sandbox, tmp_path: Path, psum: Path
) -> None:
    """With settings from everywhere, none of which the job's environment has, and sbatch's own options."""
    environ = {
        "SLURM_PATHWAYS_DEVICES_PER_HOST": "2",
        "SBATCH_EXPORT": "NONE",
        "SBATCH_JOB_NAME": "not-this",
        "MINE": "here",
    }
    settings = [f"{name}={value}" for name, value in environ.items()]
    arguments = [
        *("--slices", 2, "--gres", "tpu:4", "--job-name", "pathways", "--sbatch", '--comment=it\'s "mine"'),
        *("--", "sh", "-c", 'echo "mine: $MINE"; exec "$@"', "sh", sys.executable, psum, 0),
    ]
    script = submit_command("--dry-run", *arguments)
    assert script.returncode == 0, script.stderr
    done = sandbox.run(
        ["env", "-C", str(tmp_path), *settings, str(COMMAND), "submit", "--wait", *map(str, arguments)], JOB_TIMEOUT_S
    )
    job = job_of(done, sandbox, tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), job.said()
    assert "mine: \nslices [0, 0, 1, 1]\npsum 10.0\n" in job.said()
    assert (job.fields()["NumNodes"], job.fields()["TresPerNode"]) == ("2", "gres:tpu:4")
    batch = sandbox.run(["scontrol", "write", "batch_script", str(job.job_id), "-"], COMMAND_TIMEOUT_S).stdout
    assert batch.strip() == script.stdout.strip().replace("--slices 2 --", "--slices 2 --devices-per-host 2 --")


@pytest.fixture
def waiting(
    sandbox: Sandbox, in_folder: Callable[..., list[str]], tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], Job]]:
    """A ``submit --wait`` whose program sleeps."""
    argv = sandbox.command(in_folder("--wait", "--", "sh", "-c", "echo asleep; exec sleep 600"))
    process = subprocess.Popen(
        argv, env=sandbox.environ(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        try:
            job_id = int(process.stdout.readline())
            job = Job(sandbox, job_id, tmp_path / f"pathways-{job_id}.out")
            job.until_said("asleep")
            yield process, job
        finally:
            process.kill()


def test_exit_codes_when_waiting(
    waiting: tuple[subprocess.Popen[str], Job],
    submit_command: SubmitCommand,
    sandbox: Sandbox,
    tmp_path: Path,
    runs_root: Path,
) -> None:
    # Slurm looks every half minute whose time is over, and refuses a time that has passed when it hears of it.
    out_of_time, late = waiting
    update = ["scontrol", "update", f"jobid={late.job_id}", "endtime=now+15seconds"]
    assert sandbox.run(update, COMMAND_TIMEOUT_S).returncode == 0
    programs = {0: ["true"], 3: ["sh", "-c", "exit 3"], 127: ["nonsuch"], 137: ["sh", "-c", "kill -9 $$"]}
    for code, program in programs.items():
        done = submit_command("--wait", "--", *program)
        job = job_of(done, sandbox, tmp_path)
        assert done.returncode == code, job.said()
        assert done.stderr == (f"slurm-pathways: its output is in {job.output}\n" if code else "")
    _, errors = out_of_time.communicate(timeout=JOB_TIMEOUT_S)
    assert out_of_time.returncode == 124
    assert errors.startswith(f"slurm-pathways: job {late.job_id} reached its time limit (TIMEOUT)\n")
    until_gone(runs_root)


def test_a_job_that_is_cancelled(waiting: tuple[subprocess.Popen[str], Job], sandbox: Sandbox, runs_root: Path) -> None:
    process, job = waiting
    assert sandbox.run(["scancel", str(job.job_id)], COMMAND_TIMEOUT_S).returncode == 0
    _, errors = process.communicate(timeout=COMMAND_TIMEOUT_S)
    assert process.returncode == 143
    assert errors.startswith(f"slurm-pathways: job {job.job_id} was cancelled (CANCELLED)\n")
    until_gone(runs_root)


def test_ctrl_c_ends_the_waiting_and_not_the_job(waiting: tuple[subprocess.Popen[str], Job], runs_root: Path) -> None:
    process, job = waiting
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=COMMAND_TIMEOUT_S)
    assert process.returncode == 130
    assert errors == f"slurm-pathways: job {job.job_id} goes on; to end it: scancel {job.job_id}\n"
    assert job.fields()["JobState"] == "RUNNING"
    job.sandbox.run(["scancel", str(job.job_id)], COMMAND_TIMEOUT_S)
    until_gone(runs_root)
