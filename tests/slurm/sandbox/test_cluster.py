"""The session's cluster: jobs, accounting, and nodes that die, are cut off, reboot and come back."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_pathways.sandbox import places, plan
from slurm_pathways.sandbox.cluster import Sandbox
from slurm_pathways.sandbox.configuration import PARTITION
from slurm_pathways.sandbox.errors import SandboxError
from slurm_pathways.sandbox.layout import Layout
from slurm_pathways.sandbox.perform import Performer
from slurm_pathways.sandbox.record import Record, decode
from tests.waiting import until

SandboxCommand = Callable[..., subprocess.CompletedProcess[str]]
Slurm = Callable[..., str]

#: slurmdbd hears of a job's end some seconds later.
ACCOUNTING_TIMEOUT_S = 20.0
#: Measured: 29 s with SlurmdTimeout=10, for a node whose network says nothing.
NOTICE_TIMEOUT_S = 60.0
NOBODY = 65534


def node_list(slurm: Slurm, job: str) -> str:
    """The state and nodes of a job."""
    return slurm("squeue", "--noheader", "--jobs", job, "-o", "%T %N").strip()


def test_every_node_is_a_machine_of_its_own(sandbox: Sandbox, slurm: Slurm) -> None:
    lines = slurm("srun", "-N8", "-l", "sh", "-c", "echo $SLURMD_NODENAME $(hostname) $(hostname -i)").splitlines()
    assert sorted(lines) == [f"{index}: node{index} node{index} 10.77.1.{index + 1}" for index in range(8)]
    assert slurm("sh", "-c", "hostname; hostname -i").split() == ["login", "10.77.0.1"]


def test_gres_features_and_topology(slurm: Slurm) -> None:
    lines = slurm("sinfo", "--noheader", "--Node", f"--partition={PARTITION}", "-o", "%N %f %G").splitlines()
    assert [lines[3].split(), lines[4].split()] == [["node3", "rack0", "tpu:v5p:4"], ["node4", "rack1", "tpu:v5p:4"]]
    assert "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[4-7]" in slurm("scontrol", "show", "topology")


def test_a_batch_job_with_steps_is_accounted_for(mended_sandbox: Sandbox, slurm: Slurm) -> None:
    script = "srun --overlap -N1 -n1 -w node1 --job-name=worker sleep 0.1; srun --job-name=both true; exit 3"
    job = slurm(
        *("sbatch", "--parsable", "-N2", "-w", "node[0-1]", "--gres=tpu:4", "--comment=ours", "-o", "/dev/null"),
        f"--wrap={script}",
    ).strip()
    fields = "--format=JobName,State,ExitCode,NodeList,AllocTRES,Comment"
    expected = [
        ["wrap", "FAILED", "3:0", "node[0-1]"],
        ["batch", "FAILED", "3:0", "node0"],
        ["worker", "COMPLETED", "0:0", "node1"],
        ["both", "COMPLETED", "0:0", "node[0-1]"],
    ]
    rows: list[list[str]] = []

    def is_accounted() -> bool:
        # Rows come one by one; the job's is a stub for some seconds when word of its start is late.
        rows[:] = [line.split("|") for line in slurm("sacct", "-nP", "--delimiter=|", "-j", job, fields).splitlines()]
        return [row[:4] for row in rows] == expected

    until(is_accounted, f"sacct does not say {expected}", ACCOUNTING_TIMEOUT_S, 0.1)
    assert "gres/tpu:v5p=8" in rows[0][4].split(",")
    assert rows[0][5] == "ours"


def test_two_users_share_a_node(mended_sandbox: Sandbox, slurm: Slurm) -> None:
    root = slurm("sbatch", "--parsable", "-n1", "-w", "node0", "-o", "/dev/null", "--wrap=sleep 60").strip()
    other = slurm(
        *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "env", "HOME=/"),
        *("srun", "--chdir=/", "-n1", "-w", "node0", "sh", "-c", "id -u; hostname"),
    )
    assert other.split() == [str(NOBODY), "node0"]
    assert node_list(slurm, root) == "RUNNING node0"


def test_the_local_folder_is_each_nodes_own(sandbox: Sandbox, slurm: Slurm) -> None:
    script = f"mkdir {sandbox.local_dir}/own; cd {sandbox.local_dir}/own; touch $(hostname); ls | xargs"
    seen = slurm("srun", "-N2", "-w", "node[0-1]", "sh", "-c", script)
    assert sorted(seen.split()) == ["node0", "node1"]
    assert list(sandbox.local_dir.iterdir()) == []


def test_exec_is_the_command(sandbox: Sandbox, sandbox_command: SandboxCommand) -> None:
    where = ("--dir", str(sandbox.directory))
    assert sandbox_command("exec", *where, "--", "sh", "-c", "exit 7").returncode == 7
    # Options of the command are the command's, also without "--".
    assert sandbox_command("exec", *where, "echo", "--dir", "a b").stdout == "--dir a b\n"
    assert sandbox_command("exec", *where, "pwd").stdout == f"{Path.cwd()}\n"
    with subprocess.Popen(sandbox.command(["sleep", "60"]), env=sandbox.environ(os.environ)) as command:
        command.send_signal(signal.SIGINT)
        assert command.wait(10) == -signal.SIGINT


def test_a_job_outlives_a_node_that_loses_its_power(mended_sandbox: Sandbox, slurm: Slurm) -> None:
    script = "for node in 4 5 6; do srun --overlap -N1 -n1 -w node$node sleep 300 & done; wait"
    job = slurm(
        *("sbatch", "--parsable", "-N3", "-w", "node[4-6]", "--exclusive", "--no-kill", "-o", "/dev/null"),
        f"--wrap={script}",
    ).strip()
    until(lambda: slurm("squeue", "-h", "-s", "-j", job).count("sleep") == 3, "three steps", 20, 0.1)
    mended_sandbox.kill_node(5)
    with pytest.raises(SandboxError, match="node5 is not running"):
        mended_sandbox.kill_node(5)

    def state() -> str | None:
        return mended_sandbox.status().nodes[5].slurm_state

    assert state() == "allocated"
    until(lambda: state() == "down*", "node5 is not DOWN", NOTICE_TIMEOUT_S, 0.1)
    assert node_list(slurm, job) == "RUNNING node[4,6]"
    mended_sandbox.return_node(5)
    assert state() == "idle"
    assert node_list(slurm, job) == "RUNNING node[4,6]"


def test_slurm_can_be_told_of_a_dead_node(mended_sandbox: Sandbox, sandbox_command: SandboxCommand) -> None:
    where = ("--dir", str(mended_sandbox.directory))
    assert sandbox_command("kill-node", *where, "--tell-slurm", "node7").returncode == 0
    status = json.loads(sandbox_command("status", *where, "--json").stdout)
    assert status["nodes"][7] == {"name": "node7", "is_running": False, "is_cut": False, "slurm_state": "down"}
    assert status["is_up"] is True
    assert "node7    dead  down" in sandbox_command("status", *where).stdout
    assert sandbox_command("return-node", *where, "7").returncode == 0
    assert "node7    runs  idle" in sandbox_command("status", *where).stdout


def test_slurm_notices_a_reboot(mended_sandbox: Sandbox, slurm: Slurm) -> None:
    job = slurm(
        *("sbatch", "--parsable", "-N2", "-w", "node[2-3]", "--no-kill", "-o", "/dev/null", "--wrap=sleep 300")
    ).strip()
    until(lambda: node_list(slurm, job) == "RUNNING node[2-3]", "the job does not run", 20, 0.1)
    # The nodes answer the signal: slurmctld has heard from node3 in the very second of the reboot.
    slurm("scancel", "--signal=CONT", job)
    mended_sandbox.reboot(3)
    until(lambda: node_list(slurm, job) == "RUNNING node2", "the job still has node3", 20, 0.1)
    assert slurm("sinfo", "-h", "-n", "node3", "-o", "%T %E").split(maxsplit=1) == [
        "down",
        "Node unexpectedly rebooted\n",
    ]


def test_slurm_does_not_notice_a_reboot_of_which_nobody_speaks(mended_sandbox: Sandbox, slurm: Slurm) -> None:
    job = slurm(
        *("sbatch", "--parsable", "-N2", "-w", "node[2-3]", "--no-kill", "-o", "/dev/null", "--wrap=sleep 300")
    ).strip()
    until(lambda: node_list(slurm, job) == "RUNNING node[2-3]", "the job does not run", 20, 0.1)
    mended_sandbox.reboot(3, is_unnoticed=True)
    # A step on the node proves that slurmctld has heard from its new slurmd's machine, and kept the node in the job.
    assert slurm("srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "-w", "node3", "hostname") == "node3\n"
    assert node_list(slurm, job) == "RUNNING node[2-3]"


def record_of(sandbox: Sandbox) -> Record:
    """What runs in the session's cluster."""
    path = sandbox.directory / "sandbox.json"
    return decode(path.read_bytes(), path)


def can_reach(sandbox: Sandbox, source: str, target: str) -> bool:
    """Whether a machine can connect to slurmd's port of another."""
    connect = ["timeout", "1", "bash", "-c", f"exec 3<>/dev/tcp/{target}/6818"]
    record = record_of(sandbox)
    argv = places.daemon_argv(record.inits[source].pid, record.spec, connect)
    return subprocess.run(argv, capture_output=True, timeout=10).returncode == 0


def test_a_partition_and_its_healing(mended_sandbox: Sandbox, sandbox_command: SandboxCommand) -> None:
    where = ("--dir", str(mended_sandbox.directory))
    # A step that speaks all the time: what it says during the cut arrives after it.
    speaker = ["srun", "-N1", "-w", "node1", "sh", "-c", "for i in $(seq 40); do echo $i; sleep 0.1; done"]
    with subprocess.Popen(
        mended_sandbox.command(speaker), env=mended_sandbox.environ(os.environ), stdout=subprocess.PIPE, text=True
    ) as srun:
        assert srun.stdout is not None
        assert srun.stdout.readline() == "1\n"
        assert sandbox_command("partition", *where, "1", "node2").returncode == 0
        assert [node.is_cut for node in mended_sandbox.status().nodes][:4] == [False, True, True, False]
        assert not can_reach(mended_sandbox, "login", "node1")
        assert not can_reach(mended_sandbox, "node1", "node0")
        assert can_reach(mended_sandbox, "node1", "node2")
        assert can_reach(mended_sandbox, "node0", "node3")
        assert sandbox_command("heal", *where, "node1").returncode == 0
        # A machine that has asked in vain for another's hardware address asks again after a second.
        until(lambda: can_reach(mended_sandbox, "node0", "node1"), "node0 does not reach node1", 10, 0.1)
        assert not can_reach(mended_sandbox, "node1", "node2")
        with pytest.raises(SandboxError, match="node2 is cut off: heal it first"):
            mended_sandbox.return_node(2)
        mended_sandbox.reboot(2, is_unnoticed=True)
        assert not can_reach(mended_sandbox, "node0", "node2")
        assert sandbox_command("heal", *where).returncode == 0
        until(lambda: can_reach(mended_sandbox, "node0", "node2"), "node0 does not reach node2", 10, 0.1)
        rest, _ = srun.communicate(timeout=30)
    assert rest.split() == [str(number) for number in range(2, 41)]
    assert srun.returncode == 0


@pytest.mark.parametrize("arguments", [("kill-node", "8"), ("partition", "0", "8"), ("return-node", "node8")])
def test_nodes_that_are_not_there(
    sandbox: Sandbox, sandbox_command: SandboxCommand, arguments: tuple[str, ...]
) -> None:
    verb, *nodes = arguments
    done = sandbox_command(verb, "--dir", str(sandbox.directory), *nodes)
    assert done.returncode == 1
    assert done.stderr == "Error: there is no node 8: they are node0 to node7\n"
    assert sandbox_command(verb, "--dir", str(sandbox.directory), "nodeX").returncode == 2


@pytest.mark.parametrize(
    ("script", "timeout_s", "words"),
    [
        ("echo no such database; exit 1", 20.0, "testd ended; the end of .*testd.out:\n  no such database"),
        ("echo opening it; sleep 60", 0.5, "testd was not ready in 0.5 s; the end of .*testd.out:\n  opening it"),
        ("exit 1", 20.0, "testd ended; nothing was written"),
    ],
)
def test_a_daemon_that_does_not_start_is_named_with_its_log(
    sandbox: Sandbox, script: str, timeout_s: float, words: str
) -> None:
    record = record_of(sandbox)
    layout = Layout(sandbox.directory, record.mark)
    command = ("sh", "-c", script)
    daemon = plan.StartDaemon(
        "testd", "node0", command, plan.SocketAnswers(Path("/none")), plan.daemon_environ(layout), timeout_s
    )
    with pytest.raises(SandboxError, match=words):
        Performer(layout, record).perform(((daemon,),))
    layout.out("testd").unlink()
