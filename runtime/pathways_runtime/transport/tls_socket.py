"""A TLS connection that threads use as they use a plain socket: one sends while another receives."""

import errno
import os
import select
import socket
import ssl
import threading
from collections.abc import Iterable, Sequence
from typing import Any

#: The most that one TLS record carries; OpenSSL takes and gives whole records.
RECORD_BYTES = 16 << 10

Buffer = bytes | bytearray | memoryview


class TlsSocket:
    """The methods of ``socket.socket`` that blocking connections need, over TLS.

    OpenSSL allows one call at a time per connection, and ``ssl.SSLSocket`` blocks within it, so a thread that receives
    would hold up one that sends. Here every call into OpenSSL is non-blocking and under a lock; waiting is outside.
    As with ``frames``, one thread sends at a time and one receives.

    Args:
        sock: handshaken and non-blocking; owned from now on.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        # A record that OpenSSL has begun to send for a caller who did not want to wait: it must be finished first.
        self._begun = b""

    def __enter__(self) -> "TlsSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor, -1 when closed."""
        return self._sock.fileno()

    def release(self) -> ssl.SSLSocket:
        """The non-blocking socket beneath, for an event loop; this object must not be used any more."""
        return self._sock

    def shutdown(self, how: int) -> None:
        """As of the plain socket beneath: wakes whoever waits."""
        # Not SSLSocket's own, after which it would go on in plain text.
        socket.socket.shutdown(self._sock, how)

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            self._sock.close()

    # Receiving

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As of a socket; MSG_DONTWAIT and MSG_WAITALL are understood.

        Raises:
            BlockingIOError: with MSG_DONTWAIT, nothing is there. OSError: the connection is broken.
        """
        view = memoryview(buffer).cast("B")
        if nbytes:
            view = view[:nbytes]
        filled = 0
        while filled < len(view):
            try:
                with self._lock:
                    count = self._sock.read(len(view) - filled, view[filled:])
            except ssl.SSLWantReadError:
                if filled and not flags & socket.MSG_WAITALL:
                    break
                self._wait(select.POLLIN, flags)
                continue
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, flags)
                continue
            if not count:
                break
            filled += int(count)
        return filled

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """As of a socket."""
        buffer = bytearray(bufsize)
        return bytes(buffer[: self.recv_into(buffer, bufsize, flags)])

    def recvmsg_into(
        self, buffers: Sequence[Any], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        """As of a socket; fills the first buffer only, and nothing comes beside the bytes."""
        return self.recv_into(buffers[0]), [], 0, None

    # Sending

    def send(self, data: Buffer, flags: int = 0) -> int:
        """As of a socket: returns how many bytes went.

        Raises:
            BlockingIOError: with MSG_DONTWAIT, none would. OSError: the connection is broken.
        """
        view = memoryview(data).cast("B")
        sent = 0
        while sent < len(view):
            try:
                sent += self._write(view[sent : sent + RECORD_BYTES], bool(flags & socket.MSG_DONTWAIT))
            except BlockingIOError:
                if not sent:
                    raise
                break
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, 0)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, 0)
        return sent

    def sendall(self, data: Any) -> None:
        """As of a socket."""
        self.send(data)

    def sendmsg(self, buffers: Iterable[Buffer], ancdata: Iterable[Any] = (), flags: int = 0) -> int:
        """As of a socket; nothing can go beside the bytes."""
        parts = [memoryview(part).cast("B") for part in buffers]
        if sum(map(len, parts)) <= 4 * RECORD_BYTES:
            # One record instead of one per part.
            return self.send(b"".join(parts), flags)
        total = 0
        for part in parts:
            count = self.send(part, flags)
            total += count
            if count < len(part):
                break
        return total

    def _write(self, record: memoryview, is_impatient: bool) -> int:
        """Send up to one record.

        Raises:
            BlockingIOError: ``is_impatient`` and nothing could be begun. ssl.SSLWantWriteError: call again with the
                same bytes once there is room.
        """
        with self._lock:
            try:
                if self._begun:
                    self._sock.write(self._begun)
                    self._begun = b""
                return self._sock.write(record)
            except ssl.SSLWantWriteError:
                if not is_impatient:
                    raise
                if self._begun:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
                # OpenSSL has encrypted it, and part of it may be on its way: it cannot be taken back.
                self._begun = bytes(record)
        threading.Thread(target=self._finish, name="finishes a record", daemon=True).start()
        return len(record)

    def _finish(self) -> None:
        try:
            while True:
                self._wait(select.POLLOUT, 0)
                with self._lock:
                    if not self._begun:
                        return
                    try:
                        self._sock.write(self._begun)
                    except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                        continue
                    self._begun = b""
                    return
        except (OSError, ValueError):
            # Broken or closed: whoever sends or receives next is told.
            return

    def _wait(self, events: int, flags: int) -> None:
        if flags & socket.MSG_DONTWAIT:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        fd = self._sock.fileno()
        if fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        poll = select.poll()
        poll.register(fd, events)
        poll.poll()


#: What connects two processes: a plain socket on one machine or where the fabric is trusted, TLS between hosts.
Connection = socket.socket | TlsSocket
