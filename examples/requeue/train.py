"""Training that outlives its job's time limit: on SIGUSR1 or SIGTERM it saves and ends; started again, it goes on.

Plain JAX. What it learns is a line through noisy points, one batch a step; batches follow from the number of the step,
so a training that was interrupted ends with the very numbers of one that was not.
"""

import argparse
import os
import signal
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NUM_FEATURES = 32
BATCH_SIZE = 64
LEARNING_RATE = 0.05
MOMENTUM = 0.9
NOISE = 0.5
PRINT_EVERY = 100


class State(NamedTuple):
    """What a checkpoint holds. ``total_loss`` is the sum over all ``step`` steps so far."""

    step: int
    weights: np.ndarray | jax.Array
    velocity: np.ndarray | jax.Array
    total_loss: np.ndarray | jax.Array


def start() -> State:
    """Before the first step."""
    zeros = np.zeros(NUM_FEATURES, np.float32)
    return State(0, zeros, zeros, np.float32(0))


def load(path: Path) -> State:
    """The state in a checkpoint; the start if there is none."""
    if not path.exists():
        return start()
    with np.load(path) as saved:
        return State(int(saved["step"]), saved["weights"], saved["velocity"], saved["total_loss"])


def save(path: Path, state: State) -> None:
    """Write a checkpoint; whoever reads sees the old one or the new one, whole."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        np.savez(file, **{name: np.asarray(value) for name, value in state._asdict().items()})
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


@jax.jit
def train_step(
    weights: jax.Array, velocity: jax.Array, total_loss: jax.Array, step: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of gradient descent with momentum on the batch of this step."""
    truth = jnp.linspace(-1.0, 1.0, NUM_FEATURES)
    point_key, noise_key = jax.random.split(jax.random.fold_in(jax.random.key(0), step))
    points = jax.random.normal(point_key, (BATCH_SIZE, NUM_FEATURES))
    targets = points @ truth + NOISE * jax.random.normal(noise_key, (BATCH_SIZE,))
    loss, gradient = jax.value_and_grad(lambda weights: ((points @ weights - targets) ** 2).mean())(weights)
    velocity = MOMENTUM * velocity + gradient
    return weights - LEARNING_RATE * velocity, velocity, total_loss + loss


def main() -> None:
    """Train until the last step, or until the warning."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.npz"), metavar="FILE.npz")
    args = parser.parse_args()

    is_due = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal is_due
        is_due = True

    # The second is Slurm's own, of a job that is preempted.
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, on_signal)
    state = load(args.checkpoint)
    print(f"{len(jax.devices())} devices, from step {state.step}", flush=True)
    while state.step < args.steps and not is_due:
        state = State(state.step + 1, *train_step(*state[1:], np.int32(state.step)))
        if state.step % PRINT_EVERY == 0:
            # The value is waited for: without it, steps would be dispatched long before they are computed.
            print(f"step {state.step}  mean loss {float(state.total_loss) / state.step:.6f}", flush=True)
    save(args.checkpoint, state)
    if state.step < args.steps:
        print(f"saved at step {state.step}", flush=True)
    else:
        print(f"done: {state.step} steps, mean loss {float(state.total_loss) / state.step!r}", flush=True)


if __name__ == "__main__":
    main()
