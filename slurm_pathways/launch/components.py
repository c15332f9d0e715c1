"""The runtime's processes as the launcher sees them: started, watched, explained when they fail."""

import contextlib
import json
import logging
import os
import resource
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pathways_runtime.transport.lifeline import Child, log_tail, spawn

logger = logging.getLogger(__name__)

#: Enough for sockets to every peer of the largest run; far below what makes loops over all descriptors slow.
_OPEN_FILES = 65536
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ComponentEvent:
    """A component said something on its events pipe: ``{"event": name, **fields}``."""

    component: str
    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ComponentEnded:
    """A component's process has ended.

    Attributes:
        returncode: negative for a signal.
        was_asked: it was told to end.
        will_restart: whether it is started again, where that is what is done with such a component.
    """

    component: str
    returncode: int
    was_asked: bool
    will_restart: bool | None = None


RuntimeEvent = ComponentEvent | ComponentEnded


def describe_end(returncode: int) -> str:
    """How a process ended, to be put after its name: ``ended with exit code 3``."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    hint = ", perhaps by the kernel for want of memory" if -returncode == signal.SIGKILL else ""
    return f"was killed by signal {-returncode} ({name}){hint}"


#: Of a log, under a message: enough for a Python traceback's end.
LOG_LINES_SHOWN = 12


def quote_log(path: Path, num_lines: int = LOG_LINES_SHOWN) -> str:
    """The end of a log, indented, to be put under a message; says so when it is empty."""
    tail = log_tail(path, num_lines=num_lines)
    if not tail.strip():
        return f"    (its log {path} is empty)"
    return f"    last lines of {path}:\n" + "\n".join(f"    | {line}" for line in tail.splitlines())


@contextlib.contextmanager
def only_blocked(*signals: int) -> Iterator[None]:
    """Start children in here: they inherit the mask, and a blocked SIGTERM makes them deaf to it."""
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class Components:
    """A set of processes with lifelines and events, watched by one thread.

    Args:
        on_event: called on the watching thread, in the order in which things happened to one component; what a
            component said comes before its end. It must not block.
        outlast_sigterm: they and what they start do not hear SIGTERM, which Slurm sends to every process of a job that
            is to end: until the program has ended, it needs them. ``stop`` ends them.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        on_event: Callable[[RuntimeEvent], None],
        *,
        outlast_sigterm: bool = False,
    ) -> None:
        self._environ = dict(environ)
        self._on_event = on_event
        self._blocked = (signal.SIGTERM,) if outlast_sigterm else ()
        #: Guards the two tables; notified when one of them shrinks or grows.
        self._changed = threading.Condition()
        self._running: dict[str, Child] = {}
        #: Names of those that were told to end.
        self._asked: set[str] = set()
        self._wake_read, self._wake_write = os.pipe()
        self._started: list[Child] = []
        #: Nobody is started again from now on.
        self._is_closing = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._watch, name="components")
        self._thread.start()

    def start(self, name: str, argv: Sequence[str], log_path: Path | None) -> Child:
        """Start one; from the main thread, as children may ask the kernel to be killed with it. See also ``restart``.

        Args:
            log_path: where its output goes; None leaves it ours.

        Raises:
            OSError: it cannot be started.
        """
        with only_blocked(*self._blocked):
            child = spawn(argv, name=name, env=self._environ, log_path=log_path, with_events=True)
        self._watch_over(child)
        return child

    def restart(self, name: str, argv: Sequence[str], log_path: Path | None) -> Child | None:
        """Start one again that has ended; from ``on_event``, whose thread lives as long as any child does.

        Returns:
            None if ``close`` has begun.

        Raises:
            OSError: it cannot be started.
        """
        with self._changed:
            return None if self._is_closing else self.start(name, argv, log_path)

    def kill(self, name: str) -> None:
        """Kill one, with its process group; not if it has ended. Its end is reported as one that nobody asked for."""
        with self._changed:
            if (child := self._running.get(name)) is not None:
                child.signal(signal.SIGKILL)

    def start_step(
        self, name: str, argv: Sequence[str], environ: Mapping[str, str], log_path: Path
    ) -> tuple[Child, int]:
        """Start an srun whose standard input is its lifeline and whose standard output are its events.

        Returns:
            The child and a descriptor, the caller's to close, that writes to its standard input: the child's lifeline
            ends when that is closed too.

        Raises:
            OSError: it cannot be started.
        """
        with only_blocked():
            child, input_fd = _spawn_step(name, argv, environ, log_path)
        self._watch_over(child)
        return child, input_fd

    def _watch_over(self, child: Child) -> None:
        soft, hard = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
        wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (wanted, hard))
        with self._changed:
            self._running[child.name] = child
            self._started.append(child)
        os.write(self._wake_write, b"x")

    def running(self) -> dict[str, int]:
        """Pid by name of those whose end has not been reported."""
        with self._changed:
            return {name: child.pid for name, child in self._running.items()}

    def stop(self, names: Sequence[str], grace_s: float) -> list[str]:
        """Let the named end in good order, kill those that take longer; returns whom it had to kill.

        Those that have ended already are passed over.
        """
        with self._changed:
            self._asked.update(names)
            children = [self._running[name] for name in names if name in self._running]
            for child in children:
                child.release_lifeline()
            if not self._wait_ended(children, grace_s):
                late = [child for child in children if child.name in self._running]
                for child in late:
                    logger.warning("%s (pid %d) did not end in %g s and is killed", child.name, child.pid, grace_s)
                    child.signal(signal.SIGKILL)
                self._wait_ended(late, grace_s)
                return [child.name for child in late]
        return []

    def _wait_ended(self, children: Sequence[Child], timeout_s: float) -> bool:
        return self._changed.wait_for(
            lambda: all(self._running.get(child.name) is not child for child in children), timeout_s
        )

    def close(self, grace_s: float) -> list[str]:
        """End all of them, and the watching. Returns whom it had to kill."""
        with self._changed:
            self._is_closing = True
        killed = self.stop(list(self.running()), grace_s)
        self._is_stopping = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)
        return killed

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        by_fd: dict[int, tuple[Child, _LineReader | None]] = {}
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake_read:
                    os.read(fd, _READ_BYTES)
                    if self._is_stopping:
                        return
                    with self._changed:
                        fresh, self._started = self._started, []
                    for child in fresh:
                        events_fd = child.take_events_fd()
                        os.set_blocking(events_fd, False)
                        by_fd[events_fd] = (child, _LineReader(events_fd))
                        by_fd[child.pidfd] = (child, None)
                        poll.register(events_fd, select.POLLIN)
                        poll.register(child.pidfd, select.POLLIN)
                elif fd in by_fd:
                    child, reader = by_fd[fd]
                    if reader is not None:
                        self._report_lines(child, reader)
                        if not reader.is_open:
                            poll.unregister(fd)
                            del by_fd[fd]
                            os.close(fd)
                        continue
                    if not child.has_ended():
                        continue
                    poll.unregister(fd)
                    del by_fd[fd]
                    # What it said last, before the word of its end. A grandchild may hold the pipe open for ever.
                    for events_fd, (owner, last) in list(by_fd.items()):
                        if owner is child and last is not None:
                            self._report_lines(child, last)
                            poll.unregister(events_fd)
                            del by_fd[events_fd]
                            os.close(events_fd)
                    self._report_end(child)

    def _report_lines(self, child: Child, reader: "_LineReader") -> None:
        for line in reader.read():
            try:
                fields = json.loads(line)
                name = fields.pop("event")
            except (ValueError, KeyError, AttributeError):
                logger.warning("%s wrote a line that is no event: %r", child.name, line[:200])
                continue
            # An agent passes on what others say.
            self._on_event(ComponentEvent(fields.pop("component", child.name), name, fields))

    def _report_end(self, child: Child) -> None:
        with self._changed:
            returncode = child.reap()
            was_asked = child.name in self._asked
        self._on_event(ComponentEnded(child.name, returncode, was_asked))
        with self._changed:
            if self._running.get(child.name) is child:
                del self._running[child.name]
            self._changed.notify_all()


def _spawn_step(name: str, argv: Sequence[str], environ: Mapping[str, str], log_path: Path) -> tuple[Child, int]:
    lifeline_read, lifeline_write = os.pipe()
    events_read, events_write = os.pipe()
    try:
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                list(argv), stdin=lifeline_read, stdout=events_write, stderr=log, env=dict(environ), process_group=0
            )
    except BaseException:
        os.close(lifeline_write)
        os.close(events_read)
        raise
    finally:
        os.close(lifeline_read)
        os.close(events_write)
    return Child(name, process, lifeline_write, events_read), os.dup(lifeline_write)


class _LineReader:
    """Whole lines from a non-blocking pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.is_open = True

    def read(self) -> list[bytes]:
        """The lines that are there now."""
        lines: list[bytes] = []
        while self.is_open:
            try:
                chunk = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                break
            self.is_open = bool(chunk)
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            lines += whole
        return lines
