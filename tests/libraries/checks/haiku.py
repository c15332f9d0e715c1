"""dm-haiku: a transformed function with parameters, state and random numbers."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from checks import mesh


def trains() -> Any:
    def forward(x: jax.Array, is_training: bool) -> jax.Array:
        x = hk.Linear(32)(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
        if is_training:
            x = hk.dropout(hk.next_rng_key(), 0.2, x)
        return hk.Linear(1)(x)

    net = hk.transform_with_state(forward)
    on = mesh(4, 2)
    rows, everywhere = NamedSharding(on, PartitionSpec("data")), NamedSharding(on, PartitionSpec())
    params, state = jax.device_put(net.init(jax.random.key(0), jnp.zeros((2, 8)), True), everywhere)
    optimizer = optax.rmsprop(1e-3)
    opt_state = jax.device_put(optimizer.init(params), everywhere)

    @jax.jit
    def step(params: Any, state: Any, opt_state: Any, key: jax.Array, x: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            out, new_state = net.apply(params, state, key, x, True)
            return jnp.mean((out[:, 0] - jnp.cos(x).sum(1)) ** 2), new_state

        (loss, new_state), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), new_state, opt_state, loss

    losses = []
    for number in range(5):
        x = jax.device_put(jax.random.normal(jax.random.key(number), (32, 8)), rows)
        params, state, opt_state, loss = step(params, state, opt_state, jax.random.key(number), x)
        losses.append(loss)
    return {"losses": losses, "state": state}


CHECKS = (trains,)
