"""Jobs that are not like others: arrays, cut-down environments, odd folders, the time limit, chosen networks."""

import re
import sys
from pathlib import Path

import pytest

from slurm_pathways.sandbox.cluster import Sandbox

from .jobs import (
    COMMAND,
    COMMAND_TIMEOUT_S,
    JOB_TIMEOUT_S,
    Submit,
    processes_of,
    remove_kept_logs,
    until_gone,
)

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(180)]

RUN = f"exec {COMMAND} run -q"


def test_each_task_of_an_array_has_a_runtime_of_its_own(
    submit: Submit, sandbox: Sandbox, psum: Path, tmp_path: Path
) -> None:
    output = f"{tmp_path}/%a.out"
    job = submit(
        2,
        f"{RUN} --devices-per-host $((SLURM_ARRAY_TASK_ID + 1)) -- {sys.executable} {psum} $SLURM_ARRAY_TASK_ID",
        options=["--array=0-2", f"--output={output}"],
    )
    for task, total in enumerate((3, 10, 21)):

        def fields(task: int = task) -> dict[str, str]:
            shown = sandbox.run(["scontrol", "show", "job", "-o", f"{job.job_id}_{task}"], COMMAND_TIMEOUT_S)
            return dict(word.split("=", 1) for word in shown.stdout.split() if "=" in word)

        job.until(lambda: fields()["JobState"] in ("COMPLETED", "FAILED"), f"has not ended task {task}", JOB_TIMEOUT_S)
        assert fields()["ExitCode"] == f"{task}:0"
        assert f"psum {float(total)}\n" in (tmp_path / f"{task}.out").read_text()


def test_what_sbatch_does_not_export_is_not_needed(submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "from the login")
    program = "import jax, os; print(jax.device_count(), os.environ.get('FOO'), os.environ.get('MINE'))"
    command = f'{RUN} -- {sys.executable} -c "{program}"'
    jobs = [submit(2, command, options=[f"--export={names}"]) for names in ("NONE", "NIL", "FOO=1", "ALL,FOO=2")]
    assert [job.wait() for job in jobs] == ["0:0"] * 4, [job.said() for job in jobs]
    said = ["2 None None\n", "2 None None\n", "2 1 None\n", "2 2 from the login\n"]
    assert [job.said() for job in jobs] == said


def test_a_folder_may_have_any_name(submit: Submit, tmp_path: Path, psum: Path) -> None:
    folder = tmp_path / 'it\'s "a" $HOME; ünïcödé\\ folder'
    folder.mkdir()
    program = folder / psum.name
    program.write_text(psum.read_text())
    job = submit(2, "pwd", f"{RUN} -- {sys.executable} ./{program.name} 3", folder=folder)
    assert job.wait() == "3:0", job.said()
    assert job.said().startswith(f"{folder}\nslices [0, 0]\npsum 3.0\n")


def test_a_folder_that_only_the_login_has(submit: Submit, sandbox: Sandbox, psum: Path) -> None:
    folder = sandbox.local_dir / "only here"
    made = sandbox.run(["mkdir", str(folder)], COMMAND_TIMEOUT_S)
    assert made.returncode == 0, made.stderr
    job = submit(2, f"{RUN} -- {sys.executable} {psum} 0", folder=folder)
    assert job.wait() == "2:0"
    reason = f"the job was submitted from {folder}, which is not there on this node, so Slurm has started it in /tmp"
    assert reason in job.said()
    assert sandbox.run(["rmdir", str(folder)], COMMAND_TIMEOUT_S).returncode == 0


def test_out_of_time(submit: Submit, sandbox: Sandbox, runs_root: Path) -> None:
    program = "import jax, time; print(jax.device_count(), 'ready', flush=True); time.sleep(600)"
    job = submit(2, f'{RUN} -- {sys.executable} -c "{program}"', options=["--time=1"])
    job.until_said("2 ready")
    assert processes_of(runs_root)
    ended = sandbox.run(["scontrol", "update", f"jobid={job.job_id}", "EndTime=now+15seconds"], COMMAND_TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr
    # slurmctld looks for such jobs twice a minute, and takes no end that has passed when it hears of it. The exit code
    # is the program's, of SIGTERM; SIGKILL comes after 5 s, which a busy machine may need.
    assert job.wait() in ("143:0", "0:9")
    assert job.fields()["JobState"] == "TIMEOUT"
    until_gone(runs_root)
    remove_kept_logs(runs_root)


def test_slices_follow_the_topology_and_nodes_speak_over_the_network_that_was_chosen(
    submit: Submit, psum: Path
) -> None:
    """Of the first rack there are two nodes, of the second three."""
    addresses = 'cat "$SLURM_PATHWAYS_RUN_DIR/logs/controller.log"'
    job = submit(
        5,
        f"{COMMAND} run -q --slice-by topology --interface 10.0.0.0/8 --data-plane-encryption none -- "
        f"sh -c '{sys.executable} {psum} 3; code=$?; {addresses}; exit $code'",
        options=["--nodelist=node[2-6]"],
    )
    assert job.wait() == "3:0", job.said()
    assert "slices [0, 0, 1, 1]\npsum 10.0\n" in job.said()
    bound = re.findall(r"event=bound host=(\d) worker=\d name='(node\d)'", job.said())
    assert dict(bound) == {"0": "node2", "1": "node3", "2": "node4", "3": "node5"}


def test_a_network_that_a_node_does_not_have(submit: Submit) -> None:
    command = f"{COMMAND} run -q --interface {{}} -- true; echo code $?"
    job = submit(2, command.format("ib0"), command.format("lo"))
    assert job.wait() == "0:0"
    assert job.said().count("code 125\n") == 2, job.said()
    assert re.search(r"node\d: --interface ib0: this node has no ib0; it has eth0 \(10\.77\.\S+, ", job.said())
    assert re.search(r"node\d: --interface lo: 127\.0\.0\.1 is a loopback address, which other nodes can", job.said())
    for logs in re.findall(r"the logs are in (\S+)", job.said()):
        remove_kept_logs(Path(logs).parents[1])


def test_in_a_shell_of_salloc(sandbox: Sandbox, psum: Path) -> None:
    run = [str(COMMAND), "run", "-q", "--slice-by", "gres", "--slices", "2", "--", sys.executable, str(psum), "3"]
    done = sandbox.run(["salloc", "-Q", "-N2", "--gres=tpu:4", *run], JOB_TIMEOUT_S)
    assert (done.returncode, done.stdout) == (3, "slices [0, 1]\npsum 3.0\n"), done.stderr


def test_a_shell_that_has_only_some_of_the_jobs_variables(sandbox: Sandbox) -> None:
    """As one that was entered by ssh, or by an editor."""
    for variables, words in (
        (["SLURM_JOB_ID=7"], r"SLURM_JOB_ID says that this is job 7, but SLURM_JOB_NODELIST is missing.*--jobid=7"),
        (["SLURMD_NODENAME=node1"], r"not inside a Slurm job.*there are only SLURMD_NODENAME.*add --local"),
        (["SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=node[1"], r"SLURM_JOB_NODELIST=node\[1 cannot be: "),
        (["SLURM_JOB_ID=7", "SLURM_JOB_NODELIST=node1", "SLURM_JOB_NUM_NODES=2"], r"and there are 1 nodes, node1"),
    ):
        done = sandbox.run(["env", *variables, str(COMMAND), "run", "--", "true"], COMMAND_TIMEOUT_S)
        assert done.returncode == 2
        assert re.search(words, done.stderr, re.DOTALL), done.stderr
