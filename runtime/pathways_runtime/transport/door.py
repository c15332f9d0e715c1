"""Where connections from other hosts come in: accepts them and lets in who is of the job.

One thread for each door carries on all handshakes side by side, so a peer that says nothing, or nonsense, keeps nobody
waiting. What has not introduced itself costs a descriptor for ``HANDSHAKE_TIMEOUT_S`` at most; and beyond
``MAX_PENDING`` of them the one that has waited longest gives way. A process of the job needs milliseconds, in which a
stranger would have to bring ``MAX_PENDING`` connections to push it out; it then tries again.
"""

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from pathways_runtime.transport.handshakes import HANDSHAKE_TIMEOUT_S, Handshake, HandshakeFactory
from pathways_runtime.transport.tls_socket import Connection

logger = logging.getLogger(__name__)

MAX_PENDING = 256
#: Accepted between two looks at the handshakes.
_ACCEPTS_PER_TURN = 16
#: How long it stops accepting when descriptors have run out.
_PAUSE_S = 0.05
#: Strangers are logged one by one, but not more often.
_LOG_INTERVAL_S = 1.0


class _Pending:
    __slots__ = ("deadline_s", "handshake", "peer", "sock_fd")

    def __init__(self, handshake: Handshake, sock_fd: int, peer: str, deadline_s: float) -> None:
        self.handshake = handshake
        self.sock_fd = sock_fd
        self.peer = peer
        self.deadline_s = deadline_s


class Door:
    """Accepts on a listening socket until ``close``.

    Args:
        listener: a listening TCP socket, owned from now on.
        handshake: see ``handshakes``.
        on_connected: called on the door's thread with each connection that is of the job: blocking if plain. Must be
            quick.
    """

    def __init__(
        self, listener: socket.socket, handshake: HandshakeFactory, on_connected: Callable[[Connection], None]
    ) -> None:
        self._listener = listener
        self._handshake = handshake
        self._on_connected = on_connected
        listener.setblocking(False)
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        # By descriptor, the longest waiting first: all have the same time.
        self._pending: dict[int, _Pending] = {}
        self._is_closing = False
        self._accepts_again_s = 0.0
        self._logged_s = -_LOG_INTERVAL_S
        self._num_refused = 0
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def num_pending(self) -> int:
        """Connections that have not introduced themselves yet."""
        return len(self._pending)

    def close(self) -> None:
        """Accept no more, drop handshakes under way. Not to be called from ``on_connected``."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for pending in list(self._pending.values()):
            self._drop(pending)
        self._epoll.close()
        os.close(self._wake_fd)
        self._listener.close()

    def _run(self) -> None:
        while not self._is_closing:
            for fd, _ in self._epoll.poll(self._timeout_s()):
                if fd == self._listener.fileno():
                    self._accept()
                elif (pending := self._pending.get(fd)) is not None:
                    self._advance(pending)
            now_s = time.monotonic()
            while self._pending:
                longest = next(iter(self._pending.values()))
                if longest.deadline_s > now_s:
                    break
                self._refuse(longest, f"did not introduce itself in {HANDSHAKE_TIMEOUT_S:g} s")
            if self._accepts_again_s and now_s >= self._accepts_again_s:
                self._accepts_again_s = 0.0
                self._epoll.register(self._listener.fileno(), select.EPOLLIN)

    def _timeout_s(self) -> float:
        """Until something is due; -1: nothing is."""
        due_s = [self._accepts_again_s] if self._accepts_again_s else []
        if self._pending:
            due_s.append(next(iter(self._pending.values())).deadline_s)
        return max(0.0, min(due_s) - time.monotonic()) if due_s else -1

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as failure:
                logger.warning("no connection can be accepted for %g s: %s", _PAUSE_S, failure)
                self._epoll.unregister(self._listener.fileno())
                self._accepts_again_s = time.monotonic() + _PAUSE_S
                return
            sock.setblocking(False)
            # A peer that is gone already is found out by the handshake.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            fd = sock.fileno()
            pending = _Pending(self._handshake(sock), fd, str(peer[0]), time.monotonic() + HANDSHAKE_TIMEOUT_S)
            if len(self._pending) >= MAX_PENDING:
                self._refuse(next(iter(self._pending.values())), "gave way: too many have not introduced themselves")
            self._epoll.register(fd, 0)
            self._pending[fd] = pending
            self._advance(pending)

    def _advance(self, pending: _Pending) -> None:
        try:
            awaited = next(pending.handshake)
        except StopIteration as done:
            connection: Connection = done.value
            self._forget(pending)
            os.set_blocking(pending.sock_fd, isinstance(connection, socket.socket))
            try:
                self._on_connected(connection)
            except Exception:
                logger.exception("a connection from %s could not be served", pending.peer)
                connection.close()
        except OSError as failure:
            self._refuse(pending, str(failure))
        except Exception:
            # Whatever a stranger's bytes bring about must not close the door for the others.
            logger.exception("the handshake with %s failed", pending.peer)
            self._drop(pending)
        else:
            self._epoll.modify(pending.sock_fd, select.EPOLLIN if awaited == select.POLLIN else select.EPOLLOUT)

    def _refuse(self, pending: _Pending, reason: str) -> None:
        self._drop(pending)
        self._num_refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now_s
            logger.warning(
                "a connection from %s was refused: %s (%d refused so far)", pending.peer, reason, self._num_refused
            )

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        pending.handshake.close()

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending.sock_fd]
        # A handshake that failed has closed its descriptor, which takes it out as well.
        with contextlib.suppress(OSError):
            self._epoll.unregister(pending.sock_fd)
