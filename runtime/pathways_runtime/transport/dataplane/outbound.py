"""The sending end: one ``Link`` per peer, with its connections, queue and shared blocks."""

import functools
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from pathways_runtime.transport import addresses
from pathways_runtime.transport.dataplane import messages
from pathways_runtime.transport.dataplane.memory import BlockPool, Bytes, PoolClosed, shared_mapping
from pathways_runtime.transport.dataplane.messages import HEAD, INLINE_BYTES, NOTICE, Key, PeerLost
from pathways_runtime.transport.dataplane.poller import Poller
from pathways_runtime.transport.handshakes import HandshakeFactory
from pathways_runtime.transport.tls_socket import Connection

logger = logging.getLogger(__name__)

#: What one connection sends of a large payload before the other may take the next part.
CHUNK_BYTES = 4 << 20
CONNECTIONS_WITHOUT_SHARED_MEMORY = 2
_CONNECT_TIMEOUT_S = 10.0
_NOTICES_BYTES = 64 << 10

OnSent = Callable[[Exception | None], None]


class _Outgoing:
    """One payload on its way out, in ``parts_left`` parts."""

    __slots__ = ("failure", "key", "memory", "on_sent", "parts_left", "ticket")

    def __init__(self, key: Key, memory: Bytes, on_sent: OnSent) -> None:
        self.key = key
        self.memory = memory
        self.on_sent = on_sent
        self.parts_left = 1
        self.ticket = 0
        self.failure: Exception | None = None


def report_sent(on_sent: OnSent, failure: Exception | None) -> None:
    """Call ``on_sent``; its mistakes must not end the thread that also serves others."""
    try:
        on_sent(failure)
    except Exception:
        logger.exception("a sender's callback failed")


class _Connection:
    """A socket with the lock that keeps messages on it whole."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sock: Connection | None = None
        # The rest of a message that a caller of ``try_send`` could not send without blocking; goes before any other.
        self.unsent = b""
        # Part of a notice; only the poller's thread uses it.
        self.notices_tail = b""

    def try_send(self, head: bytes, memory: Bytes) -> bool:
        """Send a small message from the caller's thread if that does not block. ``unsent`` may be set afterwards.

        Raises:
            OSError: the connection is broken.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            if self.sock is None or self.unsent:
                return False
            try:
                count = self.sock.sendmsg([head, memory.data], (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            if count < len(head) + memory.nbytes:
                self.unsent = (head + memory.tobytes())[count:]
            return True
        finally:
            self.lock.release()

    def send(self, head: bytes, memory: Bytes | None = None, fds: tuple[int, ...] = ()) -> None:
        """Send a message, blocking; descriptors travel with its first byte."""
        with self.lock:
            self._flush()
            assert self.sock is not None
            if fds:
                assert isinstance(self.sock, socket.socket)
                count = socket.send_fds(self.sock, [head], list(fds), socket.MSG_NOSIGNAL)
                if count < len(head):
                    self.sock.sendall(head[count:])
                return
            if memory is None:
                self.sock.sendall(head)
                return
            count = self.sock.sendmsg([head, memory.data], (), socket.MSG_NOSIGNAL)
            if count < len(head):
                self.sock.sendall(head[count:])
                count = len(head)
            if count < len(head) + memory.nbytes:
                self.sock.sendall(memory[count - len(head) :].data)

    def flush(self) -> None:
        """Send what ``try_send`` could not."""
        with self.lock:
            self._flush()

    def _flush(self) -> None:
        if self.unsent:
            assert self.sock is not None
            rest, self.unsent = self.unsent, b""
            self.sock.sendall(rest)


class Link:
    """Everything that goes to one peer. Connects when there is something to send; ends for good when the peer is lost.

    Args:
        peer: how messages name it.
        hello: how this side introduces itself.
        shares_memory: large payloads go by shared memory, over one connection; else over several connections.
        handshake: how both sides make sure of each other on TCP; None when there is no TCP.
        budget_bytes: what may lie in shared memory until the peer releases it.
        on_moved: called with the bytes of each payload that was handed over.
    """

    def __init__(
        self,
        peer: str,
        address: str,
        hello: messages.Hello,
        shares_memory: bool,
        budget_bytes: int,
        poller: Poller,
        on_moved: Callable[[int], None],
        handshake: HandshakeFactory | None = None,
    ) -> None:
        self.peer = peer
        self.address = address
        self._way = addresses.way_to(address, shares_memory)
        self._handshake = handshake
        self.shares_memory = shares_memory
        self.failure: PeerLost | None = None
        self._hello = hello
        self._poller = poller
        self._on_moved = on_moved
        self._pool = BlockPool(budget_bytes, shared_mapping, self._announce_drop)
        self._connections = [_Connection() for _ in range(1 if shares_memory else CONNECTIONS_WITHOUT_SHARED_MEMORY)]
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        # Guarded by _changed, as is parts_left of what is queued.
        self._small: deque[_Outgoing] = deque()
        self._large: deque[tuple[_Outgoing, int, int]] = deque()
        self._drops: deque[int] = deque()
        self._next_ticket = 0

    def send(self, key: Key, memory: Bytes, on_sent: OnSent) -> None:
        """See ``DataPlane.send``."""
        if self.failure is not None:
            report_sent(on_sent, self.failure)
            return
        length = memory.nbytes
        # Also for large ones, whose heads are made elsewhere: a key that cannot be sent is the caller's mistake.
        head = HEAD.pack(messages.INLINE, 0, *key, 0, length, length)
        if length < INLINE_BYTES:
            try:
                for connection in self._connections:
                    if connection.try_send(head, memory):
                        if connection.unsent:
                            with self._changed:
                                self._changed.notify_all()
                        self._on_moved(length)
                        report_sent(on_sent, None)
                        return
            except OSError as failure:
                self.lose(PeerLost(f"{self.peer}: sending failed: {failure}"))
        outgoing = _Outgoing(key, memory, on_sent)
        with self._changed:
            if self.failure is None:
                if length < INLINE_BYTES:
                    self._small.append(outgoing)
                    self._start_threads(1)
                elif self.shares_memory:
                    self._large.append((outgoing, 0, length))
                    self._start_threads(1)
                else:
                    starts = range(0, length, CHUNK_BYTES)
                    outgoing.parts_left = len(starts)
                    outgoing.ticket = self._next_ticket
                    self._next_ticket = (self._next_ticket + 1) % messages.NUM_TICKETS
                    self._large.extend((outgoing, start, min(CHUNK_BYTES, length - start)) for start in starts)
                    self._start_threads(min(len(self._connections), len(self._large)))
                self._changed.notify_all()
                return
        report_sent(on_sent, self.failure)

    def lose(self, failure: PeerLost) -> None:
        """End the link: what is queued and what is sent later fails. Further calls do nothing."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure = failure
            abandoned = [*self._small, *(outgoing for outgoing, _, _ in self._large)]
            self._small.clear()
            self._large.clear()
            self._changed.notify_all()
        self._pool.close()
        for connection in self._connections:
            sock = connection.sock
            if sock is not None:
                try:
                    # Wakes threads that block in sending; they leave the socket to the poller.
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError as error:
                    logger.debug("%s was already disconnected: %s", self.peer, error)
        for outgoing in abandoned:
            self._part_done(outgoing, failure)

    def join(self) -> None:
        """Wait until no thread of a lost link is left."""
        for thread in self._threads:
            thread.join()

    def held_bytes(self) -> dict[str, int]:
        """Shared memory of this link: see ``BlockPool.held_bytes``."""
        return self._pool.held_bytes()

    def num_queued(self) -> int:
        """Payloads (parts of large ones) that no thread has begun to send."""
        return len(self._small) + len(self._large)

    def _start_threads(self, num_wanted: int) -> None:
        while len(self._threads) < num_wanted:
            connection = self._connections[len(self._threads)]
            thread = threading.Thread(target=self._run, args=(connection,), name=f"data to {self.peer}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _announce_drop(self, block_id: int) -> None:
        with self._changed:
            if self.failure is None:
                self._drops.append(block_id)
                self._changed.notify_all()

    def _part_done(self, outgoing: _Outgoing, failure: Exception | None) -> None:
        with self._changed:
            outgoing.parts_left -= 1
            outgoing.failure = outgoing.failure or failure
            if outgoing.parts_left:
                return
        if outgoing.failure is None:
            self._on_moved(outgoing.memory.nbytes)
        report_sent(outgoing.on_sent, outgoing.failure)

    # A connection's thread

    def _run(self, connection: _Connection) -> None:
        sock: Connection | None = None
        try:
            sock = addresses.connect(self._way, _CONNECT_TIMEOUT_S, lambda: self.failure is not None, self._handshake)
            sock.sendall(messages.encode_hello(self._hello))
            self._poller.watch(sock, functools.partial(self._read_notices, connection, sock))
            with self._changed:
                if self.failure is None:
                    connection.sock = sock
            self._serve(connection)
        except (OSError, addresses.AddressError) as failure:
            self.lose(PeerLost(f"{self.peer}: {failure}"))
        finally:
            with connection.lock:
                connection.sock = None
            if sock is not None:
                self._poller.retire(sock)

    def _serve(self, connection: _Connection) -> None:
        while True:
            outgoing: _Outgoing | None = None
            drops: list[int] = []
            with self._changed:
                while not (self.failure or connection.unsent or self._drops or self._small or self._large):
                    self._changed.wait()
                if self.failure is not None:
                    return
                if self._drops:
                    drops = list(self._drops)
                    self._drops.clear()
                elif self._small:
                    outgoing, start, length = self._small.popleft(), 0, 0
                elif self._large:
                    outgoing, start, length = self._large.popleft()
            if outgoing is None:
                connection.flush()
                if drops:
                    heads = (HEAD.pack(messages.DROP, block_id, 0, 0, 0, 0, 0, 0) for block_id in drops)
                    connection.send(b"".join(heads))
                continue
            failure: Exception | None = None
            try:
                self._send_part(connection, outgoing, start, length)
            except PoolClosed:
                failure = self.failure
            except (OSError, MemoryError) as error:
                failure = PeerLost(f"{self.peer}: sending failed: {error}")
                if isinstance(error, OSError):
                    self.lose(failure)
                    failure = self.failure
            self._part_done(outgoing, failure)

    def _send_part(self, connection: _Connection, outgoing: _Outgoing, start: int, length: int) -> None:
        memory, total = outgoing.memory, outgoing.memory.nbytes
        if total < INLINE_BYTES:
            connection.send(HEAD.pack(messages.INLINE, 0, *outgoing.key, 0, total, total), memory)
        elif not self.shares_memory:
            head = HEAD.pack(messages.CHUNK, outgoing.ticket, *outgoing.key, start, length, total)
            connection.send(head, memory[start : start + length])
        else:
            try:
                block = self._pool.acquire(total, on_wait=self._warn_of_waiting)
            except (OSError, MemoryError) as failure:
                logger.warning("no shared memory of %d bytes for %s, so they are sent: %s", total, self.peer, failure)
                # As there is one connection, nobody else takes tickets.
                ticket, self._next_ticket = self._next_ticket, (self._next_ticket + 1) % messages.NUM_TICKETS
                connection.send(HEAD.pack(messages.CHUNK, ticket, *outgoing.key, 0, total, total), memory)
                return
            np.copyto(block.mapping.array()[:total], memory)
            head = HEAD.pack(messages.BLOCK, block.id, *outgoing.key, 0, total, total)
            if block.fd is None:
                connection.send(head)
                return
            announcement = HEAD.pack(messages.SEGMENT, block.id, 0, 0, 0, 0, 0, block.size_bytes)
            fd, block.fd = block.fd, None
            try:
                connection.send(announcement + head, fds=(fd,))
            finally:
                os.close(fd)

    def _warn_of_waiting(self) -> None:
        logger.warning(
            "%s has not released any of %s for 10 s; sending to it waits", self.peer, self._pool.held_bytes()
        )

    # On the poller's thread

    def _read_notices(self, connection: _Connection, sock: Connection) -> None:
        try:
            received = sock.recv(_NOTICES_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as failure:
            self._poller.unwatch(sock)
            self.lose(PeerLost(f"{self.peer}: {failure}"))
            return
        if not received:
            self._poller.unwatch(sock)
            self.lose(PeerLost(f"{self.peer}: closed its data connection"))
            return
        received = connection.notices_tail + received
        whole = len(received) - len(received) % NOTICE.size
        connection.notices_tail = received[whole:]
        for kind, block_id in NOTICE.iter_unpack(received[:whole]):
            if kind == messages.RELEASE:
                self._pool.release(block_id)
            elif kind == messages.KEEP:
                self._pool.keep(block_id)
            else:
                self.lose(PeerLost(f"{self.peer}: sent an unknown notice {kind}"))
