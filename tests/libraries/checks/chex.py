"""Chex: assertions about trees and values, inside and outside of jit, and its dataclasses."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from checks import mesh


@chex.dataclass(frozen=True)
class _State:
    position: chex.Array
    count: chex.Array


def dataclasses_are_trees() -> Any:
    rows = NamedSharding(mesh(8), PartitionSpec("data"))
    state = _State(position=jax.device_put(jnp.arange(16.0), rows), count=jnp.int32(0))

    @jax.jit
    def step(state: _State) -> _State:
        chex.assert_shape(state.position, (16,))
        return state.replace(position=state.position * 1.5 - 1, count=state.count + 1)

    for _ in range(3):
        state = step(state)
    chex.assert_tree_all_finite(state)
    chex.assert_trees_all_close(state, jax.device_get(state))
    return {"position": state.position, "count": state.count}


def assertions_about_values_in_jit() -> Any:
    @chex.chexify
    @jax.jit
    def log(x: jax.Array) -> jax.Array:
        chex.assert_trees_all_equal(x > 0, jnp.ones_like(x, dtype=bool))
        return jnp.log(x)

    values: list[Any] = [log(jnp.array([1.0, 2.0]))]
    log.wait_checks()
    try:
        log(jnp.array([1.0, -2.0]))
        log.wait_checks()
    except AssertionError as failure:
        values.append("not equal" in str(failure).lower() or "mismatch" in str(failure).lower())
    return values


def compilations_are_counted() -> Any:
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    return [double(jnp.arange(3)) for _ in range(2)]


CHECKS = (dataclasses_are_trees, assertions_about_values_in_jit, compilations_are_counted)
