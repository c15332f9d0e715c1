"""The example on real processes: in fewer slices, in all again, and in the next job; test_soak.py has the deaths."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_pathways.launch.local import Client, LocalRuntime
from tests.elastic.kills import Training, behind, resume

EXAMPLE = "examples/elastic/train.py"


@pytest.fixture
def runtime(start_dying: Callable[..., LocalRuntime]) -> LocalRuntime:
    """With a spare."""
    return start_dying(num_spares=1)


@pytest.fixture
def train(runtime: LocalRuntime) -> Iterator[Callable[..., Training]]:
    """Starts trainings on the runtime, one after another."""
    trainings: list[Training] = []
    clients: list[Client] = [runtime.clients[0]]

    def start(*arguments: object) -> Training:
        client = clients.pop() if clients else runtime.new_proxy()
        training = Training(runtime, client, EXAMPLE, "--snapshot-every", 5, *arguments)
        trainings.append(training)
        return training

    yield start
    for training in trainings:
        training.close()


def read(path: Path) -> dict[int, float]:
    """Losses by step."""
    return {int(step): loss for step, loss in json.loads(path.read_text()).items()}


@pytest.mark.timeout(400)
def test_fewer_slices_then_all_then_the_next_job(
    runtime: LocalRuntime, train: Callable[..., Training], tmp_path: Path
) -> None:
    """Down to one slice and up again; on the warning it saves and ends, and the next start goes on from there."""
    options = ("--wait-s", 0, "--grow", "AT_ONCE", "--checkpoints", tmp_path / "checkpoints")
    training = train("--steps", 100_000, "--losses", tmp_path / "first.json", "--min-step-s", 0.05, *options)
    training.until("step 10 ")
    host, spare = behind(runtime, 2), spare_of(runtime)
    # As long as they stand still, nobody takes the host's place.
    stopped = (host["supervisor_pid"], spare["supervisor_pid"], spare["executor_pid"])
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    os.kill(host["executor_pid"], signal.SIGKILL)
    training.until(r"started: from step \d+ on slices 0 ")
    resume(*stopped)
    grown = training.until(r"grows: to slices 0,1 after step (\d+)")
    # It goes on with the very state that it had.
    training.until(rf"started: from step {grown[1]} on slices 0,1")
    training.until(r"loss \S+  2 slices")
    training.process.send_signal(signal.SIGUSR1)
    found = re.search(r"preempted: after step (\d+), saved in \S+/snapshot-(\d+)", training.end())
    assert found is not None and found[1] == found[2]
    step = int(found[1])
    last = train("--steps", step + 10, "--losses", tmp_path / "last.json", *options).end()
    assert f"started: from step {step} on slices 0,1" in last
    assert list((tmp_path / "checkpoints").iterdir()) == []
    train("--steps", step + 10, "--losses", tmp_path / "undisturbed.json").end()
    expected = read(tmp_path / "undisturbed.json")
    first, last_losses = read(tmp_path / "first.json"), read(tmp_path / "last.json")
    assert sorted(last_losses) == list(range(step, step + 10))
    for step, loss in {**first, **last_losses}.items():
        assert loss == pytest.approx(expected[step], rel=1e-5)


def spare_of(runtime: LocalRuntime) -> dict[str, Any]:
    (spare,) = [worker for worker in runtime.status(10)["workers"] if worker["state"] == "spare"]
    return spare
