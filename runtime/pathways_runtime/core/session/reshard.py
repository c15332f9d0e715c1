"""Reshard plans: which ranges to copy from which shard so that an array lies as another sharding says. Pure."""

import functools
import itertools
from collections.abc import Iterable

import msgspec

from pathways_runtime.core.ids import DeviceId, HostIndex
from pathways_runtime.core.sharding import Box, Shape, Sharding, TileKind, box_shape, intersect, num_elements, relative
from pathways_runtime.core.status import Code, error
from pathways_runtime.core.topology import Topology


class PlannedMove(msgspec.Struct, frozen=True, gc=False):
    """One range to copy; boxes as in ``operations.Move``."""

    source_device: DeviceId
    target_device: DeviceId
    source_box: Box | None
    target_box: Box | None


class Holders:
    """The devices that hold one part, sorted by what is near to what."""

    def __init__(self, topology: Topology, devices: list[DeviceId]) -> None:
        self.devices = frozenset(devices)
        self.on_host: dict[HostIndex, list[DeviceId]] = {}
        for device in devices:
            self.on_host.setdefault(topology.host_of(device), []).append(device)
        self.hosts = sorted(self.on_host)
        self.hosts_in_slice: dict[int, list[HostIndex]] = {}
        for host in self.hosts:
            self.hosts_in_slice.setdefault(topology.slice_of_host(host), []).append(host)


class Replicas:
    """Which devices hold which distinct part of an array, found by range without looking at every shard."""

    def __init__(self, sharding: Sharding, shape: Shape, topology: Topology) -> None:
        self._shape = shape
        self._tile_shape = sharding.shard_shape(shape)
        devices: dict[tuple[int, ...], list[DeviceId]] = {}
        if sharding.tiles.kind is TileKind.TILED:
            for device, tile in zip(sharding.devices, sharding.tiles.tile_of_place().tolist(), strict=True):
                devices.setdefault(tuple(tile), []).append(device)
        else:
            devices[(0,) * len(shape)] = list(sharding.devices)
        self._holders = {tile: Holders(topology, holders) for tile, holders in devices.items()}

    def covering(self, box: Box) -> Iterable[tuple[Box, Holders]]:
        """The parts that have an element of ``box``, row-major, each with the devices that hold it."""
        ranges = [
            range(start // size, -(-stop // size)) if start < stop else range(0)
            for (start, stop), size in zip(box, self._tile_shape, strict=True)
        ]
        for tile in itertools.product(*ranges):
            part = tuple(
                (index * size, min((index + 1) * size, dim))
                for index, size, dim in zip(tile, self._tile_shape, self._shape, strict=True)
            )
            yield part, self._holders[tile]


class _Senders:
    """Chooses among replicas: the nearest; among equally near hosts the one that has sent least so far."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._sent: dict[HostIndex, int] = {}
        self._turns: dict[HostIndex, int] = {}

    def choose(self, holders: Holders, target: DeviceId, elements: int) -> DeviceId:
        if target in holders.devices:
            return target
        host = self._topology.host_of(target)
        if host not in holders.on_host:
            near = holders.hosts_in_slice.get(self._topology.slice_of_host(host), holders.hosts)
            sent = self._sent
            host = min(near, key=lambda h: sent.get(h, 0))
            sent[host] = sent.get(host, 0) + elements
        devices = holders.on_host[host]
        turn = self._turns.get(host, 0)
        self._turns[host] = turn + 1
        return devices[turn % len(devices)]


@functools.lru_cache(maxsize=256)
def plan_reshard(source: Sharding, target: Sharding, shape: Shape, topology: Topology) -> tuple[PlannedMove, ...]:
    """The moves that make an array of ``shape`` laid out as ``source`` lie as ``target``; made once and kept.

    Every element of every target shard is covered exactly once; padding is not. A target shard that is whole on its own
    device already is a move of that shard onto itself (``source_device == target_device``, no boxes).

    Args:
        source, target: shardings of the same ``shape``; their memory kinds do not matter here.

    Returns:
        Moves in the order of the target's devices, row-major within each.

    Raises:
        StatusError: UNIMPLEMENTED where terms of a sum would have to be added up, or a value taken apart into some.
    """
    if source.tiles.holds_partial_sums() or target.tiles.holds_partial_sums():
        if source.tiles != target.tiles or len(source.devices) != len(target.devices):
            raise error(
                Code.UNIMPLEMENTED,
                "an array whose devices hold terms of a sum (unreduced) can change devices but not its sharding: "
                "add them up in a program, with jax.sharding.reshard",
            )
        return tuple(
            PlannedMove(from_device, to_device, None, None)
            for from_device, to_device in zip(source.devices, target.devices, strict=True)
        )
    replicas = Replicas(source, shape, topology)
    senders = _Senders(topology)
    source_shape, target_shape = source.shard_shape(shape), target.shard_shape(shape)
    moves = []
    for device, target_box in zip(target.devices, target.boxes(shape), strict=True):
        for part, holders in replicas.covering(target_box):
            common = intersect(part, target_box)
            if common is None:
                continue
            chosen = senders.choose(holders, device, num_elements(box_shape(common)))
            if source_shape == target_shape and part == target_box:
                moves.append(PlannedMove(chosen, device, None, None))
            else:
                moves.append(PlannedMove(chosen, device, relative(common, part), relative(common, target_box)))
    return tuple(moves)
