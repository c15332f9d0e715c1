"""Python processes as the executor starts and ends them; what runs in them is tested by ``tests/e2e``."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from pathways_runtime.core.ids import HostIndex, SessionId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.worker.colocated import process as process_module
from pathways_runtime.worker.colocated.process import Place, Process, ProcessEnded
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)
SESSION = SessionId(5)
Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes whose functions print to ``tmp_path/log``; after the test none is left."""
    started: list[Process] = []
    place = Place("node7", HostIndex(1), Topology(1, 2, 2, "cpu"), tmp_path, tmp_path / "log")

    def start(*command: str) -> Process:
        options: dict[str, Any] = {"command": command} if command else {}
        made = Process(place, SESSION, len(started) + 1, **options)
        started.append(made)
        return made

    yield start
    for process in started:
        process.stop()
        assert not psutil.pid_exists(process.pid)
    assert list(tmp_path.glob("*.sock")) == []


def load(process: Process, pickled: bytes = b"no pickle") -> list[Status | None]:
    answers: list[Status | None] = []
    process.load(1, "f", pickled, (), False, answers.append)
    return answers


def wait_for(answers: Sequence[Any]) -> Any:
    until(lambda: bool(answers), lambda: "no answer came", 120, 0.01)
    return answers[0]


def test_what_cannot_be_unpickled_is_the_functions_failure(start: Start) -> None:
    process = start()
    failure = wait_for(load(process))
    assert failure.code is Code.UNKNOWN
    assert "UnpicklingError" in failure.message and "function f on node7" in failure.message
    assert process.report()["functions"] == 1 and process.report()["pid"] == process.pid


def test_a_process_that_ends_says_how_to_all_who_wait(start: Start, tmp_path: Path) -> None:
    process = start(sys.executable, "-c", "print('last words'); raise SystemExit(7)")
    answers = load(process)
    calls: list[Status | None] = []
    try:
        process.call(1, "g", 1, [], (), lambda _, failure: calls.append(failure))
    except ProcessEnded:
        calls = answers
    failure = wait_for(answers)
    assert failure.code is Code.INTERNAL
    assert f"the Python process of node7 (colocated Python, pid {process.pid}) ended" in failure.message
    assert "exit code 7" in failure.message and failure.message.endswith("last words")
    assert wait_for(calls) == failure
    with pytest.raises(ProcessEnded):
        process.load(2, "h", b"", (), False, answers.append)


def test_a_signal_has_its_name(start: Start) -> None:
    process = start(sys.executable, "-c", "import time; time.sleep(1000)")
    answers = load(process)
    os.kill(process.pid, signal.SIGSEGV)
    assert "killed by SIGSEGV" in wait_for(answers).message


def test_a_process_that_is_never_ready_is_given_up(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "START_TIMEOUT_S", 0.2)
    process = start(sys.executable, "-c", "import time; time.sleep(1000)")
    failure = wait_for(load(process))
    assert "it was not ready within 0.2 s of its start" in failure.message


def test_a_process_that_speaks_nonsense_is_given_up(start: Start) -> None:
    program = "import os, sys, time; os.write(int(sys.argv[2]), b'x' * 100); time.sleep(1000)"
    process = start(sys.executable, "-c", program)
    assert "it does not keep to the protocol" in wait_for(load(process)).message


def test_stopping_tells_that_the_session_is_over(start: Start) -> None:
    process = start(sys.executable, "-c", "import time; time.sleep(1000)")
    answers = load(process)
    process.stop()
    assert wait_for(answers) == Status(Code.CANCELLED, "the session whose Python process this was is over")


GUARDED = """
import os, subprocess, sys, time
from pathways_runtime.worker.colocated import guard
guard.start(int(sys.argv[sys.argv.index("--lifeline-fd") + 1]), ())
waiting = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
child = subprocess.Popen([sys.executable, "-c", waiting])
print(os.getpid(), child.pid, flush=True)
time.sleep(1000)
"""
#: A process in the executor's place.
OWNER = """
import sys, time
from pathlib import Path
from pathways_runtime.transport.lifeline import spawn
spawn([sys.executable, "-c", sys.argv[1]], name="python", env={}, log_path=Path(sys.argv[2]))
time.sleep(1000)
"""


@pytest.mark.parametrize("dies", ["owner", "process"])
def test_whatever_dies_nothing_is_left(tmp_path: Path, dies: str) -> None:
    log = tmp_path / "pids"
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(OWNER), GUARDED, str(log)])
    try:
        until(lambda: log.exists() and log.read_text().endswith("\n"), lambda: "not started", 60, 0.01)
        python, child = map(int, log.read_text().split())
        group = [each for each in psutil.process_iter() if _group_of(each.pid) == python]
        assert {python, child} < {each.pid for each in group}, "the guard is of the group too"
        os.kill(owner.pid if dies == "owner" else python, signal.SIGKILL)
        _, alive = psutil.wait_procs([each for each in group if each.pid != python], timeout=60)
        assert not alive
    finally:
        owner.kill()
        owner.wait()


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
