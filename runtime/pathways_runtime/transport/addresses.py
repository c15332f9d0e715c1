"""Addresses of our own processes, as strings; nobody outside this file takes them apart.

* ``unix:/path``: on one host. The file system says who may connect.
* ``tcp:HOST:PORT``: between hosts; always with the job's credentials. Processes bind port 0 and publish the real one.
* ``tcp:HOST:PORT,unix:/path``: one listener that is reached both ways, by the second from its own host.

What an executor tells its peers may bear a mark at its end: see ``mark_private``.
"""

import contextlib
import errno
import ipaddress
import os
import re
import select
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pathways_runtime.transport import handshakes
from pathways_runtime.transport.handshakes import HANDSHAKE_TIMEOUT_S, HandshakeFactory, NotOfThisJob
from pathways_runtime.transport.tls_socket import Connection

_PRIVATE_MARK = ",private"

#: ``sockaddr_un.sun_path`` has 108 bytes, one of them for the terminating zero.
MAX_UNIX_PATH_BYTES = 107

_RETRY_INTERVAL_S = 0.005
#: What connecting gives while the listener is not there yet or its queue is full.
_NOT_YET = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN})
_TCP = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:,\[\]]+):([0-9]{1,5})")
_ANSWER_INTERVAL_S = 0.1


class AddressError(ValueError):
    """A string that is no address, or one that this machine cannot use; the message says what to change."""


class ConnectFailed(OSError):
    """Nobody could be reached; the message names the address, how long it was tried, and the last cause."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix stream socket at ``path``."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port of ``host``: a name, or an IP address without brackets. Port 0: any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


def parse(address: str) -> UnixAddress | TcpAddress:
    """The parts of an address that stands for one way.

    Raises:
        AddressError: unknown scheme, no port, or a path that does not fit a Unix socket address.
    """
    scheme, colon, rest = address.partition(":")
    if colon and scheme == "tcp":
        found = _TCP.fullmatch(rest)
        if found is None or int(found[2]) > 65535:
            raise AddressError(f"{address!r} is no address: it must look like tcp:host:port")
        return TcpAddress(found[1].strip("[]"), int(found[2]))
    if not colon or scheme != "unix":
        raise AddressError(
            f"{address!r} is no address of this version: it must look like unix:/path/of/socket or tcp:host:port"
        )
    if not rest.startswith("/"):
        raise AddressError(f"{address!r}: the path of a Unix socket must be absolute")
    size = len(rest.encode())
    if size > MAX_UNIX_PATH_BYTES:
        raise AddressError(
            f"{address!r}: the path has {size} bytes, a Unix socket allows {MAX_UNIX_PATH_BYTES}: "
            "choose a shorter run folder"
        )
    return UnixAddress(rest)


def parse_unix(address: str) -> UnixAddress:
    """The parts of an address that must be of a Unix socket.

    Raises:
        AddressError: it is not.
    """
    parsed = parse(address)
    if not isinstance(parsed, UnixAddress):
        raise AddressError(f"{address!r}: only a Unix socket, unix:/path, can be here")
    return parsed


def both_ways(tcp: str, unix: str) -> str:
    """The address of a listener that is reached by either."""
    return f"{tcp},{unix}"


def way_to(address: str, is_same_host: bool) -> str:
    """The way to a listener that may have two: the Unix socket from its own host, TCP from another."""
    if not address.startswith("tcp:"):
        return address
    tcp, comma, unix = address.partition(",")
    return unix if comma and is_same_host else tcp


def mark_private(address: str) -> str:
    """An executor's address with the mark that says that it has private sockets (``worker.private_sockets``)."""
    return address + _PRIVATE_MARK


def without_mark(address: str) -> tuple[str, bool]:
    """The address itself, and whether it bears the mark."""
    bare = address.removesuffix(_PRIVATE_MARK)
    return bare, bare != address


def resolve(host: str) -> str:
    """The IP address that ``host`` has here.

    Raises:
        AddressError: it has none, or it is the name of a host that would only be found from itself.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as failure:
        raise AddressError(f"the host name {host!r} cannot be resolved: {failure}") from failure
    address = str(found[0][4][0])
    if host not in (address, "localhost") and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise AddressError(
            f"the host name {host!r} resolves to {address} on this host, where other hosts cannot connect: "
            "name the interface's address instead (the host's /etc/hosts has the line)"
        )
    return address


def listen_tcp(address: str, advertise: str | None = None, backlog: int = 1024) -> tuple[socket.socket, str]:
    """A listening socket and the address to publish: with the real port, and ``advertise`` as the host if it is given.

    Whoever accepts must authenticate (``door``): nothing of ours speaks to strangers.

    Raises:
        AddressError: see ``parse``; also when others could not connect to it. OSError: it cannot be bound.
    """
    parsed = parse(address)
    if not isinstance(parsed, TcpAddress):
        raise AddressError(f"{address!r}: only tcp:host:port can be here")
    bound_to = resolve(parsed.host)
    if advertise is not None:
        resolve(advertise)
    elif ipaddress.ip_address(bound_to.partition("%")[0]).is_unspecified:
        raise AddressError(
            f"{address}: others cannot connect to {parsed.host}; say which host name or address they use"
        )
    try:
        is_v6 = ":" in bound_to
        sock = socket.create_server(
            (bound_to, parsed.port), family=socket.AF_INET6 if is_v6 else socket.AF_INET, backlog=backlog
        )
    except OSError as failure:
        raise OSError(failure.errno, f"cannot listen at {address}: {failure.strerror}") from failure
    return sock, str(TcpAddress(advertise or parsed.host, sock.getsockname()[1]))


def listen(address: str, backlog: int = 1024) -> socket.socket:
    """A blocking socket that listens at ``address``, a Unix socket's; only this user may connect.

    A socket file that nobody listens on any more is replaced.

    Raises:
        AddressError: see ``parse_unix``; also when somebody listens there already.
        OSError: the folder is missing or not writable.
    """
    path = parse_unix(address).path
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(path)
        except OSError as failure:
            if failure.errno != errno.EADDRINUSE:
                raise OSError(failure.errno, f"cannot listen at {address}: {failure.strerror}") from failure
            if _is_served(path):
                raise AddressError(f"{address}: another process listens there") from failure
            Path(path).unlink(missing_ok=True)
            sock.bind(path)
        Path(path).chmod(0o600)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except OSError as failure:
            # A full queue (EAGAIN) has somebody behind it; a refusal or a plain file has nobody.
            return failure.errno == errno.EAGAIN
        return True


def stop_listening(sock: socket.socket, address: str) -> None:
    """Close a listening socket and remove its file."""
    with contextlib.suppress(OSError):
        # Wakes a thread that blocks in accept; closing alone would not.
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
    Path(parse_unix(address).path).unlink(missing_ok=True)


def connect(
    address: str,
    timeout_s: float,
    is_given_up: Callable[[], bool] = lambda: False,
    handshake: HandshakeFactory | None = None,
) -> Connection:
    """A blocking connection to ``address``.

    Waits while nobody listens there yet; ``timeout_s=0`` tries once. Blocks the thread: on an event loop, use
    ``streams.connect``.

    Args:
        is_given_up: asked between attempts; True ends the waiting at once.
        handshake: how both sides make sure of each other on TCP (``handshakes.tls_connecting``).

    Raises:
        AddressError: see ``parse``; also TCP without ``handshake``. ConnectFailed: nobody was there in time, or the
            system refused, or the peer is not of this job.
    """
    parsed = parse(address)
    if isinstance(parsed, TcpAddress) and handshake is None:
        raise AddressError(f"{address}: TCP connections need the job's credentials, and this process was given none")
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            if isinstance(parsed, UnixAddress):
                return _connect_unix(parsed)
            assert handshake is not None
            return _connect_tcp(parsed, deadline_s, is_given_up, handshake)
        except OSError as failure:
            is_over = time.monotonic() >= deadline_s or is_given_up() or isinstance(failure, NotOfThisJob)
            if is_over or (isinstance(parsed, UnixAddress) and failure.errno not in _NOT_YET):
                # OpenSSL numbers its errors in its own way, and handshakes give none.
                is_ours = isinstance(failure, ssl.SSLError | NotOfThisJob) or failure.errno is None
                raise ConnectFailed(
                    errno.EACCES if is_ours else failure.errno,
                    f"cannot connect to {address} (tried for {timeout_s:g} s): {failure.strerror or failure}",
                ) from failure
            time.sleep(_RETRY_INTERVAL_S)


def connect_unix(address: str, timeout_s: float) -> socket.socket:
    """``connect`` to an address that must be of a Unix socket."""
    parse_unix(address)
    connection = connect(address, timeout_s)
    assert isinstance(connection, socket.socket)
    return connection


def _connect_unix(address: UnixAddress) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Non-blocking: a full listen queue must not hold us beyond the deadline.
        sock.setblocking(False)
        sock.connect(address.path)
        sock.setblocking(True)
        return sock
    except BaseException:
        sock.close()
        raise


def _connect_tcp(
    address: TcpAddress, deadline_s: float, is_given_up: Callable[[], bool], handshake: HandshakeFactory
) -> Connection:
    family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        error = sock.connect_ex(where)
        if error == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            while not poll.poll(_ANSWER_INTERVAL_S * 1e3):
                if time.monotonic() >= deadline_s or is_given_up():
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    # A peer that is there gets the time for it, however late we found it.
    return handshakes.complete(handshake(sock), sock.fileno(), HANDSHAKE_TIMEOUT_S, is_given_up)
