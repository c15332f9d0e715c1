"""Trains for as long as it is told, and says what it sees; ``python -m programs.compiling STEPS FAILS``."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

num_steps, fails = int(sys.argv[1]), bool(int(sys.argv[2]))
devices = jax.devices()
mesh = jax.sharding.Mesh(np.array(devices), ("data",))
batch = jax.device_put(
    np.arange(8 * 64, dtype=np.float32).reshape(8, 64) / 512, NamedSharding(mesh, PartitionSpec("data"))
)
weights = jax.device_put(np.full((64, 64), 0.01, np.float32), NamedSharding(mesh, PartitionSpec()))
count = jax.device_put(np.int32(41))


@jax.jit
def train_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(weights: jax.Array) -> jax.Array:
        return ((batch @ weights - 1) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


@jax.jit
def tell(x: jax.Array) -> jax.Array:
    jax.debug.print("called back")
    return x + 1


if fails:
    try:
        jax.jit(lambda x: jax.ffi.ffi_call("nobody_has_this", jax.ShapeDtypeStruct((4,), jnp.float32))(x))(
            np.ones(4, np.float32)
        )
    except jax.errors.JaxRuntimeError as failure:
        print(f"refused: {failure}", file=sys.stderr)
losses = []
for _ in range(num_steps):
    weights, value = train_step(weights, batch)
    losses.append(float(value))
print(
    json.dumps(
        {
            "devices": [
                [d.id, *(getattr(d, name, None) for name in ("slice_index", "virtual_task_index"))] for d in devices
            ],
            "losses": losses,
            "count": int(count),
            "told": np.asarray(tell(jnp.ones(3))).tolist(),
            "batch": float(np.asarray(batch).sum()),
            "topology": os.environ.get("SLURM_PATHWAYS_COMPILE_TOPOLOGY"),
        }
    )
)
