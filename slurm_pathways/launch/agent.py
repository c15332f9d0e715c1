"""The agent: the one task of a step of the runtime. It starts components on its node as the launcher says.

Its standard input comes from the launcher, through srun: JSON lines, first ``Welcome``, then ``Start`` for each
component, ``Stop`` for one that the others outlive, and ``Kill`` for one that does not answer; ``Dismiss`` comes last.
End of file means that the launcher, or its srun, is gone, and everything ends; if it was not dismissed, see
``head_loss``. SIGTERM, which Slurm sends to every process of a job that is cancelled, preempted or at its time limit,
is the program's to answer: agent and components stay for it until the launcher ends them, or Slurm kills. Its standard
output goes the other way: what components say, with their names. Components' own output goes to its standard error,
which srun brings into the launcher's logs. So nothing but Slurm itself carries the job's material to nodes, and no file
system needs to be shared.
"""

import dataclasses
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec

from pathways_runtime.transport.addresses import TcpAddress
from pathways_runtime.transport.lifeline import EventWriter
from slurm_pathways.config import ConfigurationError
from slurm_pathways.launch import client_step, head_loss
from slurm_pathways.launch.client_environment import component_environment
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, Components, RuntimeEvent
from slurm_pathways.launch.controller_status import NoAnswer, ask
from slurm_pathways.launch.news import AGENT_EVENT, AGENT_FAILED_EVENT, TERMINATING_EVENT
from slurm_pathways.launch.node_address import own_place
from slurm_pathways.launch.restarts import Restarts
from slurm_pathways.launch.run_folder import (
    LOCK_NAME,
    RunFolder,
    make_log_dir,
    make_private,
    place_log,
    remove_abandoned,
)
from slurm_pathways.launch.steps import step_environment
from slurm_pathways.slurm.commands import Slurm

#: Of components that have ended.
PROCESS_ENDED_EVENT = "process_ended"
#: The answer to ``Ask``.
STATUS_EVENT = "status"

#: In the agent's folder once its run has ended in good order: whoever waits for the lock need not hope any more.
OVER_NAME = "over"

#: Between the start of this process and the launcher's first line.
WELCOME_TIMEOUT_S = 60.0
#: How often the launcher of a batch job lets its agents hear of it, and the silence after which it is gone.
ALIVE_INTERVAL_S = 5.0
LAUNCHER_TIMEOUT_S = 30.0
#: For components to end by themselves, below Slurm's usual KillWait.
CLOSE_GRACE_S = 4.0

#: What a SIGTERM that is outlasted writes into the pipe that wakes.
_TERMINATING = b"t"

FOLDER, LOGS, CACHE, HOST, ANY_PORT = "{folder}", "{logs}", "{cache}", "{host}", "{any_port}"


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """What the agent is to be.

    Attributes:
        folder: the node's own, made and removed by the agent. Its parent is the folder of runs.
        launcher_folder: the run folder; its logs and compile cache are used where this node sees it.
        work_dir: the program's working folder, which this node has to see.
        files: material of the job by name, written into ``folder`` for this user alone.
        interface: the setting.
        log_dir: the setting.
        head: where the launcher runs; None if that is not the node of a batch job's script.
        is_lent: the node is another job's, which takes it back by SIGTERM.
    """

    folder: str
    launcher_folder: str
    work_dir: str
    files: dict[str, str] = {}
    interface: str | None = None
    log_dir: str | None = None
    head: head_loss.Head | None = None
    is_lent: bool = False


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start a component. In ``argv``, ``{folder}``, ``{logs}`` and ``{cache}`` stand for folders of the node, and
    ``{host}`` for the address under which others reach it, ``{any_port}`` for a place to listen there.

    Attributes:
        is_primary: the agent ends with it.
        restarts: it is started again when it ends, see ``restarts``.
    """

    name: str
    argv: tuple[str, ...]
    is_primary: bool = True
    restarts: bool = False


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End a component in good order."""

    name: str


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Kill a component: its end is one that nobody asked for."""

    name: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Ask the controller of this node for its status report, which is told as ``STATUS_EVENT``.

    Attributes:
        number: comes back with the report.
        address: of its Unix socket.
    """

    number: int
    address: str
    timeout_s: float


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """Send a signal to a program of this node; ``pid_file`` is a name in ``{folder}``, see ``client_step``."""

    pid_file: str
    number: int


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The launcher lives."""


class Dismiss(msgspec.Struct, frozen=True, tag="dismiss"):
    """The run is over; end of file follows."""


Line = Welcome | Start | Stop | Kill | Ask | Signal | Alive | Dismiss


def encode_line(line: Line) -> bytes:
    """As ``read_lines`` takes it."""
    return msgspec.json.encode(line) + b"\n"


class NodeUnfit(Exception):
    """This node cannot carry its part of the run; the message says what to do."""


class Agent:
    """Performs the launcher's lines until it goes, the primary component ends, or a signal comes."""

    def __init__(self, input_fd: int, events: EventWriter) -> None:
        self._input_fd = input_fd
        self._events = events
        self._wake_read, self._wake_write = os.pipe()
        self._lock = threading.Lock()
        self._components: Components | None = None
        self._restarts = Restarts()
        #: Command line and log of components that are started again when they end.
        self._restartable: dict[str, tuple[list[str], Path | None]] = {}
        self._primary = ""
        #: Of the primary component, once it has ended.
        self._returncode: int | None = None
        self._is_asked = False
        self._outlasts_sigterm = False
        self._is_launcher_gone = False
        self._launcher_timeout_s: float | None = None

    def run(self) -> int:
        """Returns the exit code: that of the primary component, 0 if the launcher went first."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        lines = self._lines()
        welcome = next(lines, None)
        if not isinstance(welcome, Welcome):
            print("the launcher was gone, or said nothing, before this node had anything to do", file=sys.stderr)
            return 1
        try:
            place = own_place(os.environ, welcome.interface)
            folder = self._prepare(welcome)
        except (NodeUnfit, ConfigurationError) as failure:
            self._events.write(AGENT_FAILED_EVENT, reason=f"{_node()}: {failure}")
            print(failure, file=sys.stderr)
            return 1
        if welcome.head is not None:
            self._launcher_timeout_s = LAUNCHER_TIMEOUT_S
        is_dismissed = False
        self._outlasts_sigterm = not welcome.is_lent
        components = self._components = Components(
            component_environment(os.environ), self._tell, outlast_sigterm=self._outlasts_sigterm
        )
        try:
            launcher_folder = Path(welcome.launcher_folder)
            shared = launcher_folder if (launcher_folder / LOCK_NAME).exists() else folder.path
            cache = shared / "compile-cache"
            cache.mkdir(exist_ok=True, mode=0o700)
            places = {FOLDER: str(folder.path), LOGS: str(shared / folder.logs.name), CACHE: str(cache)}
            places |= {HOST: place.address, ANY_PORT: str(TcpAddress(place.address, 0))}
            self._events.write(AGENT_EVENT, step_id=os.environ.get("SLURM_STEP_ID"), place=dataclasses.asdict(place))
            for line in lines:
                if isinstance(line, Alive):
                    continue
                if isinstance(line, Dismiss):
                    is_dismissed = True
                    continue
                if isinstance(line, Signal):
                    client_step.send_signal(folder.path / line.pid_file, line.number)
                    continue
                if isinstance(line, Stop):
                    components.stop([line.name], CLOSE_GRACE_S)
                    continue
                if isinstance(line, Kill):
                    components.kill(line.name)
                    continue
                if isinstance(line, Ask):
                    self._ask(line)
                    continue
                assert isinstance(line, Start), line
                argv = [_replace(word, places) for word in line.argv]
                if line.is_primary:
                    self._primary = line.name
                if welcome.log_dir is not None:
                    place_log(Path(places[LOGS]), Path(welcome.log_dir), line.name, _node())
                # Of several in one step, only the first one's output is the step's.
                log_path = None if line.is_primary else Path(places[LOGS]) / f"{line.name}.log"
                if line.restarts:
                    self._restartable[line.name] = argv, log_path
                components.start(line.name, argv, log_path)
            if self._returncode is None or self._is_asked:
                (folder.path / OVER_NAME).touch()
        finally:
            components.close(CLOSE_GRACE_S)
            folder.remove(keep_logs=False)
        if self._is_launcher_gone and not is_dismissed and welcome.head is not None:
            done = head_loss.settle(welcome.head, Slurm(step_environment(os.environ), head_loss.PROBE_TIMEOUT_S))
            if done is not None:
                print(f"{_node()}: {done}", file=sys.stderr)
        return 0 if self._returncode is None else self._returncode if self._returncode >= 0 else 128 - self._returncode

    def _prepare(self, welcome: Welcome) -> RunFolder:
        if not os.path.isdir(welcome.work_dir):  # noqa: PTH112 (bytes-exact)
            raise NodeUnfit(
                f"the working folder {welcome.work_dir} is not there on this node: start from a folder that all nodes "
                "see, on a shared file system (sbatch --chdir, or cd before slurm-pathways run)"
            )
        if welcome.log_dir is not None:
            make_log_dir(Path(welcome.log_dir))
        path = Path(welcome.folder)
        make_private(path.parent)
        remove_abandoned(path.parent)
        folder = RunFolder.create(os.environ, path)
        folder.mark_in_use()
        for name, text in welcome.files.items():
            fd = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
        return folder

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._outlasts_sigterm:
            os.write(self._wake_write, _TERMINATING)
            return
        self._is_asked = True
        os.write(self._wake_write, b"x")

    def _tell(self, event: RuntimeEvent) -> None:
        match event:
            case ComponentEvent(component, name, fields):
                self._restarts.note(component, name, fields, time.monotonic())
                self._events.write(name, **{"component": component, **fields})
            case ComponentEnded(component, returncode, was_asked):
                will_restart = None if was_asked or self._is_asked else self._restart(component)
                if will_restart is not None:
                    self._events.write(
                        PROCESS_ENDED_EVENT, component=component, returncode=returncode, will_restart=will_restart
                    )
                if will_restart:
                    return
                if component == self._primary:
                    self._returncode = returncode
                    # One that has been given up is known to the launcher, which decides what becomes of the run.
                    if will_restart is None:
                        os.write(self._wake_write, b"x")
                elif not was_asked:
                    self._events.write(PROCESS_ENDED_EVENT, component=component, returncode=returncode)

    def _restart(self, component: str) -> bool | None:
        """Start a component again; whether that was of use, None where that is not what is done with it."""
        if component not in self._restartable:
            return None
        if not (is_due := self._restarts.is_another_due(component, time.monotonic())):
            return is_due
        assert self._components is not None
        try:
            return True if self._components.restart(component, *self._restartable[component]) else None
        except OSError as failure:
            print(f"{component} cannot be started again: {failure}", file=sys.stderr)
            return False

    def _ask(self, line: Ask) -> None:
        try:
            answer: dict[str, object] = {"report": ask(line.address, line.timeout_s)}
        except NoAnswer as failure:
            answer = {"problem": str(failure)}
        self._events.write(STATUS_EVENT, number=line.number, **answer)

    def _lines(self) -> Iterator[Line]:
        """The launcher's lines; ends with its end, with the primary component's, and with a signal."""
        decoder = msgspec.json.Decoder(Line)
        poll = select.poll()
        poll.register(self._input_fd, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        rest = b""
        deadline_s: float | None = time.monotonic() + WELCOME_TIMEOUT_S
        while True:
            timeout_ms = None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) * 1e3
            ready = dict(poll.poll(timeout_ms))
            if self._wake_read in ready:
                if os.read(self._wake_read, 64).strip(_TERMINATING):
                    return
                self._events.write(TERMINATING_EVENT)
                continue
            chunk = os.read(self._input_fd, 1 << 16) if ready else b""
            if not chunk:
                self._is_launcher_gone = True
                return
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield decoder.decode(line)
            if whole:
                timeout_s = self._launcher_timeout_s
                deadline_s = None if timeout_s is None else time.monotonic() + timeout_s


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME", "this node")


def _replace(word: str, places: dict[str, str]) -> str:
    for place, path in places.items():
        word = word.replace(place, path)
    return word


def main() -> int:
    """The process."""
    # What components and libraries print must not get among the events.
    events_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return Agent(sys.stdin.fileno(), EventWriter(events_fd)).run()


if __name__ == "__main__":
    sys.exit(main())
