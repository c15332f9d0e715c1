"""Training on one slice, whose hosts die: there is nobody else to hold its snapshots. Prints how far it is."""

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from slurm_pathways import elastic

NUM_ATTEMPTS = int(sys.argv[1])


def init(mesh: Mesh) -> dict[str, Any]:
    """Each leaf tells where it is from: partitioned, the same everywhere, of an odd size."""
    return {
        "rows": jax.device_put(np.arange(32, dtype=np.int32).reshape(8, 4), NamedSharding(mesh, P("device"))),
        "same": jax.device_put(np.arange(12, dtype=np.float32), NamedSharding(mesh, P())),
        "odd": jax.device_put(jnp.arange(7, dtype=jnp.bfloat16), NamedSharding(mesh, P())),
    }


step_of = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state))


def check(state: dict[str, Any], step: int) -> None:
    """It is the state of that step."""
    expected = {
        "rows": np.arange(32).reshape(8, 4) + step,
        "same": np.arange(12) + step,
        "odd": np.arange(7) + step,
    }
    for name, leaf in state.items():
        np.testing.assert_array_equal(np.asarray(leaf).astype(np.float64), expected[name], err_msg=name)


def train(attempt: elastic.Attempt) -> int:
    """Three steps, and then whatever until a host is lost."""
    state = attempt.start(init)
    check(state, attempt.step)
    print(f"attempt {attempt.number} from step {attempt.step}", flush=True)
    if attempt.number == NUM_ATTEMPTS:
        return attempt.step
    target = attempt.step + 3
    for step in range(attempt.step, target):
        state = step_of(state)
        attempt.done(step + 1, state)
    while attempt.newest_snapshot != target:
        attempt.done(target, state)
        time.sleep(0.01)
    print(f"newest {target}", flush=True)
    while True:
        jax.block_until_ready(step_of(state))


print("ended at step", elastic.run(train, snapshots=elastic.Snapshots(every_steps=1)), flush=True)
