"""The part in C: its own checks under sanitizers, and what it exports."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pathways_runtime.worker.private_sockets import LIBRARY

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "runtime" / "native"
WARNINGS = (
    *("-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes", "-Wformat=2", "-Wvla"),
    "-Werror",
)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def compile_with(*arguments: object) -> None:
    assert shutil.which("gcc"), "gcc is missing: apt-get install gcc libc6-dev"
    argv = ["gcc", "-std=gnu11", *WARNINGS, "-I", SOURCES, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a short path, as sockets lie in it."""
    made = Path(tempfile.mkdtemp(prefix="sockets-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def test_its_checks_pass_under_sanitizers(tmp_path: Path, folder: Path) -> None:
    program = tmp_path / "check"
    sources = (HERE / "check_private_sockets.c", SOURCES / "private_sockets.c")
    compile_with("-O1", "-g", *SANITIZERS, "-o", program, *sources)
    done = subprocess.run([program, folder], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "private sockets: ok\n"), done.stderr


@pytest.mark.parametrize("optimization", ["-O0", "-O3"])
def test_it_compiles_without_a_warning(tmp_path: Path, optimization: str) -> None:
    compile_with(optimization, "-fPIC", "-fanalyzer", "-c", "-o", tmp_path / "o", SOURCES / "private_sockets.c")


def test_it_exports_what_it_stands_before_and_nothing_else() -> None:
    assert LIBRARY.exists(), f"{LIBRARY} is missing: install slurm-pathways where there is a C compiler"
    argv = ["nm", "-D", "--defined-only", LIBRARY]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout
    names = sorted(line.split()[-1] for line in listed.splitlines())
    stood_before = ["accept", "accept4", "bind", "connect", "epoll_wait", "getsockname", "recv", "setsockopt"]
    assert names == [*stood_before, "slurm_pathways_private_sockets_use", "writev"]
