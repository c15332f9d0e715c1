"""Programs over several hosts, against plain multi-process JAX, which has no controller to pay for."""

import functools
from collections.abc import Iterator

from benchmarks.measure import (
    Figure,
    Figures,
    Row,
    clean_environment,
    local_runtime,
    median_of,
    rows,
    run_workload,
    seconds,
    workload,
)
from benchmarks.plain_multiprocess import run_on_processes
from benchmarks.sleep_program import sleep, with_sleep
from pathways_runtime.worker.private_sockets import PLAIN_VARIABLE

#: A chain is as good as plain JAX's when it runs at this part of its speed.
BREAK_EVEN_RATIO = 0.95
DURATIONS_MS = (0.25, 0.5, 1.0, 1.5, 2.3, 4.0, 8.0)


@workload
def chain_of_psums(num_calls: int = 200, repeats: int = 5) -> Figures:
    """Dependent psums of 64 bytes per device over all devices; calls per second."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("x",))
    place = NamedSharding(mesh, P("x"))
    host = np.ones((len(devices), 16), np.float32)
    x = jax.make_array_from_callback(host.shape, place, lambda index: host[index])

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def step(x: jax.Array) -> jax.Array:
        return x + jax.lax.psum(x, "x") * 0 + 1

    done = 0

    def chain() -> None:
        nonlocal x, done
        for _ in range(num_calls):
            x = step(x)
        jax.block_until_ready(x)
        done += num_calls

    duration_s = median_of(repeats, lambda: seconds(chain))
    value = np.asarray(x.addressable_shards[0].data)
    assert (value == done + 1).all(), f"{done} calls gave {value}"
    return {"calls_per_s": num_calls / duration_s}


@workload
def all_reduces(num_bytes: int = 64 << 20, repeats: int = 15) -> Figures:
    """Sums of so many bytes of each device over all devices, and of 64 bytes, each waited for; seconds."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("x",))
    place = NamedSharding(mesh, P("x"))
    total = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x")))

    def duration_s(size: int, repeats: int) -> float:
        row = np.arange(size // 4, dtype=np.float32) % 1000
        x = jax.make_array_from_callback((len(devices), row.size), place, lambda index: row[None] + index[0].start)
        taken_s = median_of(repeats, lambda: seconds(lambda: jax.block_until_ready(total(x))))
        value = np.asarray(total(x).addressable_shards[0].data)[0]
        right = len(devices) * row + sum(range(len(devices)))
        assert (value == right).all(), f"the sum of {size} bytes is wrong"
        return taken_s

    return {"large_s": duration_s(num_bytes, repeats), "small_s": duration_s(64, 20 * repeats)}


@workload
def chains_of_known_duration(durations_ms: list[float], num_calls: int = 60, repeats: int = 5) -> Figures:
    """Dependent programs over all devices that take a known time without using the processor; calls per second by
    duration. They have no collective in them: gloo's own time is not what is asked for."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("x",))
    place = NamedSharding(mesh, P("x"))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def step(x: jax.Array) -> jax.Array:
        return x * 0 + sleep(jnp.ravel(x)[0])

    figures = {}
    for duration_ms in durations_ms:
        host = np.full((len(devices), 1), duration_ms / 1e3, np.float32)
        x = jax.make_array_from_callback(host.shape, place, lambda index, host=host: host[index])

        def chain(x: jax.Array = x) -> None:
            for _ in range(num_calls):
                x = step(x)
            jax.block_until_ready(x)

        figures[str(duration_ms)] = num_calls / median_of(repeats, lambda: seconds(chain))
    return figures


@rows(3)
def psum_across_slices() -> Iterator[Row]:
    """The chain of gloo's smallest sum."""
    with local_runtime(2, 2, 2) as runtime:
        ours = run_workload("chain_of_psums", runtime.environment())["calls_per_s"]
    plain = run_on_processes("chain_of_psums", num_processes=4, devices_per_process=2)["calls_per_s"]
    yield Row(
        "dependent tiny psum over 2 slices x 2 hosts x 2 devices",
        "% of plain multi-process JAX",
        100 * ours / plain,
        at_least=80,
        aim=100,
        remarks=f"{ours:.0f} calls/s, plain {plain:.0f}",
    )


@rows(12)
def all_reduce_on_one_machine() -> Iterator[Row]:
    """Executors of one machine compute together through Unix sockets; without the library, gloo makes TCP of it."""
    measured = {}
    for name, environ in (("sockets", {}), ("tcp", {PLAIN_VARIABLE: "1"})):
        with local_runtime(1, 4, 1, environ=environ) as runtime:
            measured[name] = run_workload("all_reduces", runtime.environment())
    yield all_reduce_row("4 hosts of one machine, through Unix sockets", measured["sockets"], measured["tcp"])


def all_reduce_row(where: str, ours: Figures, plain: Figures, also: tuple[Figure, ...] = (), remarks: str = "") -> Row:
    """A row of ``all_reduces``, beside what gloo's own TCP gives."""
    small = f"64 bytes: {1e3 * ours['small_s']:.2f} ms, gloo's TCP {1e3 * plain['small_s']:.2f}"
    return Row(
        f"all-reduce of 64 MiB a device, {where}",
        "ms",
        1e3 * ours["large_s"],
        smaller_is_better=True,
        compared=(Figure("gloo's plain TCP", 1e3 * plain["large_s"]), *also),
        remarks=f"{small}{remarks}",
    )


@rows(5)
def break_even() -> Iterator[Row]:
    """The shortest program for which a chain is as fast as without a controller."""
    environ = with_sleep(clean_environment())
    durations = list(DURATIONS_MS)
    with local_runtime(1, 4, 1, environ=environ) as runtime:
        ours = run_workload("chains_of_known_duration", runtime.environment(), durations_ms=durations)
    plain = run_on_processes(
        "chains_of_known_duration", num_processes=4, devices_per_process=1, environ=environ, durations_ms=durations
    )
    ratios = {duration: ours[str(duration)] / plain[str(duration)] for duration in durations}
    yield Row(
        "break-even: duration of a step at which a chain reaches 95 % of plain multi-process JAX, 4 hosts",
        "ms",
        break_even_ms(ratios),
        at_least=2.3,
        aim=1.0,
        smaller_is_better=True,
        compared=(Figure("the Pathways paper at 16 hosts", 2.3),),
        remarks=", ".join(f"{duration:g} ms: {ratio:.0%}" for duration, ratio in ratios.items()),
    )


def break_even_ms(ratios: dict[float, float]) -> float:
    """Where the ratio reaches ``BREAK_EVEN_RATIO`` for good, between two measured durations; infinity if nowhere."""
    reached = float("inf")
    previous: tuple[float, float] | None = None
    for duration, ratio in sorted(ratios.items(), reverse=True):
        if ratio < BREAK_EVEN_RATIO:
            if previous is not None:
                above_duration, above_ratio = previous
                part = (BREAK_EVEN_RATIO - ratio) / (above_ratio - ratio)
                reached = duration + part * (above_duration - duration)
            break
        reached, previous = duration, (duration, ratio)
    return reached
