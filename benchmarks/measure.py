"""Rows of the table, medians, and workloads: functions that run in a process of their own, here under one environment,
there under another."""

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

#: The folder that ``python -m benchmarks`` is started from.
PROJECT = Path(__file__).resolve().parent.parent

Figures = dict[str, float]

#: A workload that takes longer has hung.
WORKLOAD_TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        name: whose it is.
        value: in the row's unit.
    """

    name: str
    value: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was done.
        unit: of ``value`` and of the figures that it is compared to.
        value: ours.
        at_least: what it must reach, in the same unit; None where there is no such figure.
        aim: what it should reach.
        smaller_is_better: durations and sizes.
        compared: the same work without us, measured in the same run.
        remarks: how to read it.
    """

    what: str
    unit: str
    value: float
    at_least: float | None = None
    aim: float | None = None
    smaller_is_better: bool = False
    compared: tuple[Figure, ...] = ()
    remarks: str = ""

    def reaches(self, goal: float | None) -> bool | None:
        """Whether the value is as good as a goal; None when there is no goal."""
        if goal is None:
            return None
        return self.value <= goal if self.smaller_is_better else self.value >= goal


Rows = Callable[[], Iterator[Row]]
#: By name: functions that measure one row or several that share a runtime.
ROWS: dict[str, "Registered"] = {}
#: By name: functions that run in a client process and return figures.
WORKLOADS: dict[str, Callable[..., Figures]] = {}


class Registered(NamedTuple):
    """What measures rows, and their place in the table. Some take long, and are measured only when they are named."""

    place: int
    measure: Rows
    only_when_named: bool


def rows(place: int, *, only_when_named: bool = False) -> Callable[[Rows], Rows]:
    """Register a function that measures rows, under its own name."""

    def register(function: Rows) -> Rows:
        ROWS[function.__name__] = Registered(place, function, only_when_named)
        return function

    return register


def ordered_rows() -> dict[str, Registered]:
    """What measures the rows, by name, in the order of the table."""
    return dict(sorted(ROWS.items(), key=lambda item: item[1].place))


def workload(function: Callable[..., Figures]) -> Callable[..., Figures]:
    """Register a function to be run by ``run_workload``, under its own name."""
    WORKLOADS[function.__name__] = function
    return function


def median_of(repeats: int, once: Callable[[], float]) -> float:
    """The median of what ``once`` returns, after one run that does not count."""
    once()
    return statistics.median(once() for _ in range(repeats))


def seconds(run: Callable[[], Any]) -> float:
    """How long ``run`` takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def run_workload(name: str, environ: Mapping[str, str], **arguments: Any) -> Figures:
    """Run a workload in a process of its own.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    command = workload_command(name, **arguments)
    result = subprocess.run(
        command, env=dict(environ), cwd=PROJECT, capture_output=True, text=True, timeout=WORKLOAD_TIMEOUT_S, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(
            f"workload {name} ended with {result.returncode}:\n{result.stdout[-500:]}{result.stderr[-3000:]}"
        )
    figures: Figures = json.loads(result.stdout.splitlines()[-1])
    return figures


def workload_command(name: str, **arguments: Any) -> list[str]:
    """The command line that runs a workload and prints its figures as the last line."""
    return [sys.executable, "-m", "benchmarks.workloads", name, json.dumps(arguments)]


def plain_environment(num_devices: int = 1) -> dict[str, str]:
    """The environment of a program under plain JAX on CPU devices, in one process."""
    environ = clean_environment()
    environ["JAX_PLATFORMS"] = "cpu"
    environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
    return environ


def clean_environment() -> dict[str, str]:
    """This process's environment without what would choose a backend."""
    chosen = ("JAX_PLATFORMS", "JAX_BACKEND_TARGET", "XLA_FLAGS")
    return {name: value for name, value in os.environ.items() if name not in chosen}


@functools.cache
def memory_copy_bytes_per_s(num_bytes: int = 256 << 20) -> float:
    """How fast this machine copies memory, pages touched before."""
    import numpy as np

    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    return num_bytes / median_of(5, lambda: seconds(lambda: np.copyto(target, source)))


@contextmanager
def local_runtime(
    num_slices: int,
    hosts_per_slice: int,
    devices_per_host: int,
    *,
    environ: Mapping[str, str] | None = None,
    over_tcp: str | None = None,
    **spec: Any,
) -> Iterator[Any]:
    """A runtime on this machine (``slurm_pathways.launch.local.LocalRuntime``).

    Args:
        over_tcp: as between hosts (``slurm_pathways.launch.over_tcp``), with this encryption of the data plane.
    """
    from slurm_pathways.config import RuntimeSpec
    from slurm_pathways.launch.local import LocalRuntime
    from slurm_pathways.launch.over_tcp import OverTcp

    shape = RuntimeSpec(
        num_slices=num_slices,
        hosts_per_slice=hosts_per_slice,
        devices_per_host=devices_per_host,
        data_plane_encryption=over_tcp or "tls",
        **spec,
    )
    inherited = clean_environment() | dict(environ or {})
    started = LocalRuntime(shape, environ=inherited) if over_tcp is None else OverTcp(shape, environ=inherited)
    with started as runtime:
        yield runtime


def table(measured: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| what | measured | at least | aim | the same without us | ratio |", "|---|---|---|---|---|---|"]
    for row in measured:
        others = "; ".join(f"{figure.name} {_number(figure.value)}" for figure in row.compared) or "-"
        ratio = "-"
        if row.compared:
            first = row.compared[0].value
            ratio = f"{row.value / first:.3g} x"
        lines.append(
            f"| {row.what}{' (' + row.remarks + ')' if row.remarks else ''} | **{_number(row.value)} {row.unit}** "
            f"| {_goal(row, row.at_least)} | {_goal(row, row.aim)} | {others} | {ratio} |"
        )
    return "\n".join(lines)


def _goal(row: Row, goal: float | None) -> str:
    reached = row.reaches(goal)
    return "-" if goal is None else f"{_number(goal)} {'reached' if reached else 'missed'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
