"""A way between hosts for a service that knows no credentials: jaxlib's coordination service.

    client ── Unix socket ── Entrance ══ TLS ══ Exit ── Unix socket ── service

The service listens at a Unix socket of its host and its clients connect to one of theirs; what is between shows the
job's credentials both ways. Bytes pass unchanged and unread. An end that closes, or breaks, closes the other.
"""

import contextlib
import logging
import os
import select
import socket
import ssl
import threading

from pathways_runtime.transport import addresses
from pathways_runtime.transport.handshakes import HandshakeFactory
from pathways_runtime.transport.network import Network, open_door
from pathways_runtime.transport.tls_socket import RECORD_BYTES, Connection, TlsSocket

logger = logging.getLogger(__name__)

#: The exit listens before anybody hears of it; this bridges a host that is short of processors.
_CONNECT_TIMEOUT_S = 10.0
#: What is taken from one side before it is given to the other.
_STAGE_BYTES = 256 << 10


class _Flow:
    """One direction of a passage.

    Attributes:
        awaits: the socket and the event without which nothing can be done; None once the source has ended.
        num_bytes: given to the target so far.
    """

    __slots__ = ("_source", "_target", "_unsent", "awaits", "num_bytes")

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self._source = source
        self._target = target
        self._unsent = b""
        self.awaits: tuple[socket.socket, int] | None = (source, select.EPOLLIN)
        self.num_bytes = 0

    def advance(self, stage: memoryview) -> None:
        """Carry on what there is, a stage at most.

        Raises:
            OSError: one of the two is broken.
        """
        unsent = memoryview(self._unsent)
        try:
            if not unsent:
                unsent = self._take(stage)
                if not unsent:
                    # Beneath TLS, whose own end would throw away what still comes the other way.
                    socket.socket.shutdown(self._target, socket.SHUT_WR)
                    self.awaits = None
                    return
            while unsent:
                count = self._target.send(unsent)
                self.num_bytes += count
                unsent = unsent[count:]
        except ssl.SSLWantReadError:
            self.awaits = (self._target if unsent else self._source, select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self.awaits = (self._target if unsent else self._source, select.EPOLLOUT)
        except BlockingIOError:
            self.awaits = (self._target, select.EPOLLOUT) if unsent else (self._source, select.EPOLLIN)
        else:
            self.awaits = (self._source, select.EPOLLIN)
        # The stage is for others too.
        self._unsent = bytes(unsent)

    def _take(self, stage: memoryview) -> memoryview:
        """What the source has, part of the stage; empty: it has ended.

        Raises:
            ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError: nothing is there.
        """
        count = 0
        # Always with room for a record: of what OpenSSL kept back, the descriptor would not tell.
        while len(stage) - count >= RECORD_BYTES:
            try:
                received = self._source.recv_into(stage[count:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                if not count:
                    raise
                break
            if not received:
                # Said again when it is asked next.
                break
            count += received
        return stage[:count]


class _Passage:
    """Two connections whose bytes go from each to the other."""

    __slots__ = ("ends", "flows", "watched")

    def __init__(self, one: socket.socket, other: socket.socket) -> None:
        self.ends = (one, other)
        self.flows = (_Flow(one, other), _Flow(other, one))
        #: Events by descriptor, as the epoll has them.
        self.watched: dict[int, int] = {}


class Carrier:
    """Carries bytes between pairs of connections, all on one thread, which sleeps while there are none."""

    def __init__(self, name: str) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._lock = threading.Lock()
        self._by_fd: dict[int, _Passage] = {}
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._num_bytes_of_ended = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def bytes_out(self) -> int:
        """Carried so far from the first to the second of every pair."""
        with self._lock:
            under_way = sum(passage.flows[0].num_bytes for passage in set(self._by_fd.values()))
            return self._num_bytes_of_ended + under_way

    def join(self, one: Connection, other: Connection) -> None:
        """Carry what comes from either to the other until both have ended. Owns them from now on."""
        ends = [end.release() if isinstance(end, TlsSocket) else end for end in (one, other)]
        for end in ends:
            end.setblocking(False)
        passage = _Passage(*ends)
        with self._lock:
            if self._is_closed:
                self._end(passage)
                return
            for end in ends:
                self._by_fd[end.fileno()] = passage
            self._watch(passage)

    def num_passages(self) -> int:
        """Pairs that have not ended."""
        with self._lock:
            return len(self._by_fd) // 2

    def close(self) -> None:
        """End all passages and the thread. May be called again."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for passage in set(self._by_fd.values()):
            self._end(passage)
        self._epoll.close()
        os.close(self._wake_fd)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                with self._lock:
                    if self._is_closed:
                        return
                    passage = self._by_fd.get(fd)
                    if passage is not None:
                        self._advance(passage, fd)

    def _advance(self, passage: _Passage, fd: int) -> None:
        try:
            for flow in passage.flows:
                if flow.awaits is not None and flow.awaits[0].fileno() == fd:
                    flow.advance(self._stage)
        except OSError as failure:
            logger.info("a tunnel ended: %s", failure)
            self._end(passage)
            return
        if any(flow.awaits for flow in passage.flows):
            self._watch(passage)
        else:
            self._end(passage)

    def _watch(self, passage: _Passage) -> None:
        wanted: dict[int, int] = {}
        for flow in passage.flows:
            if flow.awaits is not None:
                fd = flow.awaits[0].fileno()
                wanted[fd] = wanted.get(fd, 0) | flow.awaits[1]
        for end in passage.ends:
            fd = end.fileno()
            old, new = passage.watched.get(fd, 0), wanted.get(fd, 0)
            if old and not new:
                # Not with an empty mask: the end of a peer would be told for ever.
                self._epoll.unregister(fd)
            elif new and not old:
                self._epoll.register(fd, new)
            elif old != new:
                self._epoll.modify(fd, new)
        passage.watched = wanted

    def _end(self, passage: _Passage) -> None:
        self._num_bytes_of_ended += passage.flows[0].num_bytes
        for end in passage.ends:
            self._by_fd.pop(end.fileno(), None)
            # Takes it out of the epoll as well.
            end.close()


class Entrance:
    """Where clients of a service on another host connect: a Unix socket of this one.

    Args:
        address: where to listen, ``unix:/path``.
        exit_address: of the ``Exit``, ``tcp:host:port``.
        handshake: of the side that connects.

    Raises:
        AddressError, OSError: see ``addresses.listen``.
    """

    def __init__(self, address: str, exit_address: str, handshake: HandshakeFactory) -> None:
        self.address = address
        self._exit_address = exit_address
        self._handshake = handshake
        self._listener = addresses.listen(address)
        self._is_listening = True
        self._carrier = Carrier("tunnel")
        self._thread = threading.Thread(target=self._accept, name="tunnel entrance", daemon=True)
        self._thread.start()

    def stop_listening(self) -> None:
        """Remove the socket; connections that were made go on. May be called again."""
        if self._is_listening:
            self._is_listening = False
            addresses.stop_listening(self._listener, self.address)
            self._thread.join()

    def close(self) -> None:
        """Close connections too."""
        self.stop_listening()
        self._carrier.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                if self._is_listening:
                    raise
                return
            try:
                connection = addresses.connect(
                    self._exit_address, _CONNECT_TIMEOUT_S, lambda: not self._is_listening, self._handshake
                )
            except OSError as failure:
                # The client sees a service that is gone.
                logger.warning("no tunnel: %s", failure.strerror)
                client.close()
            else:
                self._carrier.join(client, connection)


class Exit:
    """Where tunnels come out, on the service's host: lets processes of the job through to its Unix socket.

    Args:
        service: where the service listens, ``unix:/path``.
        network: where to listen, and the job's credentials.

    Attributes:
        address: what entrances are given.

    Raises:
        AddressError, OSError: see ``addresses.listen_tcp``.
    """

    def __init__(self, service: str, network: Network) -> None:
        self._service = service
        self._carrier = Carrier("tunnels")
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._carrier.close)
            self._door, self.address = open_door(network.any_port, network.accepting(), self._admit, network.host)
            on_failure.pop_all()

    def num_passages(self) -> int:
        """Connections to the service."""
        return self._carrier.num_passages()

    def close(self) -> None:
        """Let nobody in any more, and end the connections."""
        self._door.close()
        self._carrier.close()

    def _admit(self, connection: Connection) -> None:
        # Tried once, as others wait for the door's thread. Where it fails the door closes the connection.
        self._carrier.join(connection, addresses.connect_unix(self._service, 0.0))
