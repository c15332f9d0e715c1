"""What tests on the cluster share: batch jobs, and a look at what is left of them."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from slurm_pathways.sandbox.cluster import Sandbox
from slurm_pathways.slurm.states import ENDED
from tests.folders import all_below
from tests.waiting import until

COMMAND = Path(sys.executable).with_name("slurm-pathways")
TRAIN = Path(__file__).parents[2] / "examples" / "digits" / "train.py"
JOB_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 30.0
#: What was cancelled or lost its launcher is gone from all nodes by then.
GONE_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.2

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

    def nodes(self) -> list[str]:
        """The names of its nodes, in the order of the allocation, which is that of worker ids."""
        listed = self.sandbox.run(["scontrol", "show", "hostnames", self.fields()["NodeList"]], COMMAND_TIMEOUT_S)
        return listed.stdout.split()

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

    def until(self, is_so: Callable[[], object], what: str, timeout_s: float) -> None:
        """Until something is so; ``what`` says what the job does as long as it is not."""
        until(is_so, lambda: f"job {self.job_id} {what}:\n{self.said()}", timeout_s, POLL_INTERVAL_S)


Submit = Callable[..., Job]


def commands(sandbox: Sandbox) -> Iterator[tuple[int, list[str]]]:
    """The command lines of the processes of a cluster's jobs, by pid: there may be several clusters on this machine."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLURM_CONF", "").startswith(f"{sandbox.directory}/"):
                yield process.pid, process.cmdline()
        # Not ours to look into: no job's.
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def supervisor_of(sandbox: Sandbox, worker_id: int) -> int:
    """The process id of a worker's supervisor."""
    [supervisor] = [
        pid
        for pid, argv in commands(sandbox)
        if "pathways_runtime.worker" in argv and argv[argv.index("--worker-id") + 1] == str(worker_id)
    ]
    return supervisor


def kill_worker(sandbox: Sandbox, worker_id: int) -> None:
    """Kill a supervisor, and with it its executor."""
    os.kill(supervisor_of(sandbox, worker_id), signal.SIGKILL)


def processes_of(runs_root: Path) -> list[list[str]]:
    """Processes that have the folder of runs in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            argv = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if str(runs_root) in " ".join(argv):
            found.append(argv)
    return found


def until_gone(runs_root: Path) -> None:
    """Until no such process is left, ``GONE_TIMEOUT_S`` at most."""
    until(
        lambda: not processes_of(runs_root),
        lambda: f"there is still {processes_of(runs_root)}",
        GONE_TIMEOUT_S,
        POLL_INTERVAL_S,
    )


def remove_kept_logs(runs_root: Path) -> None:
    """Those of a runtime that was ended from outside stay; nothing else does."""

    def others() -> list[Path]:
        return [path for path in all_below(runs_root) if path.is_file() and path.parent.name != "logs"]

    until(lambda: not others(), others, GONE_TIMEOUT_S, POLL_INTERVAL_S)
    for path in sorted(runs_root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
