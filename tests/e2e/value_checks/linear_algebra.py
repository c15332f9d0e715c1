"""Decompositions: LAPACK kernels that a worker must have made ready."""

import jax
import jax.numpy as jnp
import numpy as np

from value_checks.meshes import mesh_1d, noise, sharded
from value_checks.registry import Returned, check


def _positive(n: int = 6) -> np.ndarray:
    a = noise(n, n)
    return a @ a.T + n * np.eye(n, dtype=np.float32)


@check()
def cholesky_and_solve() -> Returned:
    a, b = _positive(), noise(6, 2, seed=1)
    return jnp.linalg.cholesky(a), jnp.linalg.solve(a, b), jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(a), True), b)


@check(1e-4)
def eigh() -> Returned:
    values, vectors = jax.jit(jnp.linalg.eigh)(_positive())
    return values, vectors * jnp.sign(vectors[0])


@check(1e-4)
def svd_and_pseudo_inverse() -> Returned:
    u, s, vt = jnp.linalg.svd(noise(5, 3), full_matrices=False)
    return s, (u * s) @ vt, jnp.linalg.pinv(noise(5, 3)), jnp.linalg.matrix_rank(noise(5, 3))


@check(1e-4)
def qr_lu_and_determinant() -> Returned:
    q, r = jnp.linalg.qr(noise(6, 4))
    return q @ r, jnp.abs(r), jax.scipy.linalg.lu(_positive()), jnp.linalg.det(_positive()), jnp.linalg.inv(_positive())


@check(1e-4)
def eigenvalues_of_a_general_matrix() -> Returned:
    return jnp.sort_complex(jnp.linalg.eigvals(noise(4, 4)))


@check(1e-4)
def batches_on_all_devices() -> Returned:
    batch = jax.device_put(np.stack([_positive(4)] * 8), sharded(mesh_1d(), "x"))
    return jax.jit(jax.vmap(jnp.linalg.cholesky), out_shardings=sharded(mesh_1d(), "x"))(batch)


@check(1e-4)
def triangular_solve_and_gradient() -> Returned:
    a, b = _positive(), noise(6, seed=1)
    lower = np.linalg.cholesky(a)
    solved = jax.scipy.linalg.solve_triangular(lower, b, lower=True)
    return solved, jax.grad(lambda a: jnp.sum(jnp.linalg.solve(a, b)))(a), jax.scipy.linalg.expm(a / 10)
