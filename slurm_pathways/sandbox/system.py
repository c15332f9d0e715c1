"""Programs, processes and files of this machine: the sandbox's only hands and eyes. Everything has a deadline."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from slurm_pathways.sandbox.errors import SandboxError
from slurm_pathways.sandbox.packages import SYSTEM_PATH
from slurm_pathways.sandbox.record import Process

Completed = subprocess.CompletedProcess[str]

POLL_INTERVAL_S = 0.01
#: A command that changes a sandbox waits this long for another one to finish.
LOCK_TIMEOUT_S = 120.0
#: For processes to go after SIGKILL.
KILL_TIMEOUT_S = 20.0

_LOG_LINES = 15
_LISTEN = "0A"
#: What carries a mark in its command line before it has one in its mounts.
_STARTERS = ("sh", "setsid", "unshare", "nsenter")

# The command's parent ends at once, so that nobody has to collect it later. Arguments: file for output, command.
_DETACH = 'out=$0; setsid "$@" </dev/null >>"$out" 2>&1 & echo $!'


def which(program: str) -> str | None:
    """The path of a program of the system."""
    return shutil.which(program, path=SYSTEM_PATH)


def run(
    argv: Sequence[str], timeout_s: float, *, environ: Mapping[str, str] | None = None, stdin: str = ""
) -> Completed:
    """Run a program to its end, whatever its exit code.

    Raises:
        SandboxError: it did not end in time (it is killed), or there is no such program.
    """
    try:
        return subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=timeout_s, env=_environ(environ), check=False
        )
    except subprocess.TimeoutExpired as late:
        raise SandboxError(f"{_shown(argv)} did not end in {timeout_s:g} s") from late
    except OSError as failure:
        raise SandboxError(f"{argv[0]} cannot be run: {failure.strerror}") from failure


def check(argv: Sequence[str], timeout_s: float, *, environ: Mapping[str, str] | None = None, stdin: str = "") -> str:
    """Run a program that has to succeed; what it wrote to stdout.

    Raises:
        SandboxError: it did not; with what it wrote to stderr.
    """
    done = run(argv, timeout_s, environ=environ, stdin=stdin)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise SandboxError(f"{_shown(argv)} ended with exit code {done.returncode}: {said or 'no message'}")
    return done.stdout


def start_detached(argv: Sequence[str], out: Path, environ: Mapping[str, str] | None = None) -> Process | None:
    """Start a program in a session of its own, nobody's child, with its output appended to ``out``.

    Returns:
        Its process; None if it has already ended.
    """
    done = run(["sh", "-c", _DETACH, str(out), *argv], KILL_TIMEOUT_S, environ=environ)
    if done.returncode != 0:
        raise SandboxError(f"{_shown(argv)} cannot be started: {done.stderr.strip()}")
    return identify(int(done.stdout))


def become(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Replace this process. Returns never.

    Raises:
        SandboxError: there is no such program.
    """
    try:
        os.execvpe(argv[0], list(argv), dict(environ))
    except OSError as failure:
        raise SandboxError(f"{argv[0]} cannot be run: {failure.strerror}") from failure


def _environ(environ: Mapping[str, str] | None) -> dict[str, str]:
    return dict(environ) if environ is not None else {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"}


def _shown(argv: Sequence[str]) -> str:
    return " ".join(argv) if len(argv) <= 12 else " ".join([*argv[:12], "..."])


def _stat_fields(pid: int) -> list[str] | None:
    try:
        # The name, in parentheses, may hold spaces and parentheses of its own.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def identify(pid: int) -> Process | None:
    """A process that lives; None when there is none with this id, or only its corpse."""
    fields = _stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else Process(pid, int(fields[19]))


def is_alive(process: Process) -> bool:
    """Whether that very process lives."""
    return identify(process.pid) == process


def only_child(parent: Process) -> Process | None:
    """The child of a process that has one."""
    for pid in _pids():
        fields = _stat_fields(pid)
        if fields is not None and int(fields[1]) == parent.pid:
            return identify(pid)
    return None


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def marked_processes(mark: str) -> dict[int, str]:
    """Every living process that belongs to a sandbox, with its command line; not this one nor its ancestors."""
    spared = set(_ancestors())
    by_namespace: dict[str, bool] = {}
    found = {}
    for pid in _pids():
        if pid in spared or identify(pid) is None:
            continue
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
            namespace = str(Path(f"/proc/{pid}/ns/mnt").readlink())
            if namespace not in by_namespace:
                by_namespace[namespace] = mark in Path(f"/proc/{pid}/mountinfo").read_text(errors="replace")
        except (OSError, ValueError):
            # It has ended since.
            continue
        is_starter = Path(argv[0]).name in _STARTERS and any(mark in argument for argument in argv)
        if by_namespace[namespace] or is_starter:
            found[pid] = " ".join(argv).strip()
    return found


def _ancestors() -> Iterator[int]:
    pid = os.getpid()
    while pid > 0:
        yield pid
        fields = _stat_fields(pid)
        pid = int(fields[1]) if fields is not None else 0


def kill(process: Process, timeout_s: float = KILL_TIMEOUT_S) -> None:
    """Kill a process and wait for its end; if it is the init of a place, for that of the whole place.

    Raises:
        SandboxError: the kernel did not end it in time.
    """
    if not is_alive(process):
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    if not wait_until(lambda: not is_alive(process), timeout_s):
        raise SandboxError(f"process {process.pid} did not end in {timeout_s:g} s after SIGKILL")


def kill_marked(mark: str, timeout_s: float = KILL_TIMEOUT_S) -> None:
    """Kill every process of a sandbox and wait until there is none.

    Raises:
        SandboxError: some did not end in time; with their command lines.
    """
    deadline_s = time.monotonic() + timeout_s
    while left := marked_processes(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            listed = "; ".join(f"{pid}: {command}" for pid, command in left.items())
            raise SandboxError(f"{timeout_s:g} s after SIGKILL there still is: {listed}")
        time.sleep(POLL_INTERVAL_S)


def wait_until(condition: Callable[[], bool], timeout_s: float, interval_s: float = POLL_INTERVAL_S) -> bool:
    """Whether a condition came true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(interval_s)
    return True


def socket_answers(path: Path) -> bool:
    """Whether a Unix socket takes connections."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(str(path))
        except OSError:
            return False
    return True


def port_listens(pid: int, port: int) -> bool:
    """Whether somebody listens on a TCP port in the network of a process."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_ = line.split()
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


def free_ports(count: int) -> tuple[int, ...]:
    """TCP ports on which nobody listens now, all different."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            sock = held.enter_context(socket.socket())
            sock.bind(("", 0))
            ports.append(sock.getsockname()[1])
        return tuple(ports)


def log_tail(paths: Sequence[Path]) -> str:
    """The end of the first of these files that has something in it, for a message."""
    for path in paths:
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        if lines:
            return f"the end of {path}:\n" + "\n".join(f"  {line}" for line in lines[-_LOG_LINES:])
    return f"nothing was written to {paths[0]}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other commands that change the sandbox in it; the lock leaves no file.

    Raises:
        SandboxError: another command holds it for too long.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise SandboxError(
                        f"another command has been working on the sandbox in {folder} for {LOCK_TIMEOUT_S:g} s"
                    ) from None
                time.sleep(POLL_INTERVAL_S)
        yield
    finally:
        os.close(descriptor)


def write(path: Path, content: str | bytes, mode: int) -> None:
    """Write a file as a whole: a reader, or a crash, sees the old one or the new one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content.encode() if isinstance(content, str) else content)
    fresh.rename(path)


def make_folder(path: Path, mode: int) -> None:
    """Make a folder with exactly this mode."""
    path.mkdir(parents=False)
    path.chmod(mode)


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it; it is fine if it has gone."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
