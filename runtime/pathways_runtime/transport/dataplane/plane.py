"""The data plane of one executor: everything that it sends to others and gets from them, without a detour."""

import contextlib
import functools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pathways_runtime.transport import addresses
from pathways_runtime.transport.dataplane import messages
from pathways_runtime.transport.dataplane.inbound import Inbound, OnTunnel, serve_connection
from pathways_runtime.transport.dataplane.memory import Bytes
from pathways_runtime.transport.dataplane.messages import DATA_PLANE_VERSION, DataPlaneError, Hello, Key, PeerLost
from pathways_runtime.transport.dataplane.outbound import Link, OnSent, report_sent
from pathways_runtime.transport.dataplane.payload import Arrivals, OnArrived
from pathways_runtime.transport.dataplane.poller import Poller
from pathways_runtime.transport.door import Door
from pathways_runtime.transport.network import Network, open_door
from pathways_runtime.transport.tls_socket import Connection

logger = logging.getLogger(__name__)

#: Per peer and direction: what may lie in shared memory or receive buffers unreleased.
DEFAULT_BUDGET_BYTES = 512 << 20
_TUNNEL_TIMEOUT_S = 10.0


class DataPlane:
    """Sends buffers to other executors and receives theirs, each under a key that is used once.

    Large payloads go by shared memory to peers with an equal host key, else over sockets. Callbacks run on the data
    plane's threads, or within the call that brought them about; they must be quick and must not call ``close``.

    Args:
        listen_address: where peers of this host reach this data plane: a Unix socket.
        host_key: equal to another's if and only if the two can share memory.
        force_sockets: never use shared memory.
        budget_bytes: see ``DEFAULT_BUDGET_BYTES``; one larger payload at a time may exceed it.
        network: where peers of other hosts reach it; None: all are on this host.
        on_tunnel: where tunnels lead that peers open; None: nowhere.

    Attributes:
        address: what peers give to ``connect``.
    """

    def __init__(
        self,
        listen_address: str,
        host_key: str,
        force_sockets: bool = False,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        network: Network | None = None,
        on_tunnel: OnTunnel | None = None,
    ) -> None:
        self.address = self._local_address = listen_address
        self.host_key = host_key
        self._force_sockets = force_sockets
        self._budget_bytes = budget_bytes
        self._listener = addresses.listen(listen_address)
        self._listener.setblocking(False)
        self._poller = Poller("data plane")
        self._arrivals = Arrivals()
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._lost_links: list[Link] = []
        self._link_count = 0
        self._inbound: dict[tuple[str, str], Inbound] = {}
        self._receivers: dict[threading.Thread, Connection] = {}
        self._moved_lock = threading.Lock()
        self._moved = {"shared_memory": 0, "socket": 0}
        self._is_closed = False
        self._on_tunnel = on_tunnel
        self._handshake = None if network is None else network.data_connecting()
        self._door: Door | None = None
        if network is not None and network.host is not None:
            self._door, published = open_door(network.any_port, network.data_accepting(), self._admit, network.host)
            self.address = addresses.both_ways(published, listen_address)
        self._poller.watch(self._listener, self._accept)

    def connect(self, host: int, address: str, host_key: str) -> None:
        """Host ``host`` is reached at ``address``. The connection is made when something is sent.

        Called again with the same address, it revives a lost peer and else does nothing; with another, the old peer is
        lost.
        """
        with self._lock:
            if self._is_closed:
                raise PeerLost("this data plane is closed")
            old = self._links.get(host)
            if old is not None and old.address == address and old.failure is None:
                return
            self._link_count += 1
            shares_memory = host_key == self.host_key and not self._force_sockets
            self._links[host] = Link(
                f"host {host} ({address})",
                address,
                Hello(DATA_PLANE_VERSION, self.address, f"{os.getpid()}-{self._link_count}"),
                shares_memory,
                self._budget_bytes,
                self._poller,
                functools.partial(self._count_moved, "shared_memory" if shares_memory else "socket"),
                self._handshake,
            )
            if old is not None:
                self._lost_links.append(old)
        if old is not None:
            gone = PeerLost(f"host {host} ({old.address}) was replaced by {address}")
            old.lose(gone)
            self._arrivals.source_lost(host, gone)
        self._arrivals.source_found(host)

    def send(self, host: int, key: Key, buffer: npt.NDArray[Any] | memoryview, on_sent: OnSent) -> None:
        """Send a contiguous buffer, which must stay as it is until ``on_sent``. Keys may overtake each other.

        Args:
            on_sent: called once: with None when the buffer may be changed (the peer need not have read it yet), else
                with the ``PeerLost`` that says why it cannot be sent. Small buffers are often sent, and reported,
                within this call.

        Raises:
            ValueError: the buffer is not contiguous. struct.error: the key is not three unsigned 64-bit numbers.
        """
        memory = _bytes_of(buffer)
        link = self._links.get(host)
        if link is None:
            report_sent(on_sent, PeerLost(f"host {host} is not connected"))
            return
        link.send(key, memory, on_sent)

    def open_tunnel(self, host: int, number: int) -> Connection:
        """A connection to a peer on another machine that carries whatever its two ends say; the caller's from now on.

        Args:
            number: what the peer's ``on_tunnel`` is given.

        Raises:
            OSError: the peer is not connected, not there in time, or refuses.
        """
        link = self._links.get(host)
        if link is None:
            raise ConnectionError(f"host {host} is not connected")
        connection = addresses.connect(
            addresses.way_to(link.address, False),
            _TUNNEL_TIMEOUT_S,
            lambda: self._is_closed or link.failure is not None,
            self._handshake,
        )
        try:
            connection.sendall(messages.encode_tunnel(number))
            answer = _receive_all(connection, messages.NOTICE.size, f"host {host}")
            if answer != messages.NOTICE.pack(messages.OPENED, number):
                raise ConnectionError(f"host {host} refuses a tunnel to {number}")
        except BaseException:
            connection.close()
            raise
        return connection

    def expect(self, key: Key, on_arrived: OnArrived, source: int | None = None) -> None:
        """Have ``on_arrived`` called once with the payload of ``key``, or with its failure.

        May come before or after the bytes; if they are there, the callback runs within this call.

        Args:
            source: the host that sends it: when that is lost, the expectation fails. Without it, only ``close`` and
                ``forget`` end the waiting.

        Raises:
            ValueError: the key is expected already.
        """
        self._arrivals.expect(key, on_arrived, source)

    def forget(self, session: int) -> None:
        """Drop expectations and payloads of a session, those to come too. Its callbacks are not called any more."""
        self._arrivals.forget(session)

    def peer_lost(self, host: int, reason: str = "was lost") -> None:
        """Fail all that goes to or comes from a host, until it is connected again."""
        failure = PeerLost(f"host {host} {reason}")
        with self._lock:
            link = self._links.get(host)
            inbound = [one for one in self._inbound.values() if link is not None and one.hello.address == link.address]
        if link is not None:
            link.lose(failure)
        for one in inbound:
            one.end(reason)
        self._arrivals.source_lost(host, failure)

    def bytes_moved(self) -> dict[str, int]:
        """Bytes handed over so far, by kind of peer: those that share memory, and the others.

        Payloads under 64 KiB ride in the message itself; between peers that share memory they are counted as
        ``shared_memory``.
        """
        with self._moved_lock:
            return dict(self._moved)

    def report(self) -> dict[str, Any]:
        """For ``status``: what is under way and what memory it holds, as plain values."""
        expected, stashed = self._arrivals.counts()
        with self._lock:
            links = dict(self._links)
        peers = {
            str(host): {"address": link.address, "queued": link.num_queued(), "shared_memory": link.held_bytes()}
            for host, link in links.items()
        }
        return {"expected": expected, "arrived_early": stashed, "peers": peers, "bytes_moved": self.bytes_moved()}

    def close(self) -> None:
        """Fail everything, end all threads, close all descriptors. Arrays that were adopted stay readable."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._door is not None:
            self._door.close()
        with self._lock:
            links = [*self._links.values(), *self._lost_links]
            inbound = list(self._inbound.values())
            receivers = dict(self._receivers)
        gone = PeerLost("this data plane is closed")
        for link in links:
            link.lose(gone)
        for one in inbound:
            one.end(str(gone))
        for link in links:
            link.join()
        for sock in receivers.values():
            # Also those that have not introduced themselves.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in receivers:
            thread.join()
        self._arrivals.close()
        self._poller.close()
        addresses.stop_listening(self._listener, self._local_address)

    def _count_moved(self, kind: str, num_bytes: int) -> None:
        with self._moved_lock:
            self._moved[kind] += num_bytes

    # Receiving

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        sock.setblocking(True)
        self._admit(sock)

    def _admit(self, sock: Connection) -> None:
        thread = threading.Thread(target=self._receive, args=(sock,), name="data from a peer", daemon=True)
        with self._lock:
            if self._is_closed:
                sock.close()
                return
            self._receivers[thread] = sock
            thread.start()

    def _receive(self, sock: Connection) -> None:
        serve_connection(sock, self._poller, self._inbound_of, self._link_ended, self._lead)
        with self._lock:
            self._receivers.pop(threading.current_thread(), None)

    def _lead(self, number: int) -> Callable[[Connection], None]:
        if self._on_tunnel is None:
            raise DataPlaneError("came with a tunnel, which leads nowhere here")
        return self._on_tunnel(number)

    def _inbound_of(self, hello: Hello, sock: Connection) -> Inbound:
        name = (hello.address, hello.link)
        with self._lock:
            inbound = self._inbound.get(name)
            if inbound is None:
                inbound = Inbound(hello, self._budget_bytes, self._arrivals, self._poller)
                self._inbound[name] = inbound
            if self._is_closed or not inbound.join(sock):
                raise DataPlaneError("came for a link that has ended")
            hosts = self._hosts_at(hello.address)
        # A peer that was given up, and now sends again, is there after all.
        for host in hosts:
            self._arrivals.source_found(host)
        return inbound

    def _link_ended(self, inbound: Inbound) -> None:
        address = inbound.hello.address
        with self._lock:
            self._inbound.pop((address, inbound.hello.link), None)
            if any(other.hello.address == address for other in self._inbound.values()):
                return
            hosts = self._hosts_at(address)
        for host in hosts:
            self._arrivals.source_lost(host, PeerLost(f"host {host} ({address}) {inbound.failure}"))

    def _hosts_at(self, address: str) -> list[int]:
        return [host for host, link in self._links.items() if link.address == address]


def _receive_all(connection: Connection, size: int, peer: str) -> bytes:
    """So many bytes, and not one of what follows.

    Raises:
        OSError: the connection is broken, or they did not come in time.
    """
    received = b""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    deadline_s = time.monotonic() + _TUNNEL_TIMEOUT_S
    while len(received) < size:
        try:
            part = connection.recv(size - len(received), socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3):
                raise TimeoutError(f"{peer} did not answer in {_TUNNEL_TIMEOUT_S:g} s") from None
            continue
        if not part:
            raise ConnectionError(f"{peer} closed the connection")
        received += part
    return received


def _bytes_of(buffer: npt.NDArray[Any] | memoryview) -> Bytes:
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    if not array.flags.c_contiguous:
        raise ValueError("only contiguous buffers can be sent")
    return array.reshape(-1).view(np.uint8)
