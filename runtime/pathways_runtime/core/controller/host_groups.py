"""Sets of hosts that take part in operations together, interned: one object per set, so an operation costs O(1)."""

import bisect
import itertools
from collections.abc import Container, Sequence

import numpy as np

from pathways_runtime.core.ids import HostIndex


class HostGroup:
    """One set of hosts. Compared by identity; made by ``HostGroups.intern`` only.

    Attributes:
        number: dense from 0 in the order of first use; shells index what they keep per group by it.
        hosts: ascending, without repeats.
        overlapping: numbers of the groups that launches go to and that share a host with this one, itself included;
            grows as such groups appear. Empty until launches go to it: see ``HostGroups.let_launch``.
        missing: hosts of it that are lost or about to be declared lost; empty in good times.
    """

    __slots__ = ("hosts", "missing", "number", "overlapping")

    def __init__(self, number: int, hosts: tuple[HostIndex, ...]) -> None:
        self.number = number
        self.hosts = hosts
        self.overlapping: list[int] = []
        self.missing: tuple[HostIndex, ...] = ()

    def __contains__(self, host: HostIndex) -> bool:
        place = bisect.bisect_left(self.hosts, host)
        return place < len(self.hosts) and self.hosts[place] == host

    def __repr__(self) -> str:
        return f"HostGroup({self.number}, hosts={self.hosts})"


class HostSelection:
    """Hosts that a relay speaks of together. Compared by identity; kept, as it speaks of the same ones again and again.

    Attributes:
        hosts: without repeats. ordered: the same, ascending. array: the same, to index arrays with one element per
            host.
    """

    __slots__ = ("array", "hosts", "ordered")

    def __init__(self, hosts: Sequence[HostIndex]) -> None:
        self.hosts = frozenset(hosts)
        self.ordered = tuple(sorted(self.hosts))
        self.array = np.asarray(self.ordered, dtype=np.int64)


class HostGroups:
    """All groups seen so far. There are as many as a program uses meshes, so none is ever dropped."""

    def __init__(self, num_hosts: int) -> None:
        self._by_hosts: dict[tuple[HostIndex, ...], HostGroup] = {}
        self.num_hosts = num_hosts
        self._of_host: list[list[HostGroup]] = [[] for _ in range(num_hosts)]
        #: Those of them that launches go to. They compete for the credit of their hosts; what is fetched, awaited or
        #: deleted may name any set of hosts, and as many as there are hosts.
        self._launching_on: list[list[HostGroup]] = [[] for _ in range(num_hosts)]
        self._missing: set[HostIndex] = set()
        self.all: list[HostGroup] = []

    def intern(self, hosts: tuple[HostIndex, ...]) -> HostGroup:
        """The group of these hosts.

        Raises:
            ValueError: hosts are not ascending, repeat, or do not exist.
        """
        group = self._by_hosts.get(hosts)
        return group if group is not None else self._add(hosts)

    def let_launch(self, group: HostGroup) -> None:
        """Launches go to a group from now on; called once."""
        neighbours = {other.number: other for host in group.hosts for other in self._launching_on[host]}
        group.overlapping.append(group.number)
        for number in sorted(neighbours):
            group.overlapping.append(number)
            neighbours[number].overlapping.append(group.number)
        for host in group.hosts:
            self._launching_on[host].append(group)

    def launching_on(self, host: HostIndex) -> Sequence[HostGroup]:
        """The groups that a host is in and that launches go to."""
        return self._launching_on[host]

    def mark_missing(self, host: HostIndex) -> None:
        """A host is lost, or about to be declared lost."""
        self._missing.add(host)
        for group in self._of_host[host]:
            if host not in group.missing:
                group.missing = (*group.missing, host)

    def mark_present(self, host: HostIndex) -> None:
        """Somebody stands behind a host again."""
        self._missing.discard(host)
        for group in self._of_host[host]:
            group.missing = tuple(other for other in group.missing if other != host)

    def present(self, group: HostGroup, but: Container[HostIndex] = ()) -> HostGroup:
        """The group of those hosts of ``group`` that are not missing, nor in ``but``."""
        if not group.missing and not but:
            return group
        return self.intern(tuple(host for host in group.hosts if host not in group.missing and host not in but))

    def _add(self, hosts: tuple[HostIndex, ...]) -> HostGroup:
        if any(a >= b for a, b in itertools.pairwise(hosts)):
            raise ValueError(f"hosts must ascend without repeats, not {hosts}")
        if hosts and not 0 <= hosts[0] <= hosts[-1] < len(self._of_host):
            raise ValueError(f"hosts {hosts} are not all among the {len(self._of_host)} that exist")
        group = HostGroup(len(self.all), hosts)
        group.missing = tuple(host for host in hosts if host in self._missing)
        for host in hosts:
            self._of_host[host].append(group)
        self.all.append(group)
        self._by_hosts[hosts] = group
        return group
