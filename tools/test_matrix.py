#!/usr/bin/env python3
"""Run the tests that another jax or Python may break, on every row of the table in ``slurm_pathways/supported.py``.

usage: python tools/test_matrix.py --dist DIR --venvs DIR [--begin-within-s N] [--without-own]

Each row whose Python is on this machine (on PATH, or among pyenv's) gets a virtual environment with its jax and the
wheel of DIR; nothing is installed twice. Rows without their Python are named and are no failure. The exit code says
whether a row failed.
"""

import argparse
import enum
import hashlib
import importlib.metadata
import os
import pathlib
import runpy
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: Everything that speaks with jaxlib, and programs of all kinds on one runtime.
SUBSET = (
    "tests/wire",
    "tests/worker/test_pjrt.py",
    "tests/worker/test_profiler.py",
    "tests/client",
    "tests/proxy/test_versions.py",
    "tests/e2e/test_values.py",
    "tests/e2e/test_compile.py",
    "tests/e2e/test_colocated.py",
)
#: 64-bit types differ little from version to version, and double the time.
SELECTION = "not x64"
ROW_TIMEOUT_S = 600


class Outcome(enum.Enum):
    """What became of a row."""

    PASSED = "passed"
    FAILED = "FAILED"
    NO_PYTHON = "not run: this machine has no such Python"
    OWN = "not run here: the tests in full run with it"
    NO_TIME = "not run: no time left"


def find_python(version: str, environ: dict[str, str]) -> str | None:
    """The path of a Python of this version (``3.12``) that can make virtual environments."""
    folders = [pathlib.Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    if root := environ.get("PYENV_ROOT"):
        folders += sorted(pathlib.Path(root).glob(f"versions/{version}.*/bin"))
    question = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for folder in folders:
        python = folder / f"python{version}"
        # On PATH, a version chooser's stand-in may refuse to run.
        if python.exists():
            answer = subprocess.run([python, "-c", question], capture_output=True, text=True, timeout=60)
            if answer.returncode == 0 and answer.stdout.strip() == version:
                return str(python)
    return None


def install(python: str, venv: pathlib.Path, jax: str, wheel: pathlib.Path) -> None:
    """A virtual environment with the wheel and this jax.

    Raises:
        subprocess.CalledProcessError: it could not be made; what pip said is on stderr.
    """
    stamp = venv / ".installed"
    content = f"{jax} {hashlib.sha256(wheel.read_bytes()).hexdigest()}"
    if stamp.exists() and stamp.read_text() == content:
        return
    if not (venv / "bin" / "pip").exists():
        subprocess.run([python, "-m", "venv", venv], check=True)
    pip = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # pip takes a wheel of the same version for installed.
    subprocess.run([*pip, "uninstall", "--yes", "slurm-pathways"], check=True, stderr=subprocess.DEVNULL)
    subprocess.run(
        [*pip, "install", f"jax=={jax}", f"jaxlib=={jax}", f"{wheel}[compatibility]"], check=True, timeout=ROW_TIMEOUT_S
    )
    stamp.write_text(content)


def run_row(row: Any, venvs: pathlib.Path, wheel: pathlib.Path) -> Outcome:
    """Install a row and run the tests on it; they print as they go."""
    python = find_python(row.python, dict(os.environ))
    if python is None:
        return Outcome.NO_PYTHON
    venv = venvs / f"python{row.python}-jax{row.jax}"
    try:
        install(python, venv, row.jax, wheel)
        # The script, not ``python -m pytest``: that would put the tree on sys.path.
        subprocess.run(
            [venv / "bin" / "pytest", "-q", "-p", "no:cacheprovider", "-k", SELECTION, *SUBSET],
            cwd=ROOT,
            check=True,
            timeout=ROW_TIMEOUT_S,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as failure:
        print(failure, file=sys.stderr)
        return Outcome.FAILED
    return Outcome.PASSED


def main() -> int:
    """Run the rows, oldest first, and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=pathlib.Path, required=True, help="the folder with the one wheel to test")
    parser.add_argument("--venvs", type=pathlib.Path, required=True, help="where virtual environments are kept")
    parser.add_argument("--begin-within-s", type=float, metavar="N", help="begin no row after so many seconds")
    parser.add_argument("--without-own", action="store_true", help="leave out the row of the Python that runs this")
    arguments = parser.parse_args()
    (wheel,) = arguments.dist.resolve().glob("*.whl")
    arguments.venvs.mkdir(parents=True, exist_ok=True)
    own = None
    if arguments.without_own:
        own = (f"{sys.version_info.major}.{sys.version_info.minor}", importlib.metadata.version("jax"))
    began_s = time.monotonic()
    outcomes = {}
    for row in runpy.run_path(str(ROOT / "slurm_pathways" / "supported.py"))["TESTED"]:
        print(f"--- Python {row.python}, jax {row.jax}", flush=True)
        if row == own:
            outcomes[row] = Outcome.OWN
        elif arguments.begin_within_s is not None and time.monotonic() - began_s > arguments.begin_within_s:
            outcomes[row] = Outcome.NO_TIME
        else:
            outcomes[row] = run_row(row, arguments.venvs.resolve(), wheel)
    print()
    for row, outcome in outcomes.items():
        print(f"Python {row.python}, jax {row.jax}: {outcome.value}")
    return int(Outcome.FAILED in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
