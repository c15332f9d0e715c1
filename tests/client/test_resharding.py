"""Which array moves the server is asked for, and that what the user sees of the arrays is what plain JAX gives.

The "runtime" here is a CPU client of its own in this process, whose transfers are counted and made by way of the host;
another client plays the program's own CPU devices.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxlib import xla_client

from slurm_pathways.client import jax_adapter
from slurm_pathways.client.resharding import Resharder

VALUE = np.arange(64, dtype=np.float32).reshape(8, 8)


class Moves:
    """A stand-in for ReshardArrays: keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Any], list[Any], bool]] = []

    def __call__(self, arrays: Any, shardings: Any, donate: bool) -> list[Any]:
        self.asked.append((list(arrays), list(shardings), donate))
        values = [np.asarray(array) for array in arrays]
        if donate:
            for array in arrays:
                array.delete()
        return [jax.device_put(value, sharding) for value, sharding in zip(values, shardings, strict=True)]


class World:
    """Eight devices of the runtime, two of the program's own, and the moves that were asked for."""

    def __init__(self) -> None:
        self.remote = xla_client.make_cpu_client(asynchronous=True, num_devices=8)
        self.local = xla_client.make_cpu_client(asynchronous=True, num_devices=2)
        self.moves = Moves()

    def mesh(self, *ids: int, names: tuple[str, ...] = ("x",)) -> Mesh:
        devices = self.remote.devices()
        return Mesh(np.array([devices[i] for i in ids or range(8)]), names)

    def put(self, *spec: Any) -> jax.Array:
        return jax.device_put(VALUE, NamedSharding(self.mesh(), P(*spec)))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    internals = jax_adapter.load()
    object.__setattr__(internals, "transfer", world.moves)
    resharder = Resharder(internals, is_ours=lambda client: client is world.remote)
    resharder.install()
    yield world
    resharder.uninstall()


def test_a_move_between_partitionings_is_asked_of_the_server(world: World) -> None:
    x = world.put("x")
    target = NamedSharding(world.mesh(), P(None, "x"))
    y = jax.device_put(x, target)
    assert world.moves.asked == [([x], [target], False)]
    assert y.sharding == target
    assert y.committed
    np.testing.assert_array_equal(y, VALUE)


@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (3,), (6, 1)])
@pytest.mark.parametrize("spec", [(), ("x",)])
def test_other_devices(world: World, ids: tuple[int, ...], spec: tuple[str, ...]) -> None:
    target = NamedSharding(world.mesh(*ids), P(*spec))
    y = jax.device_put(world.put("x"), target)
    assert len(world.moves.asked) == 1
    assert y.sharding == target
    np.testing.assert_array_equal(y, VALUE)


def test_to_and_from_one_device(world: World) -> None:
    device = world.remote.devices()[5]
    single = jax.device_put(world.put("x"), device)
    assert single.sharding == SingleDeviceSharding(device)
    wide = jax.device_put(single, NamedSharding(world.mesh(), P("x")))
    assert len(world.moves.asked) == 2
    np.testing.assert_array_equal(single, VALUE)
    np.testing.assert_array_equal(wide, VALUE)


def test_the_same_devices_in_another_order(world: World) -> None:
    target = NamedSharding(world.mesh(7, 6, 5, 4, 3, 2, 1, 0), P("x"))
    y = jax.device_put(world.put("x"), target)
    assert len(world.moves.asked) == 1
    assert y.sharding == target
    np.testing.assert_array_equal(y, VALUE)


def test_equal_parts_are_left_to_jax(world: World) -> None:
    x = world.put("x")
    assert jax.device_put(x, x.sharding) is x
    copied = jax.device_put(x, NamedSharding(world.mesh(), P("x")), may_alias=False)
    np.testing.assert_array_equal(copied, VALUE)
    assert world.moves.asked == []


def test_arrays_of_one_source_move_together(world: World) -> None:
    target = NamedSharding(world.mesh(), P())
    kept = world.put("x")
    tree = {"a": world.put("x"), "b": world.put(None, "x"), "c": kept, "d": np.int32(3)}
    moved = jax.device_put(tree, {"a": target, "b": target, "c": kept.sharding, "d": target})
    assert [len(arrays) for arrays, _, _ in world.moves.asked] == [2]
    np.testing.assert_array_equal(moved["a"], VALUE)
    np.testing.assert_array_equal(moved["b"], VALUE)
    np.testing.assert_array_equal(moved["c"], VALUE)
    assert int(moved["d"]) == 3


def test_donation_is_passed_on(world: World) -> None:
    x = world.put("x")
    target = NamedSharding(world.mesh(), P(None, "x"))
    y = jax.device_put(x, target, donate=True)
    assert [donate for _, _, donate in world.moves.asked] == [True]
    assert x.is_deleted()
    np.testing.assert_array_equal(y, VALUE)


def test_a_deleted_array_is_an_error(world: World) -> None:
    x = world.put("x")
    x.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        jax.device_put(x, NamedSharding(world.mesh(), P()))
    assert world.moves.asked == []


def test_keys_move_as_their_words(world: World) -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(1), 8), NamedSharding(world.mesh(), P("x")))
    moved = jax.device_put(keys, NamedSharding(world.mesh(0, 1), P("x")))
    assert len(world.moves.asked) == 1
    assert moved.dtype == keys.dtype
    assert {d.id for d in moved.devices()} == {0, 1}
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


def test_weak_types_stay_weak(world: World) -> None:
    weak = jax.device_put(2.5, world.remote.devices()[0])
    moved = jax.device_put(weak, NamedSharding(world.mesh(), P()))
    assert len(world.moves.asked) == 1
    assert moved.weak_type == weak.weak_type


def test_arguments_of_jit(world: World) -> None:
    """An uncommitted argument beside one that fixes the devices goes by the server, too."""
    x = world.put("x")
    with jax.default_device(world.remote.devices()[0]):
        uncommitted = jnp.asarray(VALUE)
    assert not uncommitted.committed
    total = jax.jit(lambda a, b: a + b)(x, uncommitted)
    assert len(world.moves.asked) == 1
    np.testing.assert_array_equal(total, 2 * VALUE)


def test_the_programs_own_devices_go_by_values(world: World) -> None:
    cpu = world.local.devices()
    target = NamedSharding(Mesh(np.array(cpu), ("x",)), P("x"))
    for there in (cpu[1], target):
        for source in (world.put("x"), jax.device_put(VALUE, world.remote.devices()[2])):
            fetched = jax.device_put(source, there)
            assert fetched.devices() <= set(cpu)
            assert fetched.committed
            np.testing.assert_array_equal(fetched, VALUE)
            back = jax.device_put(fetched, NamedSharding(world.mesh(), P("x")))
            assert back.devices() == set(world.remote.devices())
            np.testing.assert_array_equal(back, VALUE)
    assert world.moves.asked == []


def test_host_arrays_that_run_backwards_are_made_dense(world: World) -> None:
    hosts = [VALUE[::-1], np.broadcast_to(VALUE[0], (8, 8)), VALUE.T, VALUE, VALUE[::2]]
    seen: list[np.ndarray] = []
    resharder = Resharder(jax_adapter.load(), is_ours=lambda client: client is world.remote)
    for devices in (world.remote.devices(), world.local.devices()):
        resharder.put_shards(lambda aval, sharding, shards, devices: seen.extend(shards), None, None, hosts, devices)
    for host, given in zip(2 * hosts, seen, strict=True):
        np.testing.assert_array_equal(given, host)
    assert [given is host for host, given in zip(hosts, seen[:5], strict=True)] == [False, False, True, True, True]
    assert [given is host for host, given in zip(hosts, seen[5:], strict=True)] == [True] * 5


def test_other_clients_are_left_alone(world: World) -> None:
    x = jax.device_put(VALUE, NamedSharding(Mesh(np.array(world.local.devices()), ("x",)), P("x")))
    y = jax.device_put(x, NamedSharding(x.sharding.mesh, P(None, "x")))
    np.testing.assert_array_equal(y, VALUE)
    assert world.moves.asked == []


def test_installing_twice_changes_nothing(world: World) -> None:
    internals = jax_adapter.load()
    handler = internals.handlers[internals.array_type]
    Resharder(internals).install()
    assert internals.handlers[internals.array_type] is handler
