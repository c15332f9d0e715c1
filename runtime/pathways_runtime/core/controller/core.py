"""The controller's core: one event in, instructions out."""

from collections.abc import Callable
from typing import Any

from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.controller.credits import MAX_LAUNCHES_IN_FLIGHT
from pathways_runtime.core.controller.events import Event, PeerId, ProtocolViolation
from pathways_runtime.core.controller.gang import Order
from pathways_runtime.core.controller.host_groups import HostGroup
from pathways_runtime.core.controller.instructions import Instruction
from pathways_runtime.core.controller.membership import (
    Bound,
    Finding,
    HostClosing,
    HostJoining,
    HostLost,
    Membership,
)
from pathways_runtime.core.controller.programs import Programs
from pathways_runtime.core.controller.sessions import Session, Sessions
from pathways_runtime.core.controller.status import report
from pathways_runtime.core.controller.worlds import World, Worlds
from pathways_runtime.core.defaults import HEARTBEAT_TIMEOUT_S, RELAY_FANOUT
from pathways_runtime.core.ids import HostIndex, SessionId
from pathways_runtime.core.topology import Topology

#: How many operations of a session may wait here before its proxy stops reading its client.
MAX_UNDISPATCHED = 512


class ControllerCore:
    """Everything that the controller decides: membership, worlds, programs, sessions, and the one order.

    The same events give the same instructions. ``handle`` never raises for what a peer does: a peer that breaks the
    protocol is refused, and loses what it had.

    Args:
        num_spares: workers beyond the topology's hosts that are expected.
        heartbeat_timeout_ns: silence after which a worker counts as lost.
        relay_fanout: up to so many hosts, executors connect to the controller itself; see ``relays.RelayPlan``.
        num_absent_slices: of the topology, the last ones: they begin without workers, as if they were lost.
    """

    def __init__(
        self,
        topology: Topology,
        num_spares: int = 0,
        heartbeat_timeout_ns: int = int(HEARTBEAT_TIMEOUT_S * 1e9),
        max_launches_in_flight: int = MAX_LAUNCHES_IN_FLIGHT,
        max_undispatched: int = MAX_UNDISPATCHED,
        relay_fanout: int = RELAY_FANOUT,
        num_absent_slices: int = 0,
    ) -> None:
        self._topology = topology
        self._max_undispatched = max_undispatched
        self._membership = Membership(topology, num_spares, heartbeat_timeout_ns, relay_fanout, num_absent_slices)
        self._worlds = Worlds(topology, self._membership, num_absent_slices)
        self._programs = Programs(topology, self._membership, self._worlds)
        self._sessions = Sessions()
        self._order = Order(topology.num_hosts, max_launches_in_flight)
        self._last_change = 0
        #: Sets of hosts that proxies have named, by connection and number.
        self._named_hosts: dict[PeerId, dict[int, HostGroup]] = {}
        self._handlers: dict[type[Event], Callable[[Any, list[Instruction]], None]] = {
            ev.Started: self._on_started,
            ev.TimePassed: self._on_time_passed,
            ev.WorkerRegistered: self._on_worker_registered,
            ev.WorkerLeaving: self._on_worker_leaving,
            ev.ExecutorRegistered: self._on_executor_registered,
            ev.RelayListening: self._on_relay_listening,
            ev.HeartbeatsReceived: self._on_heartbeats_received,
            ev.MemoryRetained: self._on_memory_retained,
            ev.ExecutorExited: self._on_executor_exited,
            ev.PeerClosed: self._on_peer_closed,
            ev.CoordinationStarted: self._on_coordination_started,
            ev.CoordinationFailed: self._on_coordination_failed,
            ev.MemberFormed: self._on_member_formed,
            ev.MemberLeft: self._on_member_left,
            ev.ProgramRequested: self._on_program_requested,
            ev.MemberCompiled: self._on_member_compiled,
            ev.SessionRequested: self._on_session_requested,
            ev.SessionDetached: self._on_session_detached,
            ev.HostChangesSeen: self._on_host_changes_seen,
            ev.HostsNamed: self._on_hosts_named,
            ev.OperationsSubmitted: self._on_operations_submitted,
            ev.Acknowledged: self._on_acknowledged,
            ev.ChildrenAcknowledged: self._on_children_acknowledged,
            ev.MemberFailed: self._on_member_failed,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """What is to be done about an event.

        Raises:
            TypeError: the event is of no known type.
        """
        handler = self._handlers.get(type(event))
        if handler is None:
            raise TypeError(f"the controller knows no event {type(event).__name__}")
        out: list[Instruction] = []
        try:
            handler(event, out)
        except ProtocolViolation as violation:
            if not isinstance(event, ev.PeerEvent):
                raise
            self._refuse(event.peer, str(violation), out)
        for host in self._order.take_overdrawn():
            if (overdrawn := self._membership.executor_peer(host)) is not None:
                self._refuse(overdrawn, "it completed more launches than were in flight", out)
        for reported in self._programs.take_reported():
            if self._sessions.get(reported.session) is not None:
                self._order.end_load(reported.session, reported.executable, reported.failure, out)
        for session, count in self._order.take_progress():
            out.append(ins.ReportDispatched(self._peer_of(session), session, count))
        for gone in self._order.take_abandoned():
            if (owner := self._sessions.get(gone.session)) is not None:
                out.append(ins.ReportFailed(owner.peer, gone.session, gone.op_id, gone.handles, gone.failure))
        return out

    def report(self, now_ns: int) -> dict[str, Any]:
        """What ``status`` shows of the controller; see docs/status.md."""
        return report(
            self._topology, self._membership, self._worlds, self._programs, self._sessions, self._order, now_ns
        )

    def check_invariants(self, *, of_workers: bool = True) -> None:
        """What must hold between events.

        Args:
            of_workers: also who is there, which takes the longer the more workers there are, and changes only with
                events about them.
        """
        if of_workers:
            self._membership.check_invariants()
        self._worlds.check_invariants()
        self._programs.check_invariants()
        self._order.check_invariants()

    def check_at_rest(self) -> None:
        """What must hold when nothing is under way and somebody serves for every host."""
        self.check_invariants()
        self._order.check_at_rest()
        assert not self._programs.all()

    # workers

    def _on_started(self, event: ev.Started, out: list[Instruction]) -> None:
        self._membership.start(event.now_ns, event.wall_clock_s)
        self._worlds.start(out)

    def _on_time_passed(self, event: ev.TimePassed, out: list[Instruction]) -> None:
        self._act_on(self._membership.pass_time(event.now_ns, out), out)

    def _on_worker_registered(self, event: ev.WorkerRegistered, out: list[Instruction]) -> None:
        self._membership.register_worker(event, out)

    def _on_worker_leaving(self, event: ev.WorkerLeaving, out: list[Instruction]) -> None:
        self._act_on(self._membership.leave(event, out), out)

    def _on_executor_registered(self, event: ev.ExecutorRegistered, out: list[Instruction]) -> None:
        self._act_on(self._membership.register_executor(event, out), out)
        if self._membership.retained_in_vain(event):
            out.append(ins.DropRetained((event.peer,)))

    def _on_relay_listening(self, event: ev.RelayListening, out: list[Instruction]) -> None:
        self._membership.relay_listens(event, out)

    def _on_heartbeats_received(self, event: ev.HeartbeatsReceived, out: list[Instruction]) -> None:
        self._membership.heard_from(event.peers, event.now_ns)

    def _on_memory_retained(self, event: ev.MemoryRetained, _: list[Instruction]) -> None:
        self._membership.retain_memory(event.peer, event.is_used)

    def _on_executor_exited(self, event: ev.ExecutorExited, out: list[Instruction]) -> None:
        self._act_on(self._membership.exit_executor(event, out), out)

    def _on_peer_closed(self, event: ev.PeerClosed, out: list[Instruction]) -> None:
        self._act_on(self._membership.close_peer(event.peer, event.reason, event.now_ns, out), out)
        for session in self._sessions.close_peer(event.peer):
            self._close(session, out)
        self._named_hosts.pop(event.peer, None)

    def _act_on(self, findings: list[Finding], out: list[Instruction]) -> None:
        """Act on what was found at once. Membership knows all of it already, so nothing goes to a host that is lost, or
        to who takes its place, for the sake of one that is looked at before it."""
        lost = [finding.host for finding in findings if isinstance(finding, HostLost) and finding.had_served]
        if len(lost) > 1:
            self._order.close_hosts(lost, out)
        for finding in sorted(findings, key=lambda finding: isinstance(finding, HostJoining)):
            match finding:
                case Bound(absent):
                    for host in absent:
                        absence = self._membership.failure_of(host)
                        assert absence is not None
                        self._order.lose_host(host, absence, self._last_change, out)
                    self._worlds.bind(out)
                case HostClosing(host):
                    self._order.close_hosts((host,), out)
                case HostLost(host, name, failure, had_served, may_return):
                    if had_served:
                        # Sessions hear of the host before they hear of operations that failed for it.
                        self._last_change += 1
                        out.append(ins.ChangeHost(host, None, name, failure, self._last_change, may_return))
                    settled = self._worlds.lose_host(host, failure, out)
                    self._programs.lose_host(host, failure, out)
                    self._programs.settle_worlds(settled, out)
                    if had_served:
                        self._order.lose_host(host, failure, self._last_change, out)
                case HostJoining(host):
                    self._worlds.join(host, out)
                case _:
                    raise TypeError(f"no such finding: {finding!r}")

    def _restore(self, hosts: tuple[HostIndex, ...], now_ns: int, out: list[Instruction]) -> None:
        """The world of a slice is formed: whoever was about to serve for one of its hosts does so from now on."""
        joining = [host for host in hosts if self._membership.is_joining(host)]
        restored = [self._membership.restore(host, now_ns, out) for host in joining]
        peers = tuple(peer for host in joining if (peer := self._membership.executor_peer(host)) is not None)
        for session in self._sessions.all():
            out.append(ins.OpenSession(peers, session.session, session.request.links_address, self._last_change))
        if finders := [host.index for host in restored if host.retained]:
            found = tuple(peer for host in finders if (peer := self._membership.executor_peer(host)) is not None)
            out.append(ins.DropRetained(found))
        for host in restored:
            self._order.restore_host(host.index, out)
            worker, retained = host.worker, host.retained
            assert worker is not None
            # Sessions hear of it last: all that they then ask of the host can be done.
            self._last_change += 1
            out.append(
                ins.ChangeHost(host.index, worker.worker, worker.name, None, self._last_change, retained=retained)
            )

    # worlds and programs

    def _on_coordination_started(self, event: ev.CoordinationStarted, out: list[Instruction]) -> None:
        self._worlds.coordination_started(event.world, event.address, out)

    def _on_coordination_failed(self, event: ev.CoordinationFailed, out: list[Instruction]) -> None:
        self._settle(self._worlds.coordination_failed(event.world, event.reason, out), out)

    def _on_member_formed(self, event: ev.MemberFormed, out: list[Instruction]) -> None:
        host = self._membership.host_of_executor(event.peer)
        if host is not None:
            formed = self._worlds.member_formed(host, event.world, event.failure, out)
            for world in formed:
                # A member whose loss is being looked into ends the world as soon as the verdict is there.
                is_whole = all(self._membership.member_peer(host) is not None for host in world.hosts)
                if len(world.slices) == 1 and not world.is_over and is_whole:
                    self._restore(world.hosts, event.now_ns, out)
            self._settle(formed, out)

    def _on_member_left(self, event: ev.MemberLeft, out: list[Instruction]) -> None:
        host = self._membership.host_of_executor(event.peer)
        if host is not None:
            self._worlds.member_left(host, event.world, out)

    def _settle(self, worlds: list[World], out: list[Instruction]) -> None:
        self._programs.settle_worlds(worlds, out)
        if self._worlds.is_ready:
            for request in self._sessions.take_waiting():
                self._open(request, out)

    def _on_program_requested(self, event: ev.ProgramRequested, out: list[Instruction]) -> None:
        self._sessions.owned(event.session, event.peer)
        if not event.devices or not all(0 <= device < self._topology.num_device_ids for device in event.devices):
            raise ProtocolViolation(f"program {event.executable} is for devices that do not exist: {event.devices}")
        self._order.begin_load(event.session, event.executable)
        self._programs.request(event, out)

    def _on_member_compiled(self, event: ev.MemberCompiled, out: list[Instruction]) -> None:
        host = self._membership.host_of_executor(event.peer)
        if host is not None:
            self._programs.member_compiled(host, event, out)

    # sessions and operations

    def _on_session_requested(self, event: ev.SessionRequested, out: list[Instruction]) -> None:
        if self._worlds.is_ready:
            self._open(event, out)
        else:
            self._sessions.wait(event)

    def _open(self, request: ev.SessionRequested, out: list[Instruction]) -> None:
        session = self._sessions.open(request)
        self._order.open_session(session.session)
        executor = self._membership.any_executor()
        bindings = self._membership.bindings()
        peers = self._membership.live_executors()
        out.append(ins.OpenSession(peers, session.session, request.links_address, self._last_change))
        out.append(
            ins.AcceptSession(
                request.peer,
                session.session,
                bindings,
                executor.platform_version,
                executor.device_kind,
                self._max_undispatched,
            )
        )

    def _on_session_detached(self, event: ev.SessionDetached, out: list[Instruction]) -> None:
        self._close(self._sessions.owned(event.session, event.peer), out)
        out.append(ins.EndSession(event.peer, event.session, None))

    def _close(self, session: Session, out: list[Instruction]) -> None:
        self._sessions.close(session.session)
        self._programs.close_session(session.session)
        self._order.close_session(session.session, out)
        out.append(ins.CloseSession(self._membership.live_executors(), session.session))

    def _on_host_changes_seen(self, event: ev.HostChangesSeen, out: list[Instruction]) -> None:
        if event.change > self._last_change:
            raise ProtocolViolation(f"there were {self._last_change} changes of hosts, not {event.change}")
        for session in self._sessions.all():
            if session.peer == event.peer:
                self._order.note_awareness(session.session, event.change)

    def _on_hosts_named(self, event: ev.HostsNamed, out: list[Instruction]) -> None:
        self._named_hosts.setdefault(event.peer, {})[event.number] = self._order.group_of(event.hosts)

    def _on_operations_submitted(self, event: ev.OperationsSubmitted, out: list[Instruction]) -> None:
        submit, group_of, now_ns = self._order.submit, self._order.group_of, event.now_ns
        named = self._named_hosts.get(event.peer, {})
        checked: SessionId | None = None
        for submission in event.submissions:
            if submission.session != checked:
                checked = self._sessions.owned(submission.session, event.peer).session
            if submission.host_set:
                group = named.get(submission.host_set)
                if group is None:
                    raise ProtocolViolation(f"this proxy has not named hosts {submission.host_set}")
            else:
                group = group_of(submission.hosts)
            submit(submission, group, now_ns, out)

    def _on_acknowledged(self, event: ev.Acknowledged, out: list[Instruction]) -> None:
        host = self._membership.host_of_executor(event.peer)
        if host is None:
            return
        for session, op_id in event.transfers_started:
            self._order.start_transfer(host, session, op_id, out)
        if event.launches_completed:
            self._order.complete_launches(host, event.launches_completed, out)

    def _on_children_acknowledged(self, event: ev.ChildrenAcknowledged, out: list[Instruction]) -> None:
        hosts_behind, relay = self._membership.hosts_behind, event.peer
        for session, op_id, children in event.transfers_started:
            self._order.start_transfer_on(hosts_behind(relay, children).hosts, session, op_id, out)
        for children, count in event.completed:
            if count < 1:
                raise ProtocolViolation(f"{count} launches completed")
            self._order.complete_launches_on(hosts_behind(relay, children), count, out)
        for session, wait_id, children in event.ready:
            if (owner := self._sessions.get(session)) is not None:
                selection = hosts_behind(relay, children)
                out.append(ins.ReportReady(owner.peer, session, wait_id, selection.ordered))

    def _on_member_failed(self, event: ev.MemberFailed, out: list[Instruction]) -> None:
        host: HostIndex | None = self._membership.host_of_executor(event.peer)
        owner = self._sessions.get(event.session)
        if host is None or owner is None:
            return
        # The session hears of the failure before it hears that anything was dispatched behind it.
        out.append(ins.ReportFailed(owner.peer, event.session, event.op_id, event.handles, event.failure))
        self._order.start_transfer(host, event.session, event.op_id, out)

    def _peer_of(self, session: SessionId) -> PeerId:
        owner = self._sessions.get(session)
        assert owner is not None, f"session {session} has progress and is not attached"
        return owner.peer

    def _refuse(self, peer: PeerId, reason: str, out: list[Instruction]) -> None:
        out.append(ins.Refuse(peer, reason))
        for session in self._sessions.close_peer(peer):
            self._close(session, out)
