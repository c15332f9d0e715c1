"""The streams of operations to the executors: encoded once, shared by all hosts that get the same."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pathways_runtime.core import bitmaps
from pathways_runtime.core.controller.events import PeerId
from pathways_runtime.core.controller.host_groups import HostGroup
from pathways_runtime.core.controller.instructions import Dispatch, Substitute
from pathways_runtime.core.ids import HostIndex, Seq, SessionId
from pathways_runtime.wire.messages import Batch, Sequenced

#: Everything of an encoded Batch before the count of its operations: ``["Batch", [...]]``.
_BATCH_HEAD = msgspec.msgpack.encode(Batch(()))[:-1]
#: msgpack: an array whose 32 bit length follows.
_ARRAY32 = b"\xdd"

#: The relay that a host is reached through, and the host's number there.
Place = tuple[PeerId, int]


class _Route(NamedTuple):
    """How the hosts of a group are reached.

    Attributes:
        direct: hosts with a connection of their own.
        relays: for each relay, the bitmap of its children that are meant, as an integer and as bytes.
    """

    direct: tuple[HostIndex, ...]
    relays: tuple[tuple[PeerId, int, bytes], ...]


class _Segment:
    """Runs for one set of children of a relay: one frame."""

    __slots__ = ("bitmap", "mask", "places")

    def __init__(self, mask: int, bitmap: bytes, place: int) -> None:
        self.mask = mask
        self.bitmap = bitmap
        self.places = [place]


class OperationStreams:
    """Gathers the operations of one turn and sends each host one Batch with those of its own.

    Work per operation does not grow with its hosts: consecutive operations of one group of hosts are a *run*, joined
    once, and hosts that get the same runs get the same bytes. Hosts behind relays cost one frame per relay and run,
    or less; each host's operations are in order all the same.

    Args:
        send: called with a host and an encoded Batch.
        send_through: called with a relay, a bitmap of its children, and an encoded Batch.
        place_of: where a host is reached; None: it has a connection of its own.
    """

    def __init__(
        self,
        send: Callable[[HostIndex, bytes], None],
        send_through: Callable[[PeerId, bytes, bytes], None],
        place_of: Callable[[HostIndex], Place | None],
    ) -> None:
        self._send = send
        self._send_through = send_through
        self._place_of = place_of
        self._routes: dict[HostGroup, _Route] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._runs: list[tuple[HostGroup, list[bytes]]] = []
        self._last_group: HostGroup | None = None
        self._elements: list[bytes] = []

    def __bool__(self) -> bool:
        return bool(self._runs)

    def forget_routes(self) -> None:
        """What ``place_of`` says has changed."""
        self._routes.clear()

    def dispatch(self, instruction: Dispatch, body: msgspec.Raw) -> None:
        """Append a session's operation; ``body`` is it, encoded."""
        self._append(instruction.group, instruction.seq, instruction.submission.session, body)

    def substitute(self, instruction: Substitute) -> None:
        """Append an operation of the controller's own making."""
        body = msgspec.Raw(self._encode(instruction.operation))
        self._append(instruction.group, instruction.seq, instruction.session, body)

    def flush(self) -> None:
        """Send everything."""
        runs, self._runs, self._last_group = self._runs, [], None
        if len(runs) == 1:
            route = self._route(runs[0][0])
            batch = _encode_batch(runs)
            for host in route.direct:
                self._send(host, batch)
            for relay, _, bitmap in route.relays:
                self._send_through(relay, bitmap, batch)
            return
        runs_of_host: dict[HostIndex, list[int]] = {}
        segments_of_relay: dict[PeerId, list[_Segment]] = {}
        for place, (group, _) in enumerate(runs):
            route = self._route(group)
            for host in route.direct:
                runs_of_host.setdefault(host, []).append(place)
            for relay, mask, bitmap in route.relays:
                _add_to(segments_of_relay.setdefault(relay, []), mask, bitmap, place)
        batches: dict[tuple[int, ...], bytes] = {}

        def batch_of(places: list[int]) -> bytes:
            key = tuple(places)
            shared = batches.get(key)
            if shared is None:
                shared = batches[key] = _encode_batch([runs[place] for place in places])
            return shared

        for host, places in runs_of_host.items():
            self._send(host, batch_of(places))
        for relay, segments in segments_of_relay.items():
            for segment in segments:
                self._send_through(relay, segment.bitmap, batch_of(segment.places))

    def _append(self, group: HostGroup, seq: Seq, session: SessionId, body: msgspec.Raw) -> None:
        if group is not self._last_group:
            self._last_group = group
            self._elements = []
            self._runs.append((group, self._elements))
        self._elements.append(self._encode(Sequenced(seq, session, body)))

    def _route(self, group: HostGroup) -> _Route:
        route = self._routes.get(group)
        if route is None:
            direct: list[HostIndex] = []
            masks: dict[PeerId, int] = {}
            for host in group.hosts:
                place = self._place_of(host)
                if place is None:
                    direct.append(host)
                else:
                    relay, child = place
                    masks[relay] = masks.get(relay, 0) | 1 << child
            relays = tuple((relay, mask, bitmaps.to_bytes(mask)) for relay, mask in masks.items())
            route = self._routes[group] = _Route(tuple(direct), relays)
        return route


def _add_to(segments: list[_Segment], mask: int, bitmap: bytes, place: int) -> None:
    """Add a run to the last segment for the same children, unless one behind it is for some of them."""
    for segment in reversed(segments):
        if segment.mask == mask:
            segment.places.append(place)
            return
        if segment.mask & mask:
            break
    segments.append(_Segment(mask, bitmap, place))


def _encode_batch(runs: list[tuple[HostGroup, list[bytes]]]) -> bytes:
    count = sum(len(elements) for _, elements in runs)
    return b"".join([_BATCH_HEAD, _ARRAY32, count.to_bytes(4, "big"), *(e for _, elements in runs for e in elements)])
