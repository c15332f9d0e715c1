"""What fails, fails as in plain JAX, and what comes after it works."""

import jax
import jax.numpy as jnp

from value_checks.meshes import FIRST_SLICE, SECOND_SLICE, mesh_1d, mesh_of, ramp, sharded
from value_checks.registry import EXACT, Returned, check


@check(EXACT)
def shapes_that_do_not_fit() -> Returned:
    try:
        jax.jit(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((2, 3)))
    except TypeError as error:
        return "incompatible" in str(error), jnp.ones(2)
    return "no error"


@check(EXACT)
def devices_that_do_not_fit() -> Returned:
    a = jax.device_put(ramp(8), sharded(mesh_of(FIRST_SLICE), "x"))
    b = jax.device_put(ramp(8), sharded(mesh_of(SECOND_SLICE), "x"))
    try:
        jax.block_until_ready(a + b)
    except ValueError as error:
        return "incompatible devices" in str(error), a
    return "no error"


@check(EXACT)
def a_sharding_that_does_not_divide() -> Returned:
    try:
        jax.device_put(ramp(11), sharded(mesh_1d(), "x"))
    except ValueError as error:
        return "divisible" in str(error)
    return "no error"


@check(EXACT)
def memory_that_is_not_there() -> Returned:
    """64 TiB: the program runs out of memory, what depends on it fails with it, the session goes on."""
    make = jax.jit(lambda x: jnp.broadcast_to(x, (1 << 44,)))
    use = jax.jit(lambda x: x[:8] + 1)
    outcomes = []
    for _ in range(2):
        try:
            jax.block_until_ready(use(make(jnp.float32(1))))
        except jax.errors.JaxRuntimeError as error:
            outcomes.append("RESOURCE_EXHAUSTED" in str(error))
    return str(outcomes), jax.jit(lambda x: x + 1)(ramp(4))


@check(EXACT)
def an_exception_in_the_traced_function() -> Returned:
    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        raise KeyError("mine")

    try:
        f(1.0)
    except KeyError as error:
        return str(error)
    return "no error"
