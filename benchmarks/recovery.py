"""Hosts are lost: from the kill to the next good step on the same slice, and what the other slice notices of it."""

import json
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.measure import (
    PROJECT,
    Figures,
    Row,
    clean_environment,
    local_runtime,
    rows,
    run_workload,
    workload,
    workload_command,
)
from benchmarks.slurm import COMMAND, sandbox_of

_SHAPE = {"num_slices": 2, "hosts_per_slice": 2, "devices_per_host": 2}
#: Hosts are numbered through the slices: the second one of the first.
_HOST = 1
_TIMEOUT_S = 60.0
_NODE_KILLS = 3


class _Slices:
    """A step on each of two slices."""

    def __init__(self) -> None:
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

        self._jax, self._np = jax, np
        self.error = jax.errors.JaxRuntimeError
        halves = [[device for device in jax.devices() if device.slice_index == index] for index in (0, 1)]
        self._shardings = [NamedSharding(Mesh(np.array(half), ("x",)), P("x")) for half in halves]
        self._step = jax.jit(lambda x: x + x.sum())
        self._arrays: list[Any] = [None, None]
        for index in (0, 1):
            self.put(index)
            self.step(index)

    def put(self, index: int) -> None:
        """Give a slice its inputs anew."""
        contents = self._np.arange(8, dtype=self._np.float32)
        self._arrays[index] = self._jax.device_put(contents, self._shardings[index])

    def put_if_possible(self, index: int) -> None:
        """As ``put``; where nobody serves for the slice yet, wait a moment."""
        try:
            self.put(index)
        except self.error:
            time.sleep(0.005)

    def step(self, index: int) -> None:
        """Step, and read the result; it must be right."""
        result = self._np.asarray(self._step(self._arrays[index]))
        assert result.tolist() == [28.0 + n for n in range(8)], result

    def until_recovered(self, since_s: float, failed_s: float | None = None) -> tuple[float, float]:
        """Step on the first slice until it has failed and works again: seconds from ``since_s`` to each.

        Args:
            failed_s: when it has failed, if it has already.
        """
        while time.monotonic() < since_s + _TIMEOUT_S:
            try:
                self.step(0)
                if failed_s is not None:
                    return failed_s, time.monotonic() - since_s
            except self.error:
                failed_s = failed_s or time.monotonic() - since_s
                self.put_if_possible(0)
        raise TimeoutError(f"{_TIMEOUT_S:g} s after the kill the slice does not serve; failed after {failed_s} s")


class _Pause:
    """Steps on the second slice from a thread of its own; the longest time from one to the next."""

    def __init__(self, slices: _Slices) -> None:
        self._slices = slices
        self._is_over = threading.Event()
        self.longest_s = 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._is_over.is_set():
            self._slices.step(1)
            now_s = time.monotonic()
            self.longest_s = max(self.longest_s, now_s - last_s)
            last_s = now_s
            time.sleep(0.005)

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


@workload
def losses(controller_address: str, num_workers: int, number: int, repeats: int) -> Figures:
    """Send a host's executor a signal, so many times; seconds."""
    from slurm_pathways.launch.controller_status import ask

    def executor() -> int:
        """Once all workers are there."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            workers = ask(controller_address, 10.0)["workers"]
            if sum(worker["state"] in ("bound", "spare") for worker in workers) == num_workers:
                return next(int(worker["executor_pid"]) for worker in workers if worker["host"] == _HOST)
            assert time.monotonic() < deadline_s, [worker["state"] for worker in workers]
            time.sleep(0.05)

    slices = _Slices()
    failed, again = [], []
    pause = _Pause(slices)
    try:
        for _ in range(repeats):
            pid = executor()
            since_s = time.monotonic()
            os.kill(pid, number)
            failed_s, again_s = slices.until_recovered(since_s)
            failed.append(failed_s)
            again.append(again_s)
    finally:
        pause.stop()
    return {
        "failed_median_s": statistics.median(failed),
        "failed_worst_s": max(failed),
        "again_median_s": statistics.median(again),
        "again_worst_s": max(again),
        "pause_s": pause.longest_s,
    }


def _losses(num_spares: int, number: int, repeats: int) -> Figures:
    with local_runtime(**_SHAPE, num_spares=num_spares) as runtime:
        return run_workload(
            "losses",
            runtime.environment(),
            controller_address=runtime.controller_address,
            num_workers=runtime.spec.num_hosts,
            number=number,
            repeats=repeats,
        )


@rows(25)
def recovery() -> Iterator[Row]:
    """2 slices x 2 hosts x 2 devices on this machine."""
    repeats = 10
    spare, alone = _losses(1, signal.SIGKILL, repeats), _losses(0, signal.SIGKILL, repeats)
    for what, taken in (("a spare", spare), ("the same worker", alone)):
        for which, goal in (("median", 2.0), ("worst", 5.0)):
            yield Row(
                f"kill -9 of an executor, to the next good step on its slice, with {what}: {which} of {repeats}",
                "s",
                taken[f"again_{which}_s"],
                at_least=goal,
                smaller_is_better=True,
                remarks=f"DATA_LOSS after {taken[f'failed_{which}_s']:.3f} s",
            )
    stopped = _losses(1, signal.SIGSTOP, 3)
    yield Row(
        "SIGSTOP of an executor, to DATA_LOSS at the client: worst of 3",
        "s",
        stopped["failed_worst_s"],
        at_least=10,
        smaller_is_better=True,
        remarks=f"next good step after {stopped['again_median_s']:.2f} s",
    )
    yield Row(
        "longest pause of the other slice in all of these",
        "s",
        max(taken["pause_s"] for taken in (spare, alone, stopped)),
        at_least=2,
        smaller_is_better=True,
    )


@workload
def steps_until_recovered() -> Figures:
    """Says "up", and steps until the first slice has been lost and works again; seconds since the last good step."""
    slices = _Slices()
    print("up", flush=True)
    good_s = time.monotonic()
    while time.monotonic() < good_s + _TIMEOUT_S:
        try:
            slices.step(0)
            good_s = time.monotonic()
        except slices.error:
            slices.put_if_possible(0)
            failed_s, again_s = slices.until_recovered(good_s, time.monotonic() - good_s)
            return {"failed_s": failed_s, "again_s": again_s}
    raise TimeoutError("nothing was lost")


@rows(26)
def recovery_slurm() -> Iterator[Row]:
    """A node of the sandbox loses its power: its network first, so that no connection ends."""
    taken = [_kill_a_node() for _ in range(_NODE_KILLS)]
    yield Row(
        f"Slurm: a node is killed, to the next good step on its slice: median of {_NODE_KILLS}",
        "s",
        statistics.median(figures["again_s"] for figures in taken),
        at_least=4,
        smaller_is_better=True,
        remarks=f"DATA_LOSS after {statistics.median(figures['failed_s'] for figures in taken):.2f} s",
    )


def _kill_a_node() -> Figures:
    """In an allocation of 5 nodes, of which Slurm takes none away."""
    shape = ["--slices", "2", "--hosts-per-slice", "2", "--devices-per-host", "2", "--spares", "1"]
    run = [COMMAND, "run", "-q", *shape, "--", *workload_command("steps_until_recovered")]
    with sandbox_of(5) as sandbox:
        program = subprocess.Popen(
            sandbox.command(["salloc", "--quiet", "--exclusive", "--no-kill", "--nodes=5", *run]),
            env=sandbox.environ(clean_environment()),
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            text=True,
        )
        with program:
            assert program.stdout is not None and program.stdout.readline() == "up\n"
            sandbox.kill_node(_HOST)
            figures: Figures = json.loads(program.stdout.read().splitlines()[-1])
        return figures
