"""One runtime for all libraries, and plain JAX to compare it with."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurm_pathways.config import RUNS_VARIABLE, RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "e2e")]

from client_programs import plain_environment  # noqa: E402

#: ``(libraries, timeout_s=…, folder=…) -> outcomes``: runs checks in one process.
RunChecks = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def gs_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``gs://`` is to the runtime."""
    return tmp_path_factory.mktemp("gs")


@pytest.fixture(scope="session")
def library_runtime(tmp_path_factory: pytest.TempPathFactory, gs_directory: Path) -> Iterator[LocalRuntime]:
    """2 slices x 2 hosts x 2 CPU devices."""
    root = tmp_path_factory.mktemp("r")
    root.chmod(0o700)
    spec = RuntimeSpec(num_slices=2, hosts_per_slice=2, devices_per_host=2, gs_directory=gs_directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNS_VARIABLE, str(root))
        with LocalRuntime(spec) as runtime:
            yield runtime
        assert list(root.iterdir()) == [], "the run left something behind"


@pytest.fixture(scope="session")
def checks_here(library_runtime: LocalRuntime) -> RunChecks:
    """Runs checks on the runtime."""
    return lambda *libraries, **options: run_checks(library_runtime.environment(), *libraries, **options)


@pytest.fixture(scope="session")
def checks_on_plain_jax() -> RunChecks:
    """Runs checks on 8 CPU devices of one process."""
    return lambda *libraries, **options: run_checks(plain_environment(), *libraries, **options)


def run_checks(
    environ: Mapping[str, str], *libraries: str, folder: Path = HERE, timeout_s: float = 300, **variables: str
) -> dict[str, Any]:
    """The outcomes of the checks of modules of ``<folder>/checks``, by module and check; see ``checks.__main__``."""
    python_path = os.pathsep.join(filter(None, (str(folder), environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, "-m", "checks", *libraries],
        env={**environ, "PYTHONPATH": python_path, **variables},
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, f"{libraries} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}"
    outcomes: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return outcomes


def assert_same(here: dict[str, Any], plain: dict[str, Any]) -> None:
    """Every check of a library gave its values, and the same here as on plain JAX."""
    for outcomes in (plain, here):
        for check, outcome in outcomes.items():
            assert "values" in outcome, f"{check} failed:\n{outcome['failed']}"
    assert here.keys() == plain.keys() and here
    for check in plain:
        assert here[check]["values"] == close_to(plain[check]["values"]), check


def close_to(value: Any) -> Any:
    """``value`` with its fractions to be compared with some tolerance: sums over devices have an order of their own."""
    if isinstance(value, dict):
        return {key: close_to(each) for key, each in value.items()}
    if isinstance(value, list):
        return [close_to(each) for each in value]
    return pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True) if isinstance(value, float) else value
