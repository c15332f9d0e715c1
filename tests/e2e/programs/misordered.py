"""Two processes of plain multi-process JAX that enqueue F = psum(x) and G = psum(3x) in opposite orders, or in one.

The negative control of the order test: this is what becomes of the values when nobody keeps the order.
"""

import functools
import json
import os
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def main() -> None:
    """``misordered COORDINATOR RANK same|opposite``; prints F and G as this process sees them."""
    coordinator, rank, order = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.distributed.initialize(coordinator, 2, rank)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    place = NamedSharding(mesh, P("x"))
    host = np.arange(4, dtype=np.float32)[:, None]
    x = jax.make_array_from_callback(host.shape, place, lambda index: host[index])
    on_mesh = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P())
    f = jax.jit(on_mesh(lambda x: jax.lax.psum(x, "x"))).lower(x).compile()
    g = jax.jit(on_mesh(lambda x: jax.lax.psum(3 * x, "x"))).lower(x).compile()
    # Connects the processes, in one order.
    jax.block_until_ready(f(x))
    if order == "opposite" and rank == 1:
        sum_g, sum_f = g(x), f(x)
    else:
        sum_f, sum_g = f(x), g(x)
    values = [float(np.asarray(value.addressable_shards[0].data)[0, 0]) for value in (sum_f, sum_g)]
    print(json.dumps(values), flush=True)
    # After an opposite order the processes do not agree on anything any more, the end included.
    os._exit(0)


if __name__ == "__main__":
    main()
