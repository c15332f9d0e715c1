"""Elastic training by pathwaysutils and orbax, unchanged: a host dies, and training goes on by their own code."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from slurm_pathways.launch.local import LocalRuntime
from tests.elastic.kills import Training, behind, resume

NUM_STEPS = 60
PROGRAM = Path(__file__).parent / "programs" / "with_pathwaysutils.py"


@pytest.fixture
def train(start_dying: Callable[..., LocalRuntime]) -> Iterator[Callable[..., Training]]:
    """Starts the program without a spare."""
    trainings: list[Training] = []

    def start(*arguments: object) -> Training:
        runtime = start_dying(num_spares=0)
        trainings.append(Training(runtime, runtime.clients[0], PROGRAM, *arguments))
        return trainings[0]

    yield start
    for training in trainings:
        training.close()


def undisturbed() -> list[float]:
    """The loss of each step of that program, in numpy."""
    w, found = np.zeros((8, 8)), []
    for step in range(NUM_STEPS):
        x = np.random.default_rng(step).normal(size=(16, 8))
        error = x @ w - 1.0
        found.append(float((error**2).mean()))
        w -= 0.1 * 2 / error.size * x.T @ error
    return found


@pytest.mark.timeout(400)
def test_down_to_one_slice_and_up_again(train: Callable[..., Training], tmp_path: Path) -> None:
    training = train(1, tmp_path / "losses.json")
    training.until("step 12 ")
    host = behind(training.runtime, 2)
    # As long as the supervisor stands still, nobody takes the host's place.
    os.kill(host["supervisor_pid"], signal.SIGSTOP)
    os.kill(host["executor_pid"], signal.SIGKILL)
    training.until(r"started from step 10 on 1 slices")
    resume(host["supervisor_pid"])
    training.until("grows")
    training.until(r"started from step \d+ on 2 slices")
    training.end()
    losses = {int(step): loss for step, loss in json.loads((tmp_path / "losses.json").read_text()).items()}
    assert [losses[step] for step in range(NUM_STEPS)] == pytest.approx(undisturbed(), rel=1e-5)
