"""Runtimes in which hosts die."""

import shutil
from collections.abc import Callable, Iterator

import pytest

from slurm_pathways.launch.local import LocalRuntime


@pytest.fixture
def start_dying(start_runtime: Callable[..., LocalRuntime]) -> Iterator[Callable[..., LocalRuntime]]:
    """Starts a runtime of 2 slices x 2 hosts x 1 CPU device, and spares; its logs, which losses leave, are removed."""
    started: list[LocalRuntime] = []

    def start(num_spares: int) -> LocalRuntime:
        started.append(start_runtime(num_slices=2, hosts_per_slice=2, devices_per_host=1, num_spares=num_spares))
        return started[-1]

    yield start
    for runtime in started:
        runtime.close()
        if runtime.kept_logs is not None:
            shutil.rmtree(runtime.kept_logs.parent)
