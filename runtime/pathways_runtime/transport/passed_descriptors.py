"""Descriptors that come beside the bytes of a socket."""

import array
import os
import socket
from collections import deque
from collections.abc import Iterable

#: Room for those that may come with what is received at once.
ANCILLARY_BYTES = socket.CMSG_SPACE(64 * array.array("i").itemsize)


class PassedDescriptors:
    """Those that have come and that nobody has taken yet, in order. For one thread."""

    def __init__(self) -> None:
        self._fds: deque[int] = deque()

    def note(self, ancillary: Iterable[tuple[int, int, bytes]]) -> None:
        """Keep what ``recvmsg`` gave beside the bytes."""
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds.extend(fds)

    def take(self) -> int | None:
        """The next one, the caller's to close; None if none has come."""
        return self._fds.popleft() if self._fds else None

    def close(self) -> None:
        """Close those that nobody took."""
        while self._fds:
            os.close(self._fds.popleft())
