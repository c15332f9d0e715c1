"""Equinox: filtered transformations, sharding inside of them, models to files and back."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from checks import folder, mesh


def _model() -> eqx.nn.MLP:
    return eqx.nn.MLP(8, 1, 32, 2, activation=jax.nn.tanh, key=jax.random.key(0))


def trains() -> Any:
    on = mesh(8)
    rows, everywhere = NamedSharding(on, PartitionSpec("data")), NamedSharding(on, PartitionSpec())
    model = eqx.filter_shard(_model(), everywhere)
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit(donate="all")
    def step(model: Any, state: Any, x: jax.Array) -> Any:
        x = eqx.filter_shard(x, rows)

        @eqx.filter_value_and_grad
        def loss_of(model: Any) -> jax.Array:
            return jnp.mean((jax.vmap(model)(x)[:, 0] - x.sum(1)) ** 2)

        loss, grads = loss_of(model)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for number in range(5):
        x = jax.device_put(jax.random.normal(jax.random.key(number), (16, 8)), rows)
        model, state, loss = step(model, state, x)
        losses.append(loss)
    return losses


def checks_values() -> Any:
    @eqx.filter_jit
    def root(x: jax.Array) -> jax.Array:
        return jnp.sqrt(eqx.error_if(x, x < 0, "it is negative"))

    values: list[Any] = [root(jnp.array(4.0))]
    try:
        root(jnp.array(-1.0)).block_until_ready()
    except RuntimeError as failure:
        values.append("it is negative" in str(failure))
    return values


def models_go_to_files() -> Any:
    model = eqx.filter_shard(_model(), NamedSharding(mesh(8), PartitionSpec()))
    with folder() as path:
        eqx.tree_serialise_leaves(path / "model.eqx", model)
        other = eqx.tree_at(lambda m: m.layers[0].weight, _model(), replace_fn=jnp.zeros_like)
        read = eqx.tree_deserialise_leaves(path / "model.eqx", other)
    return [bool(eqx.tree_equal(jax.device_get(read), jax.device_get(model))), read.layers[0].weight.sum()]


CHECKS = (trains, checks_values, models_go_to_files)
