"""pathwaysutils: what it asks of the runtime itself. Plain JAX has nothing of it; the test has the values."""

import datetime
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pathwaysutils
from jax.sharding import NamedSharding, PartitionSpec
from pathwaysutils.experimental import reshard
from pathwaysutils.persistence import helper

from checks import mesh

pathwaysutils.initialize()

_TIMEOUT = datetime.timedelta(seconds=100)
_LOCATION = "gs://bucket/arrays"


def _arrays() -> dict[str, jax.Array]:
    on = mesh(4, 2)
    grid, everywhere = NamedSharding(on, PartitionSpec("data", "model")), NamedSharding(on, PartitionSpec())
    ramp = np.arange(16 * 6)
    return {
        "f32": jax.device_put(ramp.astype(np.float32).reshape(16, 6), grid),
        "bf16": jax.device_put(
            ramp.reshape(6, 16).astype(jnp.bfloat16), NamedSharding(on, PartitionSpec(None, "data"))
        ),
        "u8": jax.device_put(ramp.astype(np.uint8), everywhere),
        "scalar": jax.device_put(jnp.int32(-3), everywhere),
        "nothing": jax.device_put(jnp.zeros((0, 4)), everywhere),
    }


def _spec(array: jax.Array, on: Any) -> PartitionSpec:
    """Along the last dimension where that can be: never as they are written."""
    if array.ndim and array.shape[-1] % on.shape["data"] == 0:
        return PartitionSpec(*[None] * (array.ndim - 1), "data")
    return PartitionSpec()


def _read(arrays: dict[str, jax.Array], on: Any) -> list[jax.Array]:
    read, done = helper.read_arrays(
        _LOCATION,
        list(arrays),
        [array.dtype for array in arrays.values()],
        [array.shape for array in arrays.values()],
        [NamedSharding(on, _spec(array, on)) for array in arrays.values()],
        on.devices,
        _TIMEOUT,
    )
    done.result()
    return list(read)


def arrays_go_to_files_and_come_back() -> Any:
    arrays = _arrays()
    helper.write_arrays(_LOCATION, list(arrays), list(arrays.values()), _TIMEOUT).result()
    values = {}
    for shape in ((4, 2), (2, 2), (8,), (3,), (1,)):
        on = mesh(*shape)
        read = _read(arrays, on)
        values[str(shape)] = [
            bool(np.array_equal(np.asarray(new), np.asarray(old))) and new.dtype == old.dtype
            for new, old in zip(read, arrays.values(), strict=True)
        ]
    return values


def what_cannot_be_read_says_why() -> Any:
    on = mesh(8)
    everywhere = NamedSharding(on, PartitionSpec())

    def failure_of(name: str, dtype: Any, shape: tuple[int, ...], location: str = _LOCATION) -> str:
        try:
            arrays, done = helper.read_arrays(location, [name], [dtype], [shape], [everywhere], on.devices, _TIMEOUT)
            done.result()
        except jax.errors.JaxRuntimeError as failure:
            return str(failure)
        return f"read {arrays}"

    helper.write_arrays(_LOCATION, ["small"], [jnp.arange(4)], _TIMEOUT).result()
    return [
        failure_of("missing", np.dtype(np.float32), (4,)),
        failure_of("small", np.dtype(np.float32), (4,)),
        failure_of("small", np.dtype(np.int32), (5,)),
        failure_of("small", np.dtype(np.int32), (4,), "gs://bucket/../arrays"),
        failure_of("small", np.dtype(np.int32), (4,), "arrays"),
    ]


def a_failed_array_is_not_written() -> Any:
    bad = jax.jit(lambda x: jax.pure_callback(_fails, x, x))(jnp.ones(3))
    try:
        helper.write_arrays(_LOCATION, ["bad"], [bad], _TIMEOUT).result()
    except jax.errors.JaxRuntimeError as failure:
        return "it fails" in str(failure)
    return "written"


def _fails(_: Any) -> Any:
    raise ValueError("it fails")


def resharding_by_a_plan() -> Any:
    x = _arrays()["f32"]
    target = NamedSharding(mesh(2, 2), PartitionSpec("model", "data"))
    moved = reshard.reshard(x, target, cache_resharding_plans=True)
    again = reshard.reshard(x, target, cache_resharding_plans=True)
    given_up = reshard.reshard(x, target, donate=True)
    values = [bool(np.array_equal(np.asarray(y), np.arange(96).reshape(16, 6))) for y in (moved, again, given_up)]
    try:
        np.asarray(x + 1)
        is_gone = False
    except jax.errors.JaxRuntimeError as failure:
        is_gone = "deleted or donated" in str(failure)
    return [*values, moved.sharding == target, is_gone]


def traces() -> Any:
    x = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh(8), PartitionSpec("data")))
    step = jax.jit(lambda x: x @ x.T / 64)
    step(x).block_until_ready()
    jax.profiler.start_trace("gs://bucket/all")
    step(x).block_until_ready()
    jax.profiler.stop_trace()
    with jax.profiler.trace("gs://bucket/two", max_num_hosts=2):
        step(x).block_until_ready()
    return "done"


CHECKS = (
    arrays_go_to_files_and_come_back,
    what_cannot_be_read_says_why,
    a_failed_array_is_not_written,
    resharding_by_a_plan,
    traces,
)
