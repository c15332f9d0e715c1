"""Elastic training by pathwaysutils' Manager and orbax's Snapshotter, as their users write it.

``with_pathwaysutils.py MINIMUM_SLICES FILE.json``; prints how far it is, and writes the loss of each step.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pathwaysutils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint.experimental.v1.training.pathways import Snapshotter

NUM_STEPS = 60
SNAPSHOT_EVERY = 5
#: Here it waits until there is a slice to grow to, if it lacks one.
HOLD_AT = 40


def main() -> None:
    """Train to the last step."""
    pathwaysutils.initialize()
    from pathwaysutils.elastic import manager as elastic

    minimum, path = int(sys.argv[1]), Path(sys.argv[2])
    manager = elastic.Manager()
    snapshotter = Snapshotter(replica_axis_index=0)
    losses: dict[int, float] = {}

    @manager.elastic_retry(minimum_slice_count=minimum, poll_interval=0.3, timeout=120)
    def train() -> int:
        slices = sorted(manager.active_slice_indices)
        devices = [manager.slice_to_devices[index] for index in slices]
        mesh = Mesh(np.array(devices), ("replica", "x"))
        partitioned, everywhere = NamedSharding(mesh, P(None, "x")), NamedSharding(mesh, P())
        if snapshotter.latest is None:
            state = {"w": jax.device_put(np.zeros((8, 8), np.float32), partitioned), "step": np.int32(0)}
            state["step"] = jax.device_put(state["step"], everywhere)
        else:
            abstract = {
                "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=partitioned),
                "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
            }
            state = snapshotter.load(abstract)
        print(f"started from step {int(state['step'])} on {len(slices)} slices", flush=True)

        @jax.jit
        def train_step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            loss, gradient = jax.value_and_grad(lambda w: ((x @ w - 1.0) ** 2).mean())(state["w"])
            w = jax.lax.with_sharding_constraint(state["w"] - 0.1 * gradient, partitioned)
            return {"w": w, "step": state["step"] + 1}, loss

        for step in range(int(state["step"]), NUM_STEPS):
            x = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
            state, loss = train_step(state, jax.device_put(x, NamedSharding(mesh, P(("replica", "x")))))
            losses[step] = float(loss)
            print(f"step {step + 1} ", flush=True)
            if (step + 1) % SNAPSHOT_EVERY == 0:
                snapshotter.save(step + 1, state)
            while step + 1 == HOLD_AT and manager.inactive_slice_indices and not manager.available_inactive_slices:
                time.sleep(0.05)
            if manager.available_inactive_slices:
                print("grows", flush=True)
                raise elastic.ScaleUpSignalError
            time.sleep(0.02)
        return int(state["step"])

    assert train() == NUM_STEPS
    path.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
