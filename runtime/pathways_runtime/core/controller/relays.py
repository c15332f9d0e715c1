"""Relays: which workers' supervisors stand between the controller and other executors, so that its work stays bounded.

Executors connect either to the controller or to their group's relay. A relay is the supervisor of one of the group,
because supervisors hold no JAX: they start at once and survive their executors.
"""

from pathways_runtime.core import bitmaps
from pathways_runtime.core.controller.events import PeerId, ProtocolViolation
from pathways_runtime.core.controller.host_groups import HostSelection
from pathways_runtime.core.controller.instructions import Instruction, StartExecutor, StartRelay
from pathways_runtime.core.ids import HostIndex, WorkerId
from pathways_runtime.core.topology import Topology

#: Sets of children that are remembered per relay. Gangs name few; what comes at odd times may name any.
_MOST_REMEMBERED = 1024


class RelayPlan:
    """Which workers share a relay.

    Args:
        fanout: clusters up to so many hosts have no relays; in larger ones the controller talks to about so many
            relays at most, and a group has at least so many hosts as long as there are enough.
    """

    def __init__(self, topology: Topology, fanout: int) -> None:
        self._topology = topology
        self.has_relays = topology.num_hosts > fanout
        group_size = max(fanout, -(-topology.num_hosts // fanout))
        per_slice = topology.hosts_per_slice
        # A relay's host takes its children along when it is lost. So a group consists of whole slices or of a part of
        # one: what a lost host has a part in is lost anyway, and that is mostly its slice.
        self._groups_per_slice = -(-per_slice // group_size) if per_slice > group_size else 0
        self._slices_per_group = max(1, group_size // per_slice)

    def group_of(self, worker: WorkerId) -> int | None:
        """A worker's group; None if its executor connects to the controller itself, as those of spares do.

        Workers stand behind hosts in the order of their ids, as far as all of them come.
        """
        if not self.has_relays or not 0 <= worker < self._topology.num_hosts:
            return None
        slice_index, place = divmod(worker, self._topology.hosts_per_slice)
        if self._groups_per_slice:
            return slice_index * self._groups_per_slice + (
                place * self._groups_per_slice // self._topology.hosts_per_slice
            )
        return slice_index // self._slices_per_group


class _Group:
    """Workers that share a relay.

    Attributes:
        relay: the supervisor that is the relay, None until one is there.
        address: where it listens, None until it does.
        waiting: supervisors whose executors are to be started once it listens, in order.
    """

    def __init__(self) -> None:
        self.relay: PeerId | None = None
        self.address: str | None = None
        self.waiting: dict[PeerId, int] = {}


class _Children:
    """The executors behind one relay, by the numbers that it gave them."""

    def __init__(self) -> None:
        self.executors: dict[int, PeerId] = {}
        self.selections: dict[bytes, HostSelection] = {}


class Relays:
    """Chooses relays, and knows who is behind each."""

    def __init__(self, topology: Topology, fanout: int) -> None:
        self._plan = RelayPlan(topology, fanout)
        self._groups: dict[int, _Group] = {}
        self._group_of_supervisor: dict[PeerId, _Group] = {}
        self._children: dict[PeerId, _Children] = {}

    def start_executor(self, worker: WorkerId, supervisor: PeerId, epoch: int, out: list[Instruction]) -> None:
        """Have a worker's executor started, connected as the plan says; now, or once its relay listens."""
        number = self._plan.group_of(worker)
        if number is None:
            out.append(StartExecutor(supervisor, epoch))
            return
        group = self._groups.setdefault(number, _Group())
        self._group_of_supervisor[supervisor] = group
        if group.address is not None:
            out.append(StartExecutor(supervisor, epoch, group.address))
            return
        group.waiting[supervisor] = epoch
        if group.relay is None:
            # The first that comes, so that nobody waits for one that may never come.
            group.relay = supervisor
            out.append(StartRelay(supervisor))

    def relay_listens(self, relay: PeerId, address: str, out: list[Instruction]) -> None:
        """A relay has begun to listen.

        Raises:
            ProtocolViolation: this is no relay, or it listens already.
        """
        group = self._group_of_supervisor.get(relay)
        if group is None or group.relay != relay or group.address is not None:
            raise ProtocolViolation("it was not told to be a relay")
        group.address = address
        self._children[relay] = _Children()
        for supervisor, epoch in group.waiting.items():
            out.append(StartExecutor(supervisor, epoch, address))
        group.waiting = {}

    def is_relay(self, peer: PeerId) -> bool:
        """Whether a supervisor is a relay that listens."""
        return peer in self._children

    def add_child(self, relay: PeerId, child: int, executor: PeerId) -> None:
        """An executor has registered through a relay, as whose child ``child``."""
        children = self._children[relay]
        children.executors[child] = executor
        children.selections.clear()

    def close_supervisor(self, supervisor: PeerId, out: list[Instruction]) -> list[PeerId]:
        """A supervisor's connection is gone; the executors that it leaves without a relay."""
        group = self._group_of_supervisor.pop(supervisor, None)
        if group is None:
            return []
        group.waiting.pop(supervisor, None)
        if group.relay == supervisor:
            group.relay = group.address = None
            if group.waiting:
                group.relay = next(iter(group.waiting))
                out.append(StartRelay(group.relay))
        children = self._children.pop(supervisor, None)
        return list(children.executors.values()) if children is not None else []

    def executors_in(self, relay: PeerId, bitmap: bytes) -> list[PeerId]:
        """The executors that a relay means by a bitmap of its children; numbers that were never anybody's are none."""
        executors = self._children[relay].executors
        return [executors[child] for child in bitmaps.members(bitmap) if child in executors]

    def selection(self, relay: PeerId, bitmap: bytes) -> HostSelection | None:
        """What ``remember`` was given for a bitmap of a relay's children, if nothing has changed since."""
        children = self._children.get(relay)
        if children is None:
            raise ProtocolViolation("it is not a relay")
        return children.selections.get(bitmap)

    def remember(self, relay: PeerId, bitmap: bytes, hosts: list[HostIndex]) -> HostSelection:
        """The virtual hosts of the children in a bitmap."""
        selections = self._children[relay].selections
        if len(selections) >= _MOST_REMEMBERED:
            selections.clear()
        selection = selections[bitmap] = HostSelection(hosts)
        return selection

    def forget_selections(self) -> None:
        """Which executors stand behind which hosts has changed."""
        for children in self._children.values():
            children.selections.clear()
