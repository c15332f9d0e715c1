"""Reinforcement learning with a part of the machine for each role. Plain JAX; it imports no more.

A policy learns, by policy gradients, to choose among actions from what it sees; a hidden teacher rewards the one right
choice. Three roles, each a program of its own on devices of its own:

* the *sampler*, on one slice, draws observations and the policy's actions;
* the *reward*, on another, judges them;
* the *trainer*, on two slices as one mesh, improves the policy.

Samples, rewards and weights pass from slice to slice by ``jax.device_put``. The loop dispatches ahead and waits for
values only where it prints them.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

NUM_FEATURES = 16
NUM_ACTIONS = 4
LEARNING_RATE = 8.0
PRINT_EVERY = 50
#: Of the reward, whose optimum is 1 and which is 1 in ``NUM_ACTIONS`` by chance.
LEARNT_REWARD = 0.9


def sample(weights: jax.Array, key: jax.Array, num_samples: int) -> tuple[jax.Array, jax.Array]:
    """Observations ``(num_samples, NUM_FEATURES)``, and an action ``(num_samples,)`` that the policy draws for each."""
    observation_key, action_key = jax.random.split(key)
    observations = jax.random.normal(observation_key, (num_samples, NUM_FEATURES))
    return observations, jax.random.categorical(action_key, observations @ weights)


def judge(teacher: jax.Array, observations: jax.Array, actions: jax.Array) -> jax.Array:
    """1 for the action that the teacher would choose, else 0."""
    return (actions == (observations @ teacher).argmax(-1)).astype(jnp.float32)


def improve(
    weights: jax.Array, observations: jax.Array, actions: jax.Array, rewards: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A step up the gradient of the expected reward. Returns the weights, and the mean reward."""
    mean_reward = rewards.mean()

    def objective(weights: jax.Array) -> jax.Array:
        log_odds = jax.nn.log_softmax(observations @ weights)
        chosen = jnp.take_along_axis(log_odds, actions[:, None], axis=1)[:, 0]
        # Better than usual counts for, worse counts against.
        return (chosen * (rewards - mean_reward)).mean()

    return weights + LEARNING_RATE * jax.grad(objective)(weights), mean_reward


class Role:
    """The devices of a role: samples are split over them, weights are everywhere."""

    def __init__(self, devices: list[Any]) -> None:
        mesh = Mesh(np.array(devices), ("samples",))
        self.split = NamedSharding(mesh, P("samples"))
        self.everywhere = NamedSharding(mesh, P())


def groups(devices: list[Any]) -> list[list[Any]]:
    """The devices of the first four slices; four equal parts when there are fewer slices."""
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    if len(slices) >= 4:
        return [slices[index] for index in sorted(slices)[:4]]
    size = len(devices) // 4
    if size == 0:
        raise SystemExit(f"this program needs four devices, and there are {len(devices)}")
    return [devices[i * size : (i + 1) * size] for i in range(4)]


def train(num_iterations: int, num_samples: int, seed: int) -> list[float]:
    """Learn; prints how it goes. Returns the mean reward of every iteration."""
    first, second, third, fourth = groups(jax.devices())
    sampler, reward, trainer = Role(first), Role(second), Role(third + fourth)
    print(
        f"{len(first)} devices sample, {len(second)} reward, {len(third + fourth)} train; "
        f"{len({getattr(device, 'slice_index', 0) or 0 for device in jax.devices()})} slice(s)",
        flush=True,
    )
    sampling = jax.jit(
        lambda weights, key: sample(weights, key, num_samples),
        in_shardings=(sampler.everywhere, sampler.everywhere),
        out_shardings=sampler.split,
    )
    judging = jax.jit(judge, in_shardings=(reward.everywhere, reward.split, reward.split), out_shardings=reward.split)
    improving = jax.jit(
        improve,
        in_shardings=(trainer.everywhere, trainer.split, trainer.split, trainer.split),
        out_shardings=trainer.everywhere,
    )

    teacher_key, sampling_key = jax.random.split(jax.random.key(seed))
    teacher = jax.device_put(jax.random.normal(teacher_key, (NUM_FEATURES, NUM_ACTIONS)), reward.everywhere)
    keys = jax.device_put(jax.random.split(sampling_key, num_iterations), sampler.everywhere)
    weights = jax.device_put(np.zeros((NUM_FEATURES, NUM_ACTIONS), np.float32), trainer.everywhere)
    rewards: list[float] = []
    waiting: list[jax.Array] = []
    started_s = time.perf_counter()
    for iteration in range(num_iterations):
        samples = sampling(jax.device_put(weights, sampler.everywhere), keys[iteration])
        judged = judging(teacher, *jax.device_put(samples, reward.split))
        weights, mean_reward = improving(weights, *jax.device_put((*samples, judged), trainer.split))
        waiting.append(mean_reward)
        if (iteration + 1) % PRINT_EVERY == 0 or iteration + 1 == num_iterations:
            rewards += [float(value) for value in jax.device_get(waiting)]
            print(
                f"iteration {iteration + 1:4d}  mean reward {np.mean(rewards[-len(waiting) :]):.3f}  "
                f"{len(rewards) / (time.perf_counter() - started_s):.1f} iterations/s",
                flush=True,
            )
            waiting.clear()
    return rewards


def main() -> None:
    """Learn; the exit code is 1 if it was in vain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--samples", type=int, default=512, help="per iteration, over all devices of a role")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rewards", type=Path, metavar="FILE.json", help="the mean reward of every iteration")
    args = parser.parse_args()
    if args.iterations < 1:
        parser.error("--iterations must be at least 1")
    num_devices = 2 * len(groups(jax.devices())[0])
    if args.samples < 1 or args.samples % num_devices:
        parser.error(f"--samples must be a multiple of {num_devices} with these devices")
    rewards = train(args.iterations, args.samples, args.seed)
    if args.rewards:
        args.rewards.write_text(json.dumps(rewards))
    learnt = float(np.mean(rewards[-10:]))
    print(f"mean reward of the last {len(rewards[-10:])} iterations: {learnt:.3f} of 1")
    if learnt < LEARNT_REWARD:
        raise SystemExit(f"it has not learnt: {LEARNT_REWARD} was expected")


if __name__ == "__main__":
    main()
