"""Worlds: the PJRT clients of this executor, and where arrays lie in them."""

import collections
import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pathways_runtime.core.ids import DeviceId, HostIndex, WorldId
from pathways_runtime.core.topology import CPU, Topology
from pathways_runtime.transport import addresses
from pathways_runtime.transport.network import Network
from pathways_runtime.transport.tunnel import Entrance
from pathways_runtime.worker import gloo_sockets, pjrt
from pathways_runtime.worker.collectives import LOOPBACK
from pathways_runtime.worker.endings import WorldEnd
from pathways_runtime.worker.gates import Gate

logger = logging.getLogger(__name__)

#: No world that the controller forms.
_BESIDE = WorldId(0)


class Placement:
    """Local devices of one world in shard order, in one memory: where an array's shards lie on this host.

    Interned by ``World.placement``, so that equal placements are the same object.

    Attributes:
        devices: virtual ids.
        memory_kind: never None.
        is_default_memory: whether that is the devices' default.
        physical: the client's devices.
        sharding: of arrays here, see ``pjrt``.
    """

    __slots__ = (
        "device_list",
        "devices",
        "is_default_memory",
        "memory_kind",
        "physical",
        "sharding",
        "single_lists",
        "singles",
        "world",
    )

    def __init__(self, world: "World", devices: tuple[DeviceId, ...], memory_kind: str) -> None:
        self.world = world
        self.devices = devices
        self.memory_kind = memory_kind
        self.physical = [world.device(device) for device in devices]
        self.is_default_memory = memory_kind == pjrt.default_memory_kind(self.physical[0])
        self.sharding = pjrt.replicated(self.physical, memory_kind)
        self.device_list = pjrt.device_list(self.physical)
        self.singles = [pjrt.single(device, memory_kind) for device in self.physical]
        self.single_lists = [pjrt.device_list([device]) for device in self.physical]

    def __repr__(self) -> str:
        return f"<placement on devices {self.devices} in {self.memory_kind} of world {self.world.id}>"


class World:
    """One PJRT client and which virtual devices its devices are.

    Args:
        hosts: the members in rank order.
        rank: of this host.
        gloo: where its collectives listen, if they are gloo's.
        by_rank: the client's devices, of each member in local order; by default those of the process with its rank.
        beside: the CPUs beside this host's accelerators.

    Attributes:
        end: whether it is over: programs of several hosts are launched in it no more then.
    """

    def __init__(
        self,
        world: WorldId,
        topology: Topology,
        hosts: tuple[HostIndex, ...],
        rank: int,
        client: pjrt.Client,
        runtime: Any,
        gloo: gloo_sockets.Listener | None = None,
        by_rank: Mapping[int, list[pjrt.Device]] | None = None,
        beside: "World | None" = None,
    ) -> None:
        self.id = world
        self.hosts = hosts
        self.rank = rank
        self.client = client
        self.beside = beside
        self._topology = topology
        self._runtime = runtime
        self.end = WorldEnd()
        self._gloo = gloo
        self._by_rank = pjrt.devices_by_process(client) if by_rank is None else by_rank
        self._rank_of = {host: place for place, host in enumerate(hosts)}
        self._gates: dict[DeviceId, Gate] = {}
        self._placements: dict[tuple[tuple[DeviceId, ...], str | None], Placement] = {}

    def device(self, device: DeviceId) -> pjrt.Device:
        """The client's device for a virtual one.

        Raises:
            KeyError: it is not in this world.
        """
        rank = self._rank_of[self._topology.host_of(device)]
        return self._by_rank[rank][self._topology.local_index_of(device)]

    def number(self, device: DeviceId) -> int:
        """The same in every world of this form, whoever made its client: by rank, then by place on the host."""
        rank = self._rank_of[self._topology.host_of(device)]
        return rank * self._topology.devices_per_host + self._topology.local_index_of(device)

    def hardware(self, devices: Sequence[DeviceId]) -> str:
        """What code for ``devices`` depends on besides its compiler, in words."""
        return pjrt.describe_hardware(self.devices(devices))

    def devices(self, devices: Sequence[DeviceId]) -> list[pjrt.Device]:
        """Several of them."""
        return [self.device(device) for device in devices]

    def placement(self, devices: tuple[DeviceId, ...], memory_kind: str | None) -> Placement:
        """The placement on local devices; None is their default memory."""
        key = (devices, memory_kind)
        found = self._placements.get(key)
        if found is None and self.beside is not None and self._topology.is_beside(devices[0]):
            found = self._placements[key] = self.beside.placement(devices, memory_kind)
        if found is None:
            kind = memory_kind or pjrt.default_memory_kind(self.device(devices[0]))
            found = self._placements.get((devices, kind))
            if found is None:
                found = self._placements[(devices, kind)] = Placement(self, devices, kind)
            self._placements[key] = found
        return found

    def cut_collectives(self) -> None:
        """A member is lost: end what is left of its collectives, so that nobody waits in one for ever.

        Has an effect on CPU only, and on what has begun; so call it again while programs of the world are running.
        """
        if self._gloo is not None:
            self._gloo.cut()

    def disconnect(self) -> None:
        """Have no more to do with the world's coordination service, whose end would else end this process."""
        if self._runtime is not None:
            pjrt.leave(self._runtime)

    def needs_gate(self, devices: Sequence[DeviceId]) -> bool:
        """Whether some host would run a program on ``devices`` within its launch, were it not for a gate."""
        num_here = collections.Counter(map(self._topology.host_of, set(devices)))
        return bool(self.client.platform == "cpu") and 1 in num_here.values()

    def gate(self, device: DeviceId) -> Gate:
        """The gate of a local device, made when first asked for."""
        gate = self._gates.get(device)
        if gate is None:
            placement = self.placement((device,), None)
            gate = self._gates[device] = Gate(self.client, placement.physical[0], placement.sharding)
        return gate


@contextlib.contextmanager
def way_to_coordination(
    address: str, is_same_host: bool, socket_address: str, network: Network | None
) -> Iterator[str]:
    """The Unix socket at which a member connects to its world's coordination service while the world forms.

    The service's own on its host, else one of ours at ``socket_address``, from which a tunnel leads there. That socket
    is there only within the block, as jaxlib does not connect twice: it aborts the process when the connection ends.
    After an orderly end of the block the tunnel stays for as long as the process.

    Args:
        address: of the service, as the controller says.
        network: the job's credentials.

    Raises:
        AddressError: it is on another host, and there are no credentials. OSError: see ``addresses.listen``.
    """
    way = addresses.way_to(address, is_same_host)
    if not way.startswith("tcp:"):
        yield way
        return
    if network is None:
        raise addresses.AddressError(f"{way}: TCP needs the job's credentials, and this process was given none")
    entrance = Entrance(socket_address, way, network.connecting())
    try:
        yield socket_address
    except BaseException:
        entrance.close()
        raise
    entrance.stop_listening()


def form(
    world: WorldId,
    topology: Topology,
    platform: str,
    hosts: tuple[HostIndex, ...],
    rank: int,
    coordinator_address: str,
    collectives_host: str = LOOPBACK,
) -> World:
    """Make this host's client of a world; blocks until all members are there.

    Args:
        coordinator_address: the Unix socket of its coordination service, or of a tunnel; unused in a world of one.
        collectives_host: see ``pjrt.make_cpu_client``.

    Raises:
        PjrtError: they did not come in time.
    """
    membership = None if len(hosts) == 1 else pjrt.Membership(coordinator_address, rank, len(hosts))
    gloo: gloo_sockets.Listener | None = None
    if platform == "cpu":
        gloo = gloo_sockets.Listener()
        client, runtime = pjrt.make_cpu_client(topology.devices_per_host, membership, collectives_host, gloo.note())
    else:
        client, runtime = pjrt.make_plugin_client(platform, membership, topology.num_slices)
    num_devices = len(client.local_devices())
    if num_devices != topology.devices_per_host:
        raise ValueError(f"this host has {num_devices} {platform} devices, and needs {topology.devices_per_host}")
    beside = None if topology.platform == CPU else _beside(topology, hosts[rank])
    return World(world, topology, hosts, rank, client, runtime, gloo, beside=beside)


@functools.cache
def _beside(topology: Topology, host: HostIndex) -> World:
    """The CPUs beside a host's accelerators: a world of this host alone, the same for all worlds that it is in."""
    client, runtime = pjrt.make_cpu_client(topology.devices_per_host, None)
    return World(_BESIDE, topology, (host,), 0, client, runtime)
