"""Optax: optimizers with state of all kinds, on sharded parameters, with donation."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from checks import mesh


def _minimized(optimizer: optax.GradientTransformation, num_steps: int = 6) -> Any:
    on = NamedSharding(mesh(4, 2), PartitionSpec("data", "model"))
    target = jnp.arange(32.0).reshape(8, 4) / 8
    params = {"w": jax.device_put(jnp.zeros((8, 4)), on), "b": jnp.ones(3)}
    state = optimizer.init(params)

    def step(params: Any, state: Any) -> Any:
        def loss_of(p: Any) -> jax.Array:
            return jnp.sum((p["w"] - target) ** 2) + jnp.sum(jnp.cos(p["b"]))

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    jitted = jax.jit(step, donate_argnums=(0, 1))
    losses = []
    for _ in range(num_steps):
        params, state, loss = jitted(params, state)
        losses.append(loss)
    return {"losses": losses, "params": params}


def adamw_with_a_schedule() -> Any:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6)
    return _minimized(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-3)))


def lamb_in_micro_batches() -> Any:
    return _minimized(optax.MultiSteps(optax.lamb(0.05), every_k_schedule=2).gradient_transformation())


def adafactor_and_lookups_by_name() -> Any:
    return _minimized(
        optax.partition({"big": optax.adafactor(0.1), "small": optax.set_to_zero()}, {"w": "big", "b": "small"})
    )


def line_search() -> Any:
    optimizer = optax.lbfgs()
    params = jax.device_put(jnp.array([-1.2, 1.0, 0.5, 2.0]), NamedSharding(mesh(4), PartitionSpec("data")))

    def rosenbrock(x: jax.Array) -> jax.Array:
        return jnp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)

    value_and_grad = optax.value_and_grad_from_state(rosenbrock)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, grad = value_and_grad(params, state=state)
        updates, state = optimizer.update(grad, state, params, value=value, grad=grad, value_fn=rosenbrock)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    values = []
    for _ in range(5):
        params, state, value = step(params, state)
        values.append(value)
    return values


CHECKS = (adamw_with_a_schedule, lamb_in_micro_batches, adafactor_and_lookups_by_name, line_search)
