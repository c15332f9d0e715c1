"""Python functions called by programs: prints what each check gave, as JSON. Plain JAX must give the same."""

import contextlib
import gc
import io
import json
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify, io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

CHECKS: dict[str, Callable[[], Any]] = {}
MESH = Mesh(np.array(jax.devices()), ("x",))
FIRST_FOUR = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def like(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def printed(function: Callable[[], Any]) -> list[str]:
    """The lines that a function and what it starts print."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        function()
        jax.effects_barrier()
    return output.getvalue().splitlines()


def double(value: Any) -> Any:
    return jax.pure_callback(lambda v: np.asarray(v) * 2, like(value), value, vmap_method="sequential")


# Unordered


@check
def debug_print() -> Any:
    def program(x: Any) -> Any:
        jax.debug.print("x={x} sum={s:.1f} {}", "said", x=x, s=x.sum())
        return x + 1

    return printed(lambda: jax.jit(program)(jnp.arange(3.0)))


@check
def debug_print_outside_of_jit() -> Any:
    return printed(lambda: jax.debug.print("{}", jnp.arange(3)))


@check
def debug_callback_in_scan_under_grad_and_vmap() -> Any:
    seen: list[float] = []

    def step(carry: Any, x: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(float(v)), carry)
        return carry * x, carry

    def loss(x: Any) -> Any:
        return jax.lax.scan(step, x, jnp.arange(1.0, 4.0))[0]

    value, slope = jax.jit(jax.value_and_grad(loss))(2.0)
    mapped = jax.jit(jax.vmap(loss))(jnp.arange(2.0))
    jax.effects_barrier()
    return float(value), float(slope), mapped.tolist(), sorted(seen)


@check
def debug_callback_of_a_sharded_operand() -> Any:
    seen: list[Any] = []
    x = jax.device_put(jnp.arange(16.0), NamedSharding(MESH, P("x")))
    jax.jit(lambda v: jax.debug.callback(lambda u: seen.append(np.asarray(u).tolist()), v))(x)
    jax.effects_barrier()
    return seen


@check
def debug_callback_in_shard_map() -> Any:
    seen: list[Any] = []

    def part(x: Any) -> Any:
        jax.debug.callback(lambda v, i: seen.append([int(i), *np.asarray(v).tolist()]), x, jax.lax.axis_index("x"))
        return jax.lax.psum(x, "x")

    x = jax.device_put(jnp.arange(16.0), NamedSharding(MESH, P("x")))
    total = jax.jit(jax.shard_map(part, mesh=MESH, in_specs=P("x"), out_specs=P()))(x)
    jax.effects_barrier()
    return total.tolist(), sorted(seen)


@check
def debug_callback_of_each_part() -> Any:
    seen: list[Any] = []
    x = jax.device_put(jnp.arange(16.0), NamedSharding(MESH, P("x")))
    jax.jit(lambda v: jax.debug.callback(lambda u: seen.append(np.asarray(u).tolist()), v, partitioned=True))(x)
    jax.effects_barrier()
    return sorted(seen)


@check
def debug_breakpoint() -> Any:
    output = io.StringIO()

    def program(x: Any) -> Any:
        y = x * 2
        jax.debug.breakpoint(num_frames=1, backend="cli", stdin=io.StringIO("p y\nc\n"), stdout=output)
        return y + 1

    return float(jax.jit(program)(jnp.float32(3))), output.getvalue()


# Pure


@check
def pure_callback_types() -> Any:
    def swap(*values: Any) -> Any:
        return tuple(np.asarray(value) for value in reversed(values))

    values = [
        jnp.arange(6).astype(dtype).reshape(2, 3)
        for dtype in (jnp.float32, jnp.int8, jnp.bfloat16, jnp.uint32, jnp.complex64, jnp.bool_, jnp.float16)
    ]
    values += [jnp.float32(3.5), jnp.zeros((0, 4), jnp.int32)]
    shapes = tuple(like(value) for value in reversed(values))
    results = jax.jit(lambda *args: jax.pure_callback(swap, shapes, *args))(*values)
    return [[str(result.dtype), result.shape, str(result.tolist())] for result in results]


@check
def pure_callback_without_operands() -> Any:
    state = {"calls": 0}

    def count() -> Any:
        state["calls"] += 1
        return np.int32(state["calls"])

    program = jax.jit(lambda: jax.pure_callback(count, jax.ShapeDtypeStruct((), jnp.int32)))
    return [int(program()), int(program()), state["calls"]]


@check
def pure_callback_of_shardings() -> Any:
    results = []
    for mesh, spec in ((MESH, P("x")), (MESH, P()), (FIRST_FOUR, P("y", "x")), (FIRST_FOUR, P(None, "x"))):
        shape = (16,) if len(spec) < 2 else (4, 4)
        x = jax.device_put(jnp.arange(16.0).reshape(shape), NamedSharding(mesh, spec))
        results.append(jax.jit(double)(x).tolist())
        results.append(jax.jit(lambda v: double(v) + v, out_shardings=NamedSharding(mesh, spec))(x).tolist())
    return results


@check
def pure_callback_in_shard_map() -> Any:
    x = jax.device_put(jnp.arange(16.0).reshape(4, 4), NamedSharding(FIRST_FOUR, P("x", "y")))
    program = jax.shard_map(double, mesh=FIRST_FOUR, in_specs=P("x", "y"), out_specs=P("x", "y"))
    return jax.jit(program)(x).tolist()


@check
def pure_callback_in_pmap() -> Any:
    return jax.pmap(double)(jnp.arange(8.0)).tolist()


@check
def pure_callback_under_vmap() -> Any:
    shapes: list[Any] = []

    def plus(x: Any, y: Any) -> Any:
        shapes.append([list(np.shape(x)), list(np.shape(y))])
        return np.asarray(x + y)

    def program(method: str) -> Any:
        def one(x: Any, y: Any) -> Any:
            return jax.pure_callback(plus, jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), x, y, vmap_method=method)

        return jax.jit(jax.vmap(one, in_axes=(0, None)))(jnp.arange(3.0), 1.0).tolist()

    return [program(method) for method in ("sequential", "broadcast_all")], shapes


@check
def pure_callback_with_custom_jvp() -> Any:
    @jax.custom_jvp
    def sine(x: Any) -> Any:
        return jax.pure_callback(lambda v: np.sin(v), like(x), x)

    @sine.defjvp
    def slope(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        return sine(x), jax.pure_callback(lambda v: np.cos(v), like(x), x) * t

    return float(jax.jit(jax.grad(sine))(jnp.float32(0.5))), float(sine(jnp.float32(0.5)))


@check
def pure_callback_in_while() -> Any:
    def body(x: Any) -> Any:
        return double(x)

    return float(jax.jit(lambda x: jax.lax.while_loop(lambda v: v < 100, body, x))(jnp.float32(3)))


@check
def large_values() -> Any:
    x = jnp.arange(1 << 20, dtype=jnp.float32)
    return float(jax.jit(double)(x).sum() / x.sum())


@check
def many_programs_share_a_function() -> Any:
    calls: list[int] = []

    def record(v: Any) -> Any:
        calls.append(int(v))
        return np.asarray(v)

    results = [
        int(jax.jit(lambda x, k=k: jax.pure_callback(record, like(x), x + k) * k)(jnp.int32(1))) for k in range(5)
    ]
    return results, calls


# Ordered


@check
def ordered_in_scan_and_cond() -> Any:
    seen: list[Any] = []

    def say(kind: str) -> Callable[[Any], None]:
        return lambda v: io_callback(lambda u: seen.append([kind, int(u)]), None, v, ordered=True)

    def step(carry: Any, _: Any) -> Any:
        say("step")(carry)
        jax.lax.cond(carry % 2 == 0, say("even"), say("odd"), carry)
        return carry + 1, io_callback(
            lambda u: np.int32(10 * u), jax.ShapeDtypeStruct((), jnp.int32), carry, ordered=True
        )

    program = jax.jit(lambda x: jax.lax.scan(step, x, None, length=3))
    results = [jax.tree.map(lambda leaf: leaf.tolist(), program(jnp.int32(start))) for start in (1, 10)]
    jax.effects_barrier()
    return results, seen


@check
def ordered_across_programs_and_devices() -> Any:
    seen: list[int] = []
    lists = [jax.device_put(jnp.int32(0), device) for device in (jax.devices()[0], jax.devices()[-1])]
    everywhere = jax.device_put(jnp.zeros(16, jnp.int32), NamedSharding(MESH, P("x")))

    def program(x: Any, number: Any) -> Any:
        io_callback(lambda v: seen.append(int(v)), None, number + x.sum(), ordered=True)
        return x + 1

    run = jax.jit(program)
    for number in range(12):
        run((*lists, everywhere)[number % 3], number)
    jax.effects_barrier()
    return seen


@check
def ordered_prints() -> Any:
    def program(x: Any) -> None:
        for i in range(4):
            jax.debug.print("{} {}", i, x, ordered=True)

    return printed(lambda: [jax.jit(program)(jnp.int32(i)) for i in range(3)])


@check
def unordered_io_with_state() -> Any:
    generator = np.random.default_rng(3)
    draw = jax.jit(lambda x: x + io_callback(lambda: generator.integers(100, size=3).astype(np.int32), like(x)))
    return [draw(jnp.zeros(3, jnp.int32)).tolist() for _ in range(3)]


# What functions may do


@check
def functions_run_in_this_process() -> Any:
    where: list[int] = []
    x = jax.device_put(jnp.arange(16.0), NamedSharding(MESH, P("x")))
    for program, arguments in ((lambda: jax.debug.callback(lambda: where.append(os.getpid())), ()),) + 2 * (
        (lambda v: jax.debug.callback(lambda _: where.append(os.getpid()), v), (x,)),
    ):
        # Nothing comes out of them: the barrier alone says that they have ended.
        jax.jit(program)(*arguments)
        jax.effects_barrier()
    return [pid == os.getpid() for pid in where]


@check
def functions_compute_with_jax() -> Any:
    x = jax.block_until_ready(jnp.arange(8.0))
    on_devices = jax.device_put(x, jax.devices()[1])

    def norm(v: Any) -> Any:
        return np.asarray(jnp.sqrt(jnp.sum(jnp.square(v))))

    def with_other_arrays(v: Any) -> Any:
        return np.asarray(jax.jit(lambda a: (a @ a) * 2)(on_devices)) + np.asarray(norm(v))

    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return [
        round(float(jax.jit(lambda v, function=function: jax.pure_callback(function, scalar, v))(value)), 3)
        for function in (norm, with_other_arrays)
        for value in (x, on_devices, jax.device_put(x, NamedSharding(MESH, P("x"))))
    ]


@check
def functions_of_deleted_programs_are_freed() -> Any:
    freed = threading.Semaphore(0)
    num_programs = 6

    def run(offset: int, x: Any) -> Any:
        def add(v: Any) -> Any:
            return np.asarray(v) + np.float32(offset)

        weakref.finalize(add, freed.release)
        return jax.jit(lambda v: jax.pure_callback(add, like(v), v))(x)

    everywhere = jax.device_put(jnp.arange(8.0), NamedSharding(MESH, P("x")))
    results = [run(i, (jnp.float32(0), everywhere)[i % 2]) for i in range(num_programs)]
    jax.clear_caches()
    gc.collect()
    # An executor keeps the last program of each set of devices until the next one.
    jax.block_until_ready([jax.jit(lambda v: v + 1)(x) for x in (jnp.float32(0), everywhere)])
    num_freed = sum(freed.acquire(timeout=60) for _ in range(num_programs))
    return num_freed, [float(np.asarray(result).sum()) for result in results]


@check
def the_compiler_asks_how_to_partition() -> Any:
    asked: list[Any] = []

    @custom_partitioning
    def scale(v: Any) -> Any:
        return v * 3

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        asked.append([str(operands[0].sharding.spec), operands[0].shape])
        return mesh, lambda part: part * 3 + part.shape[0], result.sharding, (operands[0].sharding,)

    scale.def_partition(partition, sharding_rule="i -> i")
    x = jax.device_put(jnp.arange(16.0), NamedSharding(MESH, P("x")))
    result = jax.jit(lambda v: scale(v) + 1)(x)

    def fail(*_: Any) -> Any:
        raise ValueError("cannot be partitioned")

    scale.def_partition(fail, sharding_rule="i -> i")
    try:
        failed = str(jax.jit(lambda v: scale(v) + 2)(x))
    except jax.errors.JaxRuntimeError as error:
        failed = "failed: " + str("ValueError: cannot be partitioned" in str(error))
    return asked, result.tolist(), failed


@check
def the_compiler_tells_shardings() -> Any:
    told: list[str] = []

    def program(v: Any) -> Any:
        doubled = v.reshape(4, 4) * 2
        jax.debug.inspect_array_sharding(doubled, callback=lambda sharding: told.append(str(sharding.spec)))
        jax.debug.print("{}", doubled.sum())
        return doubled

    x = jax.device_put(jnp.arange(16.0), NamedSharding(FIRST_FOUR, P("x")))
    lines = printed(lambda: told.append(str(jax.jit(program)(x).tolist())))
    return told, lines


@check
def a_failure_has_its_text() -> Any:
    def fail(v: Any) -> Any:
        raise ValueError(f"the value {float(v)} is bad")

    found = []
    for program in (
        lambda x: jax.pure_callback(fail, like(x), x),
        lambda x: io_callback(fail, like(x), x),
        lambda x: jax.pure_callback(lambda v: np.zeros(3, np.float32), like(x), x),
    ):
        try:
            jax.block_until_ready(jax.jit(program)(jnp.float32(2.5)))
        except jax.errors.JaxRuntimeError as raised:
            text = str(raised)
            found.append(
                [text.startswith("INTERNAL: "), "ValueError: the value 2.5 is bad" in text, "Incorrect output" in text]
            )
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()
    return found, float(jax.jit(double)(jnp.float32(4)))


@check
def checkify_errors() -> Any:
    def program(x: Any) -> Any:
        checkify.check(x > 0, "{x} is not positive", x=x)
        return jnp.log(x)

    error, _ = jax.jit(checkify.checkify(program))(jnp.float32(-2))
    return error.get().splitlines()[0].split(" (")[0]


def main() -> None:
    results = {}
    for name, function in CHECKS.items():
        try:
            results[name] = {"value": function()}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
