"""Diffrax: differential equations solved with adaptive steps, over many starts at once, and their gradients."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from checks import mesh


def _solve(start: jax.Array, rates: jax.Array) -> jax.Array:
    def lotka_volterra(t: Any, y: jax.Array, rates: jax.Array) -> jax.Array:
        prey, predator = y
        return jnp.stack(
            [rates[0] * prey - rates[1] * prey * predator, -rates[2] * predator + rates[3] * prey * predator]
        )

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lotka_volterra),
        diffrax.Tsit5(),
        t0=0.0,
        t1=4.0,
        dt0=0.1,
        y0=start,
        args=rates,
        saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 4.0, 5)),
        stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5),
    )
    return solution.ys


_RATES = jnp.array([0.6, 0.4, 0.5, 0.3])


def many_starts_at_once() -> Any:
    rows = NamedSharding(mesh(8), PartitionSpec("data"))
    starts = jax.device_put(jnp.linspace(1.0, 3.0, 32).reshape(16, 2), rows)
    return jax.jit(jax.vmap(_solve, in_axes=(0, None)))(starts, _RATES)


def gradients_of_a_solution() -> Any:
    return jax.jit(jax.grad(lambda rates: _solve(jnp.array([2.0, 1.0]), rates)[-1].sum()))(_RATES)


def noise() -> Any:
    path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(), key=jax.random.key(0))
    terms = diffrax.MultiTerm(
        diffrax.ODETerm(lambda t, y, args: -y), diffrax.ControlTerm(lambda t, y, args: 0.2 * y, path)
    )
    return diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, dt0=0.05, y0=jnp.array(1.0)).ys


CHECKS = (many_starts_at_once, gradients_of_a_solution, noise)
