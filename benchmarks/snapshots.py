"""Snapshots in host memory: what they cost a training that goes on, and how fast they are."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.measure import Figures, Row, local_runtime, rows, run_workload, workload

_GIB = 1 << 30
_NUM_ARRAYS = 8
_EVERY_STEPS = 20
_TIMEOUT_S = 120.0


@workload
def snapshots_in_training(num_bytes: int, cycles: int, step_s: float) -> Figures:
    """Train with a state of ``num_bytes`` and without snapshots, then with one in 20 steps, cycle by cycle in turns.

    A step writes the whole state anew and computes for about ``step_s`` besides. Seconds per step, the speed of a
    copy while nothing else goes on, in bytes per second: medians.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from slurm_pathways.elastic.policy import Snapshots
    from slurm_pathways.elastic.slices import Slices
    from slurm_pathways.elastic.snapshots import HostSnapshots

    slices = Slices()
    mesh = slices.mesh(slices.all)
    rows_of, everywhere = NamedSharding(mesh, P("device")), NamedSharding(mesh, P())
    shape = (1024, num_bytes // _NUM_ARRAYS // 4 // 1024)
    state = jax.jit(
        lambda: {"weights": [jnp.full(shape, i, jnp.float32) for i in range(_NUM_ARRAYS)], "work": jnp.eye(256)},
        out_shardings={"weights": [rows_of] * _NUM_ARRAYS, "work": everywhere},
    )()

    def step(state: dict[str, Any], num_products: Any) -> dict[str, Any]:
        work = jax.lax.fori_loop(0, num_products, lambda _, x: x @ x, state["work"])
        return {"weights": [weight + work[0, 0] for weight in state["weights"]], "work": work}

    train = jax.jit(step, donate_argnums=0)

    def steps(state: dict[str, Any], num_products: int, count: int) -> tuple[dict[str, Any], float]:
        started_s = time.perf_counter()
        for _ in range(count):
            state = train(state, num_products)
            jax.block_until_ready(state)
        return state, time.perf_counter() - started_s

    state, _ = steps(state, 1, 2)
    state, empty_s = steps(state, 1, 5)
    state, full_s = steps(state, 201, 5)
    num_products = max(1, int((step_s - empty_s / 5) / ((full_s - empty_s) / 1000)))

    snapshots = HostSnapshots(Snapshots(replicas=1), slices)
    all_slices = tuple(sorted(slices.all))

    def complete(number: int) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while snapshots.newest_step() != number:
            assert time.monotonic() < deadline_s, f"snapshot {number} is not complete after {_TIMEOUT_S:g} s"
            time.sleep(0.001)

    without: list[float] = []
    with_snapshot: list[float] = []
    copying: list[float] = []
    number = 0
    for cycle in range(cycles + 1):
        state, plain_s = steps(state, num_products, _EVERY_STEPS)
        started_s = time.perf_counter()
        number += 1
        assert snapshots.take(number, state, all_slices)
        state, _ = steps(state, num_products, _EVERY_STEPS)
        taken_s = time.perf_counter() - started_s
        complete(number)
        # And once more with nothing else to do.
        number += 1
        started_s = time.perf_counter()
        assert snapshots.take(number, state, all_slices)
        complete(number)
        if cycle:
            without.append(plain_s / _EVERY_STEPS)
            with_snapshot.append(taken_s / _EVERY_STEPS)
            copying.append(num_bytes / (time.perf_counter() - started_s))
    snapshots.close()
    return {
        "without_s": statistics.median(without),
        "with_s": statistics.median(with_snapshot),
        "bytes_per_s": statistics.median(copying),
    }


@rows(27)
def snapshots() -> Iterator[Row]:
    """1 GiB on one host, 8 arrays, kept in that host's memory."""
    with local_runtime(num_slices=1, hosts_per_slice=1, devices_per_host=2) as runtime:
        taken = run_workload("snapshots_in_training", runtime.environment(), num_bytes=_GIB, cycles=5, step_s=0.25)
    yield Row(
        "a snapshot of 1 GiB per host to its memory every 20 steps: what it adds to a step",
        "%",
        100 * (taken["with_s"] / taken["without_s"] - 1),
        at_least=10,
        smaller_is_better=True,
        remarks=f"{taken['without_s']:.3f} s a step without",
    )
    yield Row(
        "the same, warm and with nothing else going on",
        "GB/s",
        taken["bytes_per_s"] / 1e9,
        at_least=4,
    )
