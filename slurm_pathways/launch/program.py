"""The user's program: started as a shell would start it, and the signals that are meant for it.

It stays in our process group, so Ctrl-C, Ctrl-\\ and Ctrl-Z at the terminal reach it as they would without us, and a
pipeline around us keeps working. Such a signal reaches us too, from the kernel, and is not passed on: the program has
it already. What another process sends to us is passed on.
"""

import atexit
import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

#: Passed on to the program, unless the caller of ours ignores them (as nohup does), which the program then inherits.
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: Python ignores these two; a program expects them as they are.
_RESET = (signal.SIGPIPE, signal.SIGXFSZ)

NOT_FOUND = 127
NOT_EXECUTABLE = 126
_SHELL = "/bin/sh"


class ProgramNotStarted(Exception):
    """The program cannot be executed; ``exit_code`` is what a shell gives then."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """A signal came. ``from_terminal``: the kernel sent it to the whole foreground group, the program included."""

    number: int
    from_terminal: bool


@dataclass(frozen=True, slots=True)
class ProgramEnded:
    """The program has ended; ``exit_code`` as a shell gives it: 128+n after signal n."""

    exit_code: int


class Signals:
    """While entered, the signals of ``PASSED_ON`` end nothing: they are told to ``on_signal``, on a thread of its own.

    To be entered on the main thread before any other thread is started: threads inherit the mask.

    When the interpreter ends they are ignored, so that a late one does not become the exit code.
    """

    def __init__(self, on_signal: Callable[[SignalReceived], None]) -> None:
        self._on_signal = on_signal
        self._caught = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
        self._stack = contextlib.ExitStack()
        self._wake = signal.SIGRTMIN

    def __enter__(self) -> "Signals":
        # Python gives handlers back to the system's defaults while it ends.
        atexit.register(_ignore, self._caught)
        # A handler as well: the mask is lifted for moments, while children are started.
        for number in self._caught:
            self._stack.callback(signal.signal, number, signal.signal(number, self._handle))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*self._caught, self._wake})
        # Before the handlers go back to what they were, what is still pending meets ours.
        self._stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        self._thread = threading.Thread(target=self._listen, name="signals")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread.ident is not None
        signal.pthread_kill(self._thread.ident, self._wake)
        self._thread.join()
        self._stack.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._on_signal(SignalReceived(number, from_terminal=False))

    def _listen(self) -> None:
        while True:
            received = signal.sigwaitinfo({*self._caught, self._wake})
            if received.si_signo == self._wake:
                return
            # Positive codes are the kernel's own; kill() and the like give zero or less.
            self._on_signal(SignalReceived(received.si_signo, from_terminal=received.si_code > 0))


def _ignore(numbers: Sequence[int]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


class Program:
    """The running program.

    Args:
        argv: found by PATH of ``environ`` like a shell does.
        on_ended: told once, on a thread of its own.

    Raises:
        ProgramNotStarted: there is no such program, or it cannot be executed.
    """

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], on_ended: Callable[[ProgramEnded], None]
    ) -> None:
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._has_ended = False
        self.pid = _spawn(argv, environ)
        self._thread = threading.Thread(target=self._wait, name="program")
        self._thread.start()

    def signal(self, number: int) -> None:
        """Send it a signal; nothing happens when it has ended."""
        with self._lock:
            if not self._has_ended:
                os.kill(self.pid, number)

    def join(self) -> None:
        """Wait until ``on_ended`` has been called."""
        self._thread.join()

    def _wait(self) -> None:
        # Not reaped before the lock is held: until then the pid is the program's.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            _, status = os.waitpid(self.pid, 0)
            self._has_ended = True
        code = os.waitstatus_to_exitcode(status)
        self._on_ended(ProgramEnded(code if code >= 0 else 128 - code))


def _spawn(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    file = find_program(argv[0], environ)
    try:
        return _posix_spawn(file, argv, environ)
    except OSError as failure:
        if failure.errno == errno.ENOEXEC:
            # A script without #!: shells, and execvp, run it by sh.
            return _posix_spawn(_SHELL, [_SHELL, file, *argv[1:]], environ)
        if failure.errno == errno.ENOENT:
            raise ProgramNotStarted(
                f"{argv[0]}: its interpreter (the first line of {file}) is missing", NOT_FOUND
            ) from failure
        raise ProgramNotStarted(f"{argv[0]}: cannot be executed: {failure.strerror}", NOT_EXECUTABLE) from failure


def _posix_spawn(file: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    # Descriptors that our caller made inheritable go on to the program; ours are not inheritable, as Python opens them.
    return os.posix_spawn(file, list(argv), environ, setsigmask=(), setsigdef=_RESET)


def find_program(name: str, environ: Mapping[str, str]) -> str:
    """The file that a shell would execute for ``name``.

    Raises:
        ProgramNotStarted: with what a shell's exit code would be, and the likely remedy.
    """
    if "/" in name:
        candidates = [name]
    else:
        folders = environ.get("PATH", os.defpath).split(os.pathsep)
        candidates = [os.path.join(folder or ".", name) for folder in folders]  # noqa: PTH118 (keeps "./")
    present = [path for path in candidates if os.path.exists(path)]  # noqa: PTH110 (bytes-exact, like execvp)
    for path in present:
        if os.path.isfile(path) and os.access(path, os.X_OK):  # noqa: PTH113
            return path
    if not present:
        # The file lies here, and only its folder is not searched.
        hint = f"; did you mean python {name}?" if name.endswith(".py") and os.path.exists(name) else ""  # noqa: PTH110
        raise ProgramNotStarted(f"{name}: program not found{hint}", NOT_FOUND)
    if os.path.isdir(present[0]):  # noqa: PTH112
        raise ProgramNotStarted(f"{name}: is a folder", NOT_EXECUTABLE)
    hint = f"; did you mean python {name}?" if name.endswith(".py") else ""
    raise ProgramNotStarted(f"{name}: not executable{hint}", NOT_EXECUTABLE)
