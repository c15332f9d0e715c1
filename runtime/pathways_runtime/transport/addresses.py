"""Addresses of our own processes, as strings: ``unix:/path``.

Between hosts there will be ``tcp:`` with TLS; nobody outside this file may take an address apart, so that it can come
without touching its users.
"""

import contextlib
import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: ``sockaddr_un.sun_path`` has 108 bytes, one of them for the terminating zero.
MAX_UNIX_PATH_BYTES = 107

_RETRY_INTERVAL_S = 0.005
#: What connecting gives while the listener is not there yet or its queue is full.
_NOT_YET = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN})


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


def parse(address: str) -> UnixAddress:
    """The parts of an address.

    Raises:
        AddressError: unknown scheme, or a path that does not fit a Unix socket address.
    """
    scheme, colon, rest = address.partition(":")
    if not colon or scheme != "unix":
        raise AddressError(f"{address!r} is no address of this version: it must look like unix:/path/of/socket")
    if not rest.startswith("/"):
        raise AddressError(f"{address!r}: the path of a Unix socket must be absolute")
    size = len(rest.encode())
    if size > MAX_UNIX_PATH_BYTES:
        raise AddressError(
            f"{address!r}: the path has {size} bytes, a Unix socket allows {MAX_UNIX_PATH_BYTES}: "
            "choose a shorter run folder"
        )
    return UnixAddress(rest)


def listen(address: str, backlog: int = 1024) -> socket.socket:
    """A blocking socket that listens at ``address``; only this user may connect.

    A socket file that nobody listens on any more is replaced.

    Raises:
        AddressError: see ``parse``; also when somebody listens there already.
        OSError: the folder is missing or not writable.
    """
    path = parse(address).path
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
    Path(parse(address).path).unlink(missing_ok=True)


def connect(address: str, timeout_s: float, is_given_up: Callable[[], bool] = lambda: False) -> socket.socket:
    """A blocking socket connected to ``address``.

    Waits while nobody listens there yet; ``timeout_s=0`` tries once. Blocks the thread: on an event loop, call it in
    another thread or open the connection with ``loop.create_unix_connection(..., parse(address).path)``.

    Args:
        is_given_up: asked between attempts; True ends the waiting at once.

    Raises:
        AddressError: see ``parse``. ConnectFailed: nobody was there in time, or the system refused.
    """
    path = parse(address).path
    deadline_s = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Non-blocking: a full listen queue must not hold us beyond the deadline.
            sock.setblocking(False)
            sock.connect(path)
            sock.setblocking(True)
            return sock
        except OSError as failure:
            sock.close()
            if failure.errno not in _NOT_YET or time.monotonic() >= deadline_s or is_given_up():
                raise ConnectFailed(
                    failure.errno, f"cannot connect to {address} (tried for {timeout_s:g} s): {failure.strerror}"
                ) from failure
            time.sleep(_RETRY_INTERVAL_S)
