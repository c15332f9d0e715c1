"""The executor's end of session links: host buffers in, readiness and values out."""

import functools
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from pathways_runtime.core.ids import OpId, SessionId
from pathways_runtime.transport.frames import Channel, ConnectionClosed, FrameCodec, FrameError
from pathways_runtime.transport.tls_socket import Connection
from pathways_runtime.wire.callbacks import CallbackResult, CallbacksDropped, CallbacksUnused
from pathways_runtime.wire.links import AnyLinkMessage, HostBuffer, LinkHello
from pathways_runtime.worker.buffers import aligned_memory
from pathways_runtime.worker.callbacks import FORWARDERS, Calls

logger = logging.getLogger(__name__)

#: Called with (op id, index, bytes) of a host buffer, on the link's reader thread.
OnBuffer = Callable[[OpId, int, bytearray | memoryview], None]

#: Values up to this size are copied behind their header and sent at once.
_INLINE_BYTES = 1 << 16


class SessionLink:
    """One session's link. ``send`` never blocks: what the socket does not take at once, a thread sends.

    Args:
        hello: the first message.
        on_buffer: see ``OnBuffer``.

    Attributes:
        calls: of the client's Python functions.
    """

    def __init__(self, session: SessionId, sock: Connection, hello: LinkHello, on_buffer: OnBuffer) -> None:
        self._session = session
        self._sock = sock
        self._codec: FrameCodec[AnyLinkMessage] = FrameCodec(AnyLinkMessage)
        self._on_buffer = on_buffer
        self._changed = threading.Condition()
        self._backlog: deque[memoryview] = deque()
        self._is_closed = False
        self._sender: threading.Thread | None = None
        self.bytes_received = 0
        self.bytes_sent = 0
        self.calls = Calls(self.send)
        self._sock.sendall(self._codec.encode(hello))
        self._reader = threading.Thread(target=self._read, name=f"link of session {session}", daemon=True)
        self._reader.start()

    def send(self, message: AnyLinkMessage, value: "np.ndarray[Any, Any] | None" = None) -> None:
        """Send a message with the bytes of a dense array, which is kept until it has been sent.

        Frames leave in the order of the calls. On a link that is closed, nothing happens: the session is over.
        """
        payload = memoryview(b"") if value is None else value.reshape(-1).view(np.uint8).data
        head = self._codec.encode(message, payload.nbytes)
        parts = [memoryview(head + payload)] if payload.nbytes <= _INLINE_BYTES else [memoryview(head), payload]
        with self._changed:
            if self._is_closed:
                return
            self.bytes_sent += payload.nbytes
            if not self._backlog and len(parts) == 1:
                try:
                    sent = self._sock.send(parts[0], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    sent = 0
                except OSError as failure:
                    logger.info("link of session %d is gone: %s", self._session, failure)
                    return
                if sent == len(parts[0]):
                    return
                parts[0] = parts[0][sent:]
            self._backlog.extend(parts)
            if self._sender is None:
                self._sender = threading.Thread(
                    target=self._send_backlog, name=f"values of session {self._session}", daemon=True
                )
                self._sender.start()
            self._changed.notify()

    def close(self) -> None:
        """Drop what was not sent; end the threads. May be called from any thread, also twice."""
        with self._changed:
            self._is_closed = True
            self._backlog.clear()
            self._changed.notify()
        self.calls.close()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("link of session %d was gone already", self._session)

    def _send_backlog(self) -> None:
        while True:
            with self._changed:
                while not self._backlog and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                part = self._backlog[0]
            try:
                self._sock.sendall(part)
            except OSError as failure:
                logger.info("link of session %d is gone: %s", self._session, failure)
                self.close()
                return
            del part
            with self._changed:
                # Removed only now: as long as it is there, nothing may be sent past it.
                if self._backlog:
                    self._backlog.popleft()

    def _read(self) -> None:
        channel = Channel(self._sock, self._codec, aligned_memory)
        try:
            while True:
                for frame in channel.receive():
                    message = frame.message
                    self.bytes_received += len(frame.payload)
                    if isinstance(message, HostBuffer):
                        self._on_buffer(message.op_id, message.index, frame.payload)
                    elif isinstance(message, CallbackResult):
                        self.calls.answered(message, frame.payload)
                    elif isinstance(message, CallbacksDropped):
                        unused = CallbacksUnused(message.client, message.numbers)
                        FORWARDERS.when_gone(unused.client, unused.numbers, functools.partial(self.send, unused))
                    else:
                        raise FrameError(f"{message} is not for an executor")
                    del message, frame
        except ConnectionClosed as ended:
            logger.debug("link of session %d: %s", self._session, ended)
        except FrameError:
            logger.exception("link of session %d is closed", self._session)
        finally:
            self.close()
            self._sock.close()
