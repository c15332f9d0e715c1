"""PRNG keys, typed and raw, as values that are placed, moved and split."""

import jax
import jax.numpy as jnp

from value_checks.meshes import FIRST_SLICE, mesh_1d, mesh_of, sharded
from value_checks.registry import EXACT, Returned, check


@check()
def distributions() -> Returned:
    keys = jax.random.split(jax.random.key(7), 6)
    return [
        jax.random.normal(keys[0], (8, 2)),
        jax.random.uniform(keys[1], (5,)),
        jax.random.categorical(keys[2], jnp.zeros(7), shape=(9,)),
        jax.random.permutation(keys[3], 16),
        jax.random.bernoulli(keys[4], 0.3, (12,)),
        jax.random.randint(keys[5], (6,), 0, 100),
    ]


@check(EXACT)
def raw_keys() -> Returned:
    key = jax.random.PRNGKey(3)
    return key, jax.random.split(key, 4), jax.random.fold_in(key, 9), jax.random.bits(key, (3,))


@check(EXACT)
def typed_keys_of_each_kind() -> Returned:
    return [jax.random.split(jax.random.key(1, impl=impl), 2) for impl in ("threefry2x32", "rbg", "unsafe_rbg")]


@check(EXACT)
def keys_are_placed_and_moved() -> Returned:
    mesh, first = mesh_1d(), mesh_of(FIRST_SLICE)
    keys = jax.device_put(jax.random.split(jax.random.key(5), 8), sharded(mesh, "x"))
    moved = jax.device_put(keys, sharded(first, "x"))
    gathered = jax.device_put(moved, sharded(first))
    single = jax.device_put(gathered, jax.devices()[6])
    draw = jax.jit(jax.vmap(lambda k: jax.random.bits(k, (2,))))
    where = [sorted(d.id for d in k.devices()) for k in (keys, moved, gathered, single)]
    return keys, moved, gathered, single, draw(keys), draw(moved), draw(gathered), str(where)


@check()
def sharded_random_numbers_do_not_depend_on_the_sharding() -> Returned:
    draw = jax.jit(lambda k: jax.random.normal(k, (16, 4)), out_shardings=sharded(mesh_1d(), "x"))
    return draw(jax.random.key(0))
