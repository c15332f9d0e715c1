"""Trains a small model over all GPUs of hosts that are not there, and says what it sees: ``program.py [huge]``."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS, WIDTH = 256, 512

devices = jax.devices()
mesh = Mesh(np.array(devices), ("data",))
batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data")))
weights = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))


def train_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(weights: jax.Array) -> jax.Array:
        return ((batch @ weights.astype(jnp.bfloat16)).astype(jnp.float32) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


def calling(x: jax.Array) -> jax.Array:
    jax.debug.print("x = {x}", x=x)
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((4,), jnp.float32), x)


def huge(x: jax.Array) -> jax.Array:
    return x + 1


step = jax.jit(train_step, donate_argnums=0).lower(weights, batch).compile()
_, value = step(jnp.zeros_like(weights), jax.device_put(np.ones((ROWS, WIDTH), jnp.bfloat16), batch.sharding))
refused = None
if "huge" in sys.argv:
    try:
        jax.jit(huge).lower(jax.ShapeDtypeStruct((120_000, 120_000), jnp.float32)).compile()
    except jax.errors.JaxRuntimeError as failure:
        refused = str(failure)
print(
    json.dumps(
        {
            "platform": jax.default_backend(),
            "kind": devices[0].device_kind,
            "devices": [[d.id, d.slice_index, d.virtual_task_index] for d in jax.devices("gpu")],
            "reduces": "all-reduce" in step.as_text(),
            "solver": "cusolver" in jax.jit(jnp.linalg.cholesky).lower(jnp.eye(4)).as_text(),
            "called": jax.jit(calling)(jnp.ones(4)).tolist(),
            "refused": refused,
            "loss": float(value),
        }
    )
)
