"""Run folders: the private place of one run on disk, and how others find it.

``<runs root>/run-<unique>/`` holds the sockets, ``logs/``, and ``run.json``, which says what runs where. Whoever owns
the run holds a lock on ``run.lock``, so a folder whose lock is free belongs to nobody that lives. When a
run ends, ``run.json`` goes first and the lock last: a folder without both is only kept logs.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pathways_runtime.transport.addresses import MAX_UNIX_PATH_BYTES
from slurm_pathways.config import RUNS_VARIABLE, ConfigurationError
from slurm_pathways.launch import caretaker
from slurm_pathways.slurm.environment import is_in_job

RECORD_NAME = caretaker.RECORD_NAME
#: The name of a process that is the srun in front of a program.
STEP = caretaker.STEP
LOCK_NAME = caretaker.LOCK_NAME
LOGS_NAME = "logs"

#: The longest name of a socket in a run folder, ours and the workers', with room to spare.
_LONGEST_SOCKET_NAME_BYTES = 32
SCHEMA_VERSION = 1


class Process(msgspec.Struct, frozen=True):
    """A process of the run. ``start_ticks`` (since boot) tells it from a later one with the same pid."""

    name: str
    pid: int
    start_ticks: int


class Warm(msgspec.Struct, frozen=True):
    """Of a runtime that outlives programs.

    Attributes:
        address: where its keeper listens.
        job_id: the Slurm job that it runs in; None for one on this machine alone.
        settings: the fields of its ``RuntimeSpec``; folders as text.
    """

    address: str
    job_id: int | None
    settings: dict[str, str | int | float | bool | None]


class RunRecord(msgspec.Struct, frozen=True):
    """What ``run.json`` says.

    Attributes:
        schema_version: of this file.
        run_id: the folder's name.
        launcher: whose run it is.
        started_at_unix_s: when, in seconds since 1970.
        controller_address: where ``status`` asks.
        components: the runtime's processes; each is the leader of a process group.
        program: the user's, once it has been started.
        program_argv: its command line.
        warm: where programs are let in, of a runtime that outlives them.
        programs: those that were let in and run on this machine.
        job_id: the Slurm job that it runs in, if any.
        growth: where those come in who lend it nodes; empty until it is ready, None where it takes none.
        reach: what stands before a command that is to run where the controller is; empty where that is this machine.
    """

    schema_version: int
    run_id: str
    launcher: Process
    started_at_unix_s: float
    controller_address: str
    components: tuple[Process, ...]
    program: Process | None = None
    program_argv: tuple[str, ...] = ()
    warm: Warm | None = None
    programs: tuple[Process, ...] = ()
    job_id: int | None = None
    reach: tuple[str, ...] = ()
    growth: str | None = None


def identify(name: str, pid: int) -> Process:
    """A living (or not yet reaped) process, told apart from later ones with its pid."""
    return Process(name, pid, caretaker.start_ticks(pid) or 0)


def is_running(process: Process) -> bool:
    """Whether it lives still."""
    return caretaker.start_ticks(process.pid) == process.start_ticks


def runs_root(environ: Mapping[str, str]) -> Path:
    """Where this user's run folders are made."""
    return runs_roots(environ)[0]


def runs_roots(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where this user's run folders may lie on this machine; new ones in the first."""
    if configured := environ.get(RUNS_VARIABLE):
        return (Path(configured).expanduser().absolute(),)
    shared = Path(f"/tmp/slurm-pathways-{os.getuid()}")
    per_user = environ.get("XDG_RUNTIME_DIR")
    # It belongs to logins: on the nodes of a job it is missing, or goes when a login ends.
    if not per_user or not Path(per_user).is_dir():
        return (shared,)
    of_login = Path(per_user) / "slurm-pathways"
    return (shared, of_login) if is_in_job(environ) else (of_login, shared)


def make_private(path: Path) -> None:
    """Make ``path`` a folder that only this user can enter, or check that it is one.

    Raises:
        ConfigurationError: it is a link, a file, somebody else's, open to others, or cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        # lstat: a link would let another user choose where our sockets lie.
        status = path.lstat()
    except OSError as failure:
        raise ConfigurationError(
            f"the folder {path} cannot be made: {failure.strerror}; set {RUNS_VARIABLE} to a folder of yours"
        ) from failure
    if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"{path} is not a folder but a link or file: remove it, or set {RUNS_VARIABLE}")
    if status.st_uid != os.getuid():
        raise ConfigurationError(f"{path} belongs to user id {status.st_uid}: set {RUNS_VARIABLE} to a folder of yours")
    if status.st_mode & 0o077:
        raise ConfigurationError(
            f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):04o}): chmod 700 it, or set "
            f"{RUNS_VARIABLE}"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{path} is not writable: chmod 700 it, or set {RUNS_VARIABLE}")


class RunFolder:
    """The folder of one run, locked by this process until ``remove``.

    Attributes:
        path: absolute.
        run_id: its name.
    """

    def __init__(self, path: Path, *, is_ours: bool, log_dir: Path | None) -> None:
        """Use ``create``."""
        self.path = path
        self.run_id = path.name
        self._is_ours = is_ours
        self._log_dir = log_dir
        self.logs.mkdir(mode=0o700)
        self.lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock_fd, fcntl.LOCK_EX)

    @classmethod
    def create(
        cls, environ: Mapping[str, str], path: Path | None = None, *, log_dir: Path | None = None
    ) -> "RunFolder":
        """Make a fresh folder under the runs root, or use ``path``, which must be new or empty.

        Args:
            log_dir: where the logs named by ``place_log`` are; made if it is not there. None: in the folder.

        Raises:
            ConfigurationError: it cannot be used; the message says why.
        """
        if log_dir is not None:
            make_log_dir(log_dir)
        if path is not None:
            is_ours = not path.exists()
            make_private(path)
            if any(path.iterdir()):
                raise ConfigurationError(f"the run folder {path} is not empty: give a new one, or empty it")
            _check_path(path)
            return cls(path, is_ours=is_ours, log_dir=log_dir)
        root = runs_root(environ)
        make_private(root)
        remove_abandoned(root)
        # What is made here is unique by the system's word, not by chance alone.
        while True:
            path = root / f"run-{secrets.token_hex(4)}"
            _check_path(path)
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            except OSError as failure:
                raise ConfigurationError(f"the folder {path} cannot be made: {failure.strerror}") from failure
            return cls(path, is_ours=True, log_dir=log_dir)

    @property
    def logs(self) -> Path:
        """Where every process of the run logs."""
        return self.path / LOGS_NAME

    def log_of(self, component: str) -> Path:
        """The log of one process."""
        return self.logs / f"{component}.log"

    def place_log(self, component: str, node: str) -> None:
        """Before a process starts: see that its log is where logs are asked for. ``log_of`` then leads there."""
        if self._log_dir is not None:
            place_log(self.logs, self._log_dir, component, node)

    def address(self, name: str) -> str:
        """The address of a socket in this folder."""
        return f"unix:{self.path / name}.sock"

    def mark_in_use(self) -> None:
        """Say that this is more than kept logs, where no record does: whoever finds the lock free may remove it."""
        (self.path / RECORD_NAME).write_bytes(b"{}")

    def write(self, record: RunRecord) -> None:
        """Say what runs here; readers see the old record or the new one."""
        fresh = self.path / (RECORD_NAME + ".new")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        fresh.replace(self.path / RECORD_NAME)

    def remove(self, *, keep_logs: bool) -> None:
        """Remove everything, or everything but the logs. Call it when the run's processes have ended."""
        keep_logs = keep_logs and self._log_dir is None
        caretaker.remove_run(self.path, keep_logs=keep_logs, keep_folder=not self._is_ours)
        os.close(self.lock_fd)


def make_log_dir(path: Path) -> None:
    """Make a folder for logs, if it is not there.

    Raises:
        ConfigurationError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ConfigurationError(f"the log folder {path} cannot be made: {failure.strerror}") from failure


def place_log(logs: Path, log_dir: Path, component: str, node: str) -> None:
    """Make the log of a process in ``logs`` a link to ``<component>.<node>.log`` in ``log_dir``.

    A worker's executor has a log of its own, and so have its Python processes.
    """
    kind, _, number = component.partition("-")
    for name in (component, f"executor-{number}", f"python-{number}") if kind == "worker" else (component,):
        # Nodes may share the folder.
        with contextlib.suppress(FileExistsError):
            (logs / f"{name}.log").symlink_to(log_dir / f"{name}.{node}.log")


def _check_path(path: Path) -> None:
    if unusable := sorted(set("#?%") & set(str(path))):
        raise ConfigurationError(
            f"the run folder {path} has {' and '.join(unusable)} in its path, which JAX would not read as "
            f"parts of one: set {RUNS_VARIABLE} to another folder"
        )
    num_bytes = len(os.fsencode(path)) + 1 + _LONGEST_SOCKET_NAME_BYTES
    if num_bytes > MAX_UNIX_PATH_BYTES:
        raise ConfigurationError(
            f"the run folder {path} is too deep: its sockets would have paths of {num_bytes} bytes, and "
            f"{MAX_UNIX_PATH_BYTES} is the most that Unix sockets allow. Set {RUNS_VARIABLE} to a shorter folder, "
            "for example one in /tmp"
        )


def is_live(path: Path) -> bool:
    """Whether somebody holds the lock of a run folder."""
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def read_record(path: Path) -> RunRecord | None:
    """What a run folder's ``run.json`` says; None when it has none that this version understands."""
    try:
        return msgspec.json.decode((path / RECORD_NAME).read_bytes(), type=RunRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def live_runs(*roots: Path) -> list[tuple[Path, RunRecord]]:
    """The runs in these folders that run now on this machine, oldest first."""
    found = []
    for path in (path for root in roots for path in root.glob("run-*")):
        record = read_record(path)
        if record is not None and is_live(path):
            found.append((path, record))
    return sorted(found, key=lambda run: run[1].started_at_unix_s)


#: A folder this young may be between its making and its lock.
_SETTLED_AFTER_S = 60.0


def remove_abandoned(root: Path) -> None:
    """Remove what runs left behind whose launcher and caretaker were both killed. Kept logs stay."""
    for path in root.glob("run-*"):
        with contextlib.suppress(FileNotFoundError):
            is_settled = time.time() - path.stat().st_mtime > _SETTLED_AFTER_S
            is_more_than_logs = (path / RECORD_NAME).exists() or (path / LOCK_NAME).exists()
            if is_more_than_logs and is_settled and not is_live(path):
                shutil.rmtree(path, ignore_errors=True)
