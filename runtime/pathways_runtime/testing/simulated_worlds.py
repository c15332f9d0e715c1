"""Worlds of a simulated cluster: coordination services, who is a member, and collectives that end with their world."""

import random
from collections.abc import Callable
from typing import Protocol

from pathways_runtime.core.ids import DeviceId, HostIndex, WorldId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.testing.manual_clock import ManualClock

MODULUS = 2**31 - 1

_LONGEST_JOIN_NS = 300_000
#: How long sockets of a process that has ended keep its peers waiting.
_LONGEST_NOTICE_NS = 300_000
#: How long a member that was told to leave waits for those who never come.
_LONGEST_WAIT_NS = 3_000_000


class Member(Protocol):
    """An executor as its worlds know it."""

    name: str
    is_dead: bool


class Communicator:
    """Collectives over one list of devices. The n-th of each host meets the n-th of the others, whatever they are."""

    def __init__(self, hosts: tuple[HostIndex, ...]) -> None:
        self._hosts = hosts
        self._num_started: dict[HostIndex, int] = dict.fromkeys(hosts, 0)
        self._meetings: dict[int, dict[HostIndex, tuple[int, Callable[[int | None], None]]]] = {}
        self._is_broken = False

    def contribute(self, host: HostIndex, value: int, on_result: Callable[[int | None], None]) -> None:
        """A host's part of its next collective; the result is None when the collective broke."""
        if self._is_broken:
            on_result(None)
            return
        place = self._num_started[host]
        self._num_started[host] += 1
        meeting = self._meetings.setdefault(place, {})
        meeting[host] = (value, on_result)
        if len(meeting) == len(self._hosts):
            del self._meetings[place]
            result = sum(part for part, _ in meeting.values()) % MODULUS
            for _, tell in meeting.values():
                tell(result)

    def break_off(self) -> None:
        """A member is lost: whoever is in a collective sees it break, and so does whoever comes."""
        self._is_broken = True
        meetings, self._meetings = self._meetings, {}
        for meeting in meetings.values():
            for _, tell in meeting.values():
                tell(None)


class SimulatedWorld:
    """One world, with its service if it has one. Raises when a member that is none takes part in anything.

    Attributes:
        hosts: in rank order; empty until a member is to join.
        is_running: whether its service runs.
        next_failure: what the next member to make its client is told instead.
    """

    def __init__(
        self,
        world: WorldId,
        num_members: int,
        clock: ManualClock,
        rng: random.Random,
        host_of: Callable[[DeviceId], HostIndex],
    ) -> None:
        self.world = world
        self.hosts: tuple[HostIndex, ...] = ()
        self.num_members = num_members
        self.is_running = False
        self.next_failure: Status | None = None
        self._clock = clock
        self._rng = rng
        self._host_of = host_of
        self._is_broken = False
        #: Who ever joined: one executor per host in the life of a world.
        self._joined: dict[HostIndex, Member] = {}
        #: Who uses the service.
        self._connected: dict[HostIndex, Member] = {}
        self._waiting: dict[HostIndex, Callable[[Status | None], None]] = {}
        self._communicators: dict[tuple[DeviceId, ...], Communicator] = {}

    def start(self) -> None:
        """Its service listens."""
        self.is_running = True

    def stop(self, is_known: Callable[[Member], bool]) -> None:
        """Its service ends, and with it whoever still needs it: that must be nobody whom the controller knows."""
        assert self.is_running, f"the service of world {self.world} is stopped and does not run"
        left = [member.name for member in self._connected.values() if not member.is_dead and is_known(member)]
        assert not left, f"the service of world {self.world} is stopped, and {left} need it"
        self.is_running = False

    def join(self, host: HostIndex, member: Member, on_formed: Callable[[Status | None], None]) -> None:
        """A member makes its client; called back once all have come, or with why it cannot."""
        assert host in self.hosts and len(self.hosts) == self.num_members, (
            f"{member.name} joins world {self.world} as host {host}"
        )
        former = self._joined.setdefault(host, member)
        assert former is member, f"{member.name} joins world {self.world} as host {host}, and {former.name} did before"
        if self.num_members == 1:
            self._clock.call_later(self._rng.randrange(_LONGEST_JOIN_NS), lambda: on_formed(None))
            return
        if not self.is_running:
            self._clock.call_later(0, lambda: on_formed(Status(Code.UNAVAILABLE, "no coordination service is there")))
            return
        self._connected[host] = member
        self._waiting[host] = on_formed
        if len(self._joined) == self.num_members:
            waiting, self._waiting = self._waiting, {}
            for tell in waiting.values():
                self._clock.call_later(self._rng.randrange(_LONGEST_JOIN_NS), lambda tell=tell: tell(None))  # type: ignore[misc]

    def give_up(self, host: HostIndex) -> None:
        """A member was told to leave: if it still waits for others, that fails after a while."""

        def fail() -> None:
            if (tell := self._waiting.pop(host, None)) is not None:
                self._connected.pop(host, None)
                tell(Status(Code.DEADLINE_EXCEEDED, "not all members came"))

        self._clock.call_later(self._rng.randrange(_LONGEST_WAIT_NS), fail)

    def take_failure(self) -> Status | None:
        """Why one member cannot make its client although all came; told once."""
        failure, self.next_failure = self.next_failure, None
        return failure

    def leave(self, host: HostIndex) -> None:
        """A member closes its sockets and needs the service no more."""
        self.break_off()
        self._connected.pop(host, None)

    def lose(self, host: HostIndex, *, is_silent: bool) -> None:
        """A member's process has ended; if not ``is_silent``, its peers notice by their sockets."""
        self._waiting.pop(host, None)
        self._connected.pop(host, None)
        if not is_silent:
            self._clock.call_later(self._rng.randrange(_LONGEST_NOTICE_NS), self.break_off)

    def break_off(self) -> None:
        """Collectives of several hosts end, for members that have noticed nothing too."""
        if not self._is_broken:
            self._is_broken = True
            for communicator in list(self._communicators.values()):
                communicator.break_off()

    def contribute(
        self,
        host: HostIndex,
        member: Member,
        devices: tuple[DeviceId, ...],
        value: int,
        on_result: Callable[[int | None], None],
    ) -> None:
        """A member's part of its next collective over these devices."""
        assert self._joined.get(host) is member, f"{member.name} acts in world {self.world}, of which it is no member"
        communicator = self._communicators.get(devices)
        if communicator is None:
            hosts = tuple(sorted(set(map(self._host_of, devices))))
            communicator = Communicator(hosts)
            if len(hosts) > 1:
                self._communicators[devices] = communicator
                if self._is_broken:
                    communicator.break_off()
        communicator.contribute(host, value, on_result)
