"""Worlds: which exist, which are being formed, which cannot be."""

import enum

from pathways_runtime.core.controller.events import PeerId
from pathways_runtime.core.controller.instructions import (
    Announce,
    FormMember,
    Instruction,
    LeaveWorld,
    StartCoordination,
    StopCoordination,
)
from pathways_runtime.core.controller.membership import Membership
from pathways_runtime.core.ids import HostIndex, WorldId
from pathways_runtime.core.status import Code, Status, error
from pathways_runtime.core.topology import Topology

#: How often in a row a slice's world is begun anew when it failed although none of its hosts was lost.
MAX_FAILURES_IN_A_ROW = 3


class WorldState(enum.Enum):
    """Legal changes: COORDINATING -> FORMING -> FORMED -> ENDED; from the first two -> FAILED.

    FAILED and ENDED are final.
    """

    #: Its coordination service is starting, or its hosts are not bound.
    COORDINATING = "coordinating"
    #: Its members make their clients.
    FORMING = "forming"
    FORMED = "formed"
    FAILED = "failed"
    #: It was formed, and a member was lost since. Programs on one of the others still run in it.
    ENDED = "ended"


class World:
    """The hosts of some slices, in rank order.

    Attributes:
        address: where its coordination service listens; None until it does, empty when there is none (any more).
        members: the executors that use the service, as far as they have not left.
        unformed: hosts that have not made their client.
        failure: why it is FAILED or ENDED.
    """

    def __init__(self, world: WorldId, slices: tuple[int, ...], hosts: tuple[HostIndex, ...]) -> None:
        self.world = world
        self.slices = slices
        self.hosts = hosts
        self.state = WorldState.COORDINATING
        self.address: str | None = None
        self.members: dict[HostIndex, PeerId] = {}
        self.unformed: set[HostIndex] = set(hosts)
        self.failure: Status | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it is formed or will never be."""
        return self.state not in (WorldState.COORDINATING, WorldState.FORMING)

    @property
    def is_over(self) -> bool:
        """Whether it is of no use for what comes."""
        return self.failure is not None


class Worlds:
    """Methods append to ``out``; those that may settle worlds return the worlds they settled."""

    def __init__(self, topology: Topology, membership: Membership, num_absent_slices: int = 0) -> None:
        self._topology = topology
        #: The slices that there are from the start.
        self._present = range(topology.num_slices - num_absent_slices)
        self._membership = membership
        self._worlds: dict[WorldId, World] = {}
        #: The newest world per set of slices, over or not.
        self._by_slices: dict[tuple[int, ...], World] = {}
        self._failures_in_a_row: dict[int, int] = {}
        self._has_announced_ready = False

    def all(self) -> list[World]:
        """Every world there ever was, by id."""
        return list(self._worlds.values())

    @property
    def is_ready(self) -> bool:
        """Whether the worlds of all slices that are not absent were formed: sessions may begin."""
        return self._has_announced_ready

    def start(self, out: list[Instruction]) -> None:
        """Begin with the worlds of the single slices; their services start while workers do."""
        for slice_index in self._present:
            self._begin((slice_index,), out)

    def for_program(self, slices: tuple[int, ...], hosts: tuple[HostIndex, ...], out: list[Instruction]) -> World:
        """The world for a program on ``hosts``, none of them lost, in these slices; begun now if there is none yet.

        One that was formed and has ended will do for a program on one of its hosts.

        Raises:
            StatusError: another host of the slices is lost, so that the world cannot be formed.
        """
        world = self._by_slices.get(slices)
        if world is not None and (not world.is_over or (world.state is WorldState.ENDED and len(hosts) == 1)):
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
        if world.is_over:
            self._stop_if_unused(world, out)
        else:
            self._form(world, out)

    def coordination_failed(self, world_id: WorldId, reason: str, out: list[Instruction]) -> list[World]:
        """A world's service could not start, or ended by itself."""
        world = self._worlds[world_id]
        world.address = ""
        if world.is_settled:
            # Its members end with it, if they still need it; that tells.
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
        if world is None or host not in world.members:
            return []
        if failure is not None:
            del world.members[host]
        if world.state is not WorldState.FORMING:
            self._stop_if_unused(world, out)
            return []
        if failure is not None:
            return self._fail(world, Status(failure.code, f"host {host}: {failure.message}"), out)
        world.unformed.discard(host)
        if world.unformed:
            return []
        world.state = WorldState.FORMED
        for slice_index in world.slices:
            self._failures_in_a_row.pop(slice_index, None)
        out.append(Announce("world", {"world": world_id, "slices": list(world.slices), "state": world.state.value}))
        self._announce_ready(out)
        return [world]

    def member_left(self, host: HostIndex, world_id: WorldId, out: list[Instruction]) -> None:
        """A member of a world that is over does not need its coordination service any more."""
        world = self._worlds.get(world_id)
        if world is not None and world.is_over and world.members.pop(host, None) is not None:
            self._stop_if_unused(world, out)

    def lose_host(self, host: HostIndex, failure: Status, out: list[Instruction]) -> list[World]:
        """A host is lost, and the worlds that it was in are over."""
        settled: list[World] = []
        slice_index = self._topology.slice_of_host(host)
        for world in self._worlds.values():
            if slice_index not in world.slices:
                continue
            world.members.pop(host, None)
            if not world.is_settled:
                self._end(world, WorldState.FAILED, failure, out)
                settled.append(world)
            elif world.state is WorldState.FORMED:
                self._end(world, WorldState.ENDED, failure, out)
            else:
                self._stop_if_unused(world, out)
        return settled

    def join(self, host: HostIndex, out: list[Instruction]) -> None:
        """A worker is ready to take a lost host's place: begin the slice's world once all its hosts have somebody."""
        self._failures_in_a_row.pop(self._topology.slice_of_host(host), None)
        self._begin_slice(self._topology.slice_of_host(host), out)

    def check_invariants(self) -> None:
        """What must hold between events."""
        for world in self._worlds.values():
            assert (world.state in (WorldState.FAILED, WorldState.ENDED)) == (world.failure is not None)
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
            peer = self._membership.member_peer(host)
            # A member whose loss is being looked into is not asked; the loss will fail the world.
            if peer is not None:
                world.members[host] = peer
                out.append(FormMember(peer, world.world, world.address, rank, world.hosts))

    def _begin_slice(self, slice_index: int, out: list[Instruction]) -> None:
        hosts = self._topology.hosts_of_slice(slice_index)
        world = self._by_slices.get((slice_index,))
        is_complete = all(not self._membership.failure_of(host) or self._membership.is_joining(host) for host in hosts)
        if (world is None or world.is_over) and is_complete:
            self._begin((slice_index,), out)

    def _fail(self, world: World, failure: Status, out: list[Instruction]) -> list[World]:
        """It did not form although none of its hosts was lost; a slice's is begun anew, some times."""
        self._end(world, WorldState.FAILED, failure, out)
        if len(world.slices) > 1 or not self._has_announced_ready:
            return [world]
        (slice_index,) = world.slices
        failures = self._failures_in_a_row.get(slice_index, 0) + 1
        self._failures_in_a_row[slice_index] = failures
        if failures < MAX_FAILURES_IN_A_ROW:
            self._begin_slice(slice_index, out)
        return [world]

    def _end(self, world: World, state: WorldState, failure: Status, out: list[Instruction]) -> None:
        """A world is over. Its service stays as long as it has members, since they would be aborted with it."""
        world.state, world.failure = state, failure
        fields = {"world": world.world, "slices": list(world.slices), "state": state.value}
        out.append(Announce("world", {**fields, "reason": str(failure)}))
        if not self._has_announced_ready and len(world.slices) == 1:
            out.append(Announce("failed", {"reason": f"slice {world.slices[0]} did not form: {failure}"}))
        if world.members:
            out.append(LeaveWorld(tuple(world.members.values()), world.world, failure))
        self._stop_if_unused(world, out)

    def _stop_if_unused(self, world: World, out: list[Instruction]) -> None:
        if world.is_over and world.address and not world.members:
            out.append(StopCoordination(world.world))
            world.address = ""

    def _announce_ready(self, out: list[Instruction]) -> None:
        formed = (self._by_slices[(slice_index,)].state is WorldState.FORMED for slice_index in self._present)
        if self._has_announced_ready or not all(formed):
            return
        self._has_announced_ready = True
        out.append(Announce("ready", {}))


def _names(slices: tuple[int, ...]) -> str:
    return ", ".join(map(str, slices))
