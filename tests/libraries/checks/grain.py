"""Grain: a pipeline that shuffles, maps and batches feeds a sharded program, and goes on where it was stopped."""

from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from checks import mesh


def _batches() -> Any:
    return (
        grain.MapDataset.range(256)
        .shuffle(seed=7)
        .map(lambda n: {"x": np.full((4,), n, np.float32), "n": np.int32(n)})
        .batch(16)
        .to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    )


def feeds_a_program() -> Any:
    rows = NamedSharding(mesh(8), PartitionSpec("data"))
    total = jax.jit(lambda batch: (batch["x"].sum(), batch["n"] * jnp.arange(16)))
    return [total(jax.device_put(batch, rows)) for batch, _ in zip(_batches(), range(4), strict=False)]


def goes_on_where_it_was() -> Any:
    rows = NamedSharding(mesh(8), PartitionSpec("data"))
    first = iter(_batches())
    for _ in range(3):
        next(first)
    second = iter(_batches())
    second.set_state(first.get_state())
    return [jax.device_put(next(second)["n"], rows), jax.device_put(next(second)["n"], rows)]


CHECKS = (feeds_a_program, goes_on_where_it_was)
