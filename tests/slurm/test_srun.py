"""``srun --pathways`` on a real cluster: exit codes, a terminal, where the option may be, what is left of the dead."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_pathways.config import RECORDS_VARIABLE
from slurm_pathways.launch.run_folder import remove_abandoned
from slurm_pathways.sandbox.cluster import Sandbox
from tests.terminal import Terminal
from tests.waiting import until

from .jobs import (
    COMMAND_TIMEOUT_S,
    GONE_TIMEOUT_S,
    JOB_TIMEOUT_S,
    POLL_INTERVAL_S,
    TRAIN,
    Submit,
    commands,
    kill_worker,
    processes_of,
    remove_kept_logs,
    until_gone,
)

pytestmark = [pytest.mark.usefixtures("plugin", "mended_sandbox", "no_leaks"), pytest.mark.timeout(180)]

OPTION_VARIABLE = "SLURM_SPANK__SLURM_SPANK_OPTION_pathways_pathways"
SLEEPS = "import jax, time; print(jax.device_count(), 'ready', flush=True); time.sleep(600)"

#: Computes on both devices for a second and a half from SIGTERM on: whoever heard it too is gone by then.
SAVES = """
import jax, numpy, signal, sys, time
from jax.sharding import NamedSharding, PartitionSpec
due_s = []
signal.signal(signal.SIGTERM, lambda *_: due_s.append(time.monotonic() + 1.5))
mesh = jax.make_mesh((2,), ("x",))
numbers = jax.device_put(numpy.arange(4.0), NamedSharding(mesh, PartitionSpec("x")))
total = jax.jit(lambda numbers: numbers.sum())
print(jax.device_count(), "ready", flush=True)
while not due_s or time.monotonic() < due_s[0]:
    saved = float(total(numbers))
print("saved", saved, flush=True)
sys.exit(3)
"""
#: Until there is a file.
WAITS = """
import jax, os, time
print(jax.device_count(), "ready", flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.05)
"""


def test_exit_codes_are_kept(sandbox: Sandbox, psum: Path) -> None:
    """Also when the first task ends before there is a runtime: the other tasks end too."""
    option = "--pathways=slices=2,hosts-per-slice=2,devices-per-host=2"
    done = sandbox.run(["srun", "-N4", option, sys.executable, str(psum), "3"], JOB_TIMEOUT_S)
    assert (done.returncode, done.stdout) == (3, "slices [0, 0, 0, 0, 1, 1, 1, 1]\npsum 36.0\n"), done.stderr
    for argv, returncode, words in (
        (["--pathways", "true"], 0, "^$"),
        (["--pathways", "nonsuch"], 127, "nonsuch: program not found"),
        (["--pathways", "sh", "-c", "kill -9 $$"], 137, "exit code 137"),
        (["--pathways=slices=3", "true"], 2, "3 slices of 1 hosts and 0 spares were asked for, and there are 2 hosts"),
    ):
        done = sandbox.run(["srun", "-N2", *argv], JOB_TIMEOUT_S)
        assert (done.returncode, done.stdout) == (returncode, ""), done.stderr
        assert re.search(words, done.stderr), done.stderr


def test_the_example_learns_in_a_pipeline_over_two_slices(sandbox: Sandbox, tmp_path: Path) -> None:
    option, losses = "--pathways=slices=2,hosts-per-slice=2,devices-per-host=2", tmp_path / "losses.json"
    argv = [sys.executable, str(TRAIN), "--mode", "pipeline", "--epochs", "1", "--losses", str(losses)]
    done = sandbox.run(["srun", "-N5", option, *argv], JOB_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "8 cpu devices in 2 slice(s), mode pipeline" in done.stdout
    assert json.loads(losses.read_text())["accuracies"][-1] >= 0.9


def test_the_program_gets_all_of_its_input(sandbox: Sandbox) -> None:
    """srun sends it to the other tasks too, and would wait for them."""
    piped = "head -c 5000000 /dev/zero | srun -N3 --pathways wc -c"
    done = sandbox.run(["sh", "-c", piped], JOB_TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "5000000\n"), done.stderr


def test_a_node_that_cannot_take_part_is_named(sandbox: Sandbox, runs_root: Path) -> None:
    """Of the two nodes the first is in the network that was chosen."""
    alone = "ip address show dev eth0 to 10.77.1.1 | grep -q . && ip address add 10.99.0.1/24 dev eth0; true"
    assert sandbox.run(["srun", "-N2", "-w", "node[0-1]", "sh", "-c", alone], COMMAND_TIMEOUT_S).returncode == 0
    try:
        option = "--pathways=interface=10.99.0.0/24"
        done = sandbox.run(["srun", "-N2", "-w", "node[0-1]", option, "true"], JOB_TIMEOUT_S)
    finally:
        sandbox.run(["srun", "-wnode0", "ip", "address", "del", "10.99.0.1/24", "dev", "eth0"], COMMAND_TIMEOUT_S)
    assert done.returncode == 125
    reason = r"did not start: node1: --interface 10\.99\.0\.0/24: this node has no address in .*; it has eth0"
    assert re.search(reason, done.stderr), done.stderr
    remove_kept_logs(runs_root)


def test_the_option_in_a_script_in_salloc_and_in_the_environment(
    sandbox: Sandbox, submit: Submit, psum: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = [sys.executable, str(psum), "3"]
    script = submit(2, "#SBATCH --pathways", f"srun {' '.join(program)}")
    assert script.wait() == "3:0", script.said()
    assert script.said().startswith("slices [0, 0]\npsum 3.0\n")
    done = sandbox.run(["salloc", "-Q", "-N2", "--pathways", "srun", *program], JOB_TIMEOUT_S)
    assert (done.returncode, done.stdout) == (3, "slices [0, 0]\npsum 3.0\n"), done.stderr
    done = sandbox.run(["env", f"{OPTION_VARIABLE}=slices=2", "srun", "-N2", *program], JOB_TIMEOUT_S)
    assert (done.returncode, done.stdout) == (3, "slices [0, 1]\npsum 3.0\n"), done.stderr


@contextmanager
def _sleeping(sandbox: Sandbox, num_nodes: int, program: str = SLEEPS) -> Iterator["subprocess.Popen[str]"]:
    """A step whose program says that it is ready and sleeps."""
    argv = sandbox.command(["srun", f"-N{num_nodes}", "--pathways", sys.executable, "-c", program])
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, env=sandbox.environ(os.environ), stdout=pipe, stderr=pipe, text=True) as srun:
        try:
            assert srun.stdout is not None
            assert srun.stdout.readline() == f"{num_nodes} ready\n"
            yield srun
        finally:
            srun.kill()


def _tasks(sandbox: Sandbox) -> dict[int, int]:
    """The tasks of the step, by their rank."""
    found = {}
    for pid, argv in commands(sandbox):
        if "srun-task" in argv:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found.update({int(line.partition(b"=")[2]): pid for line in environ if line.startswith(b"SLURM_PROCID=")})
    return found


def test_scancel_of_the_step(sandbox: Sandbox, runs_root: Path) -> None:
    with _sleeping(sandbox, 3) as srun:
        assert sorted(_tasks(sandbox)) == [0, 1, 2]
        listed = sandbox.run(["squeue", "-s", "-h", "-o", "%i %j"], COMMAND_TIMEOUT_S).stdout.splitlines()
        [step] = [line.split()[0] for line in listed if not line.endswith("pathways-post")]
        assert sandbox.run(["scancel", step], COMMAND_TIMEOUT_S).returncode == 0
        _until_nothing_runs(sandbox, runs_root)
        assert srun.wait(GONE_TIMEOUT_S) == 137
    _remove_what_is_left(runs_root)


def test_a_program_that_slurm_tells_to_end_still_has_its_devices(sandbox: Sandbox, submit: Submit) -> None:
    job = submit(2, f"exec srun --pathways {sys.executable} -c '{SAVES}'")
    job.until_said("2 ready\n")
    # As when the job is preempted: all processes of the step get it.
    done = sandbox.run(["scancel", "--signal=TERM", str(job.job_id)], COMMAND_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert job.wait() == "3:0", job.said()
    assert re.search(r"^saved 6\.0$", job.said(), re.MULTILINE)
    assert "ended" not in job.said()
    job.until_without_steps()


def test_a_first_task_that_is_killed_takes_all_with_it(sandbox: Sandbox, runs_root: Path) -> None:
    with _sleeping(sandbox, 3) as srun:
        os.kill(_tasks(sandbox)[0], signal.SIGKILL)
        _until_nothing_runs(sandbox, runs_root)
        assert srun.wait(GONE_TIMEOUT_S) == 137
    _remove_what_is_left(runs_root)


def test_a_worker_task_that_is_killed_takes_nothing_with_it(sandbox: Sandbox, runs_root: Path) -> None:
    with _sleeping(sandbox, 3) as srun:
        os.kill(_tasks(sandbox)[1], signal.SIGKILL)
        until(
            lambda: not any("--worker-id 1 " in " ".join(argv) for argv in processes_of(runs_root)),
            "the worker is still there",
            GONE_TIMEOUT_S,
            POLL_INTERVAL_S,
        )
        assert sorted(_tasks(sandbox)) == [0, 2]
        assert srun.poll() is None
        srun.terminate()
        _until_nothing_runs(sandbox, runs_root)
        assert srun.stderr is not None
        assert re.search(r"host 1 \(node\d\) was lost", srun.stderr.read())
    _remove_what_is_left(runs_root)


def test_the_record_says_how_every_worker_ended(
    sandbox: Sandbox, runs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, go = tmp_path / "records", tmp_path / "go"
    monkeypatch.setenv(RECORDS_VARIABLE, str(records))
    with _sleeping(sandbox, 4, WAITS.format(go=str(go))) as srun:
        kill_worker(sandbox, 1)
        assert srun.stderr is not None
        said: list[str] = []
        while "host 1 is served again by" not in (said[-1] if said else ""):
            said.append(srun.stderr.readline())
            assert said[-1], said
        go.touch()
        _until_nothing_runs(sandbox, runs_root)
    assert any("worker-1 (node1) was killed by signal 9 (SIGKILL)" in line for line in said), said
    [record] = [json.loads(path.read_text()) for path in records.glob("*.json")]
    ends = {part["name"]: (part["exit_code"], part["signal"]) for part in record["components"]}
    assert {name: end for name, end in ends.items() if name.startswith("worker-")} == {
        "worker-0": (0, None),
        # That of its second life.
        "worker-1": (0, None),
        "worker-2": (0, None),
        "worker-3": (0, None),
    }
    remove_kept_logs(runs_root)


def test_supervisors_of_both_kinds_of_tasks_are_started_again(sandbox: Sandbox, runs_root: Path) -> None:
    with _sleeping(sandbox, 2) as srun:
        assert srun.stderr is not None
        for worker in (0, 1):
            kill_worker(sandbox, worker)
            said: list[str] = []
            while f"host {worker} is served again by" not in (said[-1] if said else ""):
                said.append(srun.stderr.readline())
                assert said[-1], said
            assert any(re.search(rf"worker-{worker} .* \(SIGKILL\).*; it is started again", line) for line in said), (
                said
            )
        assert srun.poll() is None
        srun.terminate()
        _until_nothing_runs(sandbox, runs_root)
    _remove_what_is_left(runs_root)


def _until_nothing_runs(sandbox: Sandbox, runs_root: Path) -> None:
    until_gone(runs_root)
    until(
        lambda: not _tasks(sandbox),
        lambda: f"there are still tasks: {_tasks(sandbox)}",
        GONE_TIMEOUT_S,
        POLL_INTERVAL_S,
    )


def _remove_what_is_left(runs_root: Path) -> None:
    """A task that is killed leaves its folder, which this user's next run on the node removes, but for logs."""
    for folder in runs_root.glob("run-*"):
        os.utime(folder, (0, 0))
    remove_abandoned(runs_root)
    remove_kept_logs(runs_root)


def test_an_interactive_session(sandbox: Sandbox, runs_root: Path) -> None:
    argv = ["srun", "-N2", "--pathways", "--pty", sys.executable, "-q"]
    terminal = Terminal(*sandbox.command(argv), environ=sandbox.environ(os.environ))
    terminal.until(">>> ")
    terminal.type("import jax; print('devices', jax.device_count())\r")
    terminal.until("\ndevices 2")
    workers = {pid for pid, argv in commands(sandbox) if "pathways_runtime.worker.executor" in argv}
    terminal.type("exec('print(1, flush=True)' + chr(10) + 'while True: pass')\r")
    terminal.until("\n1")
    terminal.type("\x03")
    terminal.until("KeyboardInterrupt")
    terminal.type("import jax.numpy as jnp; print('sum', jnp.arange(4.0).sum())\r")
    terminal.until("\nsum 6.0")
    assert {pid for pid, argv in commands(sandbox) if "pathways_runtime.worker.executor" in argv} == workers
    assert len(workers) == 2
    terminal.type("quit(5)\r")
    assert terminal.wait() == 5, terminal.shown
    _until_nothing_runs(sandbox, runs_root)
