"""``device_put`` of every kind, and the other ways to make a global array."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

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
    ramp,
    sharded,
)
from value_checks.registry import EXACT, Returned, add, check


def _places() -> dict[str, NamedSharding | SingleDeviceSharding]:
    """Shardings of a (24, 8) array. Every pair of them is a reshard."""
    return {
        "rows": sharded(mesh_1d(), "x"),
        "columns": sharded(mesh_1d(), None, "x"),
        "everywhere": sharded(mesh_1d()),
        "blocks": sharded(mesh_2d(), "x", "y"),
        "half_replicated": sharded(mesh_2d(), None, "y"),
        "shuffled": sharded(mesh_of(SHUFFLED), "x"),
        "first_slice": sharded(mesh_of(FIRST_SLICE), "x"),
        "second_slice": sharded(mesh_of(SECOND_SLICE), None, "x"),
        "second_slice_everywhere": sharded(mesh_of(SECOND_SLICE)),
        "one_per_host": sharded(mesh_of(ONE_PER_HOST, (2, 2), ("x", "y")), "y", "x"),
        "odd": sharded(mesh_of(ODD), "x"),
        "device_0": SingleDeviceSharding(jax.devices()[0]),
        "device_7": SingleDeviceSharding(jax.devices()[7]),
    }


def _from(name: str) -> Returned:
    places = _places()
    source = jax.device_put(ramp(24, 8), places[name])
    computed = jax.jit(lambda x: x + 0.5)(source)
    return {to: jax.device_put(computed, place) for to, place in places.items()}


for _name in [
    "rows",
    "columns",
    "everywhere",
    "blocks",
    "half_replicated",
    "shuffled",
    "first_slice",
    "second_slice",
    "second_slice_everywhere",
    "one_per_host",
    "odd",
    "device_0",
    "device_7",
]:
    add(f"device_put_from_{_name}", functools.partial(_from, _name), EXACT)


@check(EXACT)
def device_put_of_host_arrays() -> Returned:
    return {name: jax.device_put(ramp(24, 8), place) for name, place in _places().items()}


@check(EXACT)
def device_put_of_uncommitted_arrays() -> Returned:
    x = jnp.asarray(ramp(24, 8))
    return x, {name: jax.device_put(x, place) for name, place in _places().items()}


@check(EXACT)
def device_put_to_devices() -> Returned:
    devices = jax.devices()
    x = jax.device_put(ramp(8, 2), devices[2])
    wide = jax.device_put(ramp(8, 2), sharded(mesh_1d(), "x"))
    return [jax.device_put(x, d) for d in devices], jax.device_put(wide, devices[3]), jax.device_put(x)


@check(EXACT)
def device_put_of_trees() -> Returned:
    mesh = mesh_1d()
    tree = {"a": jax.device_put(ramp(8, 8), sharded(mesh, "x")), "b": [ramp(8), 3.0], "c": jnp.int8(2)}
    same = jax.device_put(tree, sharded(mesh))
    each = jax.device_put(
        tree, {"a": sharded(mesh, None, "x"), "b": [sharded(mesh_of(ODD)), sharded(mesh)], "c": sharded(mesh)}
    )
    return same, each


@check(EXACT)
def device_put_keeps_what_it_need_not_move() -> Returned:
    s = sharded(mesh_1d(), "x")
    x = jax.device_put(ramp(8), s)
    return jax.device_put(x, s) is x, jax.device_put(x, s, may_alias=False) is x, jax.device_put(x, s, may_alias=False)


@check(EXACT)
def weak_types_survive_a_move() -> Returned:
    weak = jax.jit(lambda: 1.5)()
    mesh = mesh_1d()
    moved = jax.device_put(weak, sharded(mesh))
    again = jax.device_put(moved, sharded(mesh_of(SECOND_SLICE)))
    return weak, moved, again, again + jnp.ones((), jnp.bfloat16)


@check(EXACT)
def device_put_donating() -> Returned:
    mesh = mesh_1d()
    x = jax.device_put(ramp(8, 8), sharded(mesh, "x"))
    y = jax.device_put(x, sharded(mesh_of(SHUFFLED), "x"), donate=True)
    z = jax.device_put(y, sharded(mesh, None, "x"), donate=True)
    return jax.device_put(z, sharded(mesh_of(FIRST_SLICE), "x"), donate=True)


@check(EXACT)
def device_put_inside_a_program() -> Returned:
    mesh = mesh_1d()
    x = jax.device_put(ramp(8, 8), sharded(mesh, "x"))
    return jax.jit(lambda x: jax.device_put(x * 2, sharded(mesh, None, "x")) + 1)(x)


@check(EXACT)
def host_memory_and_back() -> Returned:
    mesh = mesh_1d()
    results = []
    for kind in ("pinned_host", "unpinned_host"):
        x = jax.device_put(ramp(8, 4), sharded(mesh, "x"))
        parked = jax.device_put(x, sharded(mesh, "x", memory_kind=kind))
        fresh = jax.device_put(ramp(8, 4), sharded(mesh, memory_kind=kind))
        resharded = jax.device_put(parked, sharded(mesh_of(FIRST_SLICE), None, "x", memory_kind=kind))
        back = jax.device_put(parked, sharded(mesh, "x"))
        elsewhere = jax.device_put(resharded, sharded(mesh_of(SECOND_SLICE), "x"))
        results.append((parked, fresh, resharded, back, elsewhere, jax.jit(lambda x: x + 1)(back)))
    return results


@check(EXACT)
def host_memory_of_one_device() -> Returned:
    place = SingleDeviceSharding(jax.devices()[6], memory_kind="pinned_host")
    x = jax.device_put(ramp(5), place)
    return x, jax.device_put(x, SingleDeviceSharding(jax.devices()[6])), jax.device_put(jnp.arange(3), place)


@check(EXACT)
def arrays_from_callbacks() -> Returned:
    host = ramp(24, 8)
    return {name: jax.make_array_from_callback((24, 8), place, lambda i: host[i]) for name, place in _places().items()}


@check(EXACT)
def arrays_from_single_device_arrays() -> Returned:
    s = sharded(mesh_of(SHUFFLED), "x")
    by_id = {d.id: d for d in jax.devices()}
    pieces = [jax.device_put(ramp(1, 3) + 10 * i, by_id[i]) for i in SHUFFLED]
    whole = jax.make_array_from_single_device_arrays((NUM_DEVICES, 3), s, pieces)
    return whole, jax.make_array_from_process_local_data(s, ramp(NUM_DEVICES, 3)), jax.jit(lambda x: x + 1)(whole)


@check(EXACT)
def shards_as_arrays() -> Returned:
    x = jax.device_put(ramp(8, 4), sharded(mesh_2d(), "x", "y"))
    return [s.data for s in x.addressable_shards], x.addressable_data(5), x.addressable_shards[2].data * 2


@check(EXACT)
def slices_of_sharded_arrays() -> Returned:
    x = jax.device_put(ramp(8, 4), sharded(mesh_1d(), "x"))
    return x[3], x[2:6], x[:, 1], list(x)[7], x.reshape(32)[5], jax.device_get(x), np.asarray(x[::3])


@check(EXACT)
def chain_of_moves_without_a_wait() -> Returned:
    x = jax.device_put(ramp(24, 8), sharded(mesh_1d(), "x"))
    step = jax.jit(lambda x: x + 1)
    for place in itertools.islice(itertools.cycle(_places().values()), 26):
        x = step(jax.device_put(x, place))
    return x


@check(EXACT)
def large_arrays_move_whole() -> Returned:
    """Several MiB: chunked on every way that they take. Only a digest of the values is kept."""
    host = np.random.default_rng(0).integers(0, 1 << 30, (1024, 2048), dtype=np.int32)
    x = jax.device_put(host, sharded(mesh_1d(), "x"))
    moved = jax.device_put(x, sharded(mesh_of(SECOND_SLICE), None, "x"))
    digest = jax.jit(lambda x: (x * (1 + jnp.arange(2048, dtype=jnp.int32))).sum())
    return bool((np.asarray(moved) == host).all()), digest(x), digest(moved)


@check(EXACT)
def fetching_early_and_often() -> Returned:
    x = jax.device_put(ramp(8, 8), sharded(mesh_1d(), None, "x"))
    y = jax.jit(lambda x: x * 3)(x)
    y.copy_to_host_async()
    return np.asarray(y), np.asarray(y), y.tolist() == (ramp(8, 8) * 3).tolist(), jax.device_get([x, y])
