"""Compilations under way: one host compiles and fills the cache, then the others load."""

import enum
from typing import Any

import msgspec

from pathways_runtime.core.controller.events import MemberCompiled, ProgramRequested
from pathways_runtime.core.controller.instructions import CompileMember, Instruction, ReportCompiled
from pathways_runtime.core.controller.membership import Membership
from pathways_runtime.core.controller.worlds import MAX_FAILURES_IN_A_ROW, World, Worlds
from pathways_runtime.core.ids import Handle, HostIndex, SessionId
from pathways_runtime.core.operations import FUNCTION_OPTIONS
from pathways_runtime.core.status import Status, StatusError
from pathways_runtime.core.topology import Topology


class Stage(enum.Enum):
    """Legal changes: WORLD -> FIRST -> OTHERS -> (reported). A failure in any of them is reported at once."""

    WORLD = "its world to form"
    FIRST = "the first host to compile"
    OTHERS = "the other hosts to load"


class Reported(msgspec.Struct, frozen=True):
    """A compilation is over: the program is loaded on all its hosts, or not, for ``failure``."""

    session: SessionId
    executable: Handle
    failure: Status | None


class Compilation:
    """One program on its way to all its hosts.

    Attributes:
        hosts: of its devices, ascending; the first one compiles.
        num_worlds: how many it has waited for, each of which failed but the last.
        unanswered: hosts that were asked and have not answered.
    """

    def __init__(self, request: ProgramRequested, world: World, hosts: tuple[HostIndex, ...]) -> None:
        self.request = request
        self.world = world
        self.hosts = hosts
        self.stage = Stage.WORLD
        self.num_worlds = 1
        self.unanswered: set[HostIndex] = set()
        self.metadata: Any = None


class Programs:
    """Any number of compilations at once. Methods append to ``out``; each request gets exactly one ReportCompiled. What
    was reported is collected for the order, see ``take_reported``.

    Answers of hosts that come after that are ignored: a program that failed somewhere may stay loaded on other hosts
    until its session closes, and nothing can launch it, as its handle never worked.
    """

    def __init__(self, topology: Topology, membership: Membership, worlds: Worlds) -> None:
        self._topology = topology
        self._membership = membership
        self._worlds = worlds
        self._compilations: dict[tuple[SessionId, Handle], Compilation] = {}
        self._reported: list[Reported] = []

    def take_reported(self) -> list[Reported]:
        """Compilations that were reported since the last such call."""
        if not self._reported:
            return self._reported
        reported, self._reported = self._reported, []
        return reported

    def all(self) -> list[Compilation]:
        """Those under way."""
        return list(self._compilations.values())

    def request(self, event: ProgramRequested, out: list[Instruction]) -> None:
        """A session wants a program compiled. Its devices exist, which the caller has checked."""
        hosts = self._topology.hosts_of(event.devices)
        for host in hosts:
            if failure := self._membership.failure_of(host):
                self._report(event, None, failure, out)
                return
        slices = self._topology.slices_of(event.devices)
        if event.options == FUNCTION_OPTIONS:
            # It runs beside the devices, in no world: that of one slice will do, and is there.
            slices = slices[:1]
        try:
            world = self._worlds.for_program(slices, hosts, out)
        except StatusError as failed:
            self._report(event, None, failed.status, out)
            return
        compilation = Compilation(event, world, hosts)
        self._compilations[event.session, event.executable] = compilation
        if world.is_settled:
            self._ask_first(compilation, out)

    def settle_worlds(self, worlds: list[World], out: list[Instruction]) -> None:
        """Worlds were formed or failed: what waited for them goes on, waits for another one, or fails."""
        for compilation in self.all():
            if compilation.stage is Stage.WORLD and compilation.world in worlds:
                failure = compilation.world.failure
                if failure is None:
                    self._ask_first(compilation, out)
                elif compilation.num_worlds < MAX_FAILURES_IN_A_ROW:
                    self._wait_for_another_world(compilation, failure, out)
                else:
                    self._end(compilation, failure, out)

    def _wait_for_another_world(self, compilation: Compilation, failure: Status, out: list[Instruction]) -> None:
        compilation.num_worlds += 1
        try:
            compilation.world = self._worlds.for_program(compilation.world.slices, compilation.hosts, out)
        except StatusError:
            # A host is lost, of which ``failure`` tells.
            self._end(compilation, failure, out)
            return
        if compilation.world.is_settled:
            self._ask_first(compilation, out)

    def member_compiled(self, host: HostIndex, event: MemberCompiled, out: list[Instruction]) -> None:
        """A host has the program, or failed."""
        compilation = self._compilations.get((event.session, event.executable))
        if compilation is None or host not in compilation.unanswered:
            return
        compilation.unanswered.discard(host)
        if event.failure is not None:
            message = f"host {host}: {event.failure.message}" if len(compilation.hosts) > 1 else event.failure.message
            self._end(compilation, Status(event.failure.code, message), out)
            return
        if compilation.stage is Stage.FIRST:
            compilation.metadata = event.metadata
            compilation.stage = Stage.OTHERS
            self._ask(compilation, compilation.hosts[1:], out)
        if not compilation.unanswered:
            self._end(compilation, None, out)

    def lose_host(self, host: HostIndex, failure: Status, out: list[Instruction]) -> None:
        """A host is lost: programs that need it will never be everywhere, or cannot run in their world any more."""
        for compilation in self.all():
            if host in compilation.hosts or (compilation.world.is_over and len(compilation.hosts) > 1):
                self._end(compilation, failure, out)

    def close_session(self, session: SessionId) -> None:
        """Nobody is left to be told."""
        for key in [key for key in self._compilations if key[0] == session]:
            del self._compilations[key]

    def check_invariants(self) -> None:
        """What must hold between events."""
        lost = {host.index for host in self._membership.hosts if host.failure is not None}
        for compilation in self._compilations.values():
            if compilation.stage is Stage.WORLD:
                assert not compilation.world.is_settled and not compilation.unanswered
            else:
                assert compilation.unanswered, f"{compilation.request.executable} waits for nobody"
            assert lost.isdisjoint(compilation.hosts)

    def _ask_first(self, compilation: Compilation, out: list[Instruction]) -> None:
        compilation.stage = Stage.FIRST
        self._ask(compilation, compilation.hosts[:1], out)

    def _ask(self, compilation: Compilation, hosts: tuple[HostIndex, ...], out: list[Instruction]) -> None:
        compilation.unanswered = set(hosts)
        # A host whose loss is being looked into is not asked but is waited for; the verdict fails the compilation.
        peers = tuple(peer for host in hosts if (peer := self._membership.executor_peer(host)) is not None)
        request = compilation.request
        if peers:
            out.append(
                CompileMember(
                    peers,
                    request.session,
                    request.executable,
                    compilation.world.world,
                    request.program,
                    request.options,
                    request.devices,
                    wants_metadata=compilation.stage is Stage.FIRST,
                )
            )

    def _end(self, compilation: Compilation, failure: Status | None, out: list[Instruction]) -> None:
        request = compilation.request
        del self._compilations[request.session, request.executable]
        self._report(request, None if failure is not None else compilation.metadata, failure, out)

    def _report(self, request: ProgramRequested, metadata: Any, failure: Status | None, out: list[Instruction]) -> None:
        out.append(ReportCompiled(request.peer, request.session, request.executable, metadata, failure))
        self._reported.append(Reported(request.session, request.executable, failure))
