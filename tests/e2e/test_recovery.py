"""Hosts are lost in every way that one machine can show, and are served again. Real processes, default settings."""

import contextlib
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from client_programs import HERE

from slurm_pathways.config import RUNS_VARIABLE, RuntimeSpec
from slurm_pathways.launch.controller_status import ask
from slurm_pathways.launch.local import LocalRuntime
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)

#: For an answer on a loaded machine; nothing here takes longer than 12 s on an idle one.
DEADLINE_S = 150.0
ARANGE_AND_SUM = [28.0 + number for number in range(8)]
#: Of the first slice. The other one's, 0, may hold the program's arrays too; it must not be disturbed.
HOST = 1
LOST = r"DATA_LOSS: host 1 \(host-\d\) was lost at 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC, and with it slice 0: "


class Client:
    """A program that does what it is told; see ``programs/recovery.py``."""

    def __init__(self, runtime: LocalRuntime) -> None:
        self.runtime = runtime
        self._process = subprocess.Popen(
            [sys.executable, "-m", "programs.recovery"],
            env=runtime.environment(),
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._answer("start") == {"up": True}

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def ask(self, command: str) -> dict[str, Any]:
        self.tell(command)
        return self._answer(command)

    def _answer(self, command: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        assert ready, f"after {DEADLINE_S:g} s there is no answer to {command}: {self.status()}"
        line = self._process.stdout.readline()
        assert line, f"the program ended at {command} with {self._process.wait(DEADLINE_S)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            # What was not sent is of no interest.
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def status(self) -> dict[str, Any]:
        return ask(self.runtime.controller_address, 30.0)

    def pids(self, host: int = HOST) -> dict[str, int]:
        """Of who stands behind a host now."""
        (worker,) = [one for one in self.status()["workers"] if one["host"] == host and one["state"] == "bound"]
        return {"executor": worker["executor_pid"], "supervisor": worker["supervisor_pid"]}

    def check_recovered(self, failure: str) -> None:
        """The first slice works again after that failure, as soon as arrays can be put there; the second one was never
        disturbed."""
        recovered = self.ask("until_served")
        # Another loss may follow, but that one is over.
        assert failure.splitlines()[0] not in "\n".join(recovered["failures"]), recovered
        assert (recovered["first"], recovered["both"]) == (ARANGE_AND_SUM, ARANGE_AND_SUM)
        assert self.ask("other") == {"kept": ARANGE_AND_SUM, "step": ARANGE_AND_SUM}

    def await_spare(self) -> None:
        """Until all workers are there again, so that tests do not depend on one another."""
        states = ["bound"] * 4 + ["spare"] * self.runtime.spec.num_spares

        def found() -> list[str]:
            return sorted(worker["state"] for worker in self.status()["workers"])

        until(lambda: found() == states, lambda: f"workers are {found()}", DEADLINE_S, 0.05)


def _served(tmp_path_factory: pytest.TempPathFactory, spec: RuntimeSpec) -> Iterator[Client]:
    root = tmp_path_factory.mktemp("r")
    root.chmod(0o700)
    shared_memory = set(Path("/dev/shm").iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNS_VARIABLE, str(root))
        runtime = LocalRuntime(spec)
        with runtime:
            client = Client(runtime)
            try:
                yield client
            finally:
                client.close()
            descendants = [process for process in psutil.Process().children(recursive=True) if _names(process, root)]
    # Logs of a run in which something was lost stay.
    if runtime.kept_logs is not None:
        shutil.rmtree(runtime.kept_logs.parent)
    assert list(root.iterdir()) == [], "the run left something behind"
    _, alive = psutil.wait_procs(descendants, timeout=10)
    assert not alive, f"still there: {alive}"
    assert set(Path("/dev/shm").iterdir()) <= shared_memory


def _names(process: psutil.Process, root: Path) -> bool:
    """Whether a process is of the runtime whose folders are there: the other fixture's goes on."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(str(root) in word for word in process.cmdline())
    return False


SPEC = {"num_slices": 2, "hosts_per_slice": 2, "devices_per_host": 1}


@pytest.fixture(scope="module")
def with_spare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    yield from _served(tmp_path_factory, RuntimeSpec(**SPEC, num_spares=1))


@pytest.fixture(scope="module")
def without_spare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    yield from _served(tmp_path_factory, RuntimeSpec(**SPEC))


@pytest.fixture
def client(with_spare: Client) -> Iterator[Client]:
    with_spare.await_spare()
    yield with_spare


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("parts", "number", "cause"),
    [
        (["executor"], signal.SIGKILL, r"its executor was killed by signal 9 \(SIGKILL\)"),
        (["supervisor"], signal.SIGKILL, r"its supervisor's connection is gone"),
        (["executor"], signal.SIGSTOP, r"its executor has been silent for \d+\.\d s"),
        (["supervisor"], signal.SIGSTOP, r"its supervisor has been silent for \d+\.\d s"),
        (["supervisor", "executor"], signal.SIGSTOP, r"its (supervisor|executor) has been silent for \d+\.\d s"),
    ],
    ids=["executor-killed", "supervisor-killed", "executor-stopped", "supervisor-stopped", "host-stopped"],
)
def test_a_host_is_lost_and_the_spare_takes_its_place(
    client: Client, parts: list[str], number: signal.Signals, cause: str
) -> None:
    pids = client.pids()
    for part in parts:
        os.kill(pids[part], number)
    answer = client.ask("until_lost")
    assert re.match(LOST + cause, answer["failure"]), answer
    client.check_recovered(answer["failure"])
    # Also of those that were stopped nothing is left.
    for part in parts:
        until(lambda part=part: _is_gone(pids[part]), f"the {part} is still there", DEADLINE_S, 0.05)


@pytest.mark.parametrize("part", ["executor", "supervisor"])
def test_without_a_spare_the_same_worker_comes_back(without_spare: Client, part: str) -> None:
    client = without_spare
    client.await_spare()
    os.kill(client.pids()[part], signal.SIGKILL)
    answer = client.ask("until_lost")
    assert re.match(LOST, answer["failure"]), answer
    client.check_recovered(answer["failure"])
    (failure,) = [one for one in client.status()["failures"][-1:] if one["host"] == HOST]
    assert (failure["name"], failure["served_again_by"]) == ("host-1", "host-1")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_what_is_in_host_memory_outlives_the_executor(client: Client, number: signal.Signals) -> None:
    """There is a spare, but the memory is where it is."""
    assert client.ask("keep") == {"kept": 3}
    os.kill(client.pids()["executor"], number)
    failure_text = client.ask("until_lost")["failure"]
    assert re.match(LOST, failure_text)
    client.check_recovered(failure_text)
    (failure,) = [one for one in client.status()["failures"][-1:] if one["host"] == HOST]
    assert failure["served_again_by"] == failure["name"]
    doubled = [2.0 * number for number in range(8)]
    assert client.ask("read_kept") == {
        "values": [doubled, [3.0 * number for number in range(8)], doubled[4:]],
        "step": [value + 56.0 for value in doubled],
    }
    # Nothing is held when nobody has it any more. jaxlib lets go of what it used in place when it is called next.
    client.ask("let_go")
    until(lambda: _held_bytes(client) == 0, lambda: f"{_held_bytes(client)} bytes are held", 30.0, 0.05)


def _held_bytes(client: Client) -> int:
    """In memory that outlives executors, of all hosts."""
    client.ask("until_served")
    return sum(worker["retained"]["in_use"] for worker in client.status()["workers"] if "retained" in worker)


def test_who_waits_in_a_collective_for_a_stopped_host_is_freed(client: Client) -> None:
    executor = client.pids()["executor"]
    os.kill(executor, signal.SIGSTOP)
    answer = client.ask("until_collective_lost")
    assert re.match(LOST + r"its executor has been silent for", answer["failure"]), answer
    assert answer["in_flight"], "nothing was in flight"
    for failure in answer["in_flight"]:
        assert re.match(LOST + r"its executor has been silent for", failure), failure
    client.check_recovered(answer["failure"])
    until(lambda: _is_gone(executor), "the stopped executor is still there", DEADLINE_S, 0.05)


def test_an_executor_has_no_memory_left(client: Client) -> None:
    """As where a site limits the address space: an allocation fails, and what follows names that."""
    executor = client.pids()["executor"]
    used_bytes = psutil.Process(executor).memory_info().vms
    resource.prlimit(executor, resource.RLIMIT_AS, (used_bytes + (256 << 20),) * 2)
    answer = client.ask("until_too_large")
    named = LOST + r"its executor (ended with exit code|was killed by signal)"
    assert re.match(rf"{named}|RESOURCE_EXHAUSTED: ", answer["failure"]), answer
    # One that lives on has that limit still.
    with contextlib.suppress(ProcessLookupError):
        os.kill(executor, signal.SIGKILL)
    client.check_recovered(client.ask("until_lost")["failure"])


def test_no_shared_memory_can_be_had(client: Client) -> None:
    """Blocks of shared memory are files without names, so a limit on files is one on them. Payloads are sent then."""
    executors = [client.pids(host)["executor"] for host in (0, 1)]
    for executor in executors:
        resource.prlimit(executor, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    assert client.ask("transfer") == {"is_right": True}
    for executor in executors:
        resource.prlimit(executor, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert client.ask("transfer") == {"is_right": True}
    log = (client.runtime.folder.logs / "executor-0.log").read_text()
    assert "no shared memory of 16777216 bytes for" in log, log


def test_a_long_compilation_on_a_full_machine_is_no_loss(client: Client) -> None:
    num_losses = len(client.status()["failures"])
    spin = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        compiled = client.ask("compile_for_long")
    finally:
        for process in spinning:
            process.kill()
            process.wait(DEADLINE_S)
    assert compiled["took_s"] > client.runtime.spec.heartbeat_timeout_s, "the program is too small for this machine"
    assert len(client.status()["failures"]) == num_losses
    assert client.ask("until_served")["failures"] == []
