"""The task of the client's step: runs the user's program there, and ends it when its runtime has gone.

The runtime on this node holds a lock on a file while it lives. When the lock is free while the program runs, the
launcher has been killed, or the step of the controller has: the program is sent SIGTERM, then SIGKILL. If the runtime
did not end in good order, the program first has time to end by the errors that it meets.

Started by its path with ``python -I -S``: it imports nothing beyond the standard library and costs little. Slurm
signals the whole process group of a task, so the program has each signal already; here they are ignored.
"""

import argparse
import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import sys
import threading
import time
from pathlib import Path

NOT_FOUND = 127
NOT_EXECUTABLE = 126
_SHELL = "/bin/sh"
_FORWARDED_BY_SLURM = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_CHILD_SUBREAPER = 36


def send_signal(pid_file: Path, number: int) -> None:
    """Send a signal to the program whose id ``pid_file`` holds, or will hold once it has been started."""
    with _waiting(pid_file).open("a", encoding="ascii") as file:
        file.write(f"{number}\n")
    if pid_file.exists():
        deliver_signals(pid_file)


def deliver_signals(pid_file: Path) -> None:
    """Send what ``send_signal`` has left, once whoever calls it."""
    taken = pid_file.with_name(f"{pid_file.name}.taken-{os.getpid()}")
    try:
        _waiting(pid_file).rename(taken)
        numbers = taken.read_text(encoding="ascii").split()
        taken.unlink()
        pid = int(pid_file.read_text(encoding="ascii"))
    except FileNotFoundError:
        # Another one has taken them, or the program has ended.
        return
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, int(number))


def _waiting(pid_file: Path) -> Path:
    return pid_file.with_name(f"{pid_file.name}.signals")


def _watch(lock: Path, over: Path, pid: int, grace_s: float, kill_after_s: float) -> None:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            # Both names are gone when the folder is.
            is_in_order = over.exists() or not lock.exists()
    except OSError:
        is_in_order = True
    if not is_in_order:
        time.sleep(grace_s)
    for number in (signal.SIGTERM, signal.SIGCONT):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    time.sleep(kill_after_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _spawn(argv: list[str]) -> int:
    try:
        return os.posix_spawnp(argv[0], argv, os.environ, setsigmask=())
    except OSError as failure:
        if failure.errno == errno.ENOEXEC:
            return os.posix_spawnp(_SHELL, [_SHELL, *argv], os.environ, setsigmask=())
        print(f"slurm-pathways: {argv[0]}: {failure.strerror} (on {os.uname().nodename})", file=sys.stderr)
        sys.exit(NOT_FOUND if failure.errno == errno.ENOENT else NOT_EXECUTABLE)


def end_descendants() -> None:
    """Kill all that the program has left behind: it holds the task's output open, and Slurm would wait for that."""
    with contextlib.suppress(ChildProcessError):
        while True:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            # Those that are born meanwhile become ours when their parents are dead, and are found the next time.
            for pid in _descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.wait()


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # It may have ended.
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                # The name, in parentheses, may hold spaces and parentheses of its own.
                parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, rest = [], [pid]
    while rest:
        below = parents.get(rest.pop(), [])
        found += below
        rest += below
    return found


def main() -> int:
    """Returns the program's exit code, as a shell gives it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--over", type=Path, required=True)
    parser.add_argument("--pid-file", type=Path, required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("--kill-after-s", type=float, required=True)
    parser.add_argument("argv", nargs="+")
    arguments = parser.parse_args()
    # What the program leaves behind becomes ours, and ends with the step.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _FORWARDED_BY_SLURM:
        if signal.getsignal(number) is not signal.SIG_IGN:
            # Not SIG_IGN, which the program would inherit.
            signal.signal(number, lambda *_: None)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    pid = _spawn(arguments.argv)
    # Where the runtime is gone already, nobody has signals to pass on.
    with contextlib.suppress(OSError):
        arguments.pid_file.write_text(str(pid), encoding="ascii")
        deliver_signals(arguments.pid_file)
    threading.Thread(
        target=_watch,
        args=(arguments.lock, arguments.over, pid, arguments.grace_s, arguments.kill_after_s),
        daemon=True,
    ).start()
    while True:
        ended, status = os.wait()
        if ended == pid:
            # Python gives handlers back to the system's defaults while it ends: what the program has been sent, and
            # Slurm sends to us a moment later, would then be what the task ends by.
            for number in _FORWARDED_BY_SLURM:
                signal.signal(number, signal.SIG_IGN)
            arguments.pid_file.unlink(missing_ok=True)
            end_descendants()
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
