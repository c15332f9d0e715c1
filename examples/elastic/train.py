"""A language model that goes on learning when hosts are lost: data-parallel over slices, in fewer of them if need be.

It learns to write like the reference of Python, which every Python brings along, letter by letter: a transformer of two
layers. Batches follow from the number of the step, so that however often training was interrupted, each step sees the
same text; and every batch is shared out among the devices that are there.
"""

import argparse
import json
import math
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from slurm_pathways import elastic

CONTEXT = 32
WIDTH = 32
NUM_HEADS = 4
NUM_LAYERS = 2
LEARNING_RATE = 0.1
MOMENTUM = 0.9
#: One for each ASCII code.
NUM_LETTERS = 128

Tree = Any


def read_text() -> np.ndarray:
    """The text, as codes of letters."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32)


def batch(text: np.ndarray, step: int, size: int) -> np.ndarray:
    """The pieces of text of a step, ``(size, CONTEXT + 1)``."""
    starts = np.random.default_rng(step).integers(0, len(text) - CONTEXT, size)
    return text[starts[:, None] + np.arange(CONTEXT + 1)]


def start() -> Tree:
    """Weights, their momentum, and the number of tokens seen, before the first step."""
    keys = iter(jax.random.split(jax.random.key(0), 64))

    def dense(inputs: int, outputs: int) -> jax.Array:
        return jax.random.normal(next(keys), (inputs, outputs)) / math.sqrt(inputs)

    layers = [
        {"qkv": dense(WIDTH, 3 * WIDTH), "out": dense(WIDTH, WIDTH), "up": dense(WIDTH, 4 * WIDTH)}
        | {"down": dense(4 * WIDTH, WIDTH)}
        for _ in range(NUM_LAYERS)
    ]
    weights = {"letters": dense(NUM_LETTERS, WIDTH), "places": dense(CONTEXT, WIDTH), "layers": layers}
    weights["head"] = dense(WIDTH, NUM_LETTERS)
    return {"weights": weights, "momentum": jax.tree.map(jnp.zeros_like, weights), "tokens": jnp.int32(0)}


def init(mesh: Mesh) -> Tree:
    """That, the same on every device."""
    return jax.jit(start, out_shardings=NamedSharding(mesh, P()))()


def normalize(x: jax.Array) -> jax.Array:
    """Mean 0 and variance 1 over the last axis."""
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)


def mean_loss(weights: Tree, pieces: jax.Array) -> jax.Array:
    """How badly each letter is foreseen from those before it, in nats."""
    letters, targets = pieces[:, :-1], pieces[:, 1:]
    x = weights["letters"][letters] + weights["places"]
    earlier = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))
    for layer in weights["layers"]:
        heads = (normalize(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, NUM_HEADS, WIDTH // NUM_HEADS)
        query, key, value = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(WIDTH // NUM_HEADS)
        attention = jax.nn.softmax(jnp.where(earlier, scores, -1e9))
        x += jnp.einsum("bhqk,bkhd->bqhd", attention, value).reshape(x.shape) @ layer["out"]
        x += jax.nn.gelu(normalize(x) @ layer["up"]) @ layer["down"]
    scores = jax.nn.log_softmax(normalize(x) @ weights["head"])
    return -jnp.take_along_axis(scores, targets[..., None], -1).mean()


@jax.jit
def train_step(state: Tree, pieces: jax.Array) -> tuple[Tree, jax.Array]:
    """One step of gradient descent with momentum."""
    loss, gradients = jax.value_and_grad(mean_loss)(state["weights"], pieces)
    momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, state["momentum"], gradients)
    weights = jax.tree.map(lambda w, m: w - LEARNING_RATE * m, state["weights"], momentum)
    tokens = state["tokens"] + CONTEXT * pieces.shape[0]
    return {"weights": weights, "momentum": momentum, "tokens": tokens}, loss


def main() -> None:
    """Train to the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=24, help="divisible by the devices of any number of slices")
    parser.add_argument("--snapshot-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--wait-s", type=float, default=10.0, help="for lost slices, before training goes on without")
    parser.add_argument("--grow", choices=[grow.name for grow in elastic.Grow], default=elastic.Grow.AT_SNAPSHOT.name)
    parser.add_argument("--read-every", type=int, default=10, metavar="STEPS", help="print the loss")
    parser.add_argument("--min-step-s", type=float, default=0.0, help="make steps take at least so long")
    parser.add_argument("--losses", type=Path, metavar="FILE.json", help="write the loss of every step there")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="on SIGUSR1 or SIGTERM, save here and end")
    args = parser.parse_args()

    text = read_text()
    begun_s = time.monotonic()
    losses: dict[int, float] = {}

    def say(message: str) -> None:
        print(f"{time.monotonic() - begun_s:8.3f} s  {message}", flush=True)

    def train(attempt: elastic.Attempt) -> Tree:
        state = attempt.start(init)
        shared_out = NamedSharding(attempt.mesh, P(attempt.mesh.axis_names))
        unread: dict[int, jax.Array] = {}
        for step in range(attempt.step, args.steps):
            until_s = time.monotonic() + args.min_step_s
            pieces = jax.device_put(batch(text, step, args.batch), shared_out)
            state, unread[step] = train_step(state, pieces)
            attempt.done(step + 1, state)
            if (step + 1) % args.read_every == 0 or step + 1 == args.steps:
                # Reading waits for the steps, which are dispatched long before they are computed.
                losses.update((number, float(loss)) for number, loss in unread.items())
                unread.clear()
                say(f"step {step + 1}  loss {losses[step]:.6f}  {len(attempt.slices)} slices")
            time.sleep(max(0.0, until_s - time.monotonic()))
        return state

    def on_event(event: elastic.Event) -> None:
        say(f"{event.kind.value}: {event.message}" + (f" ({event.took_s:.2f} s)" if event.took_s else ""))

    try:
        state = elastic.run(
            train,
            policy=elastic.Policy(wait_s=args.wait_s, grow=elastic.Grow[args.grow], look_every_s=0.2),
            snapshots=elastic.Snapshots(every_steps=args.snapshot_every),
            preemption=elastic.Preemption(args.checkpoints) if args.checkpoints else None,
            on_event=on_event,
        )
    except elastic.Preempted:
        return
    finally:
        if args.losses:
            args.losses.write_text(json.dumps(losses))
    say(f"done: {int(state['tokens'])} tokens, loss {losses[args.steps - 1]!r}")


if __name__ == "__main__":
    main()
