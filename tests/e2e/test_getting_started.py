"""The first program of docs/getting-started.md does what the page says, with a runtime and without."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_pathways.launch.local import LocalRuntime

PAGE = Path(__file__).parents[2] / "docs" / "getting-started.md"
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``hello.py`` as printed."""
    (text,) = re.findall(r"```python\n(# hello\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path_factory.mktemp("hello") / "hello.py"
    path.write_text(text)
    return path


def _lines(program: Path, environ: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(program)], env=environ, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_shows_all_devices_of_the_runtime(program: Path, shared_runtime: LocalRuntime) -> None:
    *devices, total = _lines(program, shared_runtime.environment())
    assert [re.search(r"slice=(\d)", line)[1] for line in devices] == list("00001111")  # type: ignore[index]
    assert total == "120.0"


def test_it_runs_on_the_devices_of_plain_jax(program: Path) -> None:
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    *devices, total = _lines(program, environ)
    assert len(devices) == 2
    assert total == "120.0"
