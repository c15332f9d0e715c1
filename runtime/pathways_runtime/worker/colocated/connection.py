"""Frames with descriptors between an executor and a Python process of it."""

import contextlib
import socket
import threading
from collections.abc import Sequence

from pathways_runtime.transport.frames import Buffer, ConnectionClosed, Frame, FrameCodec, FrameReader
from pathways_runtime.transport.passed_descriptors import ANCILLARY_BYTES, PassedDescriptors
from pathways_runtime.worker.buffers import aligned_memory
from pathways_runtime.worker.colocated.messages import AnyMessage


class Connection:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._codec: FrameCodec[AnyMessage] = FrameCodec(AnyMessage)
        self._reader: FrameReader[AnyMessage] = FrameReader(self._codec, aligned_memory)
        self._lock = threading.Lock()
        self._passed = PassedDescriptors()

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
                    [self._reader.writable()], ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as failure:
                raise ConnectionClosed(f"receiving failed: {failure}") from failure
            self._passed.note(ancillary)
            if count == 0:
                raise ConnectionClosed("closed by the other end")
            if frames := self._reader.advance(count):
                return frames

    def take_fd(self) -> int:
        """The descriptor of a frame that has one, in the order of such frames; the caller's to close.

        Raises:
            ConnectionClosed: none has come; the other end does not keep to the protocol.
        """
        fd = self._passed.take()
        if fd is None:
            raise ConnectionClosed("a descriptor is missing")
        return fd

    def close(self) -> None:
        """Close, and wake a thread that receives."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._passed.close()
