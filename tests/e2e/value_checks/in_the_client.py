"""What the client's plugin adds: tokens of programs, arrays given to other libraries, sizes and costs."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from value_checks.meshes import mesh_1d, ramp, sharded
from value_checks.registry import EXACT, Returned, check


@check(EXACT)
def tokens() -> Returned:
    token = jax.lax.create_token(jnp.float32(0))
    program = jax.jit(lambda x, token: (x + 1, jax.lax.after_all(token, jax.lax.create_token(x))))
    once, token = program(ramp(8), token)
    twice, token = program(once, token)
    everywhere = jax.jit(lambda x: (x * 2, jax.lax.create_token(x)))(jax.device_put(ramp(8), sharded(mesh_1d(), "x")))
    return twice, everywhere[0], type(token).__name__, type(everywhere[1]).__name__


@check(EXACT)
def arrays_for_other_libraries() -> Returned:
    x = jax.device_put(ramp(2, 3), jax.devices()[1])
    taken = [np.from_dlpack(jnp.asarray(x, dtype)) for dtype in (jnp.float32, jnp.int8, jnp.complex64, jnp.bool_)]
    given = jax.dlpack.from_dlpack(ramp(4), device=jax.devices()[3])
    again = np.asarray(jax.dlpack.from_dlpack(x.astype(jnp.bfloat16)))
    if sys.version_info >= (3, 12):
        buffer = memoryview(x)
        seen = f"{buffer.readonly} {buffer.shape} {buffer.itemsize} {buffer.tobytes().hex()}"
        try:
            seen += repr(memoryview(x.astype(jnp.bfloat16)))
        except BufferError:
            seen += " no bfloat16"
    else:
        seen = "no buffers before Python 3.12"
    try:
        np.from_dlpack(jax.device_put(ramp(8), sharded(mesh_1d(), "x")))
    except BufferError as error:
        seen += str(error)
    return taken, given, again, seen, hasattr(x, "__cuda_array_interface__")


@check(EXACT)
def sizes_on_devices() -> Returned:
    x = ramp(16)
    split = jax.device_put(x, sharded(mesh_1d(), "x"))
    everywhere = jax.device_put(x, sharded(mesh_1d()))
    arrays = (x, split, everywhere, jnp.float32(1), jnp.zeros((0, 3)), x.astype(jnp.bfloat16), x > 1)
    return [jnp.asarray(array).on_device_size_in_bytes() for array in arrays]


@check(EXACT)
def costs_before_compilation() -> Returned:
    return jax.jit(lambda x: jnp.sin(x @ x.T)).lower(ramp(3, 4)).cost_analysis()
