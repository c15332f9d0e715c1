"""Ray doing the same work: actors that hold an array and run a jitted ``x + 1``, waited for inside the actor."""

import json
from typing import Any

import ray

from benchmarks.measure import median_of, seconds

NUM_CALLS = 2000
NUM_ROUNDS = 300
NUM_BYTES = 256 << 20


@ray.remote
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

    def make(self) -> None:
        """256 MiB on this worker's device."""
        self._array = self._jax.block_until_ready(self._jax.numpy.ones(NUM_BYTES // 4))

    def give(self) -> Any:
        """The array's values, which Ray puts into memory that all workers share."""
        import numpy as np

        return np.asarray(self._array)

    def take(self, array: Any) -> float:
        """Put it on this worker's device."""
        return float(self._jax.block_until_ready(self._jax.numpy.asarray(array))[0])


def main() -> None:
    """Measure and print."""
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    workers: list[Any] = [Worker.remote() for _ in range(4)]
    ray.get([worker.step.remote() for worker in workers])
    one = workers[0]
    ray.get(one.make.remote())

    def chain() -> None:
        ray.get([one.step.remote() for _ in range(NUM_CALLS)])

    def rounds() -> None:
        ray.get([worker.step.remote() for _ in range(NUM_ROUNDS) for worker in workers])

    def move() -> None:
        assert ray.get(workers[1].take.remote(one.give.remote())) == 1

    figures = {
        "calls_per_s": NUM_CALLS / median_of(5, lambda: seconds(chain)),
        "round_trip_ms": 1e3 * median_of(200, lambda: seconds(lambda: ray.get(one.step.remote()))),
        "rounds_per_s": NUM_ROUNDS / median_of(3, lambda: seconds(rounds)),
        "worker_to_worker_gb_per_s": NUM_BYTES / 1e9 / median_of(3, lambda: seconds(move)),
    }
    ray.shutdown()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
