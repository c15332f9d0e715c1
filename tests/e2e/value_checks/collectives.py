"""Collectives, over meshes inside a slice, across slices, over parts of hosts, in any order."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from value_checks.meshes import (
    FIRST_SLICE,
    NUM_DEVICES,
    ODD,
    ONE_PER_HOST,
    SECOND_SLICE,
    SHUFFLED,
    mesh_1d,
    mesh_2d,
    mesh_of,
    noise,
    ramp,
    sharded,
)
from value_checks.registry import EXACT, Returned, add, check


def _all_kinds(ids: tuple[int, ...]) -> Returned:
    mesh = mesh_of(ids)
    n = len(ids)
    x = jax.device_put(ramp(n * n, 2), sharded(mesh, "x"))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=(P(), P(), *[P("x")] * 6))
    def run(x: jax.Array) -> tuple[jax.Array, ...]:
        ring = [(i, (i + 1) % n) for i in range(n)]
        return (
            jax.lax.psum(x, "x"),
            jax.lax.pmax(x, "x"),
            jax.lax.all_gather(x, "x"),
            jax.lax.ppermute(x, "x", ring),
            jax.lax.all_to_all(x, "x", 0, 0, tiled=True),
            jax.lax.psum_scatter(x, "x", tiled=True),
            jnp.full((1,), jax.lax.axis_index("x")),
            jax.lax.pmean(x, "x") + jax.lax.pmin(x, "x") - x,
        )

    return run(x)


for _name, _ids in {
    "all": tuple(range(NUM_DEVICES)),
    "first_slice": FIRST_SLICE,
    "second_slice": SECOND_SLICE,
    "shuffled": SHUFFLED,
    "one_per_host": ONE_PER_HOST,
    "odd": ODD,
    "one_host": (4, 5),
    "one_device": (5,),
}.items():
    add(f"collectives_over_{_name}", functools.partial(_all_kinds, _ids), EXACT)


@check(EXACT)
def collectives_along_one_axis_of_two() -> Returned:
    mesh = mesh_2d()
    x = jax.device_put(ramp(8, 4), sharded(mesh, "x", "y"))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x", "y"), out_specs=(P(None, "y"), P("x"), P()))
    def run(x: jax.Array) -> tuple[jax.Array, ...]:
        return jax.lax.psum(x, "x"), jax.lax.psum(x, "y"), jax.lax.psum(x, ("x", "y"))

    return run(x)


@check(EXACT)
def psum_of_many_types() -> Returned:
    mesh = mesh_1d()
    results = []
    for dtype in (np.int8, np.uint8, np.int32, np.uint32, np.float16, ml_dtypes.bfloat16, np.float32, np.complex64):
        x = jax.device_put(ramp(NUM_DEVICES, 2).astype(dtype), sharded(mesh, "x"))
        run = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
        results.append(jax.jit(run)(x))
    return results


@check(EXACT)
def all_gather_of_many_types() -> Returned:
    mesh = mesh_1d()
    results = []
    for dtype in (np.bool_, np.int8, np.uint16, ml_dtypes.bfloat16, np.float16, np.complex64):
        x = jax.device_put((ramp(NUM_DEVICES * 2) % 3).astype(dtype), sharded(mesh, "x"))
        results.append(jax.jit(lambda x: x, out_shardings=sharded(mesh))(x))
    return results


@check()
def gradient_through_collectives() -> Returned:
    mesh = mesh_1d()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sum(jnp.tanh(x @ w)), "x")

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(noise(16, 3), noise(3, 2, seed=1))


@check()
def pmap_with_psum() -> Returned:
    x = noise(NUM_DEVICES, 3)
    return jax.pmap(lambda x: x / jax.lax.psum(x, "i"), axis_name="i")(np.abs(x) + 1)


@check(EXACT)
def pmap_in_axes_and_broadcast() -> Returned:
    f = jax.pmap(lambda x, y, n: x * y + n, in_axes=(1, None, None), static_broadcasted_argnums=2)
    return f(ramp(3, NUM_DEVICES), 2.0, 5)


@check(EXACT)
def pmap_over_one_slice_after_the_other() -> Returned:
    devices = {d.id: d for d in jax.devices()}
    results = []
    for ids in (FIRST_SLICE, SECOND_SLICE):
        run = jax.pmap(lambda x: x + 1, devices=[devices[i] for i in ids])
        results.append(run(np.full((4, 2), 99.0, np.float32)))
    return results


@check(EXACT)
def pmap_of_differently_placed_arguments() -> Returned:
    y = jax.device_put(ramp(8, 4), sharded(mesh_1d(), "x"))
    return jax.pmap(lambda a, b, c: a + b - c)(jnp.asarray(ramp(8, 4)), y, ramp(8, 4))


@check(EXACT)
def programs_of_both_slices_and_of_all_in_flight() -> Returned:
    """Nothing is waited for until the end; the programs share devices in overlapping groups."""
    meshes = [mesh_of(ids) for ids in (FIRST_SLICE, SECOND_SLICE, ONE_PER_HOST, SHUFFLED)]
    state = [jax.device_put(ramp(8), sharded(mesh, "x")) for mesh in meshes]
    steps = [
        jax.jit(jax.shard_map(lambda x: x + jax.lax.psum(x, "x") * 0 + 1, mesh=m, in_specs=P("x"), out_specs=P("x")))
        for m in meshes
    ]
    for _ in range(15):
        state = [step(x) for step, x in zip(steps, state, strict=True)]
    return state


@check(EXACT)
def a_long_chain() -> Returned:
    step = jax.jit(lambda x: x + 1)
    x = jax.device_put(np.int32(0), jax.devices()[6])
    for _ in range(500):
        x = step(x)
    return x


@check(EXACT)
def values_hop_between_slices_in_flight() -> Returned:
    first, second = sharded(mesh_of(FIRST_SLICE), "x"), sharded(mesh_of(SECOND_SLICE), "x")
    step = jax.jit(lambda x: x * 2 + 1)
    x = jax.device_put(ramp(8), first)
    for _ in range(10):
        x = step(x)
        x = step(jax.device_put(x, second))
        x = jax.device_put(x, first)
    return x % 1024


@check()
def terms_of_a_sum_that_is_not_made_yet() -> Returned:
    """Each device holds a term (``unreduced``): all of the array's shape, and of a part of it."""
    mesh = Mesh(mesh_2d().devices, ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    with jax.set_mesh(mesh):
        x, y = jax.device_put(ramp(8, 4), P("x", "y")), jax.device_put(ramp(4, 2), P("y", None))

        def product(spec: P) -> jax.Array:
            return jax.jit(lambda x, y: jnp.einsum("ab,bc->ac", x, y, out_sharding=spec))(x, y)

        rows = product(P("x", None, unreduced={"y"}))
        whole = jax.jit(lambda x: jax.lax.reduce_sum(x, [0], out_sharding=P("y", unreduced={"x"})))(x)
        terms = [shard.data for array in (rows, whole) for shard in array.addressable_shards]
        return terms, str(rows.sharding), jax.sharding.reshard(rows, P("x", None)), jax.sharding.reshard(whole, P("y"))
