"""Does what lines on stdin ask for, on two slices of which the first loses hosts; answers with a JSON line each."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

#: Longer than anything here may take; who waits for the answer has a time limit too.
DEADLINE_S = 60.0
#: A compilation that takes longer than a heartbeat may.
LONG_S = 9.0
CONTENTS = np.arange(8, dtype=np.float32)


def sharded(devices: list[jax.Device]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))


class Slices:
    """Functions are jitted once: the same ones must work again after a loss."""

    def __init__(self) -> None:
        everywhere = jax.devices()
        self.first, self.second, self.both = (
            sharded([device for device in everywhere if device.slice_index in indices])
            for indices in ((0,), (1,), (0, 1))
        )
        self.step = {
            where: jax.jit(lambda x: x + x.sum(), out_shardings=where) for where in (self.first, self.second, self.both)
        }
        self.allocate = jax.jit(lambda x: jnp.ones((256 << 20,), jnp.float32) * x[0], out_shardings=self.first)
        self.fill()
        #: Made before anything is lost.
        self.kept = self.step[self.second](self.x[self.second])

    def fill(self) -> None:
        self.x = {where: jax.device_put(CONTENTS, where) for where in self.step}

    def values(self, where: NamedSharding) -> list[float]:
        return np.asarray(self.step[where](self.x[where])).tolist()

    def until_lost(self) -> dict[str, Any]:
        """Step on the first slice until that fails: how, and after how long."""
        return self._until_failure(lambda: self.values(self.first))

    def until_collective_lost(self) -> dict[str, Any]:
        """As ``until_lost``, with many collectives over both slices in flight."""
        started_s = time.monotonic()
        flying = [self.step[self.both](self.x[self.both]) for _ in range(20)]
        answer = self._until_failure(lambda: self.values(self.both))
        failures = []
        for array in flying:
            try:
                array.block_until_ready()
            except jax.errors.JaxRuntimeError as failure:
                failures.append(str(failure))
        return {**answer, "freed_after_s": time.monotonic() - started_s, "in_flight": sorted(set(failures))}

    def until_too_large(self) -> dict[str, Any]:
        """Allocate 1 GiB on each host of the first slice."""
        return self._until_failure(lambda: self.allocate(self.x[self.first]).block_until_ready())

    def transfer(self) -> dict[str, Any]:
        """Move 32 MiB from the first slice to the second."""
        contents = np.arange(8 << 20, dtype=np.float32)
        try:
            moved = jax.device_put(jax.device_put(contents, self.first), self.second)
            return {"is_right": bool((np.asarray(moved) == contents).all())}
        except jax.errors.JaxRuntimeError as failure:
            return {"failure": str(failure)}

    def until_served(self) -> dict[str, Any]:
        """New arrays, and the same functions as ever, until those work; how they failed although arrays were there."""
        started_s = time.monotonic()
        failures: list[str] = []
        while True:
            are_there = False
            try:
                self.fill()
                jax.block_until_ready(list(self.x.values()))
                are_there = True
                values = {"first": self.values(self.first), "both": self.values(self.both)}
                return {**values, "failures": failures, "after_s": time.monotonic() - started_s}
            except jax.errors.JaxRuntimeError as failure:
                if are_there:
                    failures.append(str(failure))
                if time.monotonic() - started_s > DEADLINE_S:
                    raise
                time.sleep(0.02)

    def other(self) -> dict[str, Any]:
        """What the second slice has held since the start, and a step there."""
        return {"kept": np.asarray(self.kept).tolist(), "step": self.values(self.second)}

    def compile_for_long(self) -> dict[str, Any]:
        """A program whose compilation takes many seconds of one core: larger ones, until one takes long enough."""

        def repeated(below: Callable[[jax.Array], jax.Array], times: int) -> Callable[[jax.Array], jax.Array]:
            def function(x: jax.Array) -> jax.Array:
                for _ in range(times):
                    x = below(x)
                return x

            return jax.jit(function)

        # Traced and sent as a few functions, of which the compiler makes 80 copies.
        many: Callable[[jax.Array], jax.Array] = jax.jit(lambda x: jnp.sin(x) * 1.5 + x.sum())
        for times in (4, 4, 5):
            many = repeated(many, times)
        took_s = 0.0
        while took_s < LONG_S:
            started_s = time.monotonic()
            jax.jit(many, out_shardings=self.first).lower(self.x[self.first]).compile()
            took_s = time.monotonic() - started_s
            many = repeated(many, 2)
        return {"took_s": took_s}

    def keep(self) -> dict[str, Any]:
        """Copies of an array in the memory of the first slice's hosts, and one of one device."""
        memory = self.first.with_memory_kind("pinned_host")
        self.copies = [jax.device_put(self.x[self.first] * 2, memory), jax.device_put(CONTENTS * 3, memory)]
        self.copies.append(self.copies[0].addressable_shards[1].data)
        jax.block_until_ready(self.copies)
        return {"kept": len(self.copies)}

    def read_kept(self) -> dict[str, Any]:
        """Them, by way of the devices too."""
        on_devices = jax.device_put(self.copies[0], self.first)
        return {
            "values": [np.asarray(copy).tolist() for copy in self.copies],
            "step": np.asarray(self.step[self.first](on_devices)).tolist(),
        }

    def let_go(self) -> dict[str, Any]:
        """Of the copies."""
        self.copies.clear()
        return {}

    @staticmethod
    def _until_failure(act: Callable[[], object]) -> dict[str, Any]:
        started_s = time.monotonic()
        while time.monotonic() - started_s < DEADLINE_S:
            try:
                act()
            except jax.errors.JaxRuntimeError as failure:
                return {"failure": str(failure), "after_s": time.monotonic() - started_s}
        return {"failure": "", "after_s": time.monotonic() - started_s}


def main() -> None:
    """Until stdin ends."""
    slices = Slices()
    for where in slices.step:
        slices.values(where)
    print(json.dumps({"up": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(slices, line.strip())()), flush=True)


main()
