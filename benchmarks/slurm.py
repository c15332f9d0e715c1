"""On a real Slurm: starts in an allocation, what the plugin costs others, and what slurmctld is asked.

Each function brings a sandbox up for its rows, and takes it down.
"""

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.collectives import all_reduce_row
from benchmarks.measure import (
    PROJECT,
    Figure,
    Figures,
    Row,
    clean_environment,
    rows,
    seconds,
    workload,
    workload_command,
)
from pathways_runtime.worker.private_sockets import PLAIN_VARIABLE

COMMAND = str(Path(sys.executable).with_name("slurm-pathways"))
#: Says when it has seen the devices, on a clock that all processes of the machine share.
_LOOK = "import jax, time; n = len(jax.devices()); print(n, time.monotonic())"
#: For the machine to be idle, for each start. Beside other programs, a run in an allocation gets more of the machine
#: than a local one: Linux shares processors among sessions, and each step is one.
_PATIENCE_S = 45.0
_TIMEOUT_S = 3600.0
#: Those that ask slurmctld or slurmdbd something.
_SLURMS_COMMANDS = ("sacct", "salloc", "sattach", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun", "sstat")
#: What the slurmctld of a sandbox is sent whether or not something runs: by nodes, and by sdiag itself.
_ALWAYS_THERE = ("MESSAGE_NODE_REGISTRATION_STATUS", "REQUEST_STATS_INFO", "REQUEST_PING")


@contextmanager
def sandbox_of(num_nodes: int) -> Iterator[Any]:
    """A ``slurm_pathways.sandbox.cluster.Sandbox`` whose nodes have networks of their own."""
    from slurm_pathways.sandbox.cluster import Sandbox
    from slurm_pathways.sandbox.spec import SandboxSpec

    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as parent:
        there = Sandbox(Path(parent) / "sandbox")
        there.up(SandboxSpec(num_nodes=num_nodes, has_netns=True))
        try:
            yield there
        finally:
            there.down()


def _on_login(sandbox: Any, argv: list[str]) -> str:
    """Run a command on the login, in the project's folder; what it prints.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    done = subprocess.run(
        sandbox.command(argv),
        env=sandbox.environ(clean_environment()),
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{argv} ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-3000:]}")
    return done.stdout


def _in_allocation(sandbox: Any, num_nodes: int, name: str, **arguments: Any) -> Figures:
    """Run a workload in an allocation of whole nodes."""
    salloc = ["salloc", "--quiet", "--exclusive", f"--nodes={num_nodes}"]
    figures: Figures = json.loads(_on_login(sandbox, [*salloc, *workload_command(name, **arguments)]).splitlines()[-1])
    return figures


def _look(argv: list[str], num_devices: int) -> float:
    """Seconds from the start of a command to the moment at which its program has seen so many devices."""
    started_s = time.monotonic()
    seen = subprocess.run([*argv, sys.executable, "-c", _LOOK], check=True, stdout=subprocess.PIPE, text=True).stdout
    seen_devices, seen_s = seen.split()
    assert int(seen_devices) == num_devices, f"saw {seen}"
    return float(seen_s) - started_s


def _undisturbed(once: Callable[[], float]) -> float:
    """What ``once`` returns, taken while the machine is idle before and after; as it comes, when it never is so."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        while psutil.cpu_times_percent(1.5).idle < 85 and time.monotonic() < deadline_s:
            pass
        value = once()
        if psutil.cpu_times_percent(0.7).idle > 70 or time.monotonic() >= deadline_s:
            return value


def _medians(repeats: int, **measured: Callable[[], float]) -> Figures:
    """The median of each, measured in turn, so that what disturbs one disturbs all; the first round does not count."""
    taken: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(repeats + 1):
        for name, once in measured.items():
            taken[name].append(once())
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def _run_command(num_hosts: int, *options: str) -> list[str]:
    shape = ["--slices", "1", "--hosts-per-slice", str(num_hosts), "--devices-per-host", "1"]
    return [COMMAND, "run", "-q", *shape, *options, "--"]


@workload
def starts_in_allocation(num_hosts: int, repeats: int = 9) -> Figures:
    """Runs on the allocation's nodes and with --local, in turn; seconds to ``jax.devices()``."""
    return _medians(
        repeats,
        nodes_s=lambda: _undisturbed(lambda: _look(_run_command(num_hosts), num_hosts)),
        local_s=lambda: _undisturbed(lambda: _look(_run_command(num_hosts, "--local"), num_hosts)),
    )


@rows(20)
def slurm_start() -> Iterator[Row]:
    """A run in an allocation does all that a local one does, through steps of Slurm."""
    num_hosts = 4
    with sandbox_of(num_hosts) as sandbox:
        started = _in_allocation(sandbox, num_hosts, "starts_in_allocation", num_hosts=num_hosts)
    yield Row(
        "Slurm: run in an allocation of 4 nodes, to jax.devices()",
        "s",
        started["nodes_s"],
        at_least=1.5 * started["local_s"],
        smaller_is_better=True,
        compared=(Figure("run --local", started["local_s"]),),
    )


@workload
def warm_runs(num_hosts: int, repeats: int = 9) -> Figures:
    """Runs on workers that ``up`` has started; seconds to ``jax.devices()``, and what one process of JAX takes."""
    shape = ["--slices", "1", "--hosts-per-slice", str(num_hosts), "--devices-per-host", "1"]
    subprocess.run([COMMAND, "up", "-q", *shape], check=True, stdout=subprocess.DEVNULL)
    try:
        return _medians(
            repeats,
            warm_s=lambda: _undisturbed(lambda: _look([COMMAND, "run", "-q", "--"], num_hosts)),
            plain_s=lambda: _undisturbed(lambda: _look(["env", "JAX_PLATFORMS=cpu"], 1)),
        )
    finally:
        subprocess.run([COMMAND, "down"], check=True, stdout=subprocess.DEVNULL)


@rows(21)
def slurm_warm() -> Iterator[Row]:
    """The first run on warm workers does not count."""
    num_hosts = 4
    with sandbox_of(num_hosts) as sandbox:
        taken = _in_allocation(sandbox, num_hosts, "warm_runs", num_hosts=num_hosts)
    yield Row(
        "Slurm: second run on warm workers of 4 nodes, to jax.devices()",
        "s",
        taken["warm_s"],
        at_least=1,
        smaller_is_better=True,
        compared=(Figure("a JAX process of 1 device", taken["plain_s"]),),
    )


@workload
def calls_of_a_run(num_hosts: int) -> Figures:
    """Commands of Slurm that one run on so many nodes starts, by name, and messages to slurmctld, by type."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        log = Path(folder) / "log"
        log.touch()
        for name in _SLURMS_COMMANDS:
            counting = Path(folder) / name
            counting.write_text(f'#!/bin/sh\necho {name} >> {log}\nexec {shutil.which(name)} "$@"\n')
            counting.chmod(0o755)
        subprocess.run(["sdiag", "--reset"], check=True, stdout=subprocess.DEVNULL)
        _look(["env", f"PATH={folder}:{os.environ['PATH']}", *_run_command(num_hosts)], num_hosts)
        return {**Counter(log.read_text().split()), **_settled_calls()}


def _settled_calls(timeout_s: float = 30.0) -> dict[str, int]:
    """The messages since the last reset, once every step that was created has been reported to be complete."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        shown = subprocess.run(["sdiag"], check=True, stdout=subprocess.PIPE, text=True).stdout
        found = re.findall(r"^\s+([A-Z_]+)\s+\(\s*\d+\)\s+count:(\d+)", shown, re.MULTILINE)
        counts = {name: int(number) for name, number in found if name not in _ALWAYS_THERE}
        if 0 < counts.get("REQUEST_JOB_STEP_CREATE", 0) <= counts.get("REQUEST_STEP_COMPLETE", 0):
            return counts
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"steps have not completed within {timeout_s:g} s: {dict(counts)}")
        time.sleep(0.1)


@rows(22)
def slurm_calls() -> Iterator[Row]:
    """Of a step slurmctld hears three times: srun looks the allocation up, and creates it; its node reports the end."""
    sizes = (1, 2, 4, 8)
    with sandbox_of(max(sizes)) as sandbox:
        counted = {size: _in_allocation(sandbox, size, "calls_of_a_run", num_hosts=size) for size in sizes}
    for size, counts in counted.items():
        commands = {name: number for name, number in counts.items() if name in _SLURMS_COMMANDS}
        messages = {name: number for name, number in counts.items() if name not in _SLURMS_COMMANDS}
        print(f"{size} nodes, messages: {_listed(messages)}", file=sys.stderr)
        yield Row(
            f"Slurm: commands of Slurm in a run on {size} nodes",
            "calls",
            sum(commands.values()),
            at_least=size + 10,
            smaller_is_better=True,
            remarks=f"{_listed(commands)}; slurmctld gets {sum(messages.values()):.0f} messages",
        )


def _listed(counts: Figures) -> str:
    return ", ".join(f"{name} {number:.0f}" for name, number in sorted(counts.items()))


@workload
def with_and_without_plugin(drop_in: str, line: str, repeats: int = 41) -> Figures:
    """``srun true`` with the plugin's line in plugstack.conf and without, in turn; seconds."""
    path = Path(drop_in)

    def srun(*, has_plugin: bool) -> float:
        path.write_text(line if has_plugin else "")
        assert ("--pathways" in subprocess.check_output(["srun", "--help"], text=True)) == has_plugin
        return seconds(lambda: subprocess.run(["srun", "--ntasks=1", "true"], check=True))

    try:
        return _medians(
            repeats,
            with_s=lambda: srun(has_plugin=True),
            without_s=lambda: srun(has_plugin=False),
            again_s=lambda: srun(has_plugin=False),
        )
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


@rows(23)
def slurm_plugin() -> Iterator[Row]:
    """The difference of medians; how much it varies shows in the second series without the plugin."""
    with sandbox_of(1) as sandbox:
        folder = sandbox.directory / "spank"
        make = ["make", "-s", "-C", str(PROJECT / "spank"), "install", f"PREFIX={folder}", f"SYSCONFDIR={folder}/etc"]
        subprocess.run([*make, f"BUILD={folder}/build"], check=True, stdout=subprocess.DEVNULL)
        line = f"optional {folder}/lib/slurm-pathways/pathways.so command={COMMAND}\n"
        drop_in = str(sandbox.plugstack_dir / "pathways.conf")
        taken = _in_allocation(sandbox, 1, "with_and_without_plugin", drop_in=drop_in, line=line)
    yield Row(
        "Slurm: what the plugin adds to an srun of one task that does not ask for it",
        "ms",
        1e3 * (taken["with_s"] - taken["without_s"]),
        at_least=5,
        smaller_is_better=True,
        remarks=f"without it srun takes {1e3 * taken['without_s']:.1f} ms, and again {1e3 * taken['again_s']:.1f} ms",
    )


@rows(24)
def slurm_data_plane() -> Iterator[Row]:
    """From node to node, over the network that joins them."""
    measured: dict[str, float] = {}
    with sandbox_of(2) as sandbox:
        for encryption in ("none", "tls"):
            command = [*_run_command(2, "--data-plane-encryption", encryption), *workload_command("worker_to_worker")]
            said = _on_login(sandbox, ["salloc", "--quiet", "--exclusive", "--nodes=2", *command])
            measured[encryption] = json.loads(said.splitlines()[-1])["bytes_per_s"]
    yield Row(
        "Slurm: node to node, 256 MiB jax.Array, encrypted",
        "GB/s",
        measured["tls"] / 1e9,
        at_least=0.75,
        aim=2,
        compared=(Figure("authenticated, not encrypted", measured["none"] / 1e9),),
    )


@rows(25)
def slurm_collectives() -> Iterator[Row]:
    """Between nodes collectives go through tunnels of the data plane; without the library, gloo connects by itself."""
    measured: dict[str, Figures] = {}
    with sandbox_of(2) as sandbox:
        for name, environ, encryption in (
            ("plain", [f"{PLAIN_VARIABLE}=1"], "tls"),
            ("none", [], "none"),
            ("tls", [], "tls"),
        ):
            command = [*_run_command(2, "--data-plane-encryption", encryption), *workload_command("all_reduces")]
            said = _on_login(sandbox, ["env", *environ, "salloc", "--quiet", "--exclusive", "--nodes=2", *command])
            measured[name] = json.loads(said.splitlines()[-1])
    also = Figure("authenticated, not encrypted", 1e3 * measured["none"]["large_s"])
    yield all_reduce_row("Slurm: 2 nodes, encrypted", measured["tls"], measured["plain"], (also,))
