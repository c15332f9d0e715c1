"""Bytes: from worker to worker, between the client and its devices, and hidden behind computation."""

import socket
import threading
from collections.abc import Iterator

from benchmarks.measure import (
    Figure,
    Figures,
    Row,
    clean_environment,
    local_runtime,
    median_of,
    memory_copy_bytes_per_s,
    plain_environment,
    rows,
    run_workload,
    seconds,
    workload,
)
from benchmarks.sleep_program import sleep, with_sleep

NUM_BYTES = 256 << 20
MIB = 1 << 20


@workload
def worker_to_worker(num_bytes: int = NUM_BYTES, repeats: int = 5) -> Figures:
    """``device_put`` of one array from the first device to the last, which is on another host; bytes per second."""
    import jax
    import jax.numpy as jnp

    first, last = jax.devices()[0], jax.devices()[-1]
    make = jax.jit(lambda n: jnp.full((num_bytes // 4,), n, jnp.float32), device=first)
    check = jax.jit(lambda x: (x[0], x[-1], x.min(), x.max()))
    number = 0.0

    def once() -> float:
        nonlocal number
        number += 1
        source = jax.block_until_ready(make(number))
        duration_s = seconds(lambda: arrived.append(jax.block_until_ready(jax.device_put(source, last))))
        assert {float(v) for v in check(arrived.pop())} == {number}
        return duration_s

    arrived: list[jax.Array] = []
    return {"bytes_per_s": num_bytes / median_of(repeats, once)}


@workload
def client_and_back(num_bytes: int = NUM_BYTES, repeats: int = 5) -> Figures:
    """``device_put`` of a numpy array, and ``np.asarray`` of what a program made of it; bytes per second each way."""
    import jax
    import numpy as np

    host = np.arange(num_bytes // 4, dtype=np.float32)
    device = jax.devices()[0]
    negate = jax.jit(lambda x: -x)
    there = median_of(repeats, lambda: seconds(lambda: jax.block_until_ready(jax.device_put(host, device))))
    on_device = jax.device_put(host, device)

    def back() -> float:
        made = jax.block_until_ready(negate(on_device))
        values: list[np.ndarray] = []
        # A copy: in process the values are the device's own memory, and reading them is part of having them.
        duration_s = seconds(lambda: values.append(np.array(made)))
        assert values[0][1] == -1 and values[0][-1] == -host[-1]
        return duration_s

    return {"there_bytes_per_s": num_bytes / there, "back_bytes_per_s": num_bytes / median_of(repeats, back)}


@workload
def two_stages(stage_ms: float, num_bytes: int, num_microbatches: int = 16, repeats: int = 3) -> Figures:
    """Microbatches through a stage on the first slice and one on the second; seconds.

    The ideal is measured: as many runs of both stages at once on inputs that are there already, and one stage more, for
    which the second stage waits for its first input.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    by_slice = {device.slice_index: device for device in jax.devices()}
    first, second = by_slice[0], by_slice[1]
    stage = jax.jit(lambda x: x + (sleep(jnp.ravel(x)[0] * 0 + stage_ms / 1e3) * 0 + 1))
    inputs = [jax.device_put(np.full(num_bytes // 4, i, np.float32), first) for i in range(num_microbatches)]
    jax.block_until_ready(inputs)

    def step() -> None:
        results = [stage(jax.device_put(stage(x), second)) for x in inputs]
        jax.block_until_ready(results)
        # The last ones only: memory is used again, as in a training loop.
        checked[:] = [results]

    checked: list[list[jax.Array]] = []
    there = jax.block_until_ready([jax.device_put(x, second) for x in inputs])

    def step_without_transfers() -> None:
        """As many runs of either stage, on inputs that are there: what the machine needs at least."""
        jax.block_until_ready([(stage(x), stage(y)) for x, y in zip(inputs, there, strict=True)])

    duration_s = median_of(repeats, lambda: seconds(step))
    at_once_s = median_of(repeats, lambda: seconds(step_without_transfers))
    assert [float(x[0]) for x in checked[-1]] == [i + 2.0 for i in range(num_microbatches)]
    moved_s = median_of(3, lambda: seconds(lambda: jax.block_until_ready(jax.device_put(inputs[0], second))))
    return {
        "seconds": duration_s,
        "transfer_s": moved_s,
        "ideal_s": at_once_s * (num_microbatches + 1) / num_microbatches,
    }


@rows(6)
def between_workers() -> Iterator[Row]:
    """Shared memory and sockets."""
    copy = memory_copy_bytes_per_s()
    with local_runtime(1, 2, 1) as runtime:
        shared = run_workload("worker_to_worker", runtime.environment())["bytes_per_s"]
    yield Row(
        "worker to worker, 256 MiB jax.Array, shared memory",
        "GB/s",
        shared / 1e9,
        at_least=4,
        aim=0.8 * copy / 1e9,
        compared=(Figure("memcpy", copy / 1e9),),
    )
    with local_runtime(1, 2, 1, force_sockets=True) as runtime:
        sockets = run_workload("worker_to_worker", runtime.environment())["bytes_per_s"]
    raw = raw_socket_bytes_per_s()
    yield Row(
        "worker to worker, 256 MiB jax.Array, sockets",
        "GB/s",
        sockets / 1e9,
        at_least=2,
        aim=0.8 * raw / 1e9,
        compared=(Figure("raw Unix socket", raw / 1e9),),
    )
    by_encryption = {}
    for encryption in ("none", "tls"):
        with local_runtime(1, 2, 1, force_sockets=True, over_tcp=encryption) as runtime:
            by_encryption[encryption] = run_workload("worker_to_worker", runtime.environment())["bytes_per_s"]
    yield Row(
        "worker to worker, 256 MiB jax.Array, TCP and TLS as between hosts",
        "GB/s",
        by_encryption["tls"] / 1e9,
        at_least=0.75,
        aim=2,
        compared=(Figure("authenticated, not encrypted", by_encryption["none"] / 1e9),),
    )


@rows(7)
def between_client_and_device() -> Iterator[Row]:
    """Each way, with the copy that the user sees."""
    with local_runtime(1, 1, 1) as runtime:
        ours = run_workload("client_and_back", runtime.environment())
    plain = run_workload("client_and_back", plain_environment())
    for name, figure in (("client to device", "there_bytes_per_s"), ("device to client", "back_bytes_per_s")):
        yield Row(
            f"{name}, 256 MiB",
            "MiB/s",
            ours[figure] / MIB,
            at_least=400,
            aim=1024,
            compared=(Figure("JAX in process", plain[figure] / MIB),),
        )


@rows(8)
def overlap() -> Iterator[Row]:
    """The ideal is what the same stages take when nothing is transferred."""
    stage_ms, num_microbatches = 30.0, 16
    with local_runtime(2, 1, 1, environ=with_sleep(clean_environment())) as runtime:
        figures = run_workload(
            "two_stages",
            runtime.environment(),
            stage_ms=stage_ms,
            num_bytes=16 * MIB,
            num_microbatches=num_microbatches,
        )
    ideal_s = figures["ideal_s"]
    serial_s = ideal_s + num_microbatches * figures["transfer_s"]
    yield Row(
        "overlap: two stages on two slices, 16 microbatches of 16 MiB and 30 ms a stage",
        "% of the ideal",
        100 * ideal_s / figures["seconds"],
        at_least=90,
        aim=97,
        compared=(Figure("with every transfer waited for", 100 * ideal_s / serial_s),),
        remarks=f"ideal {ideal_s:.3f} s, took {figures['seconds']:.3f} s, one transfer {figures['transfer_s']:.3f} s",
    )


def raw_socket_bytes_per_s(num_bytes: int = NUM_BYTES, repeats: int = 5) -> float:
    """A thread that sends, one that receives into memory that is there already, one Unix socket between."""
    source, target = memoryview(bytearray(num_bytes)), memoryview(bytearray(num_bytes))

    def once() -> float:
        left, right = socket.socketpair()
        with left, right:
            for end in (left, right):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            sender = threading.Thread(target=left.sendall, args=(source,))

            def run() -> None:
                sender.start()
                received = 0
                while received < num_bytes:
                    received += right.recv_into(target[received:])
                sender.join()

            return seconds(run)

    return num_bytes / median_of(repeats, once)
