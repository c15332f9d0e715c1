"""Computes on all devices until something goes wrong; says ``up`` once it runs."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def main() -> None:
    """Never returns; a lost runtime shows as an exception."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    x = jax.device_put(np.ones((len(jax.devices()), 4), np.float32), NamedSharding(mesh, P("x")))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def step(x: jax.Array) -> jax.Array:
        return x * 0 + jax.lax.pmean(x, "x")

    jax.block_until_ready(step(x))
    print("up", flush=True)
    while True:
        x = step(x)
        np.asarray(x)


if __name__ == "__main__":
    main()
