"""Where those come in who lend nodes to a run: a Unix socket in its run folder, which its user alone can open."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slurm_pathways.launch.growth.messages import Request
from slurm_pathways.launch.warm.messages import Lines


class Visitor:
    """A connection. ``send`` and ``close`` from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self.lines: Lines[Request] = Lines(sock, Request)

    def send(self, answer: msgspec.Struct) -> None:
        """Tell it something; one that is gone hears nothing, and ``Went`` follows."""
        with self._lock, contextlib.suppress(OSError):
            if not self._is_closed:
                self.lines.send(answer)

    def close(self) -> None:
        """End the connection. May be called twice."""
        with self._lock:
            self._is_closed = True
            self.lines.close()


@dataclass(frozen=True, slots=True)
class Came:
    """A visitor said something."""

    visitor: Visitor
    request: Request


@dataclass(frozen=True, slots=True)
class Went:
    """A visitor's connection has ended."""

    visitor: Visitor


class Door:
    """Open until ``close``.

    Args:
        tell: gets what happens, on threads of the door's own.

    Raises:
        OSError: it cannot listen at ``path``.
    """

    def __init__(self, path: Path, tell: Callable[[Came | Went], None]) -> None:
        self._tell = tell
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(os.fspath(path))
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="growth-door")
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            # It ends with the connection, which whoever is told of it ends at the latest.
            threading.Thread(target=self._receive, args=(Visitor(sock),), name="growth-visitor", daemon=True).start()

    def _receive(self, visitor: Visitor) -> None:
        try:
            for request in visitor.lines.receive():
                self._tell(Came(visitor, request))
        finally:
            self._tell(Went(visitor))

    def close(self) -> None:
        """Let nobody in any more. Those inside stay."""
        with contextlib.suppress(OSError):
            # Wakes the thread that accepts.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
