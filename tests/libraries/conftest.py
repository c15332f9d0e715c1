"""One runtime for all libraries, and plain JAX to compare it with."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime
from tests.runtimes import shared_by_tests

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "e2e")]

from client_programs import plain_environment  # noqa: E402
from running import RunChecks, run_checks  # noqa: E402


@pytest.fixture(scope="session")
def gs_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``gs://`` is to the runtime."""
    return tmp_path_factory.mktemp("gs")


@pytest.fixture(scope="session")
def library_runtime(tmp_path_factory: pytest.TempPathFactory, gs_directory: Path) -> Iterator[LocalRuntime]:
    """2 slices x 2 hosts x 2 CPU devices."""
    spec = RuntimeSpec(num_slices=2, hosts_per_slice=2, devices_per_host=2, gs_directory=gs_directory)
    yield from shared_by_tests(tmp_path_factory, spec)


@pytest.fixture(scope="session")
def checks_here(library_runtime: LocalRuntime) -> RunChecks:
    """Runs checks on the runtime."""
    return lambda *libraries, **options: run_checks(library_runtime.environment(), *libraries, **options)


@pytest.fixture(scope="session")
def checks_on_plain_jax() -> RunChecks:
    """Runs checks on 8 CPU devices of one process."""
    return lambda *libraries, **options: run_checks(plain_environment(), *libraries, **options)
