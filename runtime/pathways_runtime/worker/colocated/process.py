"""The executor's end of one Python process: its start, what it is asked and answers, and its end."""

import itertools
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pathways_runtime.core.ids import DeviceId, HostIndex, SessionId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.transport.dataplane.memory import Bytes
from pathways_runtime.transport.frames import Buffer, ConnectionClosed, FrameError
from pathways_runtime.transport.lifeline import Child, log_tail, spawn
from pathways_runtime.worker import private_sockets
from pathways_runtime.worker.buffers import HostArray
from pathways_runtime.worker.colocated import files_prefix
from pathways_runtime.worker.colocated.connection import Connection
from pathways_runtime.worker.colocated.memory import SharedMemory
from pathways_runtime.worker.colocated.messages import (
    AnyMessage,
    Call,
    ForgetBlock,
    FreeBlock,
    Load,
    Loaded,
    NewBlock,
    Piece,
    Ready,
    Returned,
    Unload,
)
from pathways_runtime.worker.threads import tell

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "pathways_runtime.worker.colocated")
#: From the start until it can load functions; importing JAX from a busy network file system takes long.
START_TIMEOUT_S = 120.0
#: Between the end of its connection, which comes first, and its own.
_EXIT_TIMEOUT_S = 5.0
_LOG_TAIL_LINES = 10

#: Of the executor's environment: they are for its own JAX. How memory is had (GLIBC_TUNABLES) suits arrays there, too.
_DROPPED_NAMES = frozenset({"XLA_FLAGS", "NPROC"})

#: Called with what a load ended with: None is success.
OnLoaded = Callable[[Status | None], None]
#: Called with a call's results, per result the shards asked for, or why there are none.
OnReturned = Callable[[Sequence[Sequence[Bytes]], Status | None], None]


class Place(NamedTuple):
    """Which host this is, for its Python processes.

    Attributes:
        name: for people.
        folder: for sockets.
        log_path: where functions print to; None is the executor's log.
    """

    name: str
    host: HostIndex
    topology: Topology
    folder: Path
    log_path: Path | None


class ProcessEnded(Exception):
    """It takes nothing any more; the next one may."""


class Process:
    """One Python process. For any thread; the callbacks come on a thread of its own, each exactly once.

    Args:
        number: unique on this host.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, place: Place, session: SessionId, number: int, command: Sequence[str] = COMMAND) -> None:
        self._place = place
        self.session = session
        self._lock = threading.Lock()
        self._loads: dict[int, OnLoaded] = {}
        self._calls: dict[int, tuple[str, OnReturned]] = {}
        self._call_numbers = itertools.count(1)
        self._has_ended = False
        self._is_wanted = True
        self._is_ready = False
        #: Functions that it was sent; for who sends.
        self.functions: set[int] = set()
        self._socket_path = place.folder / f"{files_prefix(os.getpid())}{number}.sock"
        self._child, sock = self._start(command)
        self.pid = self._child.pid
        self._connection = Connection(sock)
        self.memory = SharedMemory(self._connection)
        self._sock = sock
        logger.info("Python process of session %d started: pid %d", session, self.pid)
        self._reader = threading.Thread(target=tell, args=(self._read,), name=f"python {self.pid}", daemon=True)
        self._reader.start()

    def _start(self, command: Sequence[str]) -> tuple[Child, socket.socket]:
        place = self._place
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            argv = [
                *command,
                *("--socket-fd", str(theirs.fileno())),
                *("--name", place.name),
                *("--session", str(self.session)),
                *("--host", str(place.host)),
                *("--num-hosts", str(place.topology.num_hosts)),
                *("--devices-per-host", str(place.topology.devices_per_host)),
                *("--first-id", str(place.topology.num_device_ids - place.topology.num_devices)),
                *("--coordination-socket", str(self._socket_path)),
            ]
            try:
                child = spawn(
                    argv,
                    name=f"Python process of session {self.session}",
                    env=_environment(place.folder),
                    log_path=place.log_path,
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:
                ours.close()
                raise
        return child, ours

    # What it is asked

    def load(
        self,
        function: int,
        name: str,
        pickled: bytes,
        module_path: tuple[str, ...],
        enable_x64: bool,
        on_loaded: OnLoaded,
    ) -> None:
        """Have it load a function; calls of it may follow at once.

        Raises:
            ProcessEnded: it has ended; nothing is called back.
        """
        with self._lock:
            if self._has_ended:
                raise ProcessEnded
            self._loads[function] = on_loaded
        self.functions.add(function)
        self._send(Load(function, name, module_path, enable_x64), [pickled])

    def unload(self, function: int) -> None:
        """It needs a function no more."""
        self.functions.discard(function)
        self._send(Unload(function))

    def call(
        self,
        function: int,
        name: str,
        stream: int,
        arguments: Sequence[Sequence[tuple[DeviceId, HostArray]]],
        results: tuple[tuple[DeviceId, ...], ...],
        on_returned: OnReturned,
    ) -> None:
        """Call a function that it was sent. The arguments are read when this returns.

        Raises:
            ProcessEnded: it has ended; nothing is called back. MemoryError: there is no memory for the arguments.
        """
        payload: list[Buffer] = []
        try:
            pieces = tuple(
                tuple([self.memory.give(device, value, payload) for device, value in shards]) for shards in arguments
            )
        except ConnectionClosed as gone:
            raise ProcessEnded from gone
        number = next(self._call_numbers)
        with self._lock:
            if self._has_ended:
                raise ProcessEnded
            self._calls[number] = (name, on_returned)
        self._send(Call(number, function, stream, pieces, results), payload)

    def _send(self, message: AnyMessage, payload: Sequence[Buffer] = ()) -> None:
        try:
            self._connection.send(message, payload)
        except ConnectionClosed as gone:
            # The thread that reads sees the end too, and tells who waits.
            logger.debug("Python process %d: %s", self.pid, gone)

    def kill(self) -> None:
        """End it, with all that it has started; does not wait. Who waits for its answers is told."""
        with self._lock:
            self._is_wanted = False
        self._child.signal(signal.SIGKILL)

    def stop(self) -> None:
        """Like ``kill``, and wait for its end."""
        self.kill()
        self._reader.join()

    def report(self) -> dict[str, Any]:
        """For ``status``."""
        with self._lock:
            num_calls = len(self._calls)
        return {
            "session": self.session,
            "pid": self.pid,
            "functions": len(self.functions),
            "calls": num_calls,
            "copied_bytes": self.memory.copied_bytes,
            "shared_bytes": self.memory.shared_bytes,
        }

    # What it answers

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        # A child of it may hold its end of the connection open.
        poll.register(self._child.pidfd, select.POLLIN)
        reason = ""
        try:
            while True:
                ready = dict(poll.poll(None if self._is_ready else START_TIMEOUT_S * 1e3))
                if not ready:
                    reason = f"it was not ready within {START_TIMEOUT_S:g} s of its start"
                    break
                if self._sock.fileno() not in ready:
                    break
                for frame in self._connection.receive():
                    self._answered(frame.message, frame.payload)
                    del frame
        except ConnectionClosed:
            logger.debug("Python process %d has closed its connection", self.pid)
        except (FrameError, LookupError, ValueError, MemoryError) as failure:
            # Functions may have damaged it in any way; the executor must not go with it.
            logger.exception("Python process %d is given up", self.pid)
            reason = f"it does not keep to the protocol: {failure!r}"
        self._ended(reason)

    def _answered(self, message: AnyMessage, payload: Buffer) -> None:
        match message:
            case Returned(call=number, results=results, failure=failure):
                with self._lock:
                    _, on_returned = self._calls.pop(number)
                on_returned(self._taken(results, payload), failure)
            case FreeBlock(block=block):
                self.memory.freed(block)
            case NewBlock():
                self.memory.new_block(message)
            case ForgetBlock():
                self.memory.forget_block(message)
            case Loaded(function=function, failure=failure):
                with self._lock:
                    on_loaded = self._loads.pop(function)
                on_loaded(failure)
            case Ready():
                self._is_ready = True
            case _:
                raise FrameError(f"{type(message).__name__} is not for an executor")

    def _taken(self, results: Sequence[Sequence[Piece]], payload: Buffer) -> list[list[Bytes]]:
        taken = []
        start = 0
        for pieces in results:
            shards, start = self.memory.take(pieces, payload, start)
            taken.append(shards)
        return taken

    def _ended(self, reason: str) -> None:
        if not reason and not self._child.has_ended(_EXIT_TIMEOUT_S):
            reason = "it closed its connection"
        returncode = self._child.reap()
        self._socket_path.unlink(missing_ok=True)
        shutil.rmtree(private_sockets.folder_beside(f"unix:{self._socket_path.absolute()}"), ignore_errors=True)
        with self._lock:
            self._has_ended = True
            loads, self._loads = self._loads, {}
            calls, self._calls = self._calls, {}
            is_wanted = self._is_wanted
        self._connection.close()
        self.memory.close()
        if not is_wanted:
            failure = Status(Code.CANCELLED, "the session whose Python process this was is over")
            logger.info("Python process %d of session %d stopped", self.pid, self.session)
        else:
            running = ", ".join(dict.fromkeys(name for name, _ in calls.values()))
            failure = Status(Code.INTERNAL, self._describe(reason or _exit_text(returncode), running))
            logger.warning("%s", failure.message)
        for on_loaded in loads.values():
            on_loaded(failure)
        for _, on_returned in calls.values():
            on_returned((), failure)

    def _describe(self, how: str, running: str) -> str:
        what = f" while it was to run {running}" if running else ""
        tail = "" if self._place.log_path is None else log_tail(self._place.log_path, _LOG_TAIL_LINES)
        return (
            f"the Python process of {self._place.name} (colocated Python, pid {self.pid}) ended{what}: {how}. "
            f"What its functions and objects held there is gone; the next call starts another process."
            + (f"\nEnd of its log:\n{tail}" if tail else "")
        )


def _exit_text(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def _environment(folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED_NAMES}
    environment["JAX_PLATFORMS"] = "cpu"
    if not private_sockets.is_preloaded():
        environment |= private_sockets.preload(environment, folder)
    return environment
