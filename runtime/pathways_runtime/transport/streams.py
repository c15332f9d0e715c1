"""Listening and connecting on an event loop, for ``frames.AsyncChannel``, whatever the address is.

Handshakes run on other threads (``door``), so the loop only sees connections of the job. ``TlsTransport`` carries them
on: no event loop takes over a TLS connection that is established.
"""

import asyncio
import contextlib
import errno
import functools
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pathways_runtime.transport import addresses
from pathways_runtime.transport.addresses import AddressError, ConnectFailed, UnixAddress
from pathways_runtime.transport.door import Door
from pathways_runtime.transport.network import Network, open_door
from pathways_runtime.transport.tls_socket import RECORD_BYTES, Connection, TlsSocket

ProtocolT = TypeVar("ProtocolT", bound=asyncio.BufferedProtocol)

_RETRY_INTERVAL_S = 0.01
#: What one turn of the loop reads or writes on one connection before others have theirs.
_TURN_BYTES = 1 << 20
#: How long a closed connection waits for the peer to close too: closing with unread bytes would destroy what it has
#: not read yet.
_LINGER_S = 0.5
#: As the kernel numbers the states of a connection: it is over, and nobody has closed it.
_TCP_CLOSE = 7


class TlsTransport(asyncio.Transport):
    """A handshaken TLS connection as a transport of the running loop.

    Args:
        sock: non-blocking; owned from now on.
    """

    def __init__(self, sock: ssl.SSLSocket, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self._sock = sock
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._unwritten: deque[memoryview] = deque()
        self._unwritten_bytes = 0
        self._is_closing = False
        self._is_lost = False
        self._is_reading = False
        self._is_writing = False
        protocol.connection_made(self)
        self.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._sock if name == "socket" else default

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return self._unwritten_bytes

    def is_reading(self) -> bool:
        return self._is_reading

    def pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._sock.fileno())

    def resume_reading(self) -> None:
        if not self._is_reading and not self._is_closing:
            self._is_reading = True
            self._loop.add_reader(self._sock.fileno(), self._read)
            # OpenSSL may hold bytes that the descriptor does not tell of.
            self._loop.call_soon(self._read)

    def write(self, data: Any) -> None:
        if self._is_closing or not len(data):
            return
        view = memoryview(data).cast("B")
        self._unwritten.append(view)
        self._unwritten_bytes += len(view)
        if not self._is_writing:
            self._write()

    def close(self) -> None:
        if not self._is_closing:
            self.pause_reading()
            self._is_closing = True
            if not self._unwritten:
                self._linger()

    def abort(self) -> None:
        self._is_closing = True
        self._lose(None)

    def _read(self) -> None:
        if not self._is_reading:
            return
        read_bytes = 0
        while self._is_reading and read_bytes < _TURN_BYTES:
            buffer = memoryview(self._protocol.get_buffer(-1)).cast("B")
            filled = 0
            is_dry, failure = False, None
            is_ended = False
            try:
                while filled < len(buffer):
                    count = self._sock.read(len(buffer) - filled, buffer[filled:])
                    if not count:
                        is_ended = True
                        break
                    filled += int(count)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                is_dry = True
            except OSError as error:
                is_ended, failure = True, error
            if filled:
                read_bytes += filled
                self._protocol.buffer_updated(filled)
            if is_ended:
                self._is_closing = True
                self._lose(failure or _cut_off(self._sock))
                return
            if is_dry:
                return
        if self._is_reading:
            self._loop.call_soon(self._read)

    def _write(self) -> None:
        written = 0
        try:
            while self._unwritten and written < _TURN_BYTES:
                view = self._unwritten[0]
                count = self._sock.write(view[:RECORD_BYTES])
                written += count
                self._unwritten_bytes -= count
                if count == len(view):
                    self._unwritten.popleft()
                else:
                    self._unwritten[0] = view[count:]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as failure:
            self._is_closing = True
            self._lose(failure)
            return
        if self._unwritten and not self._is_writing:
            self._is_writing = True
            self._loop.add_writer(self._sock.fileno(), self._write)
        elif not self._unwritten:
            self._stop_writing()
            if self._is_closing:
                self._linger()

    def _stop_writing(self) -> None:
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self._sock.fileno())

    def _linger(self) -> None:
        """Say that nothing more comes; the end is when the peer says so too, or is late."""
        if self._is_lost:
            return
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
        except OSError:
            self._lose(None)
            return
        self._loop.add_reader(self._sock.fileno(), self._discard)
        self._loop.call_later(_LINGER_S, self._lose, None)

    def _discard(self) -> None:
        try:
            # Beneath TLS: nobody looks at it.
            if socket.socket.recv(self._sock, 1 << 16):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._lose(None)

    def _lose(self, failure: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._is_reading = False
        self._loop.remove_reader(self._sock.fileno())
        self._stop_writing()
        self._unwritten.clear()
        self._unwritten_bytes = 0
        self._sock.close()
        self._loop.call_soon(self._protocol.connection_lost, failure)


def _cut_off(sock: socket.socket) -> OSError | None:
    """Why a TCP connection is over whose peer has not closed it; None if it has.

    Python's ssl takes the error that ends a connection for an end of file, and the kernel tells it once.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    state, _, retransmits, probes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)
    if state != _TCP_CLOSE:
        return None
    number = errno.ETIMEDOUT if retransmits or probes else errno.ECONNRESET
    return OSError(number, os.strerror(number))


class Server(Protocol):
    """Something that listens."""

    @property
    def address(self) -> str:
        """Where others reach it."""

    def close(self) -> None:
        """Listen no more; connections go on."""


class _UnixServer:
    def __init__(self, address: str, server: asyncio.AbstractServer) -> None:
        self.address = address
        self._server = server

    def close(self) -> None:
        self._server.close()
        Path(addresses.parse_unix(self.address).path).unlink(missing_ok=True)


class _TcpServer:
    def __init__(
        self,
        address: str,
        make_protocol: Callable[[], asyncio.BufferedProtocol],
        network: Network,
        advertise: str | None,
    ) -> None:
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._door: Door
        self._door, self.address = open_door(
            address, network.accepting(), self._connected, advertise, network.unreachable_timeout_s
        )

    def close(self) -> None:
        self._is_closed = True
        self._door.close()

    def _connected(self, connection: Connection) -> None:
        try:
            self._loop.call_soon_threadsafe(self._serve, connection)
        except RuntimeError:
            # The loop has ended.
            connection.close()

    def _serve(self, connection: Connection) -> None:
        assert isinstance(connection, TlsSocket)
        if self._is_closed:
            connection.close()
        else:
            TlsTransport(connection.release(), self._make_protocol())


async def serve(
    address: str, make_protocol: Callable[[], asyncio.BufferedProtocol], network: Network | None = None
) -> Server:
    """Listen at ``address``; ``make_protocol`` is called for each connection.

    Raises:
        AddressError: see ``addresses``; also TCP without ``network``. OSError: it cannot be listened at.
    """
    if isinstance(addresses.parse(address), UnixAddress):
        loop = asyncio.get_running_loop()
        return _UnixServer(address, await loop.create_unix_server(make_protocol, sock=addresses.listen(address)))
    if network is None:
        raise AddressError(f"{address}: listening on TCP needs the job's credentials, and this process was given none")
    return _TcpServer(address, make_protocol, network, network.host)


async def connect(
    address: str, make_protocol: Callable[[], ProtocolT], timeout_s: float, network: Network | None = None
) -> ProtocolT:
    """A protocol on a new connection; waits while nobody listens there yet.

    Raises:
        AddressError: see ``addresses``; also TCP without ``network``.
        ConnectFailed: nobody was there in time, or the peer is not of this job.
    """
    loop = asyncio.get_running_loop()
    parsed = addresses.parse(address)
    if isinstance(parsed, UnixAddress):
        deadline_s = loop.time() + timeout_s
        while True:
            try:
                _, protocol = await loop.create_unix_connection(make_protocol, parsed.path)
                return protocol
            except OSError as failure:
                if loop.time() >= deadline_s:
                    raise ConnectFailed(
                        failure.errno, f"cannot connect to {address} (tried for {timeout_s:g} s): {failure.strerror}"
                    ) from failure
                await asyncio.sleep(_RETRY_INTERVAL_S)
    handshake = None if network is None else network.connecting()
    is_given_up = False
    connecting = loop.run_in_executor(
        None, functools.partial(addresses.connect, address, timeout_s, lambda: is_given_up, handshake)
    )
    try:
        connection = await asyncio.shield(connecting)
    except asyncio.CancelledError:
        is_given_up = True
        with contextlib.suppress(OSError, ValueError):
            (await connecting).close()
        raise
    assert isinstance(connection, TlsSocket)
    protocol = make_protocol()
    TlsTransport(connection.release(), protocol)
    return protocol
