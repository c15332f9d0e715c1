"""``slurm-pathways run`` on a real cluster: values, exit codes, steps, nothing left behind."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from slurm_pathways.sandbox.cluster import Sandbox
from tests.waiting import until

from .jobs import (
    COMMAND,
    COMMAND_TIMEOUT_S,
    GONE_TIMEOUT_S,
    POLL_INTERVAL_S,
    TRAIN,
    Job,
    Submit,
    commands,
    processes_of,
    remove_kept_logs,
    until_gone,
)

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(180)]


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
    expected = {f"pathways-{name}" for name in ("controller", "client", *(f"worker-{n}" for n in range(5)))}
    options = ["-n", "-P", "-j", str(job.job_id), "-o", "jobname%30,state,exitcode,alloctres%100"]

    def rows() -> list[list[str]]:
        return [line.split("|") for line in job.sandbox.run(["sacct", *options], COMMAND_TIMEOUT_S).stdout.splitlines()]

    def ended() -> dict[str, list[str]] | None:
        steps = {row[0]: row for row in rows() if row[0].startswith("pathways-")}
        return steps if set(steps) == expected and all(row[1] != "RUNNING" for row in steps.values()) else None

    steps = until(ended, rows, COMMAND_TIMEOUT_S, POLL_INTERVAL_S)
    assert steps is not None
    assert steps["pathways-client"][2] == "3:0"
    for name, row in steps.items():
        assert "cpu=8" in row[3]
        assert ("gres/tpu=4" in row[3]) == ("worker" in name), row


def test_programs_call_python_functions_of_the_client(submit: Submit, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, jax, jax.numpy as jnp, numpy as np\n"
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec as P\n"
        "x = jax.device_put(jnp.arange(8.0), NamedSharding(Mesh(np.array(jax.devices()), ('x',)), P('x')))\n"
        "def double(value):\n"
        "    print('called in the client', os.getpid() == client, flush=True)\n"
        "    return np.asarray(value) * 2\n"
        "client = os.getpid()\n"
        "def compute(x):\n"
        "    jax.debug.print('sum {}', x.sum())\n"
        "    return jax.pure_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype), x)\n"
        "print('doubled', np.asarray(jax.jit(compute)(x)).sum())\n"
    )
    job = submit(
        4, f"exec {COMMAND} run --slices 2 --hosts-per-slice 2 --devices-per-host 2 -- {sys.executable} {program}"
    )
    assert job.wait() == "0:0", job.said()
    for said in ("called in the client True\n", "sum 28.0\n", "doubled 56.0\n"):
        assert job.said().count(said) == 1, job.said()


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


def test_the_example_learns_in_a_pipeline_over_two_slices(submit: Submit, tmp_path: Path) -> None:
    job = submit(
        5,
        f"exec {COMMAND} run --slices 2 --hosts-per-slice 2 --devices-per-host 2 -- "
        f"{sys.executable} {TRAIN} --mode pipeline --epochs 1 --losses {tmp_path}/losses.json",
    )
    assert job.wait() == "0:0", job.said()
    assert "8 cpu devices in 2 slice(s), mode pipeline" in job.said()
    assert json.loads((tmp_path / "losses.json").read_text())["accuracies"][-1] >= 0.9


def test_what_a_program_leaves_behind_ends_with_it(submit: Submit, sandbox: Sandbox) -> None:
    """It has the output of the step, and Slurm would wait for it."""
    job = submit(1, f"exec {COMMAND} run -q -- sh -c 'sleep 613 & setsid sleep 614 & (sleep 615 &); exit 3'")
    assert job.wait() == "3:0", job.said()
    assert [argv for _, argv in commands(sandbox) if argv[:1] == ["sleep"]] == []


def _start_sleeping(submit: Submit, *lines: str) -> Job:
    """A job whose program waits, on two nodes."""
    job = submit(2, f"{COMMAND} run -q -- sh -c 'echo started; sleep 600; exit 7'", *lines)
    job.until_said("started")
    assert sorted(job.steps()) == ["pathways-client", "pathways-controller", "pathways-worker-0", "pathways-worker-1"]
    return job


def test_scancel_leaves_nothing_on_any_node(submit: Submit, sandbox: Sandbox, runs_root: Path) -> None:
    job = _start_sleeping(submit)
    assert processes_of(runs_root)
    assert sandbox.run(["scancel", str(job.job_id)], COMMAND_TIMEOUT_S).returncode == 0
    until_gone(runs_root)
    job.until_without_steps()
    remove_kept_logs(runs_root)


def test_a_killed_launcher_leaves_no_step(submit: Submit, runs_root: Path) -> None:
    job = _start_sleeping(submit, 'echo "code $?"; sleep 600')
    found = commands(job.sandbox)
    [launcher] = [pid for pid, argv in found if str(COMMAND) in argv and "run" in argv and "srun" not in argv]
    os.kill(launcher, signal.SIGKILL)
    job.until_said("code 137")
    job.until_without_steps()
    until_gone(runs_root)


def test_a_worker_whose_srun_is_killed_ends_and_the_program_goes_on(submit: Submit, runs_root: Path) -> None:
    job = _start_sleeping(submit)
    for pid, argv in commands(job.sandbox):
        if "--job-name=pathways-worker-1" in argv:
            os.kill(pid, signal.SIGKILL)
    job.until(lambda: not list(runs_root.glob("*.worker-1")), "has the worker's folder", GONE_TIMEOUT_S)
    job.until(lambda: "pathways-worker-1" not in job.steps(), "has the worker's step", GONE_TIMEOUT_S)
    assert "pathways-client" in job.steps()
    assert re.search(r"worker-1 \(node\d\) was killed by signal 9", job.said())
    job.sandbox.run(["scancel", str(job.job_id)], COMMAND_TIMEOUT_S)
    until_gone(runs_root)
    remove_kept_logs(runs_root)


def test_a_working_folder_that_nodes_do_not_see(submit: Submit, sandbox: Sandbox) -> None:
    """The second node has none; the job ends at once and says so."""
    folder = f"{sandbox.local_dir}/work"
    job = submit(2, f"mkdir -p {folder} && cd {folder} || exit 9", f"exec {COMMAND} run -q -- true")
    assert job.wait() == "125:0"
    assert re.search(rf"node\d: the working folder {re.escape(folder)} is not there on this node", job.said())
    logs = re.search(r"the logs are in (\S+)", job.said())
    assert logs is not None
    remove_kept_logs(Path(logs[1]).parents[1])
