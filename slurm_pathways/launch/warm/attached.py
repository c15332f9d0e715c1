"""A place in a warm runtime, as the launcher of one program has it."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_pathways.config import ConfigurationError, RuntimeSpec
from slurm_pathways.launch.client_environment import client_environment
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, RuntimeEvent
from slurm_pathways.launch.controller_status import Report, ask
from slurm_pathways.launch.local import StartupFailed
from slurm_pathways.launch.program import Program
from slurm_pathways.launch.run import KEEPER, run_with
from slurm_pathways.launch.run_folder import LOGS_NAME, Process, RunRecord
from slurm_pathways.launch.runtime import is_at_terminal, spec_of
from slurm_pathways.launch.steps import KILL_STEPS, step_environment
from slurm_pathways.launch.warm.find import check_settings
from slurm_pathways.launch.warm.messages import Answer, Attach, Attached, Ended, Lines, Refused, Said, Signal, Started


def run_warm(
    path: Path,
    record: RunRecord,
    values: Mapping[str, object],
    argv: Sequence[str],
    environ: Mapping[str, str],
    verbosity: int,
) -> int:
    """``run.run_local`` on the warm runtime whose run folder is ``path``.

    Args:
        values: what the user asked for, from ``config.gather``.

    Raises:
        ConfigurationError: it does not have what was asked for, or another version started it.
    """
    assert record.warm is not None
    try:
        spec = spec_of(record.warm.settings)
    except TypeError as failure:
        raise ConfigurationError(
            f"the warm runtime of {path} was started by another version of slurm-pathways: end it with that version's "
            "slurm-pathways down"
        ) from failure
    check_settings(values, spec, path)
    is_in_job = record.warm.job_id is not None
    program_environ = step_environment(environ) if is_in_job else dict(environ)
    return run_with(
        lambda on_event: AttachedRuntime(spec, path, record, argv, program_environ, on_event),
        spec,
        argv,
        environ,
        verbosity,
        is_warm=True,
    )


@dataclass(frozen=True, slots=True)
class _Folder:
    path: Path

    @property
    def logs(self) -> Path:
        return self.path / LOGS_NAME

    def log_of(self, component: str) -> Path:
        return self.logs / f"{component}.log"


class AttachedRuntime:
    """A ``runtime.Runtime`` that is there already: ``start`` asks its keeper for a place, ``close`` gives it back.

    Args:
        path: the run folder; ``record`` is what it says.
        argv: of the program, to be shown to others.
        environ: what the program inherits.
        on_event: told what the keeper passes on, on a thread of its own. The keeper's end is that of ``KEEPER``.
    """

    def __init__(
        self,
        spec: RuntimeSpec,
        path: Path,
        record: RunRecord,
        argv: Sequence[str],
        environ: Mapping[str, str],
        on_event: Callable[[RuntimeEvent], None],
    ) -> None:
        self.spec = spec
        self.folder = _Folder(path)
        self.startup_deadline_s = time.monotonic() + spec.startup_timeout_s
        #: They are the keeper's.
        self.kept_logs: Path | None = None
        assert record.warm is not None
        self._address = record.warm.address
        self._controller_address = record.controller_address
        self._argv = tuple(argv)
        self._environ = dict(environ)
        self._tell = on_event
        self._lines: Lines[Answer] | None = None
        self._thread: threading.Thread | None = None
        self._attached: Attached | None = None
        self._refusal: str | None = None

    def start(self) -> None:
        """Ask for a place.

        Raises:
            StartupFailed: the keeper is not there.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self._address)
            self._lines = Lines(sock, Answer)
            self._lines.send(Attach(self._argv, is_at_terminal()))
        except OSError as failure:
            sock.close()
            raise StartupFailed(f"the keeper of {self.folder.path} does not answer: {failure}") from failure
        self._thread = threading.Thread(target=self._receive, args=(self._lines,), name="keeper")
        self._thread.start()

    def _receive(self, lines: Lines[Answer]) -> None:
        for answer in lines.receive():
            match answer:
                case Attached():
                    self._attached = answer
                    self._tell(ComponentEvent(KEEPER, "attached"))
                case Refused(reason):
                    self._refusal = reason
                    self._tell(ComponentEvent(KEEPER, "refused"))
                case Said(component, name, fields):
                    self._tell(ComponentEvent(component, name, fields))
                case Ended(component, returncode, was_asked, will_restart):
                    self._tell(ComponentEnded(component, returncode, was_asked, will_restart))
        self._refusal = self._refusal or "its keeper has ended"
        self._tell(ComponentEnded(KEEPER, 0, was_asked=self._lines is None))

    def is_ready(self) -> bool:
        """Whether there is a place."""
        return self._attached is not None

    def check_startup(self) -> None:
        """Raise StartupFailed if there is no place, or none in time."""
        if self._refusal is not None:
            raise StartupFailed(f"the warm runtime of {self.folder.path} takes no program: {self._refusal}")
        if not self.is_ready() and time.monotonic() >= self.startup_deadline_s:
            raise StartupFailed(
                f"the warm runtime of {self.folder.path} had no place within {self.spec.startup_timeout_s:g} s"
            )

    def hosts_ready(self) -> dict[str, float]:
        """All were ready before."""
        return {}

    def program(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The command line and environment of a process that runs ``argv`` in this place."""
        assert self._attached is not None
        environ = client_environment(self._environ, self._attached.address, self.folder.path)
        return [*self._attached.program_prefix, *argv], environ

    def status(self, timeout_s: float) -> Report:
        """The controller's report.

        Raises:
            NoAnswer: it does not answer in time, or it is on another machine.
        """
        return ask(self._controller_address, timeout_s)

    def signal_program(self, program: Program, number: int) -> None:
        """See ``Runtime``; the keeper passes on what srun would not."""
        assert self._attached is not None
        if not self._attached.program_prefix or number not in (*KILL_STEPS, signal.SIGKILL):
            program.signal(number)
        elif number == signal.SIGKILL:
            program.signal(KILL_STEPS[0])
        elif self._lines is not None:
            # Where the keeper is gone, the task has seen that and ends the program.
            with contextlib.suppress(OSError):
                self._lines.send(Signal(number))

    def record(self, **changes: object) -> None:
        """Tell the keeper which process is the program, so that it ends it if we cannot."""
        program = changes.get("program")
        if isinstance(program, Process) and self._lines is not None:
            try:
                self._lines.send(Started(program))
            except OSError:
                # Its end is reported where all ends are.
                return

    def describe_component(self, name: str) -> str:
        """With its node."""
        kind, _, number = name.partition("-")
        if name == KEEPER:
            return "the keeper of the warm runtime"
        # Workers that were lent since are none of these.
        if kind == "worker" and self._attached is not None and int(number) < len(self._attached.host_names):
            return f"{name} ({self._attached.host_names[int(number)]})"
        return name

    def close(self) -> None:
        """Give the place back. May be called twice."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
