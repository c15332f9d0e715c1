"""Workers: who is there, which virtual host each stands behind, and who is lost, when and why."""

import datetime
import signal
from collections.abc import Iterable

import msgspec

from pathways_runtime.core.controller.events import (
    ExecutorExited,
    ExecutorRegistered,
    PeerId,
    RelayListening,
    WorkerLeaving,
    WorkerRegistered,
)
from pathways_runtime.core.controller.host_groups import HostSelection
from pathways_runtime.core.controller.instructions import (
    Announce,
    BindExecutors,
    BoundExecutor,
    HostBinding,
    Instruction,
    LosePeers,
    Refuse,
    ReplacePeer,
    StopExecutor,
)
from pathways_runtime.core.controller.relays import Relays
from pathways_runtime.core.controller.workers import Host, Loss, Worker, WorkerState
from pathways_runtime.core.defaults import RELAY_FANOUT
from pathways_runtime.core.ids import HostIndex, WorkerId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology

#: How long a closed executor connection waits for its supervisor's word of how the executor ended.
VERDICT_NS = 500_000_000
#: How long an executor may take to register; the first of a worker may have to load all its code from a slow file
#: system, as may those of all other workers at that time.
START_TIMEOUT_NS = 120_000_000_000
FIRST_START_TIMEOUT_NS = 600_000_000_000
#: How long a lost host waits for the next executor of the same worker, if arrays are in memory there, before a spare
#: takes its place without them. A fresh Python with JAX takes about a second, and many times that on a busy machine.
RETURN_NS = 30_000_000_000


class Bound(msgspec.Struct, frozen=True):
    """Every virtual host has an executor now, but for those of absent slices."""

    absent: tuple[HostIndex, ...] = ()


class HostClosing(msgspec.Struct, frozen=True):
    """The host is lost; HostLost follows within ``VERDICT_NS``."""

    host: HostIndex


class HostLost(msgspec.Struct, frozen=True):
    """The host is lost for ``failure``. If it ``had_served``, nobody has been told that it is down.

    What was in its memory ``may_return`` with the worker's next executor.
    """

    host: HostIndex
    name: str
    failure: Status
    had_served: bool
    may_return: bool = False


class HostJoining(msgspec.Struct, frozen=True):
    """A worker is ready to take the place of one that was lost."""

    host: HostIndex


Finding = Bound | HostClosing | HostLost | HostJoining


class Membership:
    """Methods append to ``out`` and return what the rest of the controller must know.

    Args:
        num_spares: workers beyond the topology's hosts that are expected.
        heartbeat_timeout_ns: silence after which a worker counts as lost.
        relay_fanout: see ``relays.RelayPlan``.
        num_absent_slices: of the topology, the last ones, which begin without workers. Spares beyond ``num_spares``
            fill them, a slice at a time.
    """

    def __init__(
        self,
        topology: Topology,
        num_spares: int,
        heartbeat_timeout_ns: int,
        relay_fanout: int = RELAY_FANOUT,
        num_absent_slices: int = 0,
    ) -> None:
        self._topology = topology
        present = msgspec.structs.replace(topology, num_slices=topology.num_slices - num_absent_slices)
        self._relays = Relays(present, relay_fanout)
        self._num_present = present.num_hosts
        self._num_spares = num_spares
        self._num_expected = present.num_hosts + num_spares
        self._heartbeat_timeout_ns = heartbeat_timeout_ns
        self._workers: dict[WorkerId, Worker] = {}
        self._by_supervisor: dict[PeerId, Worker] = {}
        self._by_executor: dict[PeerId, Worker] = {}
        self._last_heard_ns: dict[PeerId, int] = {}
        #: Workers of which something must come in time: STARTING and CLOSING ones.
        self._awaited: set[WorkerId] = set()
        self._last_tick_ns = 0
        self._wall_clock_offset_ns = 0
        self.started_ns = 0
        #: The virtual hosts; empty until bound.
        self.hosts: list[Host] = []
        #: Lost hosts in whose memory arrays are, and until when they wait for the next executor there.
        self._returning: dict[HostIndex, int] = {}
        #: Every loss there was, in order.
        self.losses: list[Loss] = []

    # what is known

    @property
    def is_bound(self) -> bool:
        """Whether every virtual host was given an executor, but for those of absent slices."""
        return bool(self.hosts)

    def workers(self) -> list[Worker]:
        """All workers that ever registered, by id."""
        return [self._workers[worker] for worker in sorted(self._workers)]

    def host_of_executor(self, peer: PeerId) -> HostIndex | None:
        """The virtual host of the live executor on a connection; None when it has none."""
        worker = self._by_executor.get(peer)
        return worker.host if worker is not None and worker.state is WorkerState.BOUND else None

    def executor_peer(self, host: HostIndex) -> PeerId | None:
        """The connection of the live executor that serves for a virtual host."""
        return self.member_peer(host) if self.hosts[host].failure is None else None

    def member_peer(self, host: HostIndex) -> PeerId | None:
        """The connection of the live executor that serves for a virtual host, or is about to."""
        worker = self.hosts[host].member
        return worker.executor.peer if worker is not None and worker.executor else None

    def live_executors(self) -> tuple[PeerId, ...]:
        """The connections of all live executors that serve for a virtual host."""
        return tuple(peer for host in self.hosts if (peer := self.executor_peer(host.index)) is not None)

    def any_executor(self) -> ExecutorRegistered:
        """What some executor said of itself: they have all the same devices."""
        return next(worker.executor for worker in self.workers() if worker.executor is not None)

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
        """Why nobody serves for a virtual host; None while somebody does (or is not certainly lost)."""
        return self.hosts[host].failure if self.hosts else None

    def is_joining(self, host: HostIndex) -> bool:
        """Whether a worker is about to serve for a virtual host that was lost."""
        return self.hosts[host].is_joining

    def bindings(self) -> tuple[HostBinding, ...]:
        """What stands behind each virtual host."""
        return tuple(
            HostBinding(host.index, None, "" if host.worker is None else host.worker.name, host.failure)
            if host.failure is not None or host.worker is None
            else HostBinding(host.index, host.worker.worker, host.worker.name, None)
            for host in self.hosts
        )

    def is_absent(self, host: HostIndex) -> bool:
        """Whether nobody has ever stood behind a host, or is about to."""
        return self.hosts[host].worker is None

    def unix_s(self, now_ns: int) -> float:
        """The time of day at a time of the controller's clock, in seconds since 1970."""
        return (now_ns + self._wall_clock_offset_ns) / 1e9

    # what happens

    def start(self, now_ns: int, wall_clock_s: float) -> None:
        """The time of day, for messages."""
        self._last_tick_ns = self.started_ns = now_ns
        self._wall_clock_offset_ns = int(wall_clock_s * 1e9) - now_ns

    def register_worker(self, event: WorkerRegistered, out: list[Instruction]) -> None:
        """A supervisor is there. It starts its executor at once, so that a spare needs no time later.

        One that takes the place of a lost supervisor has the worker's id.
        """
        known = self._workers.get(event.worker)
        if known is not None and (known.state is not WorkerState.LOST or known.supervisor is not None):
            reason = f"worker {event.worker} is there already (as {known.name}, pid {known.supervisor_pid})"
            out.append(Refuse(event.peer, reason))
            return
        if event.devices_per_host != self._topology.devices_per_host:
            refused, needed = Worker(event), self._topology.devices_per_host
            reason = f"{refused.place()} has {event.devices_per_host} devices; each host needs {needed}"
            out.append(Refuse(event.peer, reason))
            fields = {"worker": event.worker, "name": event.name, "reason": reason}
            out.append(Announce("worker_refused", fields | refused.whose()))
            return
        if known is None:
            worker = self._workers[event.worker] = Worker(event)
        else:
            worker = known
            worker.register(event)
            worker.begin(event.now_ns)
        self._awaited.add(event.worker)
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
        self._awaited.discard(event.worker)
        worker.retains_memory = bool(event.retained)
        worker.state = WorkerState.SPARE if self.is_bound else WorkerState.READY
        self._by_executor[event.peer] = worker
        self._last_heard_ns[event.peer] = event.now_ns
        fields = {"worker": event.worker, "name": worker.name, "pid": event.pid}
        out.append(Announce("host_ready", fields | worker.whose()))
        if self.is_bound:
            return self._fill_hosts(out)
        return self._bind_when_complete(out)

    def retain_memory(self, peer: PeerId, is_used: bool) -> None:
        """Whether a worker has arrays in memory that outlives its executor has changed."""
        if (worker := self._by_executor.get(peer)) is not None:
            worker.retains_memory = is_used

    def retained_in_vain(self, executor: ExecutorRegistered) -> bool:
        """Whether a registered executor has arrays of a host that it does not stand behind."""
        worker = self._by_executor.get(executor.peer)
        return bool(executor.retained) and worker is not None and worker.host != executor.retained_host

    def restore(self, host: HostIndex, now_ns: int, out: list[Instruction]) -> Host:
        """A host that was joining serves from now on."""
        restored = self.hosts[host]
        worker, lost = restored.worker, restored.loss
        assert restored.is_joining and worker is not None
        restored.failure, restored.is_joining = None, False
        for loss in self.losses:
            if loss.host == host and loss.served_again_ns is None:
                loss.served_again_ns, loss.served_again_by = now_ns, worker.place()
        self._relays.forget_selections()
        fields = {"host": host, "worker": worker.worker, "name": worker.name}
        if lost is None:
            out.append(Announce("host_there", fields | worker.whose()))
            return restored
        fields |= {"lost_worker": lost.worker, **worker.whose()}
        out.append(Announce("host_back", {**fields, "took_s": round((now_ns - lost.at_ns) / 1e9, 3)}))
        return restored

    def heard_from(self, peers: Iterable[PeerId], now_ns: int) -> None:
        """Supervisors and executors live."""
        last_heard_ns = self._last_heard_ns
        for peer in peers:
            if peer in last_heard_ns:
                last_heard_ns[peer] = now_ns

    def close_peer(self, peer: PeerId, reason: str, now_ns: int, out: list[Instruction]) -> list[Finding]:
        """A connection is gone; nothing follows when it was no worker's, or its worker is lost already."""
        heard_ns = self._last_heard_ns.pop(peer, now_ns)
        if (worker := self._by_supervisor.pop(peer, None)) is not None:
            worker.supervisor, worker.last_heard_ns = None, heard_ns
            if worker.state is WorkerState.CLOSING:
                findings = self._lose(worker, worker.closing_cause, "", now_ns, out)
            else:
                findings = self._lose(worker, f"its supervisor's connection is gone ({reason})", "", now_ns, out)
            return findings + self._lose_children(worker, peer, reason, now_ns, out)
        if (worker := self._by_executor.pop(peer, None)) is not None:
            worker.last_heard_ns = heard_ns
            if worker.state is WorkerState.CLOSING:
                return []
            cause = f"its executor's connection is gone ({reason})"
            if worker.supervisor is None:
                return self._lose(worker, cause, "", now_ns, out)
            worker.closing_cause, worker.verdict_due_ns = cause, now_ns + VERDICT_NS
            served = worker.state is WorkerState.BOUND and worker.host is not None and not self.failure_of(worker.host)
            worker.state = WorkerState.CLOSING
            self._awaited.add(worker.worker)
            self._relays.forget_selections()
            return [HostClosing(worker.host)] if served and worker.host is not None else []
        return []

    def exit_executor(self, event: ExecutorExited, out: list[Instruction]) -> list[Finding]:
        """A supervisor says how its executor ended."""
        worker = self._workers.get(event.worker)
        if worker is None or event.epoch != worker.epoch or worker.state is WorkerState.LOST:
            return []
        return self._lose(worker, f"its executor {_ending(event.returncode)}", event.log_tail, event.now_ns, out)

    def leave(self, event: WorkerLeaving, out: list[Instruction]) -> list[Finding]:
        """A worker that was lent goes, and its executor with it."""
        worker = self._by_supervisor.get(event.peer)
        if worker is None:
            return []
        worker.is_leaving = True
        return self._lose(worker, event.reason, "", event.now_ns, out)

    def pass_time(self, now_ns: int, out: list[Instruction]) -> list[Finding]:
        """Ends CLOSING that has got no word, and finds workers that are silent, and executors that do not come."""
        gap_ns = now_ns - self._last_tick_ns
        self._last_tick_ns = now_ns
        if gap_ns > self._heartbeat_timeout_ns // 2:
            # It was the controller that did not run; what was sent may lie unread, so silence says nothing.
            for peer in self._last_heard_ns:
                self._last_heard_ns[peer] += gap_ns
            for worker in self._workers.values():
                worker.begun_ns += gap_ns
                worker.verdict_due_ns += gap_ns
            for host in self._returning:
                self._returning[host] += gap_ns
        findings: list[Finding] = []
        if self._returning and (late := [host for host, due_ns in self._returning.items() if due_ns <= now_ns]):
            for host in late:
                del self._returning[host]
            findings += self._fill_hosts(out)
        for worker in [self._workers[worker] for worker in sorted(self._awaited)]:
            if worker.state is WorkerState.CLOSING and now_ns >= worker.verdict_due_ns:
                findings += self._lose(worker, worker.closing_cause, "", now_ns, out)
            elif worker.state is WorkerState.STARTING and worker.supervisor is not None:
                timeout_ns = FIRST_START_TIMEOUT_NS if worker.epoch == 1 else START_TIMEOUT_NS
                if now_ns - worker.begun_ns >= timeout_ns:
                    cause = f"its executor has not registered within {timeout_ns // 1_000_000_000} s"
                    findings += self._lose(worker, cause, "", now_ns, out)
        oldest_ns = now_ns - self._heartbeat_timeout_ns
        for peer in [peer for peer, heard_ns in self._last_heard_ns.items() if heard_ns < oldest_ns]:
            if peer not in self._last_heard_ns:
                # It was given up with one that was silent too.
                continue
            owner = self._by_supervisor.get(peer) or self._by_executor[peer]
            part = "supervisor" if peer in self._by_supervisor else "executor"
            owner.last_heard_ns = self._last_heard_ns.pop(peer)
            silence_s = (now_ns - owner.last_heard_ns) / 1e9
            silence = f"silent for {silence_s:.1f} s"
            cause = f"its {part} has been {silence}"
            if peer in self._by_supervisor:
                # It may be cut off, and come back: then it must begin anew.
                del self._by_supervisor[peer]
                owner.supervisor = None
                out.append(Refuse(peer, f"{owner.label()}: {cause}"))
                # Whoever started it can kill it, and start another.
                out.append(Announce("supervisor_stuck", {"worker": owner.worker, "name": owner.name}))
                findings += self._lose(owner, cause, "", now_ns, out)
                findings += self._lose_children(owner, peer, silence, now_ns, out)
            else:
                findings += self._lose(owner, cause, "", now_ns, out)
        return findings

    def check_invariants(self) -> None:
        """What must hold between events."""
        hosts = [host.index for host in self.hosts]
        assert hosts == list(range(len(hosts)))
        assert not hosts or len(hosts) == self._topology.num_hosts
        # Thousands are bound, and simulations check again and again.
        bound, closing, by_executor = WorkerState.BOUND, WorkerState.CLOSING, self._by_executor
        num_spares = 0
        awaited = set()
        for worker in self._workers.values():
            state, executor = worker.state, worker.executor
            if state is bound:
                assert worker.failure is None and worker.host is not None and self.hosts[worker.host].worker is worker
                assert executor is not None and executor.peer in by_executor
                continue
            assert (state is WorkerState.LOST) == (worker.failure is not None)
            if state in (WorkerState.STARTING, closing):
                awaited.add(worker.worker)
            elif state is not WorkerState.LOST:
                assert executor is not None and executor.peer in by_executor
                num_spares += state is WorkerState.SPARE
        assert awaited == self._awaited
        for host in self.hosts:
            its = host.worker
            if host.failure is None:
                assert not host.is_joining and its is not None
                state = its.state
                assert state is bound or state is closing
            else:
                assert host.loss is not None or host.index >= self._num_present
                assert not host.is_joining or (its is not None and its.host == host.index)
        assert not num_spares or not self._to_fill(num_spares)

    def _bind_when_complete(self, out: list[Instruction]) -> list[Finding]:
        """Bind once all workers that can still come are ready: by worker id, so that hosts stand in Slurm's order."""
        # Every executor that lives is READY before that; where they are too few, nobody needs to be counted.
        if self.is_bound or len(self._by_executor) < self._num_present:
            return []
        num_lost = sum(worker.state in (WorkerState.LOST, WorkerState.CLOSING) for worker in self._workers.values())
        ready = [worker for worker in self.workers() if worker.state is WorkerState.READY]
        if len(ready) < self._num_present or len(ready) < self._num_expected - num_lost:
            return []
        for place, worker in enumerate(ready[: self._num_present]):
            self.hosts.append(Host(HostIndex(place), worker))
            self._bind(worker, HostIndex(place), out)
        absent = tuple(map(HostIndex, range(self._num_present, self._topology.num_hosts)))
        for index in absent:
            host = Host(index, None)
            its_slice = self._topology.slice_of_host(index)
            message = (
                f"no worker stands behind host {index}: slice {its_slice} is absent until there are workers for it"
            )
            host.failure = Status(Code.DATA_LOSS, message)
            self.hosts.append(host)
        for worker in ready[self._num_present :]:
            worker.state = WorkerState.SPARE
        self._relays.forget_selections()
        executors = self._bound_executors()
        out.append(BindExecutors(executors, executors))
        return [Bound(absent)]

    def _to_fill(self, num_spares: int) -> list[Host]:
        """The hosts that so many spares are for."""
        missing = [
            host
            for host in self.hosts
            if host.failure is not None and not host.is_joining and not self._is_awaited(host)
        ]
        hosts = [host for host in missing if host.index < self._num_present][:num_spares]
        # A slice that is absent is no loss: it is filled as a whole, by what is not kept for losses.
        num_left = num_spares - len(hosts) - self._num_spares
        for slice_index in range(self._num_present // self._topology.hosts_per_slice, self._topology.num_slices):
            of_slice = [host for host in missing if self._topology.slice_of_host(host.index) == slice_index]
            if len(of_slice) <= num_left:
                hosts += of_slice
                num_left -= len(of_slice)
        return hosts

    def _fill_hosts(self, out: list[Instruction]) -> list[Finding]:
        """Give lost hosts a worker, as far as there are any: preferably the one that stood there before.

        For that one a host waits, while its memory is there and it may come back.
        """
        findings: list[Finding] = []
        spares = [worker for worker in self.workers() if worker.state is WorkerState.SPARE]
        hosts = self._to_fill(len(spares)) if spares else []
        for place, host in enumerate(hosts):
            # Losses come first, and get who was there first; slices that were absent get the newest, in their order.
            any_spare = spares[0 if host.index < self._num_present else place - len(hosts)]
            worker = host.worker if host.worker in spares else any_spare
            spares.remove(worker)
            host.worker, host.is_joining = worker, True
            self._returning.pop(host.index, None)
            self._bind(worker, host.index, out)
            self._relays.forget_selections()
            everybody = self._bound_executors()
            (its_own,) = (bound for bound in everybody if bound.host == host.index)
            out.append(BindExecutors((its_own,), everybody))
            others = tuple(bound.peer for bound in everybody if bound is not its_own)
            out.append(ReplacePeer(others, its_own))
            findings.append(HostJoining(host.index))
        return findings

    def _is_awaited(self, host: Host) -> bool:
        """Whether no other worker is to take the place of the lost one, as that one may come back with its memory."""
        worker = host.worker
        return (
            host.index in self._returning
            and worker is not None
            and worker.retains_memory
            and worker.state is WorkerState.STARTING
        )

    @staticmethod
    def _bind(worker: Worker, host: HostIndex, out: list[Instruction]) -> None:
        worker.host = host
        worker.state = WorkerState.BOUND
        out.append(Announce("bound", {"host": host, "worker": worker.worker, "name": worker.name}))

    def _bound_executors(self) -> tuple[BoundExecutor, ...]:
        bound = []
        for host in self.hosts:
            worker = host.member
            executor = worker.executor if worker is not None else None
            if worker is not None and executor is not None:
                where = executor.data_address, executor.host_key
                bound.append(BoundExecutor(host.index, executor.peer, worker.worker, worker.name, *where))
        return tuple(bound)

    def _lose_children(
        self, worker: Worker, supervisor: PeerId, reason: str, now_ns: int, out: list[Instruction]
    ) -> list[Finding]:
        """The executors that were reached through a supervisor are lost with it.

        Nobody waits for their supervisors' word, which would only say that they ended because they lost the connection.
        """
        cause = f"its relay, the supervisor of {worker.label()}, is gone ({reason})"
        behind = map(self._by_executor.get, self._relays.close_supervisor(supervisor, out))
        return self._lose_together([child for child in behind if child is not None], cause, "", now_ns, out)

    def _lose(self, worker: Worker, cause: str, log_tail: str, now_ns: int, out: list[Instruction]) -> list[Finding]:
        return self._lose_together([worker], cause, log_tail, now_ns, out)

    def _lose_together(
        self, workers: list[Worker], cause: str, log_tail: str, now_ns: int, out: list[Instruction]
    ) -> list[Finding]:
        """Workers are lost for one cause. Who is left is told of all of them at once."""
        workers = [worker for worker in workers if worker.state is not WorkerState.LOST]
        if not workers:
            return []
        lost = [self._lose_one(worker, cause, log_tail, now_ns, out) for worker in workers]
        findings = [finding for finding in lost if finding is not None]
        if findings:
            peers = tuple(peer for host in self.hosts if (peer := self.member_peer(host.index)) is not None)
            out.append(LosePeers(peers, tuple((finding.host, finding.failure) for finding in findings)))
        if self.is_bound:
            for worker, finding in zip(workers, lost, strict=True):
                self._try_again(worker, finding is not None and finding.had_served, now_ns, out)
            return [*findings, *self._fill_hosts(out)]
        num_usable = self._num_expected - sum(w.state is WorkerState.LOST for w in self._workers.values())
        if num_usable < self._num_present:
            last = workers[-1].failure
            assert last is not None
            reason = f"{num_usable} workers remain for {self._num_present} hosts: {last.message}"
            out.append(Announce("failed", {"reason": reason}))
            return []
        return self._bind_when_complete(out)

    def _lose_one(
        self, worker: Worker, cause: str, log_tail: str, now_ns: int, out: list[Instruction]
    ) -> HostLost | None:
        at = datetime.datetime.fromtimestamp(self.unix_s(now_ns), tz=datetime.UTC)
        its_slice = (
            f", and with it slice {self._topology.slice_of_host(worker.host)}" if worker.host is not None else ""
        )
        message = f"{worker.label()} was lost at {at:%Y-%m-%d %H:%M:%S} UTC{its_slice}: {cause}"
        failure = worker.failure = Status(Code.DATA_LOSS, message)
        worker.state = WorkerState.LOST
        self._awaited.discard(worker.worker)
        host_index = worker.host
        loss = Loss(worker.worker, worker.name, host_index, cause, now_ns, companion=worker.companion)
        # A spare that goes as it came is missed by nobody.
        has_left = worker.is_leaving and host_index is None
        if not has_left:
            self.losses.append(loss)
        self._relays.forget_selections()
        if worker.supervisor is not None:
            out.append(StopExecutor(worker.supervisor, worker.epoch))
        if worker.executor is not None:
            # What is on its way from it is nobody's any more.
            heard_ns = self._last_heard_ns.pop(worker.executor.peer, None)
            if worker.last_heard_ns is None:
                worker.last_heard_ns = heard_ns
            if self._by_executor.pop(worker.executor.peer, None) is not None:
                out.append(Refuse(worker.executor.peer, message))
        loss.silent_ns = now_ns - worker.last_heard_ns if worker.last_heard_ns is not None else None
        fields = {"host": host_index, "worker": worker.worker, "name": worker.name, "reason": message, "cause": cause}
        how = {"found_after_s": loss.found_after_s, "log_tail": log_tail, **worker.whose()}
        what = "host_lost" if host_index is not None else "worker_left" if has_left else "worker_lost"
        out.append(Announce(what, {**fields, **how}))
        if host_index is None:
            return None
        host = self.hosts[host_index]
        had_served, host.is_joining = host.failure is None, False
        host.failure = failure
        if had_served or host.loss is None:
            host.loss = loss
        may_return = worker.retains_memory and worker.supervisor is not None and not has_left
        if may_return:
            self._returning[host_index] = now_ns + RETURN_NS
        else:
            self._returning.pop(host_index, None)
        return HostLost(host_index, worker.name, failure, had_served, may_return)

    def _try_again(self, worker: Worker, had_served: bool, now_ns: int, out: list[Instruction]) -> None:
        """Have a lost worker's supervisor, if it is there, start another executor; it will be a spare."""
        is_worth_it = worker.count_life(had_served, now_ns)
        if worker.supervisor is None or worker.is_leaving:
            return
        if not is_worth_it:
            fields = {"worker": worker.worker, "name": worker.name, "num_executors": worker.num_short_lives}
            out.append(Announce("worker_given_up", fields))
            return
        worker.begin(now_ns)
        self._awaited.add(worker.worker)
        self._relays.start_executor(worker.worker, worker.supervisor, worker.epoch, out)


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    hint = ", perhaps by the kernel for want of memory" if -returncode == signal.SIGKILL else ""
    return f"was killed by signal {-returncode} ({name}){hint}"
