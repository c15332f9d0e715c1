"""The sockets that gloo, in jaxlib, opens for a world's collectives, and how to end them.

gloo has no time limit: when a member is killed, some of the others see a connection end, and those that wait for these
wait for ever. jaxlib gives no hold on gloo, but its sockets are descriptors of this process. Per world gloo listens at
one address, and each connection of two members was accepted by one of them, so what it accepted has that address too.
If every member that is left ends what it has accepted, all connections among them end, and whoever waits in a
collective fails within milliseconds.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

from pathways_runtime.worker import descriptors

#: Host and port.
Address = tuple[str, int]

_listening_lock = threading.Lock()


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _listening() -> set[Address]:
    names = (sock.getsockname() for sock in descriptors.stream_sockets() if _is_listening(sock))
    # Others are paths, of sockets that gloo cannot make.
    return {name for name in names if isinstance(name, tuple)}


class Listener:
    """Where gloo listens for the collectives of one world."""

    def __init__(self) -> None:
        self._address: Address | None = None

    @contextlib.contextmanager
    def note(self) -> Iterator[None]:
        """It is what listens after the block and did not before.

        Nothing else in the process may begin to listen at an IP address meanwhile; blocks of several threads wait for
        each other.
        """
        with _listening_lock:
            before = _listening()
            yield
            new = _listening() - before
        if len(new) == 1:
            (self._address,) = new

    def cut(self) -> int:
        """End all connections that were accepted there. Returns how many there were.

        gloo goes on listening: an end of that would end the process.
        """
        num_cut = 0
        if self._address is not None:
            for sock in descriptors.stream_sockets():
                with contextlib.suppress(OSError):
                    if sock.getsockname() == self._address and not _is_listening(sock):
                        sock.shutdown(socket.SHUT_RDWR)
                        num_cut += 1
        return num_cut
