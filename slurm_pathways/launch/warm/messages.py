"""What a keeper and those who come to it say: JSON lines over a Unix socket that their user alone can open.

A program's launcher says ``Attach``, and ``Started`` once the program runs; it stays connected as long as the program
lives. The keeper answers with ``Attached`` or ``Refused`` and passes on what happens to the runtime. Who wants its end
says ``Down`` and waits for the end of file.
"""

import contextlib
import select
import socket
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from slurm_pathways.launch.run_folder import Process

_T = TypeVar("_T")

#: The other side reads at once, or is stopped.
SEND_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 16


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Let a program in. ``has_terminal``: it reads from and writes to a terminal."""

    argv: tuple[str, ...]
    has_terminal: bool


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The program runs, as this process of this machine."""

    program: Process


class Signal(msgspec.Struct, frozen=True, tag="signal"):
    """Send the program a signal."""

    number: int


class Down(msgspec.Struct, frozen=True, tag="down"):
    """End the runtime. ``is_forced``: programs or not."""

    is_forced: bool


Request = Attach | Started | Signal | Down


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """A program may start.

    Attributes:
        proxy: the name of its proxy among the components.
        address: where that listens.
        program_prefix: what stands before the program's command line.
        host_names: by worker id.
    """

    proxy: str
    address: str
    program_prefix: tuple[str, ...]
    host_names: tuple[str, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """It cannot be done now; the reason is for the user."""

    reason: str


class Said(msgspec.Struct, frozen=True, tag="said"):
    """``components.ComponentEvent``."""

    component: str
    name: str
    fields: dict[str, Any]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """``components.ComponentEnded``."""

    component: str
    returncode: int
    was_asked: bool
    will_restart: bool | None = None


Answer = Attached | Refused | Said | Ended


class Lines(Generic[_T]):
    """One end of a connection. ``receive`` on one thread; ``send`` on another.

    Args:
        received: the type of what comes in.
    """

    def __init__(self, sock: socket.socket, received: Any) -> None:
        self._socket = sock
        self._decoder: msgspec.json.Decoder[_T] = msgspec.json.Decoder(received)
        sock.settimeout(None)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message.

        Raises:
            OSError: the other side is gone, or does not read for ``SEND_TIMEOUT_S``.
        """
        rest = memoryview(msgspec.json.encode(message) + b"\n")
        while rest:
            # Not settimeout: it would bound receive too.
            sent = _send_some(self._socket, rest)
            rest = rest[sent:]

    def receive(self) -> Iterator[_T]:
        """What comes in, until the end of file; a connection that breaks has ended."""
        rest = b""
        while True:
            try:
                chunk = self._socket.recv(_READ_BYTES)
            except OSError:
                return
            if not chunk:
                return
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield self._decoder.decode(line)

    def close(self) -> None:
        """End both directions; ``receive`` ends too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _send_some(sock: socket.socket, data: memoryview) -> int:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(SEND_TIMEOUT_S * 1e3):
        raise TimeoutError(f"the other side has not read for {SEND_TIMEOUT_S:g} s")
    return sock.send(data, socket.MSG_DONTWAIT)
