"""What each host has to do for an operation, found once for all of them."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pathways_runtime.core import operations as ops
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex
from pathways_runtime.core.topology import Topology


class Shard(NamedTuple):
    """One shard of a result: ``source`` is the buffer, or the array, that it comes from."""

    handle: Handle
    device: DeviceId
    source: int


class Passage(NamedTuple):
    """One move of a transfer, with the hosts at its ends; ``handle`` is the result's."""

    number: int
    move: ops.Move
    handle: Handle
    source_host: HostIndex
    target_host: HostIndex


class SharedOperation:
    """An operation as all its hosts are sent it: one value, of which each finds its own part at once."""

    def __init__(self, operation: ops.Operation, topology: Topology) -> None:
        self.operation = operation
        self._topology = topology

    def shards_on(self, host: HostIndex) -> Sequence[Shard]:
        """What a host makes for a MakeArrays or an Alias."""
        return self._shards.get(host, ())

    def passages_on(self, host: HostIndex) -> Sequence[Passage]:
        """The moves of a Transfer that begin or end on a host, in their order."""
        return self._passages.get(host, ())

    @functools.cached_property
    def _shards(self) -> Mapping[HostIndex, list[Shard]]:
        operation, host_of = self.operation, self._topology.host_of
        assert isinstance(operation, ops.MakeArrays | ops.Alias)
        sources = operation.buffers if isinstance(operation, ops.MakeArrays) else operation.sources
        found: dict[HostIndex, list[Shard]] = {}
        for result, of_result in zip(operation.results, sources, strict=True):
            for device, source in zip(result.devices, of_result, strict=True):
                found.setdefault(host_of(device), []).append(Shard(result.handle, device, source))
        return found

    @functools.cached_property
    def _passages(self) -> Mapping[HostIndex, list[Passage]]:
        operation, host_of = self.operation, self._topology.host_of
        assert isinstance(operation, ops.Transfer)
        found: dict[HostIndex, list[Passage]] = {}
        for number, move in enumerate(operation.moves):
            assert move.source_box is None and move.target_box is None, "whole shards only"
            handle = operation.results[move.result_index].handle
            passage = Passage(number, move, handle, host_of(move.source_device), host_of(move.target_device))
            for host in dict.fromkeys((passage.source_host, passage.target_host)):
                found.setdefault(host, []).append(passage)
        return found


@functools.lru_cache(maxsize=1024)
def devices_by_host(topology: Topology, devices: tuple[DeviceId, ...]) -> Mapping[HostIndex, tuple[DeviceId, ...]]:
    """A program's devices on each host, in its order."""
    found: dict[HostIndex, tuple[DeviceId, ...]] = {}
    for device in devices:
        host = topology.host_of(device)
        found[host] = (*found.get(host, ()), device)
    return found
