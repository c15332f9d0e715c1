"""Links with random delays that keep the order of what is sent, as stream sockets do, and networks that are cut."""

import random
from collections.abc import Callable

import msgspec

from pathways_runtime.testing.manual_clock import ManualClock

LONGEST_DELAY_NS = 200_000


class Process:
    """An end of links. What comes to it after its death is dropped.

    Attributes:
        node: the machine that it runs on.
    """

    def __init__(self, name: str, node: str) -> None:
        self.name = name
        self.node = node
        self.is_dead = False


class Cut(msgspec.Struct, frozen=True):
    """What does not get through: connections stay open, and what is sent arrives when the cut is healed.

    Attributes:
        node: whose links to other machines are cut. process: whose links are cut, to its own machine too: it stands
            still.
        incoming, outgoing: in which directions, seen from there.
        far: only links to and from this machine; None: all.
    """

    node: str = ""
    process: str = ""
    incoming: bool = True
    outgoing: bool = True
    far: str | None = None

    def blocks(self, source: Process, target: Process) -> bool:
        """Whether what ``source`` sends to ``target`` does not get through."""
        if self.process:
            return self.process in (source.name, target.name)
        if source.node == target.node:
            return False
        if self.outgoing and source.node == self.node:
            return self.far is None or target.node == self.far
        return self.incoming and target.node == self.node and (self.far is None or source.node == self.far)


class Link:
    """One direction of one connection."""

    __slots__ = ("_held", "_last_arrival_ns", "_longest_delay_ns", "_network", "_source", "_target")

    def __init__(self, network: "Network", source: Process, target: Process, longest_delay_ns: int) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._longest_delay_ns = longest_delay_ns
        self._last_arrival_ns = 0
        #: What was sent while the link was cut.
        self._held: list[tuple[Callable[[], None], Callable[[], None] | None]] = []

    def send(self, deliver: Callable[[], None], on_way: Callable[[], None] | None = None) -> None:
        """Call ``deliver`` after a random delay, and after all that was sent before.

        Args:
            on_way: called when nothing but the target's death can keep it from arriving.
        """
        network = self._network
        if self._held or (network.has_cuts and network.is_cut(self._source, self._target)):
            self._held.append((deliver, on_way))
            network.hold(self)
        else:
            self._transmit(deliver, on_way)

    def resume(self) -> bool:
        """Send what was held if it gets through now; whether it does."""
        if self._network.is_cut(self._source, self._target):
            return False
        # What is sent while this goes on comes behind what was held.
        while self._held:
            self._transmit(*self._held[0])
            self._held.pop(0)
        return True

    def _transmit(self, deliver: Callable[[], None], on_way: Callable[[], None] | None) -> None:
        if on_way is not None:
            on_way()
        network = self._network
        arrival_ns = network.clock.now_ns + int(network.rng.random() * self._longest_delay_ns)
        if arrival_ns > self._last_arrival_ns:
            self._last_arrival_ns = arrival_ns
        network.clock.call_at(self._last_arrival_ns, deliver, self._target)


class Network:
    """Makes the links of a simulation, each with a slowness of its own.

    Attributes:
        has_cuts: whether anything is cut at present.
    """

    def __init__(self, clock: ManualClock, rng: random.Random, longest_delay_ns: int = LONGEST_DELAY_NS) -> None:
        self.clock = clock
        self.rng = rng
        self._longest_delay_ns = longest_delay_ns
        self.has_cuts = False
        self._links: dict[tuple[str, str, str], Link] = {}
        self._cuts: list[Cut] = []
        #: The nodes, and the processes, that the cuts name.
        self._cut_off: set[str] = set()
        self._holding: dict[Link, None] = {}

    def link(self, source: Process, target: Process, purpose: str = "control") -> Link:
        """The link from one end to another, the same one every time."""
        key = (source.name, target.name, purpose)
        link = self._links.get(key)
        if link is None:
            longest_ns = self.rng.randint(self._longest_delay_ns // 10, self._longest_delay_ns)
            link = self._links[key] = Link(self, source, target, longest_ns)
        return link

    def is_cut(self, source: Process, target: Process) -> bool:
        """Whether nothing gets from one end to another at present."""
        cut_off = self._cut_off
        if not cut_off or cut_off.isdisjoint((source.node, target.node, source.name, target.name)):
            return False
        return any(cut.blocks(source, target) for cut in self._cuts)

    def cut(self, cut: Cut) -> None:
        """From now on nothing that is sent gets through; what is under way arrives."""
        self._cuts.append(cut)
        self._cut_off.add(cut.process or cut.node)
        self.has_cuts = True

    def heal(self, cut: Cut) -> None:
        """The cut is no more: what was held arrives, late."""
        self._cuts.remove(cut)
        self._cut_off = {cut.process or cut.node for cut in self._cuts}
        self.has_cuts = bool(self._cuts)
        holding, self._holding = self._holding, {}
        for link in holding:
            if not link.resume():
                self.hold(link)

    def hold(self, link: Link) -> None:
        """A link holds something until it is healed."""
        self._holding[link] = None
