"""The supervisor as a process, between a controller that the test plays and an executor that is real or played."""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pathways_runtime.core.ids import WorkerId
from pathways_runtime.transport import addresses
from pathways_runtime.transport.frames import Channel, FrameCodec
from pathways_runtime.transport.lifeline import Child, spawn
from pathways_runtime.wire import messages
from pathways_runtime.wire.messages import AnyMessage
from pathways_runtime.worker import private_sockets, supervisor
from pathways_runtime.worker.supervisor import Supervisor, SupervisorOptions, executor_environment, parse_options
from tests.waiting import until

TIMEOUT_S = 30.0

#: Writes down how it was started, then does what is named first on its command line.
PLAYED_EXECUTOR = """
import json, os, signal, sys, threading
from pathlib import Path
from pathways_runtime.transport.lifeline import watch_lifeline
notes, deed = Path(sys.argv[1]), sys.argv[2]
argv = sys.argv[3:]
watch_lifeline(int(argv[argv.index("--lifeline-fd") + 1]), lambda: os._exit(0))
if deed == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
started = {"argv": argv, "environment": dict(os.environ), "pid": os.getpid(), "group": os.getpgid(0)}
written = notes.with_suffix(".new")
written.write_text(json.dumps(started))
written.rename(notes)
if deed == "fail":
    for number in range(50):
        print("line", number, file=sys.stderr)
    sys.exit(3)
threading.Event().wait()
"""

#: A supervisor with another executor than the real one.
MAIN = """
import sys
from pathways_runtime.worker.supervisor import main
count = int(sys.argv[1])
sys.exit(main(sys.argv[2 + count:], sys.argv[2:2 + count]))
"""


class PlayedController:
    """Accepts connections and says what the test says."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._listener = addresses.listen(address)
        self._listener.settimeout(TIMEOUT_S)
        self._channels: list[Channel[AnyMessage]] = []

    def accept(self) -> "Connection":
        sock, _ = self._listener.accept()
        sock.settimeout(TIMEOUT_S)
        channel: Channel[AnyMessage] = Channel(sock, FrameCodec(AnyMessage))
        self._channels.append(channel)
        return Connection(sock, channel)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        addresses.stop_listening(self._listener, self.address)


class Connection:
    """One who has connected to the controller."""

    def __init__(self, sock: socket.socket, channel: Channel[AnyMessage]) -> None:
        self.sock = sock
        self._channel = channel
        self._received: list[AnyMessage] = []
        self.heartbeats = 0

    def send(self, *sent: AnyMessage) -> None:
        for message in sent:
            self._channel.send(message)

    def receive(self) -> AnyMessage:
        """The next message that is no heartbeat."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._received:
            assert time.monotonic() < deadline_s, f"nothing but heartbeats came within {TIMEOUT_S:g} s"
            for frame in self._channel.receive():
                if isinstance(frame.message, messages.Heartbeat):
                    self.heartbeats += 1
                else:
                    self._received.append(frame.message)
        return self._received.pop(0)

    def close(self) -> None:
        self._channel.close()


class Rig:
    """A supervisor that has registered with the played controller."""

    def __init__(self, folder: Path, process: Child, controller: PlayedController) -> None:
        self.folder = folder
        self.process = process
        self.controller = controller
        self.supervisor = controller.accept()
        self.hello = self.supervisor.receive()
        self.registration = self.supervisor.receive()
        self._events = os.fdopen(process.take_events_fd(), "rb")

    def event(self) -> dict[str, object]:
        event: dict[str, object] = json.loads(self._events.readline())
        return event

    def start_executor(self, epoch: int) -> int:
        """Have it start an executor; its pid."""
        self.supervisor.send(messages.StartExecutor(epoch))
        while (event := self.event())["event"] != "executor_started":
            pass
        assert event["epoch"] == epoch
        return int(str(event["pid"]))

    def started(self) -> dict[str, object]:
        """What the played executor has noted; waits until it has."""
        notes = self.folder / "started"
        until(notes.exists, "the executor did not come up", TIMEOUT_S)
        noted: dict[str, object] = json.loads(notes.read_text())
        notes.unlink()
        return noted

    def close(self) -> None:
        self.process.release_lifeline()
        self.process.has_ended(TIMEOUT_S)
        self.process.reap()
        self._events.close()


StartRig = Callable[..., Rig]


@pytest.fixture
def start_rig(tmp_path: Path) -> Iterator[StartRig]:
    """Starts a supervisor whose executor is the real one, or a played one that does ``deed``."""
    rigs: list[Rig] = []
    controllers: list[PlayedController] = []

    def start(deed: str | None = "wait", *options: str, environment: dict[str, str] | None = None) -> Rig:
        controller = PlayedController(f"unix:{tmp_path}/controller")
        controllers.append(controller)
        if deed is None:
            command = supervisor.EXECUTOR_COMMAND
        elif deed == "missing":
            command = ("/no/such/program",)
        else:
            command = (sys.executable, "-c", PLAYED_EXECUTOR, str(tmp_path / "started"), deed)
        argv = [sys.executable, "-c", MAIN, str(len(command)), *command]
        for name, value in {
            "controller": controller.address,
            "worker-id": "5",
            "name": "host-5",
            "devices-per-host": "2",
            "platform": "cpu",
            "compile-cache": str(tmp_path / "cache"),
            "run-dir": str(tmp_path),
            "log-dir": str(tmp_path),
        }.items():
            argv += [f"--{name}", value]
        env = {**os.environ, **(environment or {})}
        log = tmp_path / "worker.log"
        process = spawn([*argv, *options], name="supervisor", env=env, log_path=log, with_events=True)
        try:
            rigs.append(Rig(tmp_path, process, controller))
        except BaseException:
            process.reap()
            raise
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.close()
    for controller in controllers:
        controller.close()


def has_ended(pid: int) -> bool:
    """Whether a process that need not be our child ends in time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = bool(poll.poll(TIMEOUT_S * 1e3))
    os.close(pidfd)
    return ended


def test_it_introduces_itself_and_sends_heartbeats(start_rig: StartRig) -> None:
    rig = start_rig()
    pid = rig.process.pid
    assert rig.hello == messages.Hello("supervisor", messages.PROTOCOL_VERSION, pid)
    assert rig.registration == messages.RegisterWorker(WorkerId(5), "host-5", pid, 2)
    assert rig.event() == {"event": "registered", "worker": 5}
    rig.start_executor(1)
    rig.supervisor.send(messages.StopExecutor(1))
    rig.supervisor.receive()
    assert rig.supervisor.heartbeats >= 1


def test_it_gives_up_a_controller_that_is_silent(start_rig: StartRig) -> None:
    rig = start_rig("wait", "--controller-timeout-s", "1.5")
    assert rig.event() == {"event": "registered", "worker": 5}
    pid = rig.start_executor(1)
    while (ended := rig.event())["event"] != "ended":
        pass
    assert str(ended["reason"]).startswith("the controller has been silent for ")
    assert has_ended(pid)


def test_what_an_executor_is_started_with(start_rig: StartRig, tmp_path: Path) -> None:
    inherited = {
        "JAX_PLATFORMS": "proxy",
        "JAX_BACKEND_TARGET": "grpc://x",
        "XLA_FLAGS": "--xla_user",
        "http_proxy": "http://proxy:1",
        "OMP_NUM_THREADS": "3",
        "KEPT": "yes",
    }
    rig = start_rig("wait", "--force-sockets", "--worker-xla-flags=--xla_ours=1 --xla_more", environment=inherited)
    pid = rig.start_executor(7)
    started = rig.started()
    argv = started["argv"]
    assert isinstance(argv, list)
    # Descriptors have whatever numbers are free.
    for name in ("--lifeline-fd", "--retained-fd"):
        place = argv.index(name)
        assert int(argv[place + 1]) > 2
        del argv[place : place + 2]
    assert argv == [
        *("--controller", f"unix:{tmp_path}/controller", "--worker-id", "5", "--name", "host-5", "--epoch", "7"),
        *("--num-devices", "2", "--platform", "cpu", "--compile-cache", str(tmp_path / "cache")),
        *("--data-listen", f"unix:{tmp_path}/data-5-7.sock"),
        *("--python-log", f"{tmp_path}/python-5.log", "--force-sockets"),
        "--worker-xla-flags=--xla_ours=1 --xla_more",
    ]
    environment = started["environment"]
    assert isinstance(environment, dict)
    assert started["pid"] == started["group"] == pid
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["XLA_FLAGS"] == "--xla_ours=1 --xla_more"
    assert "glibc.malloc.arena_max=1" in environment["GLIBC_TUNABLES"]
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["KEPT"] == "yes"
    assert not {"JAX_BACKEND_TARGET", "http_proxy"} & set(environment)


def test_settings_of_malloc_that_the_user_made_stay() -> None:
    options = SupervisorOptions("unix:/c", 0, "h", 1, "cpu", Path("c"), Path("r"), Path("l"))
    environment = executor_environment({"GLIBC_TUNABLES": "theirs", "JAX_ENABLE_X64": "1"}, options)
    assert environment["GLIBC_TUNABLES"] == "theirs"
    assert not {"JAX_ENABLE_X64", "XLA_FLAGS"} & set(environment)


def test_how_an_executor_ended_is_told_with_its_last_lines(start_rig: StartRig) -> None:
    rig = start_rig("fail")
    rig.start_executor(1)
    exited = rig.supervisor.receive()
    assert exited == messages.ExecutorExited(WorkerId(5), 1, 3, "\n".join(f"line {number}" for number in range(30, 50)))
    rig.start_executor(2)
    again = rig.supervisor.receive()
    assert isinstance(again, messages.ExecutorExited)
    assert (again.epoch, again.returncode) == (2, 3)
    log = (rig.folder / "executor-5.log").read_text()
    assert log.count("line 0\n") == 2, "the log of the first executor stays"


def test_an_executor_that_cannot_be_started_is_an_exit_too(start_rig: StartRig) -> None:
    rig = start_rig("missing")
    rig.supervisor.send(messages.StartExecutor(1))
    exited = rig.supervisor.receive()
    assert isinstance(exited, messages.ExecutorExited)
    assert (exited.epoch, exited.returncode) == (1, 127)
    assert "/no/such/program cannot be started" in exited.log_tail


def test_stop_kills_and_the_next_epoch_starts(start_rig: StartRig) -> None:
    rig = start_rig("stubborn")
    pid = rig.start_executor(1)
    rig.started()
    sockets = [rig.folder / f"{name}.sock" for name in ("data-5-1", "world-3-5-1", "world-12-5-1")]
    of_others = [rig.folder / f"world-3-{worker_and_epoch}.sock" for worker_and_epoch in ("5-2", "15-1", "4-1")]
    for path in (*sockets, *of_others):
        path.touch()
    rig.supervisor.send(messages.StopExecutor(9), messages.StopExecutor(1))
    exited = rig.supervisor.receive()
    assert isinstance(exited, messages.ExecutorExited)
    assert (exited.worker, exited.epoch, exited.returncode) == (5, 1, -signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert [path.exists() for path in sockets] == [False] * 3
    assert [path.exists() for path in of_others] == [True] * 3
    rig.start_executor(2)
    rig.started()
    # A newer one replaces it; one that was never wanted any more is not started.
    rig.supervisor.send(messages.StartExecutor(3), messages.StartExecutor(4))
    exits = [rig.supervisor.receive() for _ in range(2)]
    assert [(one.epoch, one.returncode) for one in exits if isinstance(one, messages.ExecutorExited)] == [
        (2, -signal.SIGKILL),
        (3, -signal.SIGKILL),
    ]
    assert "4" in json.dumps(rig.started()["argv"])


ENDINGS: dict[str, Callable[[Rig], None]] = {
    "lifeline": lambda rig: rig.process.release_lifeline(),
    "controller closes": lambda rig: rig.supervisor.close(),
    "shutdown": lambda rig: rig.supervisor.send(messages.Shutdown("done")),
    "sigterm": lambda rig: os.kill(rig.process.pid, signal.SIGTERM),
    "sigint": lambda rig: os.kill(rig.process.pid, signal.SIGINT),
    "refused": lambda rig: rig.supervisor.send(messages.Refused("no")),
    "nonsense": lambda rig: rig.supervisor.send(messages.StatusRequest(1)),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_whatever_ends_it_its_executor_ends_first(start_rig: StartRig, ending: str) -> None:
    rig = start_rig("stubborn" if ending == "lifeline" else "wait")
    pid = rig.start_executor(1)
    rig.started()
    ENDINGS[ending](rig)
    assert rig.process.has_ended(TIMEOUT_S)
    assert rig.process.reap() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV])
def test_an_executor_notices_that_its_supervisor_was_killed(start_rig: StartRig, signal_number: int) -> None:
    rig = start_rig()
    pid = rig.start_executor(1)
    rig.started()
    os.kill(rig.process.pid, signal_number)
    assert has_ended(pid), f"the executor lives {TIMEOUT_S:g} s after its supervisor"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_real_executor_registers_and_notices_too(start_rig: StartRig, is_stopped: bool) -> None:
    rig = start_rig(None)
    pid = rig.start_executor(3)
    executor = rig.controller.accept()
    hello, registration = executor.receive(), executor.receive()
    assert hello == messages.Hello("executor", messages.PROTOCOL_VERSION, pid)
    assert isinstance(registration, messages.RegisterExecutor)
    assert (registration.worker, registration.epoch, registration.pid) == (5, 3, pid)
    assert registration.num_devices == 2
    address, has_private_sockets = addresses.without_mark(registration.data_address)
    assert address == f"unix:{rig.folder}/data-5-3.sock"
    assert has_private_sockets == private_sockets.LIBRARY.exists()
    addresses.connect(address, 0.0).close()
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    os.kill(rig.process.pid, signal.SIGKILL)
    assert has_ended(pid), f"the executor lives {TIMEOUT_S:g} s after its supervisor"


def test_a_controller_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CONNECT_TIMEOUT_S", 0.05)
    options = parse_options(
        [
            *("--controller", f"unix:{tmp_path}/nobody", "--worker-id", "3", "--name", "host-3"),
            *("--devices-per-host", "1", "--compile-cache", "c", "--run-dir", "r", "--log-dir", "l"),
        ]
    )
    no_controller = r"worker 3 \(host-3\) has no controller: cannot connect to unix:.*nobody"
    with pytest.raises(addresses.ConnectFailed, match=no_controller):
        asyncio.run(Supervisor(options).run())


def test_its_parent_may_end_before_it_has_connected(tmp_path: Path) -> None:
    argv = [
        *(sys.executable, "-m", "pathways_runtime.worker"),
        *("--controller", f"unix:{tmp_path}/nobody", "--worker-id", "3", "--name", "host-3"),
        *("--devices-per-host", "1", "--compile-cache", "c", "--run-dir", "r", "--log-dir", "l"),
    ]
    process = spawn(argv, name="supervisor", env=os.environ, log_path=tmp_path / "log")
    process.release_lifeline()
    assert process.has_ended(TIMEOUT_S)
    assert process.reap() == 0
    assert "its parent is gone" in (tmp_path / "log").read_text()


def test_it_loads_nothing_heavy() -> None:
    code = (
        "import sys, pathways_runtime.worker.supervisor;"
        "print([name for name in ('jax', 'jaxlib', 'numpy', 'grpc') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert loaded.stdout == "[]\n"


def test_another_protocol_than_ours_ends_it(start_rig: StartRig) -> None:
    """Bytes of another protocol end it, with its executor, instead of being read as commands."""
    rig = start_rig()
    pid = rig.start_executor(1)
    rig.started()
    rig.supervisor.sock.sendall(b"\xff" * 64)
    assert rig.process.has_ended(TIMEOUT_S)
    assert rig.process.reap() == 0
    assert has_ended(pid)
