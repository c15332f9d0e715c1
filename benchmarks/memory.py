"""What proxy and controller hold after many calls."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Figures, Row, local_runtime, rows, run_workload, workload

MIB = 1 << 20


@workload
def many_calls(num_calls: int) -> Figures:
    """Dependent calls on one device, waited for every thousand."""
    import jax
    import numpy as np

    step = jax.jit(lambda x: x + 1)
    x = jax.device_put(np.int32(0), jax.devices()[0])
    for call in range(num_calls):
        x = step(x)
        if call % 1000 == 999:
            jax.block_until_ready(x)
    assert int(x) == num_calls
    return {"calls": num_calls}


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} says nothing about its memory")


@rows(9)
def memory_after_many_calls() -> Iterator[Row]:
    """After a warm-up, so that growth is not the first allocation of anything."""
    warm, many = 20_000, 200_000
    with local_runtime(1, 1, 1) as runtime:
        pids = [runtime.pids()[name] for name in ("controller", "proxy-0")]
        run_workload("many_calls", runtime.environment(), num_calls=warm)
        before = [resident_bytes(pid) for pid in pids]
        run_workload("many_calls", runtime.environment(), num_calls=many)
        after = [resident_bytes(pid) for pid in pids]
    yield Row(
        "growth of proxy and controller over 200,000 calls",
        "MB",
        (sum(after) - sum(before)) / 1e6,
        at_least=20,
        smaller_is_better=True,
        remarks=f"controller {after[0] / 1e6:.0f} MB, proxy {after[1] / 1e6:.0f} MB",
    )
    yield Row("proxy and controller after 200,000 calls", "MB", sum(after) / 1e6, at_least=400, smaller_is_better=True)
