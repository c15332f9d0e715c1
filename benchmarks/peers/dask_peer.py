"""Dask doing the same work: actors on four worker processes."""

import json
from typing import Any

from distributed import Client, LocalCluster

from benchmarks.measure import median_of, seconds

NUM_CALLS = 2000
NUM_ROUNDS = 100
NUM_BYTES = 256 << 20


class Worker:
    """One device."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self._jax = jax
        self._step = jax.jit(lambda x: x + 1)
        self._x = jnp.float32(0)

    def step(self) -> float:
        """One call, waited for."""
        self._x = self._jax.block_until_ready(self._step(self._x))
        return 0.0


def _make() -> Any:
    import jax.numpy as jnp

    return jnp.ones(NUM_BYTES // 4)


def _take(array: Any) -> float:
    return float(array[0])


def main() -> None:
    """Measure and print."""
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        names = sorted(client.scheduler_info()["workers"])
        workers: list[Any] = [client.submit(Worker, actor=True, workers=[name]).result() for name in names]
        for worker in workers:
            worker.step().result()
        one = workers[0]

        def chain() -> None:
            for future in [one.step() for _ in range(NUM_CALLS)]:
                future.result()

        def rounds() -> None:
            for future in [worker.step() for _ in range(NUM_ROUNDS) for worker in workers]:
                future.result()

        def move() -> float:
            made = client.submit(_make, workers=[names[0]], pure=False)
            client.submit(type, made, workers=[names[0]], pure=False).result()
            return seconds(lambda: client.submit(_take, made, workers=[names[1]], pure=False).result())

        figures = {
            "calls_per_s": NUM_CALLS / median_of(3, lambda: seconds(chain)),
            "round_trip_ms": 1e3 * median_of(200, lambda: seconds(lambda: one.step().result())),
            "rounds_per_s": NUM_ROUNDS / median_of(3, lambda: seconds(rounds)),
            "worker_to_worker_gb_per_s": NUM_BYTES / 1e9 / median_of(3, move),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
