"""The same workload under plain multi-process JAX: ``jax.distributed``, gloo between processes, no controller."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

from benchmarks.measure import PROJECT, WORKLOAD_TIMEOUT_S, Figures, clean_environment

#: XLA's thread pool. With as few threads as cores, two devices of a process deadlock in gloo on small machines.
_NUM_THREADS = 16


def run_on_processes(
    name: str, *, num_processes: int, devices_per_process: int, environ: dict[str, str] | None = None, **arguments: Any
) -> Figures:
    """Run a workload in ``num_processes`` processes at once, every one with the same code; the first one's figures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    variables = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_per_process}",
        "NPROC": str(_NUM_THREADS),
    }
    command = [sys.executable, "-m", "benchmarks.plain_multiprocess", name, json.dumps(arguments), coordinator]
    processes = [
        subprocess.Popen(
            [*command, str(num_processes), str(rank)],
            env=clean_environment() | variables | (environ or {}),
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_processes)
    ]
    try:
        outputs = [process.communicate(timeout=WORKLOAD_TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode != 0:
            raise RuntimeError(f"workload {name}: process {rank} ended with {process.returncode}:\n{errors[-3000:]}")
    figures: Figures = json.loads(outputs[0][0].splitlines()[-1])
    return figures


def main() -> None:
    """One of the processes."""
    name, arguments, coordinator, num_processes, rank = sys.argv[1:]
    import jax

    jax.distributed.initialize(coordinator, int(num_processes), int(rank))
    from benchmarks.workloads import WORKLOADS

    print(json.dumps(WORKLOADS[name](**json.loads(arguments))), flush=True)
    jax.distributed.shutdown()
    # Gloo's threads may still hold sockets of peers that have gone; nothing is left to be cleaned up in order.
    os._exit(0)


if __name__ == "__main__":
    main()
