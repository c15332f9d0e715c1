"""Monarch doing the same work: a mesh of four actor processes on this host."""

import json
from typing import Any

from monarch.actor import Actor, endpoint, this_host

from benchmarks.measure import median_of, seconds

NUM_CALLS = 2000
NUM_ROUNDS = 300


class Worker(Actor):
    """One device."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self._jax = jax
        self._step = jax.jit(lambda x: x + 1)
        self._x = jnp.float32(0)

    @endpoint
    async def step(self) -> float:
        """One call, waited for."""
        self._x = self._jax.block_until_ready(self._step(self._x))
        return 0.0


def main() -> None:
    """Measure and print."""
    processes = this_host().spawn_procs(per_host={"workers": 4})
    workers: Any = processes.spawn("workers", Worker)
    workers.step.call().get()
    one = workers.slice(workers=0)

    def chain() -> None:
        for future in [one.step.call_one() for _ in range(NUM_CALLS)]:
            future.get()

    def rounds() -> None:
        for future in [workers.step.call() for _ in range(NUM_ROUNDS)]:
            future.get()

    figures = {
        "calls_per_s": NUM_CALLS / median_of(5, lambda: seconds(chain)),
        "round_trip_ms": 1e3 * median_of(200, lambda: seconds(lambda: one.step.call_one().get())),
        "rounds_per_s": NUM_ROUNDS / median_of(3, lambda: seconds(rounds)),
    }
    processes.stop().get()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
