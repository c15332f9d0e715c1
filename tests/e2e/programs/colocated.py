"""Functions on hosts (colocated Python), for what the runtime and plain JAX must agree about. Prints JSON.

Every check is a function that returns a JSON-able value; see ``checks``.
"""

import json
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import colocated_python as cp

CHECKS: dict[str, Callable[[], Any]] = {}
DEVICES = cp.colocated_cpu_devices(jax.devices())
MESH = jax.sharding.Mesh(np.array(DEVICES), ("x",))
ROWS = jax.NamedSharding(MESH, jax.P("x"))
EVERYWHERE = jax.NamedSharding(MESH, jax.P())


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def failure_of(make: Callable[[], Any]) -> str:
    """The text of what a computation fails with."""
    try:
        jax.block_until_ready(make())
    except Exception as failure:
        return str(failure)
    return "no failure"


def values(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: [str(leaf.dtype), np.asarray(leaf, np.float64).tolist()], jax.device_get(tree))


@cp.colocated_python
def add_one(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + 1, tree)


@cp.colocated_python
def same(tree: Any) -> Any:
    return tree


@check
def element_types() -> Any:
    kinds = [
        np.bool_,
        np.int8,
        np.uint16,
        np.int32,
        np.float16,
        np.float32,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
    ]
    arrays = [jax.device_put(np.arange(6).reshape(2, 3).astype(kind), DEVICES[0]) for kind in kinds]
    arrays.append(jax.device_put(np.zeros((0, 3), np.float32), DEVICES[0]))
    arrays.append(jax.device_put(np.float32(7), DEVICES[0]))
    parts = jax.device_put(np.array([1 + 2j, 3], np.complex64), DEVICES[0])
    return [values(same(arrays)), str(jax.device_get(same(parts)))]


@check
def trees_and_keywords() -> Any:
    @cp.colocated_python
    def combine(first: Any, *, factor: Any, offsets: Any) -> Any:
        return {"sum": first * factor + offsets[0], "offsets": (offsets[1], [first])}

    put = lambda value: jax.device_put(np.asarray(value, np.int32), DEVICES[1])  # noqa: E731
    return values(combine(put(3), factor=put([1, 2]), offsets=(put(10), put(20))))


@check
def arrays_over_all_devices() -> Any:
    x = jax.device_put(np.arange(16, dtype=np.float32), ROWS)
    twice = add_one(add_one(x))
    whole = add_one(jax.device_put(np.arange(3, dtype=np.int32), EVERYWHERE))
    return [values(twice), twice.sharding == ROWS, values(whole), whole.is_fully_replicated]


@check
def specialized() -> Any:
    spec = jax.ShapeDtypeStruct((4,), np.int32, sharding=jax.sharding.SingleDeviceSharding(DEVICES[3]))
    exact = add_one.specialize(in_specs=((spec,), {}), out_specs_fn=lambda x: x, devices=DEVICES[3:4])
    x = jax.device_put(np.arange(4, dtype=np.int32), DEVICES[3])

    @cp.colocated_python
    def numbers() -> Any:
        return jax.make_array_from_callback((16,), ROWS, lambda index: np.arange(16, dtype=np.int32)[index] * 3)

    made = numbers.specialize(devices=DEVICES)()
    return [values(exact(x)), values(made), made.sharding == ROWS]


@check
def other_orders_of_devices() -> Any:
    backward = jax.NamedSharding(jax.sharding.Mesh(np.array(DEVICES[::-1]), ("x",)), jax.P("x"))
    x = jax.device_put(np.arange(8, dtype=np.int32), ROWS)
    y = jax.device_put(np.arange(8, dtype=np.int32) * 10, backward)

    @cp.colocated_python
    def pairs(x: Any, y: Any) -> Any:
        of_y = {shard.device: shard.data for shard in y.addressable_shards}
        shards = [shard.data + of_y[shard.device] for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    return values(pairs.specialize(devices=DEVICES)(x, y))


@check
def strings() -> Any:
    @cp.colocated_python
    def shout(x: Any) -> Any:
        shards = []
        for shard in x.addressable_shards:
            texts = [str(text).upper() + "!" for text in jax.device_get(shard.data).reshape(-1)]
            value = np.array(texts, np.dtypes.StringDType()).reshape(shard.data.shape)
            shards.append(jax.device_put(value, shard.device))
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    texts = np.array([f"größe {i}" * i for i in range(16)], np.dtypes.StringDType()).reshape(8, 2)
    cut = shout(jax.device_put(texts, ROWS))
    moved = jax.device_put(shout(jax.device_put(texts[3], DEVICES[0])), DEVICES[7])
    return [jax.device_get(cut).tolist(), jax.device_get(shout(moved)).tolist()]


@check
def objects_keep_state() -> Any:
    @cp.colocated_python_class
    class Counter:
        def __init__(self, start: int) -> None:
            self.total = np.asarray(start)

        def add(self, x: Any) -> Any:
            self.total = self.total + np.asarray(x)
            return jax.device_put(self.total.astype(np.int32), x.sharding)

    first, second = Counter(100), Counter(200)
    one = jax.device_put(np.int32(1), DEVICES[2])
    for _ in range(3):
        first.add(one)
    return [values(first.add(one)), values(second.add(one))]


@check
def objects_end() -> Any:
    put = lambda: jax.device_put(np.int32(0), DEVICES[0])  # noqa: E731

    @cp.colocated_python_class
    class Noted:
        def __init__(self) -> None:
            cp._noted = 1

        def __del__(self) -> None:
            cp._noted = 2

        def echo(self, x: Any) -> Any:
            return x

    @cp.colocated_python
    def noted(x: Any) -> Any:
        return x + getattr(cp, "_noted", 0)

    before = values(noted(put()))
    thing = Noted()
    jax.block_until_ready(thing.echo(put()))
    alive = values(noted(put()))
    del thing
    return [before, alive, values(noted(put()))]


@check
def calls_of_a_thread_are_in_order() -> Any:
    @cp.colocated_python
    def append(x: Any) -> Any:
        cp._order = [*getattr(cp, "_order", []), int(x)]
        return x

    @cp.colocated_python
    def order(x: Any) -> Any:
        return jnp.array(cp._order) + x

    append = append.specialize(out_specs_fn=lambda x: x)
    for i in range(20):
        append(jax.device_put(np.int32(i), DEVICES[0]))
    return values(order(jax.device_put(np.int32(0), DEVICES[0])))


@check
def calls_of_threads_overlap() -> Any:
    x = jax.device_put(np.int32(1), DEVICES[0])

    @cp.colocated_python
    def prepare(x: Any) -> Any:
        cp._barrier = threading.Barrier(3)
        return x

    @cp.colocated_python
    def meet(x: Any) -> Any:
        cp._barrier.wait(timeout=60)
        return x

    jax.block_until_ready(prepare(x))
    meet = meet.specialize(out_specs_fn=lambda x: x)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(values(meet(x)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@check
def failures_have_their_text() -> Any:
    @cp.colocated_python
    def fail(x: Any) -> Any:
        raise LookupError("nothing at 17")

    x = jax.device_put(np.arange(4, dtype=np.float32), DEVICES[0])
    known = fail.specialize(out_specs_fn=lambda x: x)
    texts = [failure_of(lambda: fail(x)), failure_of(lambda: known(x))]
    return ["nothing at 17" in text for text in texts] + [values(add_one(x))]


@check
def programs_use_results() -> Any:
    x = jax.device_put(np.arange(16, dtype=np.float32), ROWS)
    step = jax.jit(lambda a, b: (a * b).sum(), out_shardings=EVERYWHERE)
    total = step(add_one(x), x)
    back = same(jax.device_put(total, DEVICES[5]))
    moved = jax.device_put(add_one(x), jax.NamedSharding(MESH, jax.P(None)))
    return [values(total), values(back), values(moved)]


@check
def random_keys() -> Any:
    @cp.colocated_python
    def split(key: Any) -> Any:
        return jax.random.split(key)

    keys = split(jax.device_put(jax.random.key(7), DEVICES[0]))
    return [str(keys.dtype), np.asarray(jax.random.key_data(keys)).tolist()]


@check
def wide_types() -> Any:
    with jax.enable_x64(True):
        x = jax.device_put(np.array([1 << 40, -1], np.int64), DEVICES[0])
        y = jax.device_put(np.array([0.1]), DEVICES[0])

        @cp.colocated_python
        def wide(x: Any, y: Any) -> Any:
            return x + 1, y / 3, jnp.zeros(1)

        return values(wide(x, y))


def run() -> dict[str, Any]:
    outcome = {}
    for name, function in CHECKS.items():
        try:
            outcome[name] = {"value": function()}
        except Exception as failure:
            outcome[name] = {"error": f"{type(failure).__name__}: {failure}"}
    return outcome


if __name__ == "__main__":
    print(json.dumps(run()))
