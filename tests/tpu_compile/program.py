"""Trains a small model over all devices of a TPU that is not there, and says what it sees: ``program.py [huge]``."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS, WIDTH = 256, 512

devices = jax.devices()
num_slices = 1 + max(device.slice_index for device in devices)
per_slice = len(devices) // num_slices
# JAX puts neighbours of the torus side by side; it refuses several slices.
torus = jax.make_mesh((per_slice // 2, 2), ("x", "y")).devices.tolist() if num_slices == 1 else []
mesh = Mesh(np.array(devices).reshape(num_slices, per_slice), ("slice", "chip"))
batch = jax.ShapeDtypeStruct(
    (ROWS, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(("slice", "chip")))
)
weights = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "chip")))


def train_step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss(weights: jax.Array) -> jax.Array:
        return ((batch @ weights.astype(jnp.bfloat16)).astype(jnp.float32) ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, value


def twice(x: jax.Array) -> jax.Array:
    def kernel(x_ref: jax.Array, y_ref: jax.Array) -> None:
        y_ref[...] = x_ref[...] * 2.0  # type: ignore[index]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def huge(x: jax.Array) -> jax.Array:
    return x @ x


step = jax.jit(train_step, donate_argnums=0).lower(weights, batch).compile()
kernel = jax.jit(twice).lower(jax.ShapeDtypeStruct((256, 256), jnp.float32)).compile()
refused = None
if "huge" in sys.argv:
    try:
        jax.jit(huge).lower(jax.ShapeDtypeStruct((400_000, 400_000), jnp.bfloat16)).compile()
    except jax.errors.JaxRuntimeError as failure:
        refused = str(failure)
# An array whose default layout on TPU is not row-major goes from program to program, and from sharding to sharding.
narrow = jax.device_put(np.zeros((128, 10), np.float32), NamedSharding(mesh, PartitionSpec()))
for _ in range(2):
    narrow = jax.jit(lambda x: x + 1)(narrow)
narrow = jax.jit(lambda x: x * 2)(jax.device_put(narrow, NamedSharding(mesh, PartitionSpec("chip"))))
_, value = step(jnp.zeros_like(weights), jax.device_put(np.ones((ROWS, WIDTH), jnp.bfloat16), batch.sharding))
print(
    json.dumps(
        {
            "platform": jax.default_backend(),
            "kind": devices[0].device_kind,
            "places": [[d.slice_index, *d.coords, d.core_on_chip] for d in devices],
            "torus": [[list(device.coords) for device in row] for row in torus],
            "reduces": "all-reduce" in step.as_text() or "reduce-scatter" in step.as_text(),
            "has_kernel": "tpu_custom_call" in kernel.as_text(),
            "refused": refused,
            "loss": float(value),
            "narrow": [list(narrow.shape), float(narrow.sum())],
        }
    )
)
