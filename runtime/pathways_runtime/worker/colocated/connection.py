"""Frames with descriptors between an executor and a Python process of it."""

import array
import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence

from pathways_runtime.transport.frames import Buffer, ConnectionClosed, Frame, FrameCodec, FrameReader
from pathways_runtime.worker.buffers import aligned_memory
from pathways_runtime.worker.colocated.messages import AnyMessage

_ANCILLARY_BYTES = socket.CMSG_SPACE(64 * array.array("i").itemsize)


class Connection:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._codec: FrameCodec[AnyMessage] = FrameCodec(AnyMessage)
        self._reader: FrameReader[AnyMessage] = FrameReader(self._codec, aligned_memory)
        self._lock = threading.Lock()
        self._fds: deque[int] = deque()

    def send(self, message: AnyMessage, payload: Sequence[Buffer] = (), fd: int | None = None) -> None:
        """Send one frame, whole; with a descriptor, which stays the caller's.

        Raises:
            ConnectionClosed: the other end is gone.
        """
        views = [memoryview(part).cast("B") for part in payload if len(part)]
        head = self._codec.encode(message, sum(view.nbytes for view in views))
        with self._lock:
            try:
                if fd is not None:
                    sent = socket.send_fds(self._sock, [head], [fd], socket.MSG_NOSIGNAL)
                    self._sock.sendall(head[sent:])
                else:
                    self._sock.sendall(head)
                for view in views:
                    self._sock.sendall(view)
            except OSError as failure:
                raise ConnectionClosed(f"sending failed: {failure}") from failure

    def receive(self) -> list[Frame[AnyMessage]]:
        """Block until at least one frame is there; return all that have arrived.

        Raises:
            ConnectionClosed: the other end is gone. FrameError: it does not speak this protocol.
        """
        while True:
            try:
                count, ancillary, _, _ = self._sock.recvmsg_into(
                    [self._reader.writable()], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as failure:
                raise ConnectionClosed(f"receiving failed: {failure}") from failure
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                    self._fds.extend(fds)
            if count == 0:
                raise ConnectionClosed("closed by the other end")
            if frames := self._reader.advance(count):
                return frames

    def take_fd(self) -> int:
        """The descriptor of a frame that has one, in the order of such frames; the caller's to close.

        Raises:
            ConnectionClosed: none has come; the other end does not keep to the protocol.
        """
        if not self._fds:
            raise ConnectionClosed("a descriptor is missing")
        return self._fds.popleft()

    def close(self) -> None:
        """Close, and wake a thread that receives."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())
