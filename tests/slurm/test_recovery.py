"""A node goes, the job stays: a spare serves in its place, and the program goes on."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from slurm_pathways.sandbox.cluster import Sandbox

from .jobs import COMMAND, Job, Submit, commands, kill_worker, remove_kept_logs, supervisor_of, until_gone

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(300)]

#: Steps on each slice until the first one has failed and works again. Says "lost" and "again" with the time that it
#: took from the last good step.
PROGRAM = """
import json, sys, time, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
step = jax.jit(lambda x: x + x.sum())
halves = [[device for device in jax.devices() if device.slice_index == index] for index in (0, 1)]
where = [NamedSharding(Mesh(np.array(half), ("x",)), P("x")) for half in halves]
put = lambda i: jax.device_put(np.arange(4, dtype=np.float32), where[i])
arrays, kept = [put(0), put(1)], step(put(1))
# Its world ends with the host; that of the other slice does not.
everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
assert np.asarray(step(jax.device_put(np.arange(8, dtype=np.float32), everywhere)))[0] == 28
failure, longest_s, good_s = "", 0.0, time.monotonic()
print("values", [np.asarray(step(a)).tolist() for a in arrays], "up", flush=True)
while time.monotonic() < good_s + 90:
    other_s = time.monotonic()
    right = np.asarray(step(arrays[1])).tolist() == [6.0, 7.0, 8.0, 9.0]
    longest_s = max(longest_s, time.monotonic() - other_s)
    assert right
    try:
        values = np.asarray(step(arrays[0])).tolist()
        if failure:
            break
        good_s = time.monotonic()
    except jax.errors.JaxRuntimeError as raised:
        failure = failure or str(raised)
        try:
            arrays[0] = put(0)
        except jax.errors.JaxRuntimeError:
            pass
    time.sleep(0.01)
print("answer", json.dumps({"failure": failure, "values": values, "kept": np.asarray(kept).tolist(),
    "away_s": time.monotonic() - good_s, "longest_s": longest_s}), flush=True)
sys.exit(5)
"""


@pytest.fixture
def job(submit: Submit, tmp_path: Path) -> Job:
    """On five nodes: two slices of two hosts, and a spare. Its program computes."""
    program = tmp_path / "steps.py"
    program.write_text(PROGRAM)
    options = "--slices 2 --hosts-per-slice 2 --spares 1 --devices-per-host 2"
    job = submit(5, f"{COMMAND} run {options} -- {sys.executable} {program}")
    job.until_said("up\n")
    return job


def _answer(job: Job) -> dict[str, Any]:
    said = re.search(r"^answer (.*)$", job.said(), re.MULTILINE)
    assert said is not None, job.said()
    answer: dict[str, Any] = json.loads(said[1])
    assert (answer["values"], answer["kept"]) == ([6.0, 7.0, 8.0, 9.0], [6.0, 7.0, 8.0, 9.0])
    return answer


def test_a_node_is_killed_and_the_spare_takes_its_place(job: Job, sandbox: Sandbox, runs_root: Path) -> None:
    """Its slurmd, its steps and its network are gone at once, and nobody says so."""
    nodes = job.nodes()
    sandbox.kill_node(int(nodes[1].removeprefix("node")))
    assert job.wait() == "5:0", job.said()
    failure = _answer(job)["failure"]
    lost = rf"DATA_LOSS: host 1 \({nodes[1]}\) was lost at .* UTC, and with it slice 0: its supervisor"
    lost += r"('s connection is gone \(\[Errno 110\] Connection timed out\)| has been silent for \d+\.\d s)"
    assert re.match(lost, failure), failure
    assert re.search(rf"host 1 is served again by {nodes[4]} after \d+\.\d s\n", job.said()), job.said()
    assert job.fields()["JobId"] == str(job.job_id)
    assert job.fields().get("Restarts", "0") == "0"
    until_gone(runs_root)
    remove_kept_logs(runs_root)


def test_a_supervisor_is_killed_and_started_again_on_its_node(job: Job, sandbox: Sandbox, runs_root: Path) -> None:
    nodes = job.nodes()
    kill_worker(sandbox, 1)
    assert job.wait() == "5:0", job.said()
    assert "its supervisor's connection is gone" in _answer(job)["failure"]
    assert re.search(rf"worker-1 \({nodes[1]}\) was killed by signal 9 .*; it is started again\n", job.said()), (
        job.said()
    )
    assert re.search(r"host 1 is served again by node\d after \d+\.\d s\n", job.said()), job.said()
    until_gone(runs_root)
    remove_kept_logs(runs_root)


def test_a_job_whose_first_node_is_killed_ends(job: Job, sandbox: Sandbox, runs_root: Path) -> None:
    """Its script and its controller are gone, and Slurm would keep it until its time limit."""
    nodes = job.nodes()
    sandbox.kill_node(int(nodes[0].removeprefix("node")))
    job.until(lambda: job.fields()["JobState"] == "CANCELLED", "goes on without its first node", 90)
    assert not [argv for _, argv in commands(sandbox) if "pathways_runtime.worker" in argv]
    until_gone(runs_root)
    # What was killed there has left its folders, which the node's next run removes. Of other nodes nothing is left.
    left = {path.name.partition(".")[2] for path in runs_root.iterdir()}
    assert left == {"", "controller", "worker-0"}
    for path in runs_root.iterdir():
        shutil.rmtree(path)


def test_a_stopped_supervisor_is_killed_on_its_node(job: Job, sandbox: Sandbox, runs_root: Path) -> None:
    stopped = supervisor_of(sandbox, 1)
    os.kill(stopped, signal.SIGSTOP)
    assert job.wait() == "5:0", job.said()
    assert re.search(r"its supervisor has been silent for \d+\.\d s", _answer(job)["failure"])
    assert not psutil.pid_exists(stopped)
    until_gone(runs_root)
    remove_kept_logs(runs_root)
