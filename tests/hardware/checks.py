"""Small programs on one device, whose values are compared between platforms: ``python checks.py OUTPUT.npz``."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CHECKS: dict[str, Callable[[], Any]] = {}
_random = np.random.default_rng(0)
SQUARE = _random.standard_normal((96, 96)).astype(np.float32)
IMAGES = _random.standard_normal((4, 16, 16, 3)).astype(np.float32)
FILTERS = _random.standard_normal((3, 3, 3, 8)).astype(np.float32)
POSITIVE = SQUARE @ SQUARE.T + 96 * np.eye(96, dtype=np.float32)


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a check under its name; it returns arrays."""
    CHECKS[function.__name__] = function
    return function


@check
def matmul() -> Any:
    return jax.jit(lambda x: jnp.tanh(x @ x / 96))(SQUARE)


@check
def matmul_bfloat16() -> Any:
    return jax.jit(lambda x: (x @ x).astype(jnp.float32) / 96)(SQUARE.astype(jnp.bfloat16))


@check
def matmul_int8() -> Any:
    x = (SQUARE * 10).astype(np.int8)
    return jax.jit(lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.int32))(x)


@check
def convolution() -> Any:
    return jax.jit(
        lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    )(IMAGES, FILTERS)


@check
def fourier() -> Any:
    return jax.jit(lambda x: jnp.abs(jnp.fft.fft2(x)))(SQUARE)


@check
def cholesky_solve() -> Any:
    return jax.jit(lambda a, b: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), b))(POSITIVE, SQUARE)


@check
def eigenvalues() -> Any:
    return jax.jit(jnp.linalg.eigvalsh)(POSITIVE)


@check
def singular_values() -> Any:
    return jax.jit(lambda x: jnp.linalg.svd(x, compute_uv=False))(SQUARE)


@check
def sort_and_scan() -> Any:
    return jax.jit(lambda x: (jnp.sort(x, axis=1), jnp.argsort(x, axis=0), jnp.cumsum(x, axis=1)))(SQUARE)


@check
def random_numbers() -> Any:
    key = jax.random.key(7)
    return jax.random.bits(key, (64,)), jax.random.normal(key, (64,)), jax.random.permutation(key, 64)


@check
def gradient_in_a_loop() -> Any:
    def loss(w: jax.Array) -> jax.Array:
        return ((jnp.tanh(SQUARE @ w) - 0.5) ** 2).mean()

    @jax.jit
    def train(w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 50, lambda _, w: w - 0.1 * jax.grad(loss)(w), w)

    return train(jnp.zeros((96, 4)))


@check
def donated() -> Any:
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    x = jnp.arange(1024, dtype=jnp.float32)
    for _ in range(10):
        x = step(x)
    return x


@check
def there_and_back() -> Any:
    kinds = (np.int8, np.uint16, np.int32, np.float16, jnp.bfloat16, np.float32, np.complex64, np.bool_)
    arrays = [np.arange(64).astype(kind).reshape(8, 8) for kind in kinds]
    return [np.asarray(jax.device_put(array)).astype(np.complex64) for array in arrays]


@check
def host_memory() -> Any:
    device = jax.devices()[0]
    there = jax.device_put(SQUARE, jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))
    assert there.sharding.memory_kind == "pinned_host"
    return jax.device_put(there, jax.sharding.SingleDeviceSharding(device, memory_kind="device")) + 1


@check
def calls_to_python() -> Any:
    seen = []

    def double(x: np.ndarray) -> np.ndarray:
        seen.append(float(np.asarray(x).sum()))
        return np.asarray(x) * 2

    @jax.jit
    def call(x: jax.Array) -> jax.Array:
        return jax.pure_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1

    result = np.asarray(call(jnp.arange(8.0)))
    return result, np.array(seen, np.float32)


def main() -> None:
    """Run all of them. What one raises ends the process: there is nothing to compare then."""
    values = {"device_kind": np.array(jax.devices()[0].device_kind)}
    for name, run in CHECKS.items():
        print(name, file=sys.stderr, flush=True)
        for number, leaf in enumerate(jax.tree.leaves(run())):
            values[f"{name}.{number}"] = np.asarray(leaf)
    np.savez(sys.argv[1], **values)


if __name__ == "__main__":
    main()
