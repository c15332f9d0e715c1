"""``tools/test_matrix.py``, with stand-ins for Pythons."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_pathways.supported import TESTED

TOOL = Path(__file__).parents[2] / "tools" / "test_matrix.py"
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def matrix() -> dict[str, Any]:
    return runpy.run_path(str(TOOL))


def _add(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def test_a_python_on_path(matrix: dict[str, Any], tmp_path: Path) -> None:
    _add(tmp_path / "refuses", f"python{OWN}", "#!/bin/sh\nexit 1\n")
    _add(tmp_path / "other", f"python{OWN}", "#!/bin/sh\necho 3.1\n")
    (tmp_path / "right").mkdir()
    (tmp_path / "right" / f"python{OWN}").symlink_to(sys.executable)
    path = os.pathsep.join(str(tmp_path / name) for name in ("none", "refuses", "other", "right"))
    assert matrix["find_python"](OWN, {"PATH": path}) == f"{tmp_path}/right/python{OWN}"
    assert matrix["find_python"]("3.99", {"PATH": path}) is None


def test_a_python_of_pyenv(matrix: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "versions" / f"{OWN}.4" / "bin"
    folder.mkdir(parents=True)
    (folder / f"python{OWN}").symlink_to(sys.executable)
    environ = {"PATH": "/nonexistent", "PYENV_ROOT": str(tmp_path)}
    assert matrix["find_python"](OWN, environ) == f"{folder}/python{OWN}"


def _run(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "slurm_pathways-0-py3-none-any.whl").write_bytes(b"")
    folders = ["--dist", str(tmp_path / "dist"), "--venvs", str(tmp_path / "venvs")]
    return subprocess.run(
        [sys.executable, TOOL, *folders, *arguments],
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_pythons_that_are_not_there_are_named(tmp_path: Path) -> None:
    done = _run(tmp_path)
    assert done.returncode == 0, done.stderr
    for row in TESTED:
        assert f"Python {row.python}, jax {row.jax}: not run: this machine has no such Python" in done.stdout


def test_rows_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    done = _run(tmp_path, "--begin-within-s", "-1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("not run: no time left") == len(TESTED)


def test_a_row_that_fails(tmp_path: Path) -> None:
    python = TESTED[0].python
    # Says that it is the right one, and makes no virtual environment.
    _add(tmp_path / "bin", f"python{python}", f'#!/bin/sh\n[ "$1" = -c ] && echo {python}\n')
    done = _run(tmp_path)
    assert done.returncode == 1
    assert f"Python {python}, jax {TESTED[0].jax}: FAILED" in done.stdout
    assert f"python{python}" in done.stderr
