"""Executors that are reached through relays, seen like peers with a connection of their own."""

from typing import Protocol

import msgspec

from pathways_runtime.core import bitmaps
from pathways_runtime.core.controller.events import PeerId
from pathways_runtime.transport.frames import AsyncChannel, Buffer
from pathways_runtime.wire.messages import AnyMessage, CloseChild, ToChildren

#: The header of a message's frame.
encode_header = msgspec.msgpack.Encoder().encode


class PeerChannel(Protocol):
    """What the controller does with a peer's connection; see ``transport.frames.AsyncChannel``."""

    def send(self, message: AnyMessage) -> None: ...
    def send_header(self, header: bytes) -> None: ...
    def unsent_bytes(self) -> int: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...


class RelayConnection:
    """The connection to a supervisor that is a relay. ``backlog_bytes``: what its slowest child has not taken, as it
    said last."""

    def __init__(self, relay: PeerId, channel: AsyncChannel[AnyMessage]) -> None:
        self.relay = relay
        self.channel = channel
        self.backlog_bytes = 0

    def send_to(self, bitmap: bytes, header: Buffer) -> None:
        """Send a frame, whose header is encoded already, to some children."""
        self.channel.send(ToChildren(bitmap), header)

    def unsent_bytes(self) -> int:
        """What the relay, or its slowest child, has not taken."""
        return self.channel.unsent_bytes() + self.backlog_bytes


class RelayedChannel:
    """A child's connection, which ends at its relay."""

    def __init__(self, connection: RelayConnection, child: int) -> None:
        self.connection = connection
        self.child = child
        self._bitmap = bitmaps.bitmap_of((child,))

    def send(self, message: AnyMessage) -> None:
        """Queue one frame."""
        self.connection.send_to(self._bitmap, encode_header(message))

    def send_header(self, header: bytes) -> None:
        """Queue one frame whose header is encoded already."""
        self.connection.send_to(self._bitmap, header)

    def unsent_bytes(self) -> int:
        """Of all children of the relay together, as they share its connection."""
        return self.connection.unsent_bytes()

    def pause_reading(self) -> None:
        """Only proxies are held back, and none is behind a relay."""
        raise NotImplementedError("a child of a relay cannot be held back by itself")

    def resume_reading(self) -> None:
        """See ``pause_reading``."""
        raise NotImplementedError("a child of a relay cannot be held back by itself")

    def close(self) -> None:
        """Close once what was sent has been passed on."""
        self.connection.channel.send(CloseChild(self.child))
