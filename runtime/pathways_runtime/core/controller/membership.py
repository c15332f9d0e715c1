"""Workers: who is there, which virtual host each stands behind, and who is lost, when and why."""

import datetime
import enum
import signal

import msgspec

from pathways_runtime.core.controller.events import (
    ExecutorExited,
    ExecutorRegistered,
    PeerId,
    RelayListening,
    WorkerRegistered,
)
from pathways_runtime.core.controller.host_groups import HostSelection
from pathways_runtime.core.controller.instructions import (
    Announce,
    BindExecutors,
    BoundExecutor,
    HostBinding,
    Instruction,
    Refuse,
    StopExecutor,
)
from pathways_runtime.core.controller.relays import RELAY_FANOUT, Relays
from pathways_runtime.core.ids import HostIndex, WorkerId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology

#: How long a closed executor connection waits for its supervisor's word of how the executor ended.
VERDICT_NS = 500_000_000


class WorkerState(enum.Enum):
    """Legal changes: STARTING -> READY -> BOUND | SPARE; from each of these -> LOST, by way of CLOSING or at once."""

    #: The supervisor is there and has been told to start an executor.
    STARTING = "starting"
    #: The executor is there; hosts are not bound yet.
    READY = "ready"
    BOUND = "bound"
    SPARE = "spare"
    #: The executor's connection is closed; why is not known yet.
    CLOSING = "closing"
    LOST = "lost"


class Worker:
    """One worker of the allocation.

    Attributes:
        supervisor: its supervisor's connection, None once that is closed.
        executor: what its executor said of itself, None until it is there. Kept after a loss.
        host: the virtual host that it stands behind, or stood behind when it was lost.
        failure: why it is lost.
        lost_cause: that without who and when.
        lost_ns: when; None while it is not lost.
        verdict_due_ns: when CLOSING ends without word from the supervisor; ``closing_cause`` is then the cause.
    """

    def __init__(self, registered: WorkerRegistered, epoch: int) -> None:
        self.worker = registered.worker
        self.name = registered.name
        self.supervisor: PeerId | None = registered.peer
        self.supervisor_pid = registered.pid
        self.epoch = epoch
        self.executor: ExecutorRegistered | None = None
        self.host: HostIndex | None = None
        self.state = WorkerState.STARTING
        self.failure: Status | None = None
        self.lost_cause = ""
        self.lost_ns: int | None = None
        self.closing_cause = ""
        self.verdict_due_ns = 0

    def label(self) -> str:
        """How messages to people call it."""
        return f"worker {self.worker} ({self.name})" if self.host is None else f"host {self.host} ({self.name})"


class Bound(msgspec.Struct, frozen=True):
    """Every virtual host has an executor now."""


class HostClosing(msgspec.Struct, frozen=True):
    """The host is lost; HostLost follows within ``VERDICT_NS``."""

    host: HostIndex


class HostLost(msgspec.Struct, frozen=True):
    """The host is lost for ``failure``."""

    host: HostIndex
    name: str
    failure: Status


Finding = Bound | HostClosing | HostLost


class Membership:
    """Methods append to ``out`` and return what the rest of the controller must know.

    Args:
        num_spares: workers beyond the topology's hosts that are expected.
        heartbeat_timeout_ns: silence after which a worker counts as lost.
        relay_fanout: see ``relays.RelayPlan``.
    """

    def __init__(
        self, topology: Topology, num_spares: int, heartbeat_timeout_ns: int, relay_fanout: int = RELAY_FANOUT
    ) -> None:
        self._topology = topology
        self._relays = Relays(topology, relay_fanout)
        self._num_expected = topology.num_hosts + num_spares
        self._heartbeat_timeout_ns = heartbeat_timeout_ns
        self._workers: dict[WorkerId, Worker] = {}
        self._by_supervisor: dict[PeerId, Worker] = {}
        self._by_executor: dict[PeerId, Worker] = {}
        self._last_heard_ns: dict[PeerId, int] = {}
        self._last_tick_ns = 0
        self._wall_clock_offset_ns = 0
        self.started_ns = 0
        #: Who stands behind each virtual host; empty until bound. A lost worker stays until another takes its place.
        self.behind: list[Worker] = []

    # what is known

    @property
    def is_bound(self) -> bool:
        """Whether every virtual host was given an executor."""
        return bool(self.behind)

    def workers(self) -> list[Worker]:
        """All workers that ever registered, by id."""
        return [self._workers[worker] for worker in sorted(self._workers)]

    def host_of_executor(self, peer: PeerId) -> HostIndex | None:
        """The virtual host of the live executor on a connection; None when it has none."""
        worker = self._by_executor.get(peer)
        return worker.host if worker is not None and worker.state is WorkerState.BOUND else None

    def executor_peer(self, host: HostIndex) -> PeerId | None:
        """The connection of the live executor behind a virtual host."""
        worker = self.behind[host]
        return worker.executor.peer if worker.state is WorkerState.BOUND and worker.executor else None

    def live_executors(self) -> tuple[PeerId, ...]:
        """The connections of all live executors that stand behind a virtual host."""
        return tuple(peer for worker in self.behind if (peer := self.executor_peer_of(worker)) is not None)

    def executor_peer_of(self, worker: Worker) -> PeerId | None:
        """The connection of a worker's executor while it stands behind a virtual host."""
        return worker.executor.peer if worker.state is WorkerState.BOUND and worker.executor else None

    def relay_of(self, worker: Worker) -> WorkerId | None:
        """The worker whose supervisor is the relay of a worker's executor; None: it has none, or lost it."""
        relay = worker.executor.relay if worker.executor is not None else None
        behind = self._by_supervisor.get(relay) if relay is not None else None
        return behind.worker if behind is not None else None

    def hosts_behind(self, relay: PeerId, children: bytes) -> HostSelection:
        """The virtual hosts of live executors among children of a relay; the same object while nothing changes.

        Raises:
            ProtocolViolation: this is no relay.
        """
        selection = self._relays.selection(relay, children)
        if selection is None:
            found = map(self.host_of_executor, self._relays.executors_in(relay, children))
            selection = self._relays.remember(relay, children, [host for host in found if host is not None])
        return selection

    def failure_of(self, host: HostIndex) -> Status | None:
        """Why a virtual host is lost; None while it is not (or not certainly)."""
        return self.behind[host].failure if self.behind else None

    def bindings(self) -> tuple[HostBinding, ...]:
        """What stands behind each virtual host."""
        return tuple(
            HostBinding(HostIndex(host), None if worker.failure else worker.worker, worker.name, worker.failure)
            for host, worker in enumerate(self.behind)
        )

    def unix_s(self, now_ns: int) -> float:
        """The time of day at a time of the controller's clock, in seconds since 1970."""
        return (now_ns + self._wall_clock_offset_ns) / 1e9

    # what happens

    def start(self, now_ns: int, wall_clock_s: float) -> None:
        """The time of day, for messages."""
        self._last_tick_ns = self.started_ns = now_ns
        self._wall_clock_offset_ns = int(wall_clock_s * 1e9) - now_ns

    def register_worker(self, event: WorkerRegistered, out: list[Instruction]) -> None:
        """A supervisor is there. It starts its executor at once, so that a spare needs no time later."""
        known = self._workers.get(event.worker)
        if known is not None:
            is_or_was = "was lost and cannot come back" if known.state is WorkerState.LOST else "is there already"
            out.append(
                Refuse(event.peer, f"worker {event.worker} {is_or_was} (as {known.name}, pid {known.supervisor_pid})")
            )
            return
        if event.devices_per_host != self._topology.devices_per_host:
            reason = (
                f"{event.name} has {event.devices_per_host} devices; each host needs {self._topology.devices_per_host}"
            )
            out.append(Refuse(event.peer, reason))
            out.append(Announce("worker_refused", {"worker": event.worker, "name": event.name, "reason": reason}))
            return
        worker = Worker(event, epoch=1)
        self._workers[event.worker] = worker
        self._by_supervisor[event.peer] = worker
        self._last_heard_ns[event.peer] = event.now_ns
        self._relays.start_executor(event.worker, event.peer, worker.epoch, out)
        out.append(
            Announce("worker", {"worker": event.worker, "name": event.name, "pid": event.pid, "registered": True})
        )

    def relay_listens(self, event: RelayListening, out: list[Instruction]) -> None:
        """A supervisor has become a relay.

        Raises:
            ProtocolViolation: it was not told to.
        """
        self._relays.relay_listens(event.peer, event.address, out)

    def register_executor(self, event: ExecutorRegistered, out: list[Instruction]) -> list[Finding]:
        """An executor is there."""
        worker = self._workers.get(event.worker)
        if worker is None or worker.state is not WorkerState.STARTING or worker.epoch != event.epoch:
            out.append(Refuse(event.peer, f"no executor of epoch {event.epoch} of worker {event.worker} is expected"))
            return []
        topology = self._topology
        if (event.platform, event.num_devices) != (topology.platform, topology.devices_per_host):
            cause = (
                f"its executor has {event.num_devices} {event.platform} devices, "
                f"not {topology.devices_per_host} {topology.platform} devices"
            )
            out.append(Refuse(event.peer, cause))
            return self._lose(worker, cause, "", event.now_ns, out)
        if event.relay is not None:
            if not self._relays.is_relay(event.relay):
                out.append(Refuse(event.peer, "its relay is gone"))
                return []
            self._relays.add_child(event.relay, event.child, event.peer)
        worker.executor = event
        worker.state = WorkerState.SPARE if self.is_bound else WorkerState.READY
        self._by_executor[event.peer] = worker
        self._last_heard_ns[event.peer] = event.now_ns
        out.append(Announce("host_ready", {"worker": event.worker, "name": worker.name, "pid": event.pid}))
        return self._bind_when_complete(out)

    def heard_from(self, peer: PeerId, now_ns: int) -> None:
        """A supervisor or executor lives."""
        if peer in self._last_heard_ns:
            self._last_heard_ns[peer] = now_ns

    def close_peer(self, peer: PeerId, reason: str, now_ns: int, out: list[Instruction]) -> list[Finding]:
        """A connection is gone; nothing follows when it was no worker's, or its worker is lost already."""
        self._last_heard_ns.pop(peer, None)
        if (worker := self._by_supervisor.pop(peer, None)) is not None:
            worker.supervisor = None
            if worker.state is WorkerState.CLOSING:
                findings = self._lose(worker, worker.closing_cause, "", now_ns, out)
            else:
                findings = self._lose(worker, f"its supervisor's connection is gone ({reason})", "", now_ns, out)
            return findings + self._lose_children(worker, peer, reason, now_ns, out)
        if (worker := self._by_executor.pop(peer, None)) is not None:
            if worker.state in (WorkerState.LOST, WorkerState.CLOSING):
                return []
            cause = f"its executor's connection is gone ({reason})"
            if worker.supervisor is None:
                return self._lose(worker, cause, "", now_ns, out)
            worker.closing_cause, worker.verdict_due_ns = cause, now_ns + VERDICT_NS
            was_bound = worker.state is WorkerState.BOUND
            worker.state = WorkerState.CLOSING
            self._relays.forget_selections()
            return [HostClosing(worker.host)] if was_bound and worker.host is not None else []
        return []

    def exit_executor(self, event: ExecutorExited, out: list[Instruction]) -> list[Finding]:
        """A supervisor says how its executor ended."""
        worker = self._workers.get(event.worker)
        if worker is None or event.epoch != worker.epoch:
            return []
        return self._lose(worker, f"its executor {_ending(event.returncode)}", event.log_tail, event.now_ns, out)

    def pass_time(self, now_ns: int, out: list[Instruction]) -> list[Finding]:
        """Ends CLOSING that has got no word, and finds workers that are silent."""
        gap_ns = now_ns - self._last_tick_ns
        self._last_tick_ns = now_ns
        if gap_ns > self._heartbeat_timeout_ns // 2:
            # It was the controller that did not run; heartbeats may lie unread, so silence says nothing.
            for peer in self._last_heard_ns:
                self._last_heard_ns[peer] += gap_ns
        findings: list[Finding] = []
        for worker in self.workers():
            if worker.state is WorkerState.CLOSING and now_ns >= worker.verdict_due_ns:
                findings += self._lose(worker, worker.closing_cause, "", now_ns, out)
        oldest_ns = now_ns - self._heartbeat_timeout_ns
        for peer in [peer for peer, heard_ns in self._last_heard_ns.items() if heard_ns < oldest_ns]:
            owner = self._by_supervisor.get(peer) or self._by_executor[peer]
            part = "supervisor" if peer in self._by_supervisor else "executor"
            silence_s = (now_ns - self._last_heard_ns.pop(peer)) / 1e9
            silence = f"silent for {silence_s:.1f} s"
            findings += self._lose(owner, f"its {part} has been {silence}", "", now_ns, out)
            if peer in self._by_supervisor:
                findings += self._lose_children(owner, peer, silence, now_ns, out)
        return findings

    def check_invariants(self) -> None:
        """What must hold between events."""
        hosts = [worker.host for worker in self.behind]
        assert hosts == list(range(len(hosts)))
        assert not hosts or len(hosts) == self._topology.num_hosts
        for worker in self._workers.values():
            assert (worker.state is WorkerState.LOST) == (worker.failure is not None)
            if worker.state is WorkerState.BOUND:
                assert worker.host is not None and self.behind[worker.host] is worker
            if worker.state in (WorkerState.READY, WorkerState.BOUND, WorkerState.SPARE):
                assert worker.executor is not None and worker.executor.peer in self._by_executor

    def _bind_when_complete(self, out: list[Instruction]) -> list[Finding]:
        """Bind once all workers that can still come are ready: by worker id, so that hosts stand in Slurm's order."""
        if self.is_bound:
            return []
        num_lost = sum(worker.state in (WorkerState.LOST, WorkerState.CLOSING) for worker in self._workers.values())
        ready = [worker for worker in self.workers() if worker.state is WorkerState.READY]
        if len(ready) < self._topology.num_hosts or len(ready) < self._num_expected - num_lost:
            return []
        self.behind = ready[: self._topology.num_hosts]
        bound = []
        for place, worker in enumerate(self.behind):
            worker.host = HostIndex(place)
            worker.state = WorkerState.BOUND
            executor = worker.executor
            assert executor is not None
            bound.append(
                BoundExecutor(
                    worker.host, executor.peer, worker.worker, worker.name, executor.data_address, executor.host_key
                )
            )
            out.append(Announce("bound", {"host": worker.host, "worker": worker.worker, "name": worker.name}))
        for worker in ready[self._topology.num_hosts :]:
            worker.state = WorkerState.SPARE
        self._relays.forget_selections()
        out.append(BindExecutors(tuple(bound)))
        return [Bound()]

    def _lose_children(
        self, worker: Worker, supervisor: PeerId, reason: str, now_ns: int, out: list[Instruction]
    ) -> list[Finding]:
        """The executors that were reached through a supervisor are lost with it.

        Nobody waits for their supervisors' word, which would only say that they ended because they lost the connection.
        """
        findings: list[Finding] = []
        for peer in self._relays.close_supervisor(supervisor, out):
            child = self._by_executor.get(peer)
            if child is not None:
                cause = f"its relay, the supervisor of {worker.label()}, is gone ({reason})"
                findings += self._lose(child, cause, "", now_ns, out)
        return findings

    def _lose(self, worker: Worker, cause: str, log_tail: str, now_ns: int, out: list[Instruction]) -> list[Finding]:
        if worker.state is WorkerState.LOST:
            return []
        at = datetime.datetime.fromtimestamp(self.unix_s(now_ns), tz=datetime.UTC)
        message = f"{worker.label()} was lost at {at:%Y-%m-%d %H:%M:%S} UTC: {cause}"
        worker.failure = Status(Code.DATA_LOSS, message)
        worker.lost_cause = cause
        worker.lost_ns = now_ns
        worker.state = WorkerState.LOST
        self._relays.forget_selections()
        if worker.supervisor is not None:
            out.append(StopExecutor(worker.supervisor, worker.epoch))
        if worker.executor is not None and worker.executor.peer in self._by_executor:
            out.append(Refuse(worker.executor.peer, message))
        fields = {"host": worker.host, "worker": worker.worker, "name": worker.name, "reason": message, "cause": cause}
        out.append(
            Announce("host_lost" if worker.host is not None else "worker_lost", {**fields, "log_tail": log_tail})
        )
        if worker.host is not None:
            return [HostLost(worker.host, worker.name, worker.failure)]
        num_usable = self._num_expected - sum(w.state is WorkerState.LOST for w in self._workers.values())
        if not self.is_bound and num_usable < self._topology.num_hosts:
            out.append(
                Announce(
                    "failed", {"reason": f"{num_usable} workers remain for {self._topology.num_hosts} hosts: {message}"}
                )
            )
            return []
        return self._bind_when_complete(out)


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-returncode} ({name})"
