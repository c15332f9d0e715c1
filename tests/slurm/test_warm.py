"""Warm runtimes in allocations: in a batch script, in a shell of salloc, and from outside of the job."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pathways.sandbox.cluster import Sandbox
from tests.terminal import Terminal, use_shell

from .jobs import COMMAND, COMMAND_TIMEOUT_S, JOB_TIMEOUT_S, TRAIN, Submit, until_gone

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(240)]


def test_programs_of_a_batch_script_share_a_runtime(submit: Submit, psum: Path, runs_root: Path) -> None:
    losses = psum.with_name("losses.json")
    run = f"{COMMAND} run -q -- {sys.executable} {psum}"
    asked = "trap 'echo asked; exit 6' TERM; echo up; while :; do sleep 0.1; done\n"
    psum.with_name("asked.sh").write_text(asked)
    job = submit(
        5,
        f"{COMMAND} up --slices 2 --hosts-per-slice 2 --devices-per-host 2 || exit 9",
        f"{COMMAND} run -q -- {sys.executable} {TRAIN} --mode pipeline --epochs 1 --losses {losses}; echo codes $?",
        f"{run} 0 & {run} 3; echo codes $?",
        'wait $!; echo "codes $?"',
        f"{COMMAND} run -q -- sh -c 'kill -9 $$'; echo codes $?",
        # What srun would answer by killing the program at once.
        f"{COMMAND} run -q -- sh {psum.parent}/asked.sh > {psum}.out &",
        f"until grep -q up {psum}.out; do sleep 0.1; done; kill $!; wait $!; echo codes $?; cat {psum}.out",
        "echo $(squeue -s -h -j $SLURM_JOB_ID -o %j | sort)",
        f"{COMMAND} down; echo codes $?",
        "exit 5",
    )
    assert job.wait() == "5:0", job.said()
    said = job.said()
    assert re.findall(r"^codes (\d+)$", said, re.MULTILINE) == ["0", "3", "0", "137", "6", "0"]
    assert json.loads(losses.read_text())["accuracies"][-1] >= 0.9
    # Two at a time: their lines may be mixed.
    assert (said.count("slices [0, 0, 0, 0, 1, 1, 1, 1]\n"), said.count("psum 36.0\n")) == (2, 2)
    assert "up\nasked\n" in said
    assert "batch pathways-controller pathways-worker-0 pathways-worker-1 pathways-worker-2 pathways-worker-3" in said
    until_gone(runs_root)


@pytest.fixture
def service(submit: Submit, sandbox: Sandbox, runs_root: Path) -> Iterator[int]:
    """The id of a job that is a warm runtime of two nodes."""
    job = submit(2, f"exec {COMMAND} up --foreground --slices 2")
    job.until_said("2 devices ready")
    yield job.job_id
    assert job.wait() == "0:0", job.said()
    until_gone(runs_root)


def test_programs_from_outside_of_the_job(service: int, sandbox: Sandbox, psum: Path) -> None:
    inside = sandbox.run(
        [str(COMMAND), "run", "--job", str(service), "--", sys.executable, str(psum), "3"], JOB_TIMEOUT_S
    )
    assert (inside.returncode, inside.stdout) == (3, "slices [0, 1]\npsum 3.0\n"), inside.stderr
    status = sandbox.run([str(COMMAND), "status", "--job", str(service), "--json"], COMMAND_TIMEOUT_S)
    assert [device["slice_index"] for device in json.loads(status.stdout)["devices"]] == [0, 1], status.stderr
    other = sandbox.run([str(COMMAND), "run", "--job", "999999", "--", "true"], COMMAND_TIMEOUT_S)
    assert other.returncode == 2
    assert "--job 999999: " in other.stderr
    ended = sandbox.run([str(COMMAND), "down", "--job", str(service)], COMMAND_TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr


def test_a_shell_in_an_allocation(sandbox: Sandbox) -> None:
    argv = ["salloc", "--quiet", "--nodes=2", str(COMMAND), "shell", "--devices-per-host", "2"]
    terminal = Terminal(*sandbox.command(["env", "TERM=dumb", *argv]), environ=sandbox.environ(os.environ))
    use_shell(terminal, 4)
    sandbox.await_idle()


def test_status_of_a_runtime_on_nodes_that_share_no_folder_with_us(sandbox: Sandbox, tmp_path: Path) -> None:
    """Asked from where salloc was called, and by a program on a node."""
    script = tmp_path / "status.sh"
    script.write_text(
        f"export SLURM_PATHWAYS_RUNS={sandbox.local_dir}/runs\n"
        f"{COMMAND} up -q || exit 9\n"
        f"{COMMAND} status --json\n"
        f"{COMMAND} run -q -- {COMMAND} status --json\n"
        f"{COMMAND} down\n"
    )
    done = sandbox.run(["salloc", "--quiet", "--nodes=2", "sh", str(script)], JOB_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    decoder, rest, reports = json.JSONDecoder(), done.stdout.strip(), []
    while rest:
        report, end = decoder.raw_decode(rest)
        reports.append(report)
        rest = rest[end:].strip()
    assert [[worker["state"] for worker in report["workers"]] for report in reports] == [["bound", "bound"]] * 2
