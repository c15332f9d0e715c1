"""One thread that watches many sockets: new connections, notices that come back, ends of connections.

It is the only one that closes a connection's socket, after the thread that uses it has ended, so that a descriptor is
never used under a number that has come to mean another socket.
"""

import contextlib
import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

from pathways_runtime.transport.tls_socket import Connection

logger = logging.getLogger(__name__)


class Poller:
    """Readable sockets call their handler on the poller's thread. Handlers must not block."""

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._is_woken = False
        self._is_closing = False
        self._handlers: dict[int, Callable[[], None]] = {}
        self._actions: deque[Callable[[], None]] = deque()
        self._posted: deque[tuple[Connection, bytes]] = deque()
        self._backlogs: dict[Connection, bytearray] = {}
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, sock: Connection, on_readable: Callable[[], None]) -> None:
        """Call ``on_readable`` whenever ``sock`` has something to read or has ended, until ``unwatch``, ``retire``."""

        def register() -> None:
            self._handlers[sock.fileno()] = on_readable
            self._epoll.register(sock.fileno(), select.EPOLLIN)

        self.act(register)

    def unwatch(self, sock: Connection) -> None:
        """Stop watching; only from a handler."""
        if self._handlers.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock.fileno())

    def post(self, sock: Connection, data: bytes) -> None:
        """Send ``data`` on ``sock``, which is not watched, without blocking the caller; lost if the peer is.

        Safe in finalizers: takes no lock.
        """
        self._posted.append((sock, data))
        self._wake()

    def retire(self, sock: Connection) -> None:
        """Close ``sock``, which its own thread does not use any more."""

        def close() -> None:
            self._backlogs.pop(sock, None)
            self.unwatch(sock)
            sock.close()

        self.act(close)

    def close(self) -> None:
        """Close what was retired and end the thread."""

        def stop() -> None:
            self._is_closing = True

        self.act(stop)
        self._thread.join()
        self._epoll.close()
        os.close(self._wake_fd)

    def act(self, action: Callable[[], None]) -> None:
        self._actions.append(action)
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            # After close, posts of late finalizers go nowhere.
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        while not self._is_closing:
            for fd, _ in self._epoll.poll():
                if fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                elif (handler := self._handlers.get(fd)) is not None:
                    try:
                        handler()
                    except Exception:
                        logger.exception("a connection's handler failed")
            # First the flag, then the queues: what is added later wakes again.
            self._is_woken = False
            while self._actions:
                self._actions.popleft()()
            self._send_posted()

    def _send_posted(self) -> None:
        while self._posted:
            sock, data = self._posted.popleft()
            self._backlogs.setdefault(sock, bytearray()).extend(data)
        for sock in list(self._backlogs):
            self._flush(sock)

    def _flush(self, sock: Connection) -> None:
        backlog = self._backlogs[sock]
        fd = sock.fileno()
        try:
            while backlog:
                del backlog[: sock.send(backlog, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            if fd not in self._handlers:
                self._handlers[fd] = lambda: None
                self._epoll.register(fd, select.EPOLLOUT)
            return
        except OSError as failure:
            # The connection's own thread sees its end and says so.
            logger.debug("a notice could not be sent: %s", failure)
        del self._backlogs[sock]
        if fd >= 0:
            self.unwatch(sock)
