"""Worlds: which exist, which are being formed, which cannot be."""

import enum

from pathways_runtime.core.controller.instructions import (
    Announce,
    FormMember,
    Instruction,
    StartCoordination,
    StopCoordination,
)
from pathways_runtime.core.controller.membership import Membership
from pathways_runtime.core.ids import HostIndex, WorldId
from pathways_runtime.core.status import Code, Status, error
from pathways_runtime.core.topology import Topology


class WorldState(enum.Enum):
    """Legal changes: COORDINATING -> FORMING -> FORMED; from the first two -> FAILED. FORMED and FAILED are final."""

    #: Its coordination service is starting, or its hosts are not bound.
    COORDINATING = "coordinating"
    #: Its members make their clients.
    FORMING = "forming"
    FORMED = "formed"
    FAILED = "failed"


class World:
    """The hosts of some slices, in rank order.

    A member that is lost after the world was formed leaves it FORMED: programs on its other hosts still run.
    """

    def __init__(self, world: WorldId, slices: tuple[int, ...], hosts: tuple[HostIndex, ...]) -> None:
        self.world = world
        self.slices = slices
        self.hosts = hosts
        self.state = WorldState.COORDINATING
        #: Where its coordination service listens; None until it does, empty when there is none.
        self.address: str | None = None
        self.unformed: set[HostIndex] = set(hosts)
        self.failure: Status | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it is formed or will never be."""
        return self.state in (WorldState.FORMED, WorldState.FAILED)


class Worlds:
    """Methods append to ``out``; those that may settle worlds return the worlds they settled."""

    def __init__(self, topology: Topology, membership: Membership) -> None:
        self._topology = topology
        self._membership = membership
        self._worlds: dict[WorldId, World] = {}
        #: The newest world per set of slices.
        self._by_slices: dict[tuple[int, ...], World] = {}
        self._has_announced_ready = False

    def all(self) -> list[World]:
        """Every world there ever was, by id."""
        return list(self._worlds.values())

    @property
    def is_ready(self) -> bool:
        """Whether the worlds of all single slices were formed: sessions may begin."""
        return self._has_announced_ready

    def start(self, out: list[Instruction]) -> None:
        """Begin with the worlds of the single slices; their services start while workers do."""
        for slice_index in range(self._topology.num_slices):
            self._begin((slice_index,), out)

    def for_slices(self, slices: tuple[int, ...], out: list[Instruction]) -> World:
        """The world of these slices, begun now if there is none yet.

        Raises:
            StatusError: one of its hosts is lost, so that it cannot be formed.
        """
        world = self._by_slices.get(slices)
        if world is not None and world.state is not WorldState.FAILED:
            return world
        for slice_index in slices:
            for host in self._topology.hosts_of_slice(slice_index):
                if failure := self._membership.failure_of(host):
                    raise error(failure.code, f"slices {_names(slices)} cannot form one world: {failure.message}")
        return self._begin(slices, out)

    def coordination_started(self, world_id: WorldId, address: str, out: list[Instruction]) -> None:
        """A world's service listens."""
        world = self._worlds[world_id]
        world.address = address
        self._form(world, out)

    def coordination_failed(self, world_id: WorldId, reason: str, out: list[Instruction]) -> list[World]:
        """A world's service could not start, or ended by itself."""
        world = self._worlds[world_id]
        if world.is_settled:
            out.append(Announce("coordination_lost", {"world": world_id, "reason": reason}))
            return []
        message = f"the coordination service of slices {_names(world.slices)} ended: {reason}"
        return self._fail(world, Status(Code.INTERNAL, message), out)

    def bind(self, out: list[Instruction]) -> None:
        """Hosts are bound: worlds that waited for that can form."""
        for world in self._worlds.values():
            self._form(world, out)

    def member_formed(
        self, host: HostIndex, world_id: WorldId, failure: Status | None, out: list[Instruction]
    ) -> list[World]:
        """A member has made its client, or failed to."""
        world = self._worlds.get(world_id)
        if world is None or world.state is not WorldState.FORMING:
            return []
        if failure is not None:
            return self._fail(world, Status(failure.code, f"host {host}: {failure.message}"), out)
        world.unformed.discard(host)
        if world.unformed:
            return []
        world.state = WorldState.FORMED
        out.append(Announce("world", {"world": world_id, "slices": list(world.slices), "state": world.state.value}))
        self._announce_ready(out)
        return [world]

    def lose_host(self, host: HostIndex, failure: Status, out: list[Instruction]) -> list[World]:
        """A host is lost: its worlds cannot form any more; a service that nobody is left to use is stopped."""
        settled: list[World] = []
        for world in self._worlds.values():
            if host not in world.hosts:
                continue
            if not world.is_settled:
                settled += self._fail(world, failure, out)
            if world.address and all(self._membership.failure_of(member) for member in world.hosts):
                out.append(StopCoordination(world.world))
                world.address = ""
        return settled

    def check_invariants(self) -> None:
        """What must hold between events."""
        for world in self._worlds.values():
            assert (world.state is WorldState.FAILED) == (world.failure is not None)
            assert world.state is not WorldState.FORMED or not world.unformed
            assert world.state is not WorldState.FORMING or world.unformed

    def _begin(self, slices: tuple[int, ...], out: list[Instruction]) -> World:
        hosts = tuple(host for slice_index in slices for host in self._topology.hosts_of_slice(slice_index))
        world = World(WorldId(len(self._worlds) + 1), slices, hosts)
        self._worlds[world.world] = self._by_slices[slices] = world
        if len(hosts) > 1:
            out.append(StartCoordination(world.world, len(hosts)))
        else:
            # One process needs nobody to coordinate with.
            world.address = ""
            self._form(world, out)
        return world

    def _form(self, world: World, out: list[Instruction]) -> None:
        if world.state is not WorldState.COORDINATING or world.address is None or not self._membership.is_bound:
            return
        world.state = WorldState.FORMING
        for rank, host in enumerate(world.hosts):
            peer = self._membership.executor_peer(host)
            # A member whose loss is being looked into is not asked; the loss will fail the world.
            if peer is not None:
                out.append(FormMember(peer, world.world, world.address, rank, world.hosts))

    def _fail(self, world: World, failure: Status, out: list[Instruction]) -> list[World]:
        # The service stays up: members that did connect would be aborted with it.
        world.state, world.failure = WorldState.FAILED, failure
        fields = {"world": world.world, "slices": list(world.slices), "state": world.state.value}
        out.append(Announce("world", {**fields, "reason": str(failure)}))
        if not self._has_announced_ready and len(world.slices) == 1:
            out.append(Announce("failed", {"reason": f"slice {world.slices[0]} did not form: {failure}"}))
        return [world]

    def _announce_ready(self, out: list[Instruction]) -> None:
        slices = range(self._topology.num_slices)
        if self._has_announced_ready or any(self._by_slices[(s,)].state is not WorldState.FORMED for s in slices):
            return
        self._has_announced_ready = True
        out.append(Announce("ready", {}))


def _names(slices: tuple[int, ...]) -> str:
    return ", ".join(map(str, slices))
