"""Control flow, sorting, convolution and other operations with kernels of their own."""

import jax
import jax.numpy as jnp
import numpy as np

from value_checks.meshes import mesh_1d, noise, ramp, sharded
from value_checks.registry import EXACT, Returned, check


@check()
def loops_and_branches() -> Returned:
    @jax.jit
    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        scanned = jax.lax.scan(lambda c, v: (c + v, c * v), jnp.zeros(()), x)
        looped = jax.lax.while_loop(lambda c: jnp.sum(c) < 100, lambda c: c * 1.5 + 1, x)
        either = jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
        chosen = jax.lax.switch(2, [jnp.sin, jnp.cos, jnp.tanh], x)
        mapped = jax.lax.map(lambda v: v**2, x)
        return scanned, looped, either, chosen, mapped, jax.lax.associative_scan(jnp.add, x)

    return f(np.abs(noise(8)) + 0.1)


@check(EXACT)
def sorting() -> Returned:
    x = jax.device_put(noise(16, 8), sharded(mesh_1d(), "x"))
    return jax.jit(
        lambda x: (
            jnp.sort(x),
            jnp.sort(x, axis=0),
            jnp.argsort(x),
            jax.lax.top_k(x, 3),
            jnp.unique((x * 2).astype(jnp.int32), size=8),
        )
    )(x)


@check()
def convolutions() -> Returned:
    images, kernel = noise(8, 12, 12, 3), noise(3, 3, 3, 4, seed=1)
    numbers = jax.lax.conv_dimension_numbers(images.shape, kernel.shape, ("NHWC", "HWIO", "NHWC"))

    def conv(images: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(images, kernel, (2, 2), "SAME", dimension_numbers=numbers)

    placed = jax.device_put(images, sharded(mesh_1d(), "x"))
    return jax.jit(conv)(placed, kernel), jax.jit(jax.grad(lambda k: jnp.sum(conv(images, k) ** 2)))(kernel)


@check()
def pooling_and_cumulative() -> Returned:
    x = noise(4, 8, 8)
    pooled = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID")
    return pooled, jnp.cumsum(x, axis=1), jnp.cumprod(x, axis=2), jax.nn.softmax(x), jax.nn.logsumexp(x, axis=0)


@check()
def fast_fourier_transform() -> Returned:
    x = noise(4, 16)
    return jnp.fft.fft(x), jnp.fft.irfft(jnp.fft.rfft(x)), jnp.fft.fft2(x)


@check(EXACT)
def gather_and_scatter() -> Returned:
    x = jax.device_put(ramp(16, 4), sharded(mesh_1d(), "x"))
    indices = np.array([3, 0, 15, 3, 7])
    updates = ramp(5, 4)
    return jax.jit(
        lambda x: (
            x[indices],
            x.at[indices].add(updates),
            x.at[2:5].set(0),
            jax.ops.segment_sum(x, jnp.arange(16) % 3, 3),
            jnp.take_along_axis(x, jnp.argsort(-x), 1),
            jax.lax.dynamic_slice(x, (5, 1), (4, 2)),
        )
    )(x)


@check(EXACT)
def shapes_change() -> Returned:
    x = jax.device_put(ramp(8, 6), sharded(mesh_1d(), "x"))
    return jax.jit(
        lambda x: (
            x.reshape(4, 12),
            x.T,
            jnp.concatenate([x, x]),
            jnp.pad(x, 1),
            jnp.tile(x, 2),
            jnp.flip(x, 0),
            jnp.roll(x, 3, 0),
            jnp.stack([x, x], 1),
            x[::2],
            jnp.repeat(x, 2, 0),
        )
    )(x)


@check()
def reductions() -> Returned:
    x = jax.device_put(noise(16, 8), sharded(mesh_1d(), "x"))
    return jax.jit(
        lambda x: (
            x.sum(),
            x.mean(0),
            x.std(1),
            x.max(),
            x.argmin(1),
            jnp.median(x),
            x.prod(0),
            (x > 0).any(0),
            jnp.quantile(x, 0.3),
            jnp.linalg.norm(x),
            jnp.histogram(x, 4),
        )
    )(x)


@check(EXACT)
def integers_and_bits() -> Returned:
    x = np.array([0, 1, -1, 127, -128, 2**31 - 1, -(2**31)], np.int32)
    return jax.jit(
        lambda x: (
            x // 3,
            x % 3,
            x << 2,
            x >> 1,
            ~x,
            x ^ 5,
            x & 6,
            jax.lax.population_count(x),
            jax.lax.clz(x),
            jax.lax.bitcast_convert_type(x, jnp.float32) != 0,
            jax.lax.bitcast_convert_type(x, jnp.uint8),
        )
    )(x)


@check()
def special_values() -> Returned:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38], np.float32)
    return jax.jit(lambda x: (x + 1, x * 0, jnp.isnan(x), jnp.sign(x), x * 10, jnp.nan_to_num(x), jax.lax.erf(x)))(x)
