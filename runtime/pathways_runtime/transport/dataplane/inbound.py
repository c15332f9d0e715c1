"""The receiving end: one ``Inbound`` per link of a peer, with a thread for each of its connections."""

import logging
import os
import socket
import threading
from collections.abc import Callable

import numpy as np

from pathways_runtime.transport.dataplane import messages
from pathways_runtime.transport.dataplane.memory import Block, BlockPool, Bytes, Mapping, PoolClosed, aligned_bytes
from pathways_runtime.transport.dataplane.messages import HEAD, INLINE_BYTES, NOTICE, DataPlaneError, Hello, Key
from pathways_runtime.transport.dataplane.payload import Arrivals, Payload
from pathways_runtime.transport.dataplane.poller import Poller
from pathways_runtime.transport.passed_descriptors import ANCILLARY_BYTES, PassedDescriptors
from pathways_runtime.transport.tls_socket import Connection

logger = logging.getLogger(__name__)

_STAGE_BYTES = 128 << 10
_MAX_HELLO_BYTES = 4096


#: Given what a tunnel is for, gives who takes its connection over; raises OSError where it leads nowhere.
OnTunnel = Callable[[int], Callable[[Connection], None]]


class _Ended(Exception):
    """The connection has ended; the text says how."""


class _Stream:
    """Reads a connection: heads out of a stage, payload bytes straight into their place, descriptors aside."""

    def __init__(self, sock: Connection) -> None:
        self._sock = sock
        self._stage = bytearray(_STAGE_BYTES)
        self._view = memoryview(self._stage)
        self._start = 0
        self._end = 0
        self._passed = PassedDescriptors()

    def head(self) -> tuple[int, int, int, int, int, int, int, int]:
        """The next head, unpacked.

        Raises:
            _Ended: the peer is gone.
        """
        while self._end - self._start < HEAD.size:
            if self._start:
                # Only part of a head is left: it moves to the front.
                self._stage[: self._end - self._start] = self._stage[self._start : self._end]
                self._end -= self._start
                self._start = 0
            flags = socket.MSG_CMSG_CLOEXEC
            count, ancillary, _, _ = self._sock.recvmsg_into([self._view[self._end :]], ANCILLARY_BYTES, flags)
            self._passed.note(ancillary)
            if count == 0:
                raise _Ended("closed its data connection")
            self._end += count
        head = HEAD.unpack_from(self._stage, self._start)
        self._start += HEAD.size
        return head

    def read_into(self, target: Bytes) -> None:
        """Fill ``target`` with the bytes that follow."""
        length = target.nbytes
        staged = min(length, self._end - self._start)
        view = target.data
        view[:staged] = self._view[self._start : self._start + staged]
        self._start += staged
        while staged < length:
            count = self._sock.recv_into(view[staged:], length - staged, socket.MSG_WAITALL)
            if count == 0:
                raise _Ended("closed its data connection in the middle of a payload")
            staged += count

    def fd(self) -> int:
        """The descriptor that came along with the last head."""
        fd = self._passed.take()
        if fd is None:
            raise DataPlaneError("announced shared memory without a descriptor")
        return fd

    def close(self) -> None:
        """Close descriptors that nobody took."""
        self._passed.close()


class _Assembly:
    """A payload that arrives in chunks, over several connections. Its block comes when the pool has one."""

    def __init__(self, total: int) -> None:
        self.bytes_left = total
        self.block: Block | None = None
        self.has_block = threading.Event()


class Inbound:
    """What one link of a peer brings.

    Payloads in chunks get their memory in the order of their tickets, whichever connection is first. The sender takes
    up chunks in that order too, so when a connection waits for memory, all payloads that hold some are complete, and
    their release does not depend on what the waiting connection has not read yet.
    """

    def __init__(self, hello: Hello, budget_bytes: int, arrivals: Arrivals, poller: Poller) -> None:
        self.hello = hello
        self.failure = ""
        self._arrivals = arrivals
        self._poller = poller
        self._pool = BlockPool(budget_bytes, lambda size: (Mapping(size), None), lambda block_id: None)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._next_ticket = 0
        self._sockets: list[Connection] = []
        self._segments: dict[int, Bytes] = {}
        self._assemblies: dict[Key, _Assembly] = {}

    def join(self, sock: Connection) -> bool:
        """Another connection of the link; False when the link has ended."""
        with self._lock:
            if self.failure:
                return False
            self._sockets.append(sock)
            return True

    def leave(self, sock: Connection, reason: str) -> bool:
        """A connection has ended, and with it the link. True when it was the last: our memory is not written then."""
        self.end(reason)
        with self._lock:
            self._sockets.remove(sock)
            return not self._sockets

    def end(self, reason: str) -> None:
        """Stop receiving."""
        with self._lock:
            self.failure = self.failure or reason
            self._changed.notify_all()
            for sock in self._sockets:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError as failure:
                    logger.debug("%s was already disconnected: %s", self.hello.address, failure)
        self._pool.close()

    def serve(self, sock: Connection, stream: _Stream) -> None:
        """Read messages until the connection ends.

        Raises:
            _Ended, OSError, PoolClosed: it has. DataPlaneError: the peer made no sense. MemoryError: there is no room.
        """
        while True:
            kind, segment, session, op_id, index, offset, length, total = stream.head()
            if kind == messages.INLINE:
                if length >= INLINE_BYTES:
                    raise DataPlaneError(f"sent {length} bytes in one message")
                memory = aligned_bytes(length)
                stream.read_into(memory)
                self._arrivals.arrived((session, op_id, index), Payload(memory))
            elif kind == messages.BLOCK:
                self._take_block(sock, segment, (session, op_id, index), length)
            elif kind == messages.CHUNK:
                self._take_chunk(stream, segment, (session, op_id, index), offset, length, total)
            elif kind == messages.SEGMENT:
                fd = stream.fd()
                try:
                    if os.fstat(fd).st_size < total:
                        raise DataPlaneError(f"announced {total} bytes of shared memory that are not there")
                    self._segments[segment] = Mapping(total, fd).array()
                finally:
                    os.close(fd)
            elif kind == messages.DROP:
                self._segments.pop(segment, None)
            else:
                raise DataPlaneError(f"sent an unknown message {kind}")

    def _take_block(self, sock: Connection, segment: int, key: Key, length: int) -> None:
        memory = self._segments.get(segment)
        if memory is None or length > memory.nbytes:
            raise DataPlaneError(f"sent {length} bytes in shared memory {segment}, which does not hold them")
        post = self._poller.post
        payload = Payload(
            memory[:length],
            keep=lambda: post(sock, NOTICE.pack(messages.KEEP, segment)),
            release=lambda: post(sock, NOTICE.pack(messages.RELEASE, segment)),
        )
        self._arrivals.arrived(key, payload)

    def _take_chunk(self, stream: _Stream, ticket: int, key: Key, offset: int, length: int, total: int) -> None:
        with self._lock:
            assembly = self._assemblies.get(key)
            is_first = assembly is None
            if assembly is None:
                assembly = self._assemblies[key] = _Assembly(total)
                while self._next_ticket != ticket and not self.failure:
                    self._changed.wait()
        if is_first:
            # Without the lock: chunks of other payloads go on on the other connection.
            try:
                assembly.block = self._pool.acquire(total, on_wait=self._warn_of_waiting)
            finally:
                assembly.has_block.set()
            with self._lock:
                self._next_ticket = (ticket + 1) % messages.NUM_TICKETS
                self._changed.notify_all()
        else:
            assembly.has_block.wait()
        block = assembly.block
        if block is None:
            raise PoolClosed
        if offset + length > block.size_bytes or length > assembly.bytes_left:
            raise DataPlaneError(f"sent a part of payload {key} beyond its end")
        memory = block.mapping.array()
        stream.read_into(memory[offset : offset + length])
        with self._lock:
            assembly.bytes_left -= length
            if assembly.bytes_left:
                return
            del self._assemblies[key]
        act, pool, block_id = self._poller.act, self._pool, block.id
        payload = Payload(
            memory[:total],
            # Through the poller: finalizers must take no lock.
            keep=lambda: act(lambda: pool.keep(block_id)),
            release=lambda: act(lambda: pool.release(block_id)),
        )
        self._arrivals.arrived(key, payload)

    def _warn_of_waiting(self) -> None:
        held = self._pool.held_bytes()
        logger.warning("received payloads (%s) were not released for 10 s; %s waits", held, self.hello.address)


def serve_connection(
    sock: Connection,
    poller: Poller,
    inbound_of: Callable[[Hello, Connection], Inbound],
    on_link_ended: Callable[[Inbound], None],
    on_tunnel: OnTunnel,
) -> None:
    """The thread of an accepted connection: reads until it ends, then leaves the socket to the poller.

    Args:
        inbound_of: gives the link that a connection belongs to, joined.
        on_link_ended: called by the last connection of a link.
        on_tunnel: see ``OnTunnel``.
    """
    inbound: Inbound | None = None
    stream = _Stream(sock)
    reason = ""
    is_given_away = False
    try:
        kind, number, _, _, _, _, length, _ = stream.head()
        if kind == messages.TUNNEL:
            take_over = on_tunnel(number)
            # The peer sends no more before it has this.
            sock.sendall(NOTICE.pack(messages.OPENED, number))
            is_given_away = True
            take_over(sock)
            return
        if kind != messages.HELLO or length > _MAX_HELLO_BYTES:
            raise DataPlaneError("began without a hello")
        body = np.empty(length, np.uint8)
        stream.read_into(body)
        inbound = inbound_of(messages.decode_hello(body.tobytes()), sock)
        inbound.serve(sock, stream)
    except _Ended as ending:
        reason = str(ending)
    except PoolClosed:
        reason = "was given up"
    except (DataPlaneError, OSError, MemoryError) as failure:
        reason = str(failure)
        logger.warning("a data connection of %s ends: %s", inbound.hello.address if inbound else "a stranger", failure)
    finally:
        stream.close()
        if inbound is not None and inbound.leave(sock, reason or "failed"):
            on_link_ended(inbound)
        if not is_given_away:
            poller.retire(sock)
