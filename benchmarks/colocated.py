"""What a call of a function on a host (colocated Python) costs, against the same computation on the device."""

from collections.abc import Iterator

from benchmarks.measure import Figure, Figures, Row, local_runtime, median_of, rows, run_workload, seconds, workload

_LARGE_BYTES = 64 << 20


@workload
def colocated_round_trip(num_bytes: int, num_calls: int) -> Figures:
    """Milliseconds for ``x + 1`` of an array, waited for: called on the host, and on the device."""
    import jax
    import numpy as np
    from jax.experimental import colocated_python

    device = colocated_python.colocated_cpu_devices(jax.devices())[0]
    x = jax.device_put(np.zeros(num_bytes // 4, np.float32), device)
    on_host = colocated_python.colocated_python(lambda x: x + 1)
    same = colocated_python.colocated_python(lambda x: x)
    on_device = jax.jit(lambda x: x + 1)
    for function in (on_host, on_device):
        assert float(function(x)[-1]) == 1
    # It lies in shared memory: what the host is given it need not copy, nor what comes back.
    shared = on_host(x)
    assert float(same(shared)[-1]) == 1
    return {
        name: 1e3 * median_of(num_calls, lambda f=f, x=x: seconds(lambda: jax.block_until_ready(f(x))))
        for name, f, x in (
            ("host_ms", on_host, x),
            ("device_ms", on_device, x),
            ("pass_ms", same, shared),
        )
    }


@rows(16)
def colocated() -> Iterator[Row]:
    """One device."""
    with local_runtime(1, 1, 1) as runtime:
        small = run_workload("colocated_round_trip", runtime.environment(), num_bytes=4, num_calls=300)
        large = run_workload("colocated_round_trip", runtime.environment(), num_bytes=_LARGE_BYTES, num_calls=30)
    for size, figures in (("4 bytes", small), (f"{_LARGE_BYTES >> 20} MiB", large)):
        yield Row(
            f"blocking round trip of x + 1 of {size} as colocated Python",
            "ms",
            figures["host_ms"],
            smaller_is_better=True,
            compared=(Figure("the same on the device", figures["device_ms"]),),
            remarks=f"a function that returns such an argument of an earlier call {figures['pass_ms']:.3g} ms",
        )
