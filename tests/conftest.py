"""What all tests share: options, a runtime, and checks that a test leaves nothing behind."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from slurm_pathways.config import RECORDS_VARIABLE, RUNS_VARIABLE, VARIABLE_PREFIX, RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime
from tests.folders import all_below
from tests.waiting import until

#: What ends by itself is given this long; a leak is then reported.
SETTLE_S = 5.0

# What takes long on a busy machine is no failure. Settings in test files begin from these.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--wheel",
        metavar="DIR",
        type=Path,
        help="folder with the wheel and sdist that are installed: tests/packaging looks into them",
    )


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests must not reach them."""
    for name in list(os.environ):
        if name.startswith(VARIABLE_PREFIX):
            monkeypatch.delenv(name)
    # Nor must records of theirs get among the user's own.
    monkeypatch.setenv(RECORDS_VARIABLE, "none")


@pytest.fixture
def runs_root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs for one test; short, as sockets lie in it."""
    root = tmp_path_factory.mktemp("r")
    root.chmod(0o700)
    monkeypatch.setenv(RUNS_VARIABLE, str(root))
    return root


def _children() -> dict[int, str]:
    """The living descendants of this process, by pid."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found[child.pid] = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
    return found


def _processes_of(root: Path) -> dict[int, str]:
    """Every process with the folder of runs in its command line, also when its parent has died."""
    found = {}
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if str(root) in command and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = command
        except psutil.NoSuchProcess:
            continue
    return found


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.fixture
def no_leaks(runs_root: Path) -> Iterator[None]:
    """Fails a test that leaves a process, a run folder or shared memory. Sockets lie in run folders."""
    children, shared_memory = set(_children()), _shared_memory()
    yield

    def leaks() -> list[str]:
        processes = {**_children(), **_processes_of(runs_root)}
        return [
            *(f"process {pid}: {command}" for pid, command in processes.items() if pid not in children),
            *(f"file {path}" for path in sorted(all_below(runs_root))),
            *(f"shared memory {name}" for name in sorted(_shared_memory() - shared_memory)),
        ]

    until(lambda: not leaks(), lambda: "the test has left:\n" + "\n".join(leaks()), SETTLE_S, 0.02)


@pytest.fixture
def start_runtime(no_leaks: None) -> Iterator[Callable[..., LocalRuntime]]:
    """Starts runtimes, given the fields of ``RuntimeSpec``; ended after the test."""
    started: list[LocalRuntime] = []

    def start(**fields: object) -> LocalRuntime:
        runtime = LocalRuntime(RuntimeSpec(**fields))  # type: ignore[arg-type]
        started.append(runtime)
        return runtime.__enter__()

    yield start
    for runtime in started:
        runtime.close()


@pytest.fixture
def runtime(start_runtime: Callable[..., LocalRuntime]) -> LocalRuntime:
    """2 slices x 2 hosts x 2 CPU devices."""
    return start_runtime(num_slices=2, hosts_per_slice=2, devices_per_host=2)
