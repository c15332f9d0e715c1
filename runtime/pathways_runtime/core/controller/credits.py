"""How many launches each worker has in flight, counted per group of hosts: a launch costs O(1), not O(its hosts)."""

from collections.abc import Iterable

import numpy as np

from pathways_runtime.core.controller.host_groups import HostGroup, HostGroups, HostSelection
from pathways_runtime.core.ids import HostIndex

#: PJRT blocks the thread that enqueues once 32 launches are in flight on a device; staying below keeps an executor
#: responsive.
MAX_LAUNCHES_IN_FLIGHT = 24

#: Reports of relays that are kept before they are spread over the hosts. Relays name the same hosts again and again, so
#: there are few.
_MOST_UNSETTLED = 256


class _Blocked:
    """A group that cannot launch. Once none of its hosts is full any more, it is worth looking again.

    ``is_full`` marks the hosts that lacked credit at the last look and have completed nothing since.
    """

    __slots__ = ("is_full", "num_full")

    def __init__(self, is_full: np.ndarray, num_full: int) -> None:
        self.is_full = is_full
        self.num_full = num_full


class Credits:
    """At most ``limit`` launches are in flight per worker, over all sessions.

    Launches are counted per group and carried over to the hosts only now and then. Each group has an *allowance*: so
    many launches may certainly go out without looking at its hosts again. It is a lower bound, because launches of
    every overlapping group lower it, while completions raise it only when it is computed anew. So completions that a
    relay reports for many hosts at once need not be spread over the hosts before somebody looks.
    """

    def __init__(self, groups: HostGroups, num_hosts: int, limit: int) -> None:
        self._groups = groups
        self._limit = limit
        #: Launches in flight per host, without those in ``_uncarried``; an element may be negative meanwhile.
        self._carried = np.zeros(num_hosts, dtype=np.int64)
        #: Per group number: launches that ``_carried`` does not count yet.
        self._uncarried: list[int] = []
        #: Per group number. Invariant: when positive, at most ``limit - in_flight(host)`` for each host of the group.
        self._allowance: list[int] = []
        #: Per group number: what indexes an array with one element per host.
        self._host_arrays: list[np.ndarray | slice] = []
        self._blocked: dict[int, _Blocked] = {}
        #: Completions reported for many hosts at once that ``_carried`` does not count yet; empty while a group is
        #: blocked.
        self._reported: dict[HostSelection, int] = {}
        self._overdrawn: list[HostIndex] = []

    def take(self, group: HostGroup) -> bool:
        """Count one launch on all hosts of a group, or count nothing and return False when one of them is full."""
        allowance = self._allowance
        if len(allowance) < len(self._groups.all):
            self._add_groups()
        number = group.number
        if allowance[number] <= 0 and not self._look(group):
            return False
        self._uncarried[number] += 1
        for overlapping in group.overlapping:
            allowance[overlapping] -= 1
        return True

    def complete(self, host: HostIndex, count: int) -> bool:
        """``count`` launches have finished on a host. Returns whether a group that could not launch may now be able to.

        Raises:
            ValueError: more than were in flight.
        """
        if self._reported:
            self._settle()
        carried = self._carried
        carried[host] -= count
        # Only what is not carried yet can make up for a negative number.
        if count < 0 or (carried[host] < 0 and self.in_flight(host) < 0):
            carried[host] += count
            raise ValueError(f"host {host} completed {count} launches of {self.in_flight(host)} in flight")
        may_launch = False
        if self._blocked and count:
            for number, blocked in list(self._blocked.items()):
                if blocked.is_full[host]:
                    blocked.is_full[host] = False
                    blocked.num_full -= 1
                    if not blocked.num_full:
                        del self._blocked[number]
                        may_launch = True
        return may_launch

    def complete_on(self, selection: HostSelection, count: int) -> bool:
        """``count`` launches, above 0, have finished on each of some hosts. Returns what ``complete`` does.

        Costs O(1) as long as no group is blocked. That a host has completed more than were in flight is found later,
        and told by ``take_overdrawn``.
        """
        self._reported[selection] = self._reported.get(selection, 0) + count
        if not self._blocked:
            if len(self._reported) >= _MOST_UNSETTLED:
                self._settle()
            return False
        self._settle()
        may_launch = False
        for number, blocked in list(self._blocked.items()):
            num_freed = int(np.count_nonzero(blocked.is_full[selection.array]))
            if num_freed:
                blocked.is_full[selection.array] = False
                blocked.num_full -= num_freed
                if not blocked.num_full:
                    del self._blocked[number]
                    may_launch = True
        return may_launch

    def reset(self, host: HostIndex) -> None:
        """Whoever stood behind a host is gone, and its launches with it; groups that could not launch may now."""
        self.complete(host, self.in_flight(host))

    def take_overdrawn(self) -> list[HostIndex]:
        """Hosts for which relays have reported more completions than were in flight; each once."""
        if not self._overdrawn:
            return self._overdrawn
        overdrawn, self._overdrawn = self._overdrawn, []
        return overdrawn

    def in_flight(self, host: HostIndex) -> int:
        """Launches that a host has been sent and has not completed."""
        if self._reported:
            self._settle()
        if len(self._uncarried) < len(self._groups.all):
            self._add_groups()
        return int(self._carried[host]) + sum(self._uncarried[g.number] for g in self._groups.launching_on(host))

    def in_flight_everywhere(self) -> np.ndarray:
        """``in_flight`` of each host."""
        if self._reported:
            self._settle()
        if len(self._uncarried) < len(self._groups.all):
            self._add_groups()
        in_flight = self._carried.copy()
        for number, count in enumerate(self._uncarried):
            if count:
                in_flight[self._host_arrays[number]] += count
        return in_flight

    def full_hosts(self, group: HostGroup) -> tuple[HostIndex, ...]:
        """The hosts that keep a group from launching."""
        is_full = self.in_flight_everywhere() >= self._limit
        return tuple(host for host in group.hosts if is_full[host])

    def check_invariants(self) -> None:
        """0 <= in flight <= limit on every host, and no group is allowed more than its hosts have."""
        assert not (self._blocked and self._reported)
        in_flight = self.in_flight_everywhere()
        for host in np.flatnonzero((in_flight < 0) | (in_flight > self._limit)).tolist():
            raise AssertionError(f"host {host}: {in_flight[host]}")
        for group in self._groups.all:
            most = int(in_flight[self._host_arrays[group.number]].max(initial=0))
            allowance = self._allowance[group.number]
            assert allowance <= 0 or allowance <= self._limit - most, f"{group} is allowed {allowance}"

    def _look(self, group: HostGroup) -> bool:
        """Compute a group's allowance anew; return whether it may launch."""
        if group.number in self._blocked:
            return False
        if self._reported:
            self._settle()
        self._carry(group.overlapping)
        in_flight = self._carried[self._host_arrays[group.number]]
        allowance = self._limit - int(in_flight.max(initial=0))
        self._allowance[group.number] = allowance
        if allowance > 0:
            return True
        is_full = np.zeros(len(self._carried), dtype=bool)
        is_full[self._host_arrays[group.number]] = in_flight >= self._limit
        self._blocked[group.number] = _Blocked(is_full, int(is_full.sum()))
        return False

    def _settle(self) -> None:
        """Spread over the hosts what relays have reported."""
        reported, self._reported = self._reported, {}
        carried = self._carried
        for selection, count in reported.items():
            carried[selection.array] -= count
        if carried.min() < 0:
            # Only what is not carried yet can make up for negative numbers.
            self._carry(range(len(self._uncarried)))
            for host in np.flatnonzero(carried < 0).tolist():
                carried[host] = 0
                self._overdrawn.append(HostIndex(host))

    def _carry(self, numbers: Iterable[int]) -> None:
        """Count launches of these groups per host."""
        for number in numbers:
            if count := self._uncarried[number]:
                self._carried[self._host_arrays[number]] += count
                self._uncarried[number] = 0

    def _add_groups(self) -> None:
        # A new group is allowed nothing, so that its first launch looks.
        for group in self._groups.all[len(self._allowance) :]:
            self._uncarried.append(0)
            self._allowance.append(0)
            first, last = (group.hosts[0], group.hosts[-1]) if group.hosts else (0, -1)
            is_range = last - first + 1 == len(group.hosts)
            self._host_arrays.append(slice(first, last + 1) if is_range else np.asarray(group.hosts, dtype=np.int64))
