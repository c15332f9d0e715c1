"""One of several clients that submit collectives over overlapping meshes at the same time; checks every value.

Two programs of the same shape, F = psum(x) and G = psum(3x), are what a runtime that loses the order gets wrong without
an error: the sums of one are made of the parts of the other. Others differ in size and kind, which would abort or hang.
"""

import functools
import json
import random
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

#: Overlapping groups of the eight devices: a slice, hosts of both slices, everything, one device of each host (PJRT
#: orders launches on these by another rule than on several), two devices of one host.
GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7), (2, 3, 4, 5), tuple(range(8)), (7, 0, 3, 4), (1, 2), (6, 7))
#: How many are dispatched before their values are looked at.
WINDOW = 16


def main() -> None:
    """``gang_client SEED NUM_LAUNCHES``; prints how many values were checked, and the wrong ones."""
    seed, num_launches = int(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    devices = {device.id: device for device in jax.devices()}
    programs = [
        make(Mesh(np.array([devices[i] for i in group]), ("x",)))
        for group in GROUPS
        for make in (sum_of, triple_sum_of, large_sum_of, shifted)
    ]
    num_checked, wrong = 0, []
    in_flight: list[tuple[str, jax.Array, np.ndarray]] = []
    for launch in range(num_launches):
        run = rng.choice(programs)
        in_flight.append(run(seed * 1000 + launch))
        if len(in_flight) == WINDOW or launch == num_launches - 1:
            for name, value, expected in in_flight:
                for shard in value.addressable_shards:
                    num_checked += 1
                    if not np.array_equal(np.asarray(shard.data).ravel()[:4], expected[shard.index].ravel()[:4]):
                        wrong.append(f"{name}: {np.asarray(shard.data).ravel()[:4]}, not {expected[shard.index]}")
            in_flight.clear()
    print(json.dumps({"checked": num_checked, "wrong": wrong[:10], "num_wrong": len(wrong)}))


Run = Callable[[int], tuple[str, jax.Array, np.ndarray]]


def _collective(mesh: Mesh, size: int, name: str, body: Callable[[jax.Array], jax.Array], reference: Callable) -> Run:
    n = mesh.devices.size
    place = NamedSharding(mesh, P("x"))
    program = jax.jit(functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(body))

    def run(tag: int) -> tuple[str, jax.Array, np.ndarray]:
        host = (np.arange(n, dtype=np.int32) + tag)[:, None].repeat(size, 1)
        return f"{name} over {n}", program(jax.device_put(host, place)), reference(host)

    return run


def sum_of(mesh: Mesh) -> Run:
    """F: psum(x)."""
    return _collective(
        mesh, 4, "psum(x)", lambda x: x * 0 + jax.lax.psum(x, "x"), lambda x: x * 0 + x.sum(0, keepdims=True)
    )


def triple_sum_of(mesh: Mesh) -> Run:
    """G: psum(3x), of the same shape as F."""
    return _collective(
        mesh, 4, "psum(3x)", lambda x: x * 0 + jax.lax.psum(3 * x, "x"), lambda x: x * 0 + 3 * x.sum(0, keepdims=True)
    )


def large_sum_of(mesh: Mesh) -> Run:
    """A sum of another size."""
    return _collective(
        mesh, 30_000, "large psum(x)", lambda x: x * 0 + jax.lax.psum(x, "x"), lambda x: x * 0 + x.sum(0, keepdims=True)
    )


def shifted(mesh: Mesh) -> Run:
    """A ppermute followed by a sum: a collective of another kind."""
    n = mesh.devices.size
    ring = [(i, (i + 1) % n) for i in range(n)]

    def body(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "x", ring) + jnp.max(jax.lax.pmax(x, "x"))

    return _collective(mesh, 4, "ppermute(x)", body, lambda x: np.roll(x, 1, 0) + x.max())


if __name__ == "__main__":
    main()
