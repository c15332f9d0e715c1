"""Lives of processes: how a child is started so that it never outlives its parent, and how either hears of the end.

A *lifeline* is a pipe. The parent keeps the write end and writes nothing; the child inherits the read end
(``--lifeline-fd``). End of file means that the parent is gone, whatever killed it. ``die_with_parent`` is the second
line, for a child whose Python cannot run: the kernel kills it. *Events* go the other way: the child writes JSON lines
to ``--events-fd``.

``spawn`` starts a child with both; launcher, controller and supervisor all start theirs with it.
"""

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# asyncio is imported where it is used: launchers and agents have no loop, and start without it.

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


# The child's side


class LifelineWatch:
    """Watches an inherited lifeline from a thread. ``close`` ends the watching; it is not needed before exit."""

    def __init__(self, fd: int, on_end: Callable[[], None]) -> None:
        self._fd = fd
        self._on_end = on_end
        self._wake_read, self._wake_write = os.pipe()
        # A daemon: it must never keep a process alive that is done.
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._wake_read in ready:
                return
            if not os.read(self._fd, 4096):
                self._on_end()
                return

    def close(self) -> None:
        """Stop watching; ``on_end`` is not called afterwards. Not to be called from ``on_end``."""
        os.write(self._wake_write, b"x")
        self._thread.join()
        for fd in (self._fd, self._wake_read, self._wake_write):
            os.close(fd)


def watch_lifeline(fd: int | None, on_end: Callable[[], None]) -> LifelineWatch | None:
    """Call ``on_end`` once, on a thread of its own, when the parent is gone. None as ``fd``: nobody to watch."""
    return None if fd is None else LifelineWatch(fd, on_end)


def watch_lifeline_on_loop(fd: int | None, on_end: Callable[[], None]) -> None:
    """Like ``watch_lifeline``, calling ``on_end`` once on the running event loop."""
    if fd is None:
        return
    import asyncio

    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)

    def readable() -> None:
        try:
            ended = not os.read(fd, 4096)
        except BlockingIOError:
            return
        if ended:
            loop.remove_reader(fd)
            on_end()

    loop.add_reader(fd, readable)


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process ``signal_number`` when its parent ends.

    The kernel counts the *thread* that started this process as the parent: whoever uses ``spawn`` for a child that
    calls this must do so from a thread that lives as long as the process, so from the main thread. When the parent
    ended before the call, nothing comes: the lifeline covers that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")


class EventWriter:
    """Writes ``{"event": name, ...}`` as JSON lines to an inherited pipe; nowhere when ``fd`` is None. Thread-safe."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        """Write one event. A reader that is gone is no failure: the lifeline tells of a parent's end."""
        line = json.dumps({"event": event, **fields}).encode() + b"\n"
        with self._lock:
            if self._fd is None:
                return
            view = memoryview(line)
            try:
                while view:
                    view = view[os.write(self._fd, view) :]
            except BrokenPipeError:
                logger.debug("nobody reads events any more")
                os.close(self._fd)
                self._fd = None

    def close(self) -> None:
        """The reader sees end of file."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


# The parent's side


class Child:
    """A process that was started by ``spawn``: the leader of a process group of its own.

    Its end shows on ``pidfd`` (readable). Until ``reap`` its pid is not used again, so signals cannot hit a stranger.

    Attributes:
        name: for messages.
        pid: also the id of its process group.
        pidfd: readable once the process has ended; for ``poll`` or ``loop.add_reader``.
        events_fd: read end of its events, if it has any. ``reap`` closes it unless ``take_events_fd`` took it.
    """

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", lifeline_fd: int, events_fd: int | None) -> None:
        self.name = name
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.events_fd = events_fd
        self.returncode: int | None = None
        self._process = process
        self._lifeline_fd: int | None = lifeline_fd

    def signal(self, signal_number: int) -> None:
        """Send a signal to the whole group; nothing happens when it has been reaped or is empty."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal_number)

    def release_lifeline(self) -> None:
        """Let go of the lifeline: the child sees its parent's end. For an end in good order."""
        if self._lifeline_fd is not None:
            os.close(self._lifeline_fd)
            self._lifeline_fd = None

    def take_events_fd(self) -> int:
        """The read end of the events, now the caller's to close."""
        assert self.events_fd is not None, f"{self.name} was started without events"
        fd, self.events_fd = self.events_fd, None
        return fd

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Whether the process ends within ``timeout_s``. Blocks the thread; does not reap."""
        if self.returncode is not None:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3))

    async def ended(self) -> None:
        """Wait on the running event loop until the process has ended; does not reap."""
        if self.returncode is not None:
            return
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def readable() -> None:
            loop.remove_reader(fd)
            if not future.done():
                future.set_result(None)

        # A descriptor of its own: several waiters, and cancellation, do not disturb each other.
        fd = os.dup(self.pidfd)
        try:
            loop.add_reader(fd, readable)
            await future
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    def reap(self) -> int:
        """Kill what is left of the group, wait for the process, close its descriptors.

        Returns:
            The exit code; negative for a signal.
        """
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.returncode = self._process.wait()
            self.release_lifeline()
            os.close(self.pidfd)
            if self.events_fd is not None:
                os.close(self.events_fd)
                self.events_fd = None
        return self.returncode

    def stop(self, grace_s: float) -> int:
        """End the process: SIGTERM, which it may be deaf to, and the end of its lifeline; SIGKILL after ``grace_s``.

        Blocks the thread. Returns the exit code.
        """
        self._ask_to_end()
        if not self.has_ended(grace_s):
            logger.warning(
                "%s (pid %d) did not end within %g s of being asked to and is killed", self.name, self.pid, grace_s
            )
        return self.reap()

    async def stop_on_loop(self, grace_s: float) -> int:
        """Like ``stop``, waiting on the running event loop."""
        import asyncio

        self._ask_to_end()
        try:
            await asyncio.wait_for(self.ended(), grace_s)
        except TimeoutError:
            logger.warning(
                "%s (pid %d) did not end within %g s of being asked to and is killed", self.name, self.pid, grace_s
            )
        return self.reap()

    def _ask_to_end(self) -> None:
        self.signal(signal.SIGTERM)
        self.release_lifeline()


def spawn(
    argv: Sequence[str],
    *,
    name: str,
    env: Mapping[str, str],
    log_path: Path | None,
    with_events: bool = False,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start a child with a lifeline, in a process group of its own, with stdin from /dev/null.

    ``--lifeline-fd N`` and, with events, ``--events-fd M`` are appended to ``argv``. Call it from the main thread (see
    ``die_with_parent``).

    Args:
        name: for messages.
        env: the child's whole environment.
        log_path: where its stdout and stderr are appended; None leaves ours.
        pass_fds: descriptors that it inherits under their numbers, besides.

    Raises:
        OSError: the program or the log cannot be opened.
    """
    with contextlib.ExitStack() as at_end, contextlib.ExitStack() as on_failure:
        lifeline_read, lifeline_write = os.pipe()
        at_end.callback(os.close, lifeline_read)
        on_failure.callback(os.close, lifeline_write)
        full_argv = [*argv, "--lifeline-fd", str(lifeline_read)]
        passed = [lifeline_read, *pass_fds]
        events_read: int | None = None
        if with_events:
            events_read, events_write = os.pipe()
            at_end.callback(os.close, events_write)
            on_failure.callback(os.close, events_read)
            full_argv += ["--events-fd", str(events_write)]
            passed.append(events_write)
        output = None if log_path is None else at_end.enter_context(log_path.open("ab"))
        process = subprocess.Popen(
            full_argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            pass_fds=passed,
            process_group=0,
        )
        child = Child(name, process, lifeline_write, events_read)
        on_failure.pop_all()
        return child


def log_tail(path: Path, num_lines: int = 20, max_bytes: int = 16 << 10) -> str:
    """The last lines of a log, for a message; an empty string when there is none."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - max_bytes))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-num_lines:])
    except FileNotFoundError:
        return ""
