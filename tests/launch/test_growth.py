"""Runs that grow: more workers join, serve, and leave."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pathways.launch.run_folder import live_runs
from slurm_pathways.status import fetch
from tests.waiting import until

COMMAND = str(Path(sys.executable).with_name("slurm-pathways"))
DEADLINE_S = 120.0

pytestmark = pytest.mark.usefixtures("no_leaks")

#: Computes until its device was lost and was there again, twice.
TWICE = """
import os, time, jax, numpy as np
step = jax.jit(lambda x: x + x.sum())
num_lost, is_down, has_begun, deadline_s = 0, False, False, time.monotonic() + 90
while num_lost < 2 or is_down:
    assert time.monotonic() < deadline_s
    try:
        values = np.asarray(step(np.arange(4.0))).tolist()
        if is_down or not has_begun:
            print("values", values, flush=True)
            print("again" if is_down else "up", flush=True)
        is_down, has_begun = False, True
    except jax.errors.JaxRuntimeError as failure:
        if not is_down:
            print("lost", failure, flush=True)
            num_lost, is_down = num_lost + 1, True
    time.sleep(0.05)
# Not by way of jaxlib's threads, which may crash while the interpreter ends.
os._exit(0)
"""


class Process:
    """A command whose output goes to a file."""

    def __init__(self, output: Path, *arguments: str) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen([COMMAND, *arguments], stdout=file, stderr=file)

    def said(self) -> str:
        return self.output.read_text()

    def until_said(self, words: str) -> None:
        until(lambda: words in self.said(), self.said, DEADLINE_S, 0.05)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def growing(tmp_path: Path, runs_root: Path) -> Iterator[tuple[Process, Path]]:
    """A run of one host whose program is ``TWICE``, and its folder."""
    program = tmp_path / "twice.py"
    program.write_text(TWICE)
    run = Process(tmp_path / "run.out", "run", "--local", "--", sys.executable, str(program))
    run.until_said("up\n")
    [(path, _)] = live_runs(runs_root)
    yield run, path
    run.process.kill()
    run.process.wait()
    # After losses its logs stay.
    shutil.rmtree(path / "logs", ignore_errors=True)
    until(lambda: not live_runs(runs_root), run.said, DEADLINE_S)
    shutil.rmtree(path, ignore_errors=True)


def test_a_run_on_one_machine_grows_and_shrinks(growing: tuple[Process, Path], tmp_path: Path) -> None:
    run, path = growing
    grow = Process(tmp_path / "grow.out", "grow", "--run", str(path), "--nodes", "1")
    companion = f"grow (pid {grow.process.pid})"
    grow.until_said(f"worker-1 (host-1 of {companion}) has joined the run")
    run.until_said(f"worker 1 (host-1 of {companion}) has joined")
    workers = fetch(path, os.environ)["workers"]
    assert [(w["state"], w["companion"]) for w in workers] == [("bound", None), ("spare", companion)]
    # The run's own executor is killed, and the worker that was lent takes its place.
    os.kill(workers[0]["executor_pid"], signal.SIGKILL)
    run.until_said(f"host 0 is served again by host-1 of {companion} after")
    until(lambda: fetch(path, os.environ)["workers"][0]["state"] == "spare", run.said, DEADLINE_S, 0.2)
    # It goes, and the run's own is the one that takes over.
    grow.process.terminate()
    grow.wait()
    assert run.wait() == 0, run.said()
    said = run.said()
    assert re.findall(r"^lost .*DATA_LOSS: host 0 \((.*?)\) was lost", said, re.MULTILINE) == [
        "host-0",
        f"host-1 of {companion}",
    ], said
    assert "takes it back: that job ends, or was cancelled or preempted" in said
    assert "host 0 is served again by host-0 after" in said
    assert said.count("values [6.0, 7.0, 8.0, 9.0]") == 3
    assert "Traceback" not in said + grow.said()


#: Says which slices it trains on, and ends when it has had two.
ELASTIC = """
import jax, numpy as np, jax.numpy as jnp, time
from jax.sharding import NamedSharding, PartitionSpec
from slurm_pathways import elastic

def init(mesh):
    return jax.device_put(np.zeros(()), NamedSharding(mesh, PartitionSpec()))

step = jax.jit(lambda state, batch: state + batch.sum())

def train(attempt):
    state = attempt.start(init)
    print("slices", attempt.slices, "of", len(jax.devices()), "devices from", attempt.step, flush=True)
    where = NamedSharding(attempt.mesh, PartitionSpec(attempt.mesh.axis_names))
    for number in range(attempt.step, 100_000):
        state = step(state, jax.device_put(np.ones(2), where))
        attempt.done(number + 1, state)
        if len(attempt.slices) == 2:
            return number + 1, float(state)
        time.sleep(0.02)

began_s = time.monotonic()
policy = elastic.Policy(wait_s=600, grow=elastic.Grow.AT_ONCE)
num_steps, total = elastic.run(train, policy=policy, snapshots=elastic.Snapshots(every_steps=10, replicas=1))
assert total == 2 * num_steps, (total, num_steps)
print("trained", flush=True)
"""


def test_training_grows_into_a_slice_that_was_absent(tmp_path: Path, runs_root: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(ELASTIC)
    run = Process(tmp_path / "run.out", "run", "--local", "--absent-slices", "1", "--", sys.executable, str(program))
    try:
        run.until_said("from 0\n")
        assert "slices (0,) of 2 devices from 0\n" in run.said()
        [(path, _)] = live_runs(runs_root)
        assert [device["state"] for device in fetch(path, os.environ)["devices"]][1] == "absent"
        grow = Process(tmp_path / "grow.out", "grow", "--run", str(path), "--nodes", "1")
        assert run.wait() == 0, run.said()
        assert grow.wait() == 0, grow.said()
    finally:
        run.process.kill()
        run.process.wait()
    said = run.said()
    assert re.search(r"^slices \(0, 1\) of 2 devices from [1-9]", said, re.MULTILINE), said
    assert f"host 1, of a slice that was absent, is served by host-1 of grow (pid {grow.process.pid})\n" in said
    assert "trained\n" in said and "Traceback" not in said
    assert "the run has ended" in grow.said()
