"""Callbacks of programs over all devices, and what the compiler asks: prints as JSON what they saw and gave."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("x",))
x = jax.device_put(jnp.arange(64.0).reshape(16, 4), NamedSharding(mesh, P("x")))
seen: list[object] = []


def note(value: np.ndarray) -> None:
    seen.append([os.getpid(), float(np.sum(value))])


def program(v: jax.Array) -> jax.Array:
    io_callback(note, None, v.sum(), ordered=True)
    doubled = jax.shard_map(
        lambda part: jax.pure_callback(
            lambda value: np.asarray(value) * 2, jax.ShapeDtypeStruct(part.shape, part.dtype), part
        ),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )(v)
    io_callback(note, None, doubled.sum(), ordered=True)
    return doubled


def fail(value: np.ndarray) -> np.ndarray:
    raise ValueError(f"{float(np.sum(value))} is bad")


@custom_partitioning
def add_rows(v: jax.Array) -> jax.Array:
    return v + v.shape[0]


add_rows.def_partition(
    lambda mesh, operands, result: (mesh, lambda v: v + v.shape[0], result.sharding, (operands[0].sharding,)),
    sharding_rule="i j -> i j",
)

# A megabyte through a callback: more than goes into a message with its header.
large = jax.jit(
    lambda v: jax.pure_callback(lambda value: np.asarray(value)[::-1], jax.ShapeDtypeStruct(v.shape, v.dtype), v)
)(jnp.arange(1 << 18))
result = jax.jit(program)(x)
jax.effects_barrier()
try:
    failure = str(jax.block_until_ready(jax.jit(lambda v: jax.pure_callback(fail, v[0], v))(x)))
except jax.errors.JaxRuntimeError as error:
    failure = "failed: " + str("\nValueError: 2016.0 is bad" in str(error))
answer = {
    "seen": [[pid == os.getpid(), value] for pid, value in seen],  # type: ignore[misc]
    "sum": float(np.asarray(result).sum()),
    "large": [int(large[0]), int(large[-1])],
    "failure": failure,
    "partitioned": np.asarray(jax.jit(add_rows)(x))[:, 0].tolist(),
}
print(json.dumps(answer))
