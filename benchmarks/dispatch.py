"""What a call costs: asynchronous chains, blocking round trips, calls fanned out over slices, wide train steps."""

import functools
from collections.abc import Iterator
from typing import Any

from benchmarks.measure import (
    Figure,
    Figures,
    Row,
    local_runtime,
    median_of,
    plain_environment,
    rows,
    run_workload,
    seconds,
    workload,
)
from benchmarks.plain_multiprocess import run_on_processes

#: What Ray compiled graphs, the fastest peer, reach on a machine of this kind (see docs/benchmarks.md for all of them).
PEERS_CALLS_PER_S = 25_800
PEERS_ROUND_TRIP_MS = 0.4
PEERS_ROUNDS_PER_S = 6_400


@workload
def chain_of_calls(num_calls: int = 2000, repeats: int = 7) -> Figures:
    """Dependent calls of ``x + 1`` on one device, none waited for but the last; calls per second."""
    import jax
    import numpy as np

    step = jax.jit(lambda x: x + 1)
    x = jax.device_put(np.float32(0), jax.devices()[0])
    done = 0

    def chain() -> None:
        nonlocal x, done
        for _ in range(num_calls):
            x = step(x)
        jax.block_until_ready(x)
        done += num_calls

    duration_s = median_of(repeats, lambda: seconds(chain))
    assert float(x) == done, f"{done} calls gave {float(x)}"
    return {"calls_per_s": num_calls / duration_s}


@workload
def blocking_round_trip(num_calls: int = 300) -> Figures:
    """One call of ``x + 1`` and a wait for it; milliseconds."""
    import jax
    import numpy as np

    step = jax.jit(lambda x: x + 1)
    x = jax.device_put(np.float32(0), jax.devices()[0])
    for _ in range(50):
        jax.block_until_ready(step(x))
    return {"ms": 1e3 * median_of(num_calls, lambda: seconds(lambda: jax.block_until_ready(step(x))))}


@workload
def one_call_on_each(num_devices: int = 4, num_rounds: int = 500, repeats: int = 5) -> Figures:
    """A round is one dependent call on each device; rounds per second, nothing waited for but the last."""
    import jax
    import numpy as np

    step = jax.jit(lambda x: x + 1)
    xs = [jax.device_put(np.float32(0), device) for device in jax.devices()[:num_devices]]
    done = 0

    def rounds() -> None:
        nonlocal xs, done
        for _ in range(num_rounds):
            xs = [step(x) for x in xs]
        jax.block_until_ready(xs)
        done += num_rounds

    duration_s = median_of(repeats, lambda: seconds(rounds))
    assert [float(x) for x in xs] == [done] * num_devices
    return {"rounds_per_s": num_rounds / duration_s}


@workload
def wide_train_step(num_parameters: int = 200, num_steps: int = 100, repeats: int = 5) -> Figures:
    """A donating step over many small parameter arrays, sharded over all devices; steps per second."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = jax.devices()
    place = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
    host = np.zeros((len(devices), 8), np.float32)
    state = {
        f"w{i}": jax.make_array_from_callback(host.shape, place, lambda index: host[index])
        for i in range(num_parameters)
    }
    step = jax.jit(functools.partial(jax.tree.map, lambda w: w * 0.5 + 1), donate_argnums=0)

    def steps() -> None:
        nonlocal state
        for _ in range(num_steps):
            state = step(state)
        jax.block_until_ready(state)

    duration_s = median_of(repeats, lambda: seconds(steps))
    value = np.asarray(next(iter(state.values())).addressable_shards[0].data)
    assert abs(value - 2).max() < 1e-6, f"the steps gave {value}"
    return {"steps_per_s": num_steps / duration_s}


@rows(1)
def calls_on_one_device() -> Iterator[Row]:
    """One device."""
    with local_runtime(1, 1, 1) as runtime:
        ours = _both(runtime.environment())
    plain = _both(plain_environment())
    yield Row(
        "dependent calls of a tiny jit, asynchronous, 1 device",
        "calls/s",
        ours["calls_per_s"],
        at_least=3_000,
        aim=PEERS_CALLS_PER_S,
        compared=(Figure("JAX in process", plain["calls_per_s"]),),
    )
    yield Row(
        "blocking round trip of a tiny jit",
        "ms",
        ours["ms"],
        at_least=1.2,
        aim=PEERS_ROUND_TRIP_MS,
        smaller_is_better=True,
        compared=(Figure("JAX in process", plain["ms"]),),
    )


def _both(environ: dict[str, str]) -> Figures:
    return run_workload("chain_of_calls", environ) | run_workload("blocking_round_trip", environ)


@rows(2)
def calls_on_four_slices() -> Iterator[Row]:
    """Four single-host slices."""
    with local_runtime(4, 1, 1) as runtime:
        ours = run_workload("one_call_on_each", runtime.environment())
    plain = run_workload("one_call_on_each", plain_environment(4))
    yield Row(
        "one call on each of 4 single-host slices, pipelined",
        "rounds/s",
        ours["rounds_per_s"],
        at_least=1_000,
        aim=PEERS_ROUNDS_PER_S,
        compared=(Figure("JAX in one process", plain["rounds_per_s"]),),
    )


@rows(4)
def wide_train_steps() -> Iterator[Row]:
    """Many parameter arrays on one slice of two hosts."""
    with local_runtime(1, 2, 1) as runtime:
        ours = run_workload("wide_train_step", runtime.environment())
    plain: Any = run_on_processes("wide_train_step", num_processes=2, devices_per_process=1)
    yield Row(
        "a train step with 200 parameter arrays, 1 slice x 2 hosts",
        "steps/s",
        ours["steps_per_s"],
        at_least=100,
        aim=500,
        compared=(Figure("2 processes of jax.distributed", plain["steps_per_s"]),),
    )
