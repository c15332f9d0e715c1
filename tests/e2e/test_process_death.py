"""Whatever dies first, by SIGKILL: the run ends with a message that names it, and nothing is left."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from client_programs import HERE

from tests.waiting import until

COMMAND = Path(sys.executable).parent / "slurm-pathways"
#: From the kill to the end of everything. A JAX client's own deadline is not among what is waited for.
DEADLINE_S = 45.0


class Run:
    """``slurm-pathways run`` of a program that never ends by itself, and the processes that belong to it."""

    def __init__(self) -> None:
        options = ["--local", "--slices", "2", "--hosts-per-slice", "1", "--devices-per-host", "2"]
        self.process = subprocess.Popen(
            [COMMAND, "run", *options, "--failure-grace-s", "10", "--", sys.executable, "-m", "programs.endless"],
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.folder = Path()
        self.everything: list[psutil.Process] = []

    def wait_until_up(self, runs_root: Path) -> None:
        """Until the program says that it computes; pytest's own time limit ends a wait that is too long."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "up\n", f"the program did not start: {line!r} {self.process.communicate(timeout=DEADLINE_S)}"
        (self.folder,) = [path.parent for path in runs_root.glob("run-*/run.json")]
        self.everything = psutil.Process(self.process.pid).children(recursive=True)

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.folder / "run.json").read_text())
        return record

    def pid_of(self, component: str) -> int:
        if component == "run":
            return self.process.pid
        if component == "program":
            return int(self.record()["program"]["pid"])
        if component == "executor":
            report = subprocess.run(
                [COMMAND, "status", "--json", "--run", self.folder], capture_output=True, check=True, timeout=30
            )
            return int(json.loads(report.stdout)["workers"][0]["executor_pid"])
        (pid,) = [process["pid"] for process in self.record()["components"] if process["name"] == component]
        return int(pid)

    def end(self) -> str:
        """Wait for the end of everything; what was said on stderr."""
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        _, alive = psutil.wait_procs(self.everything, timeout=DEADLINE_S)
        assert not alive, f"{DEADLINE_S} s after the kill there is still {alive}; run said {errors}"
        return errors

    def close(self) -> None:
        """Leave nothing, also when the test has failed."""
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def kill(runs_root: Path) -> Iterator[Callable[[str], tuple[int, str]]]:
    """Starts a run, kills a component of it, and returns the exit code and the messages."""
    runs: list[Run] = []
    shared_memory = set(Path("/dev/shm").iterdir())

    def kill_one(component: str) -> tuple[int, str]:
        run = Run()
        runs.append(run)
        run.wait_until_up(runs_root)
        os.kill(run.pid_of(component), signal.SIGKILL)
        errors = run.end()

        def left() -> list[Path]:
            return [*_left(runs_root), *(set(Path("/dev/shm").iterdir()) - shared_memory)]

        until(lambda: not left(), lambda: f"left behind: {left()}", 5, 0.05)
        return run.process.returncode, errors

    yield kill_one
    for run in runs:
        run.close()


def _left(runs_root: Path) -> list[Path]:
    """Files other than kept logs."""
    return [path for path in runs_root.rglob("*") if path.is_socket() or (path.is_file() and path.suffix != ".log")]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("component", "said"),
    [
        ("proxy-0", r"proxy-0 was killed by signal 9"),
        ("controller", r"controller was killed by signal 9"),
        ("worker-0", r"DATA_LOSS"),
        ("executor", r"DATA_LOSS"),
    ],
)
def test_a_component_dies(kill: Callable[[str], tuple[int, str]], component: str, said: str) -> None:
    returncode, errors = kill(component)
    assert returncode != 0
    assert re.search(said, errors), errors


@pytest.mark.timeout(150)
def test_the_program_dies(kill: Callable[[str], tuple[int, str]]) -> None:
    returncode, _ = kill("program")
    assert returncode == 128 + signal.SIGKILL


@pytest.mark.timeout(150)
def test_the_launcher_dies(kill: Callable[[str], tuple[int, str]]) -> None:
    returncode, _ = kill("run")
    assert returncode == -signal.SIGKILL
