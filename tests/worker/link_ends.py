"""A session link, and the proxy's end of it in the test's hands."""

import socket
import threading
from typing import Any

from pathways_runtime.core.ids import HostIndex, SessionId
from pathways_runtime.transport.frames import Channel, FrameCodec
from pathways_runtime.wire.links import AnyLinkMessage, LinkHello
from pathways_runtime.worker.links import SessionLink

HELLO = LinkHello(SessionId(1), HostIndex(2), 3)
DEADLINE_S = 20.0


class Ends:
    """A link and the proxy's end of it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        theirs.settimeout(DEADLINE_S)
        self.buffers: list[tuple[int, int, bytes]] = []
        self.arrived = threading.Semaphore(0)
        self.link = SessionLink(SessionId(1), ours, HELLO, self._on_buffer)
        self.proxy: Channel[Any] = Channel(theirs, FrameCodec(AnyLinkMessage))
        self._frames: list[Any] = []
        assert self.receive().message == HELLO

    def _on_buffer(self, op_id: int, index: int, contents: Any) -> None:
        self.buffers.append((op_id, index, bytes(contents)))
        self.arrived.release()

    def receive(self) -> Any:
        while not self._frames:
            self._frames += self.proxy.receive()
        return self._frames.pop(0)

    def close(self) -> None:
        self.link.close()
        self.proxy.close()
