"""Flax: training with nnx and with linen, parameters laid over both axes of a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec

from checks import mesh


def _batch(key: int, sharding: NamedSharding) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(key), (32, 16))
    return jax.device_put((x, jnp.sin(x.sum(1, keepdims=True))), sharding)


def nnx_trains() -> Any:
    on = mesh(4, 2)

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            # A bias before the norm would have no gradient but noise, of which Adam makes full steps.
            self.inner = nnx.Linear(16, 64, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(64, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.out = nnx.Linear(64, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(self.dropout(nnx.relu(self.norm(self.inner(x)))))

    def lay(path: Any, value: Any) -> Any:
        is_inner = "inner" in jax.tree_util.keystr(path) and value.ndim == 2
        spec = PartitionSpec(None, "model") if is_inner else PartitionSpec()
        return jax.device_put(value, NamedSharding(on, spec))

    model = Net(nnx.Rngs(0))
    state = nnx.state(model)
    nnx.update(model, jax.tree_util.tree_map_with_path(lay, state))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Net, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    rows = NamedSharding(on, PartitionSpec("data"))
    losses = [step(model, optimizer, *_batch(key, rows)) for key in range(5)]
    return {
        "losses": losses,
        "mean": model.norm.mean.get_value(),
        "laid": str(model.inner.kernel.get_value().sharding.spec),
    }


def linen_trains() -> Any:
    on = mesh(4, 2)

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
            x = linen.relu(linen.Dense(64, kernel_init=init)(x))
            x = linen.Dropout(0.1, deterministic=False)(linen.LayerNorm()(x))
            return linen.Dense(1)(x)

    model, optimizer = Net(), optax.sgd(0.05, momentum=0.9)

    def make() -> Any:
        params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((1, 16)))
        return params, optimizer.init(params)

    specs = linen.get_partition_spec(jax.eval_shape(make))
    laid = jax.tree.map(lambda spec: NamedSharding(on, spec), specs)
    params, state = jax.jit(make, out_shardings=laid)()

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((model.apply(params, x, rngs={"dropout": key}) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rows = NamedSharding(on, PartitionSpec("data"))
    losses = []
    for number in range(5):
        params, state, loss = step(params, state, jax.random.key(number), *_batch(number, rows))
        losses.append(loss)
    return {"losses": losses, "bias": params["params"]["Dense_1"]["bias"]}


CHECKS = (nnx_trains, linen_trains)
