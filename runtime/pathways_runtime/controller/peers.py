"""Connections to the controller, by who is behind each, and what is sent to one of them, or to several alike."""

from collections.abc import Iterator, Sequence
from typing import cast

from pathways_runtime.controller.relayed import PeerChannel, RelayConnection, RelayedChannel, encode_header
from pathways_runtime.controller.streams import OperationStreams, Place
from pathways_runtime.core import bitmaps
from pathways_runtime.core.controller.events import PeerId
from pathways_runtime.core.ids import HostIndex
from pathways_runtime.wire.messages import AnyMessage


class Peer:
    """One connection. ``role`` is empty until Hello.

    Attributes:
        relay: set when it is a supervisor that is a relay; ``children`` are then those who have connected to it.
    """

    __slots__ = ("channel", "children", "label", "peer", "pid", "relay", "role")

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.role = ""
        self.pid = 0
        self.label = f"connection {peer}"
        self.channel: PeerChannel = cast(PeerChannel, None)
        self.relay: RelayConnection | None = None
        self.children: dict[int, Peer] = {}


class Peers:
    """Everybody who is connected.

    Attributes:
        by_id: those who are there. Changed by ``add`` and ``remove`` only.
        streams: the operations of this turn. What is sent to an executor goes behind them.
    """

    def __init__(self, num_hosts: int) -> None:
        self.by_id: dict[PeerId, Peer] = {}
        self.streams = OperationStreams(self._send_batch, self._send_batch_through, self._place_of)
        self._last_peer = 0
        #: The connection of the executor behind each virtual host.
        self._executors: list[Peer | None] = [None] * num_hosts
        #: Connections that executors are reached through, each once; None: to be found anew.
        self._ways: list[PeerChannel | RelayConnection] | None = None

    def add(self) -> Peer:
        """A new connection, whose ``channel`` the caller sets."""
        self._last_peer += 1
        peer = self.by_id[PeerId(self._last_peer)] = Peer(PeerId(self._last_peer))
        return peer

    def remove(self, peer: Peer) -> bool:
        """Forget a connection; whether it was there."""
        was_there = self.by_id.pop(peer.peer, None) is not None
        if peer.role == "executor" and peer in self._executors:
            self._executors[self._executors.index(peer)] = None
            self._ways = None
        return was_there

    def bind(self, host: HostIndex, executor: Peer) -> None:
        """An executor stands behind a virtual host from now on."""
        self._executors[host] = executor
        self._ways = None

    def proxies(self) -> Iterator[Peer]:
        """Those who have said that they are proxies."""
        return (peer for peer in self.by_id.values() if peer.role == "proxy")

    def executors(self) -> Iterator[tuple[HostIndex, Peer]]:
        """Those that stand behind a virtual host, by host."""
        return ((HostIndex(host), peer) for host, peer in enumerate(self._executors) if peer is not None)

    def send(self, peer: PeerId, message: AnyMessage) -> None:
        """Send to a peer if it is there. To executors: behind the operations that went before."""
        receiver = self.by_id.get(peer)
        if receiver is None:
            return
        if self.streams and receiver.role == "executor":
            self.streams.flush()
        receiver.channel.send(message)

    def send_to_all(self, peers: Sequence[PeerId], message: AnyMessage) -> None:
        """Send the same to several executors: encoded once, and once per relay."""
        if self.streams:
            self.streams.flush()
        header = encode_header(message)
        masks: dict[PeerId, tuple[RelayConnection, int]] = {}
        for peer in peers:
            receiver = self.by_id.get(peer)
            if receiver is None:
                continue
            channel = receiver.channel
            if isinstance(channel, RelayedChannel):
                connection = channel.connection
                mask = masks[connection.relay][1] if connection.relay in masks else 0
                masks[connection.relay] = (connection, mask | 1 << channel.child)
            else:
                channel.send_header(header)
        for connection, mask in masks.values():
            connection.send_to(bitmaps.to_bytes(mask), header)

    def most_unsent_bytes(self) -> int:
        """What the slowest connection that leads to executors has not taken."""
        if self._ways is None:
            ways: dict[int, PeerChannel | RelayConnection] = {}
            for _, executor in self.executors():
                channel = executor.channel
                way = channel.connection if isinstance(channel, RelayedChannel) else channel
                ways[id(way)] = way
            self._ways = list(ways.values())
        return max((way.unsent_bytes() for way in self._ways), default=0)

    def hold_proxies(self, is_held: bool) -> None:
        """Read nothing from proxies, or read again."""
        for proxy in self.proxies():
            if is_held:
                proxy.channel.pause_reading()
            else:
                proxy.channel.resume_reading()

    def _place_of(self, host: HostIndex) -> Place | None:
        executor = self._executors[host]
        if executor is None or not isinstance(executor.channel, RelayedChannel):
            return None
        return executor.channel.connection.relay, executor.channel.child

    def _send_batch_through(self, relay: PeerId, bitmap: bytes, batch: bytes) -> None:
        peer = self.by_id.get(relay)
        if peer is not None and peer.relay is not None:
            peer.relay.send_to(bitmap, batch)

    def _send_batch(self, host: HostIndex, batch: bytes) -> None:
        executor = self._executors[host]
        if executor is not None:
            executor.channel.send_header(batch)
