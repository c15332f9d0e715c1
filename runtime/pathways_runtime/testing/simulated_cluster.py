"""A whole runtime in one process: the real cores of controller and sessions, simulated workers and network."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence

from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.controller.core import ControllerCore
from pathways_runtime.core.controller.events import PeerId
from pathways_runtime.core.defaults import RELAY_FANOUT
from pathways_runtime.core.ids import HostIndex, OpId, SessionId, WaitId, WorkerId, WorldId
from pathways_runtime.core.operations import Operation
from pathways_runtime.core.session import events as sev
from pathways_runtime.core.session import instructions as sins
from pathways_runtime.core.status import Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.manual_clock import ManualClock
from pathways_runtime.testing.simulated_cells import Cell
from pathways_runtime.testing.simulated_client import SimulatedClient, SimulatedSubmit
from pathways_runtime.testing.simulated_executor import MoveKey, SimulatedExecutor
from pathways_runtime.testing.simulated_network import LONGEST_DELAY_NS, Network, Process
from pathways_runtime.testing.simulated_parts import SharedOperation
from pathways_runtime.testing.simulated_relay import Action, SimulatedRelay
from pathways_runtime.testing.simulated_reordering import Reordering
from pathways_runtime.testing.simulated_stages import stage_of
from pathways_runtime.testing.simulated_supervisor import SimulatedSupervisor
from pathways_runtime.testing.simulated_worlds import Member, SimulatedWorld

_FIRST_WORKER_PEER = 1_000_000

#: Events that leave it as it is who is there, and where.
_NOT_ABOUT_WORKERS = frozenset(
    (
        ev.CoordinationStarted,
        ev.MemberLeft,
        ev.ProgramRequested,
        ev.MemberCompiled,
        ev.SessionRequested,
        ev.SessionDetached,
        ev.HostChangesSeen,
        ev.OperationsSubmitted,
        ev.Acknowledged,
        ev.ChildrenAcknowledged,
        ev.MemberFailed,
    )
)

#: Processes show that they live at every so many calls of ``beat``, each a third of them.
_BEAT_EVERY = 3


class Stuck(AssertionError):
    """Nothing can happen any more, and something still waits."""


class _Connection:
    """A worker's process and the controller.

    Attributes:
        is_open: whether the controller's end is.
        relay, child: what stands between, and the number there.
    """

    __slots__ = ("child", "is_open", "process", "relay")

    def __init__(self, process: SimulatedExecutor | SimulatedSupervisor, relay: SimulatedRelay | None) -> None:
        self.process = process
        self.relay = relay
        self.child = relay.add_child(process) if relay is not None and isinstance(process, SimulatedExecutor) else 0
        self.is_open = True


class SimulatedCluster:
    """The same seed gives the same run.

    Args:
        num_spares: workers beyond the topology's hosts.
        reordering: hosts that break the order on purpose: they let launches of one session overtake another's.
        check_every: check all invariants after every so many events, besides each that begins a stage of a recovery.
        relay_fanout: up to so many hosts are reached directly, more through relays.
        how_often_stuck: how often a program does not end although its world is over, so that its process must.
        observe: called with each instruction of the controller that begins a stage of a recovery, and the stage, before
            it is performed.

    Attributes:
        supervisors: by worker, the newest process of each.
        lost_hosts: hosts that sessions were told are lost, with the first failure of each.
        down_hosts: those of them that nobody serves for at present.
        num_checks: how often all invariants were checked.
    """

    def __init__(
        self,
        seed: int,
        num_slices: int,
        hosts_per_slice: int,
        devices_per_host: int = 1,
        *,
        num_spares: int = 0,
        num_absent_slices: int = 0,
        reordering: Sequence[HostIndex] = (),
        check_every: int = 50,
        max_launches_in_flight: int = 24,
        relay_fanout: int = RELAY_FANOUT,
        heartbeat_timeout_ns: int = 3_000_000_000,
        how_often_stuck: float = 0.0,
        observe: Callable[[str, ins.Instruction], None] = lambda stage, instruction: None,
    ) -> None:
        self.topology = Topology(num_slices, hosts_per_slice, devices_per_host, "simulated")
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.network = Network(self.clock, self.rng)
        self.core = ControllerCore(
            self.topology,
            num_spares,
            heartbeat_timeout_ns,
            max_launches_in_flight=max_launches_in_flight,
            relay_fanout=relay_fanout,
            num_absent_slices=num_absent_slices,
        )
        self.controller = Process("controller", "controller")
        self.observe = observe
        self.how_often_stuck = how_often_stuck
        self.clients: list[SimulatedClient] = []
        self.supervisors: dict[WorkerId, SimulatedSupervisor] = {}
        self.worlds: dict[WorldId, SimulatedWorld] = {}
        self.lost_hosts: dict[HostIndex, Status] = {}
        self.down_hosts: set[HostIndex] = set()
        self.num_dispatched = 0
        self.num_checks = 0
        self._connections: dict[PeerId, _Connection] = {}
        self._bound: dict[HostIndex, SimulatedExecutor] = {}
        self._clients: dict[SessionId, SimulatedClient] = {}
        self._reordering = dict.fromkeys(reordering)
        self._reorderings: dict[HostIndex, Reordering] = {}
        self._check_every = check_every
        self._num_events = 0
        self._num_beats = 0
        #: Whether there was an event about workers since the last check.
        self._have_workers_changed = True
        #: What the instructions of one event send through each relay, and what they tell each executor of others.
        self._relayed: dict[SimulatedRelay, list[tuple[SimulatedExecutor, Action]]] = {}
        self._news_of_peers: dict[PeerId, list[Callable[[SimulatedExecutor], None]]] = {}
        self._is_ready = False
        self.tell(ev.Started(0, 0.0))
        for worker in range((num_slices - num_absent_slices) * hosts_per_slice + num_spares):
            self.start_supervisor(WorkerId(worker))
            # One after the other, so that it is the first of a group that becomes its relay.
            self.clock.run(self.clock.now_ns + LONGEST_DELAY_NS)
        self.clock.run()
        assert self._is_ready

    # workers

    def start_supervisor(self, worker: WorkerId, companion: str = "") -> None:
        """A worker's supervisor begins, and introduces itself; one that was there before has ended."""
        former = self.supervisors.get(worker)
        assert former is None or former.is_dead
        supervisor = SimulatedSupervisor(worker, self._new_peer(), self.clock, self.rng, self)
        self.supervisors[worker] = supervisor
        self._connections[supervisor.peer] = _Connection(supervisor, None)
        registered = ev.WorkerRegistered(
            supervisor.peer,
            worker,
            f"node-{worker}",
            worker,
            self.topology.devices_per_host,
            self.clock.now_ns,
            companion,
        )
        self._to_controller(supervisor.peer, lambda: self.tell(registered))

    def new_executor(self, worker: WorkerId, epoch: int, relay: SimulatedRelay | None) -> SimulatedExecutor:
        """A supervisor has started an executor, which introduces itself."""
        executor = SimulatedExecutor(worker, epoch, self._new_peer(), self.topology, self.clock, self.rng, self)
        connection = self._connections[executor.peer] = _Connection(executor, relay)
        platform = (self.topology.platform, "version", "kind", self.topology.devices_per_host)
        place = (None, 0) if relay is None else (relay.supervisor, connection.child)

        def register() -> None:
            self.tell(
                ev.ExecutorRegistered(
                    executor.peer, worker, epoch, worker, "", "", *platform, self.clock.now_ns, *place
                )
            )

        self._to_controller(executor.peer, register)
        return executor

    def executor_ended(self, executor: SimulatedExecutor, is_silent: bool) -> None:
        """Its connection is closed, and its supervisor sees it end."""
        if not is_silent:
            self._close(executor.peer)
            self.supervisors[executor.worker].executor_ended(executor)

    def supervisor_ended(self, supervisor: SimulatedSupervisor, is_silent: bool) -> None:
        """Its connection is closed."""
        if not is_silent:
            self._close(supervisor.peer)

    def relays(self) -> list[SimulatedRelay]:
        """Those that live, by the worker whose supervisor each is."""
        found = (self.supervisors[worker] for worker in sorted(self.supervisors))
        return [s.relay for s in found if s.relay is not None and not s.is_dead]

    def executors(self) -> Iterator[SimulatedExecutor]:
        """Those that live, by worker."""
        for worker in sorted(self.supervisors):
            executor = self.supervisors[worker].executor
            if executor is not None and not executor.is_dead:
                yield executor

    def lose_worker(self, worker: WorkerId) -> None:
        """A worker's processes are gone, now, and with them, soon, the executors that it is the relay of."""
        supervisor = self.supervisors[worker]
        supervisor.end()
        if supervisor.executor is not None:
            supervisor.executor.end()

    def take_back(self, worker: WorkerId) -> None:
        """A worker that was lent says so, and ends; nothing, if it has ended."""
        supervisor = self.supervisors[worker]
        if not supervisor.is_dead:
            self.tell_of_supervisor(supervisor, ev.WorkerLeaving(supervisor.peer, "taken back", self.clock.now_ns))
            supervisor.end()

    # clients

    def add_client(self, name: str) -> SimulatedClient:
        """A client whose session is open."""
        client = SimulatedClient(name, self.topology, random.Random(self.rng.random()), self)
        self.clients.append(client)
        self.tell(ev.SessionRequested(self._peer(client), name, 0, name, self.clock.now_ns))
        assert client.session, "the cluster is not ready"
        return client

    def detach(self, client: SimulatedClient) -> None:
        """A client is gone."""
        self._from_client(client, lambda: ev.SessionDetached(self._peer(client), client.session))

    def submit(self, client: SimulatedClient, submit: SimulatedSubmit) -> None:
        self._from_client(client, lambda: ev.OperationsSubmitted(self._peer(client), (submit,), self.clock.now_ns))

    def see_changes(self, client: SimulatedClient, change: int) -> None:
        self._from_client(client, lambda: ev.HostChangesSeen(self._peer(client), change))

    def compile(self, client: SimulatedClient, told: sins.CompileProgram) -> None:
        what = told.executable, told.program, told.options, told.devices
        self._from_client(
            client, lambda: ev.ProgramRequested(self._peer(client), client.session, *what, self.clock.now_ns)
        )

    def send_host_buffer(
        self, client: SimulatedClient, executor: SimulatedExecutor, op_id: OpId, index: int, value: int
    ) -> None:
        receive = functools.partial(executor.receive_host_buffer, client.session, op_id, index, value)
        self.network.link(client, executor, "session").send(receive)

    # executors

    def world(self, world: WorldId) -> SimulatedWorld:
        return self.worlds[world]

    def open_link(self, executor: SimulatedExecutor, session: SessionId, change: int) -> None:
        client = self._clients[session]
        self._to_proxy(executor, client, lambda: client.link_opened(executor, change))

    def send_shard(
        self, source: SimulatedExecutor, target: SimulatedExecutor, key: MoveKey, cell: Cell, on_way: Action
    ) -> None:
        def leave() -> None:
            target.note_on_way(source, key)
            on_way()

        deliver = functools.partial(target.receive_shard, key, cell.value, cell.failure)
        self.network.link(source, target, "data").send(deliver, leave)

    def acknowledge(
        self, executor: SimulatedExecutor, launches: int, transfers: tuple[tuple[SessionId, OpId], ...]
    ) -> None:
        connection = self._connections[executor.peer]
        if connection.relay is None:
            self.tell_controller(executor, ev.Acknowledged(executor.peer, launches, transfers))
        else:
            connection.relay.acknowledge(connection.child, executor, launches, transfers)

    def arrays_ready(
        self, executor: SimulatedExecutor, session: SessionId, wait_id: WaitId, failure: Status | None
    ) -> None:
        client, connection = self._clients[session], self._connections[executor.peer]
        if connection.relay is None or failure is not None:
            ready = sev.ArraysReady(wait_id, executor.host, failure)
            self._to_proxy(executor, client, lambda: client.from_link(executor, lambda: client.feed(ready)))
        else:
            connection.relay.arrays_ready(connection.child, executor, session, wait_id)

    def fetched(
        self,
        executor: SimulatedExecutor,
        session: SessionId,
        wait_id: WaitId,
        value: int | None,
        failure: Status | None,
    ) -> None:
        client, host = self._clients[session], executor.host

        def arrive() -> None:
            client.from_link(executor, lambda: client.fetched(wait_id, host, value, failure))

        self._to_proxy(executor, client, arrive)

    def tell_controller(self, executor: SimulatedExecutor, event: ev.PeerEvent) -> None:
        self._to_controller(executor.peer, lambda: self.tell(event))

    def tell_of_supervisor(self, supervisor: SimulatedSupervisor, event: ev.Event) -> None:
        self._to_controller(supervisor.peer, lambda: self.tell(event))

    # running

    def run(self) -> None:
        """Let everything happen that can happen.

        Raises:
            WrongValue: an order was broken. Stuck: a request is not answered, or an operation never went out.
        """
        self.clock.run()
        self.check_nothing_waits()

    def check_nothing_waits(self) -> None:
        """All that was asked is answered, and all that was submitted went out.

        Raises:
            Stuck: it is not so.
        """
        self.check_invariants()
        waiting = self.core.report(self.clock.now_ns)["waiting"]
        unanswered = [f"{c.name}: {what}" for c in self.clients for what, _ in c.open_requests.values()]
        if waiting or unanswered:
            queues = {e.name: e.describe() for e in self.executors() if e.describe() != "nothing queued"}
            raise Stuck(
                f"unanswered: {unanswered[:5]}; held: {waiting[:5]}; executors: {dict(list(queues.items())[:5])}"
            )
        for client in self.clients:
            assert client.num_undispatched == 0, f"{client.name} was not told that everything went out"

    def check_invariants(self) -> None:
        """What must hold between events, in the controller and in all sessions."""
        self.num_checks += 1
        self.core.check_invariants(of_workers=self._have_workers_changed)
        self._have_workers_changed = False
        for client in self.clients:
            client.check_invariants()

    def beat(self) -> None:
        """Every process that lives says so at each third call, and the controller looks who did not."""
        now_ns, controller = self.clock.now_ns, self.controller
        has_cuts, is_cut, connections = self.network.has_cuts, self.network.is_cut, self._connections
        self._num_beats += 1
        turn = self._num_beats % _BEAT_EVERY
        heard = []
        for peer in range(_FIRST_WORKER_PEER + turn, _FIRST_WORKER_PEER + len(connections), _BEAT_EVERY):
            connection = connections[PeerId(peer)]
            process, relay = connection.process, connection.relay
            if not connection.is_open or process.is_dead or (relay is not None and relay.is_dead):
                continue
            if has_cuts and is_cut(process, relay or controller):
                continue
            if has_cuts and relay is not None and is_cut(relay, controller):
                continue
            heard.append(PeerId(peer))
        self.core.handle(ev.HeartbeatsReceived(heard, now_ns))
        self.tell(ev.TimePassed(now_ns))

    def tell(self, event: ev.Event) -> None:
        """Something happens to the controller, now."""
        is_stage = False
        self._have_workers_changed = self._have_workers_changed or type(event) not in _NOT_ABOUT_WORKERS
        for instruction in self.core.handle(event):
            stage = stage_of(instruction)
            if stage is not None:
                is_stage = True
                self.observe(stage, instruction)
            self._perform(instruction)
        self._flush()
        self._num_events += 1
        if is_stage or self._num_events % self._check_every == 0:
            self.check_invariants()

    def _perform(self, instruction: ins.Instruction) -> None:
        match instruction:
            case ins.Dispatch(seq, group, submission):
                assert isinstance(submission, SimulatedSubmit)
                self.num_dispatched += 1
                self._start_on(group.hosts, seq, submission.session, submission.operation)
            case ins.Substitute(seq, group, session, operation):
                self._start_on(group.hosts, seq, session, operation)
            case ins.ReportDispatched(_, session, count):
                client = self._clients[session]
                self._to_client(client, functools.partial(client.dispatched, count))
            case ins.ReportFailed(_, session, op_id, handles, failure):
                self._feed(session, sev.OperationFailed(op_id, handles, failure))
            case ins.ReportCompiled(_, session, executable, devices, failure):
                client = self._clients[session]
                self._to_client(client, functools.partial(client.compiled, executable, devices, failure))
            case ins.ReportReady(_, session, wait_id, hosts):
                self._feed(session, sev.ReadyOnHosts(wait_id, hosts))
            case ins.ChangeHost(host, _, _, failure):
                if failure is not None:
                    self.lost_hosts.setdefault(host, failure)
                    self.down_hosts.add(host)
                else:
                    self.down_hosts.discard(host)
                for client in self.clients:
                    self._to_client(client, functools.partial(client.host_changed, instruction))
            case ins.AcceptSession(peer, session, hosts, _, _, max_undispatched):
                client = self._clients[session] = self.clients[peer - 1]
                losses = {b.host: b.failure for b in hosts if b.failure is not None}
                client.attached(session, max_undispatched, losses)
            case ins.EndSession(_, session):
                client = self._clients[session]
                self._to_client(client, client.ended)
            case ins.CompileMember():
                self._to_executors(instruction.peers, lambda e: functools.partial(e.load, instruction))
            case ins.OpenSession(peers, session, name, change):
                client = next(client for client in self.clients if client.name == name)
                self._clients[session] = client
                self._to_executors(peers, lambda e: functools.partial(e.open_session, session, change))
            case ins.CloseSession(peers, session):
                self._to_executors(peers, lambda e: functools.partial(e.close_session, session))
            case ins.BindExecutors(executors, everybody):
                all_peers = {b.host: self._executor(b.peer) for b in everybody}
                for bound in executors:
                    executor = self._bound[bound.host] = self._executor(bound.peer)
                    self._to_process(bound.peer, functools.partial(executor.bind, bound.host, all_peers))
            case ins.LosePeers(peers, lost):
                self._add_news(peers, lambda e: e.lose_peers(lost))
            case ins.ReplacePeer(peers, bound):
                replacement = self._executor(bound.peer)
                self._add_news(peers, lambda e: e.replace_peer(bound.host, replacement))
            case ins.StartCoordination(world, num_members):
                self._world(world, num_members)
                self.clock.call_later(0, functools.partial(self._start_coordination, world))
            case ins.StopCoordination(world):
                self.worlds[world].stop(self._is_known)
            case ins.FormMember(peer, world, _, _, hosts):
                self._world(world, len(hosts)).hosts = hosts
                self._to_process(peer, functools.partial(self._executor(peer).form, world))
            case ins.LeaveWorld(peers, world, _):
                self._to_executors(peers, lambda e: functools.partial(e.leave_world, world))
            case ins.StartRelay(peer):
                self._to_process(peer, functools.partial(self._start_relay, self._supervisor(peer)))
            case ins.StartExecutor(peer, epoch, relay_address):
                relay = self._supervisor(PeerId(int(relay_address))).relay if relay_address else None
                self._to_process(peer, functools.partial(self._supervisor(peer).start_executor, epoch, relay))
            case ins.StopExecutor(peer, epoch):
                self._to_process(peer, functools.partial(self._supervisor(peer).stop_executor, epoch))
            case ins.Refuse(peer, reason):
                assert peer >= _FIRST_WORKER_PEER, f"a client is refused: {reason}"
                self._refuse(peer)
            case ins.Announce(what, _):
                self._is_ready = self._is_ready or what == "ready"
            case _:
                raise TypeError(f"nobody performs {instruction!r}")

    def _start_on(self, hosts: tuple[HostIndex, ...], seq: int, session: SessionId, operation: Operation) -> None:
        shared, relayed = SharedOperation(operation, self.topology), self._relayed
        for host in hosts:
            executor = self._bound[host]
            start: Action = functools.partial(executor.start, seq, session, shared)
            if host in self._reordering:
                reordering = self._reorderings.setdefault(host, Reordering(executor, self.clock))
                start = functools.partial(reordering.start, session, shared)
            connection = self._connections[executor.peer]
            assert connection.is_open, f"an operation is dispatched to {executor.name}, which was given up"
            if executor.peer in self._news_of_peers:
                self._tell_news(executor.peer)
            if connection.relay is None:
                self.network.link(self.controller, executor).send(start)
            else:
                relayed.setdefault(connection.relay, []).append((executor, start))

    # worlds

    def _world(self, world: WorldId, num_members: int) -> SimulatedWorld:
        if world not in self.worlds:
            self.worlds[world] = SimulatedWorld(world, num_members, self.clock, self.rng, self.topology.host_of)
        return self.worlds[world]

    def _start_coordination(self, world: WorldId) -> None:
        self.worlds[world].start()
        self.tell(ev.CoordinationStarted(world, "somewhere"))

    def _is_known(self, member: Member) -> bool:
        assert isinstance(member, SimulatedExecutor)
        return self._connections[member.peer].is_open

    # connections of workers

    def _new_peer(self) -> PeerId:
        return PeerId(_FIRST_WORKER_PEER + len(self._connections))

    def _executor(self, peer: PeerId) -> SimulatedExecutor:
        process = self._connections[peer].process
        assert isinstance(process, SimulatedExecutor)
        return process

    def _supervisor(self, peer: PeerId) -> SimulatedSupervisor:
        process = self._connections[peer].process
        assert isinstance(process, SimulatedSupervisor)
        return process

    def _start_relay(self, supervisor: SimulatedSupervisor) -> None:
        assert supervisor.relay is None, f"{supervisor.name} is told twice to be a relay"
        peer = supervisor.peer

        def send(what: Action | ev.ChildrenAcknowledged) -> None:
            # A connection that is closed brings nothing more.
            if self._connections[peer].is_open:
                if isinstance(what, ev.ChildrenAcknowledged):
                    self.tell(what)
                else:
                    what()

        supervisor.relay = SimulatedRelay(supervisor.node, peer, self.clock, self.network, self.controller, send)
        self.tell_of_supervisor(supervisor, ev.RelayListening(peer, str(peer)))

    def _to_controller(self, peer: PeerId, action: Action) -> None:
        connection = self._connections[peer]

        def arrive() -> None:
            if connection.is_open:
                action()

        if connection.relay is not None:
            assert isinstance(connection.process, SimulatedExecutor)
            connection.relay.forward(connection.process, arrive)
        else:
            self.network.link(connection.process, self.controller).send(arrive)

    def _close(self, peer: PeerId) -> None:
        """A process has ended: the kernel closes its connection behind what it has sent."""
        connection = self._connections[peer]

        def arrive() -> None:
            if connection.is_open:
                connection.is_open = False
                self.tell(ev.PeerClosed(peer, "gone", self.clock.now_ns))

        if connection.relay is not None:
            assert isinstance(connection.process, SimulatedExecutor)
            connection.relay.child_closed(connection.child, connection.process, arrive)
        else:
            self.network.link(connection.process, self.controller).send(arrive)

    def _refuse(self, peer: PeerId) -> None:
        connection = self._connections[peer]
        if connection.is_open:
            self._to_process(peer, connection.process.end)
            connection.is_open = False
            self.clock.call_later(0, lambda: self.tell(ev.PeerClosed(peer, "refused", self.clock.now_ns)))

    def _to_process(self, peer: PeerId, action: Action) -> None:
        if peer in self._news_of_peers:
            self._tell_news(peer)
        self._send(peer, action)

    def _add_news(self, peers: tuple[PeerId, ...], news: Callable[[SimulatedExecutor], None]) -> None:
        for peer in peers:
            self._news_of_peers.setdefault(peer, []).append(news)

    def _tell_news(self, peer: PeerId) -> None:
        self._send(peer, functools.partial(_learn, self._executor(peer), self._news_of_peers.pop(peer)))

    def _send(self, peer: PeerId, action: Action) -> None:
        connection = self._connections[peer]
        if not connection.is_open:
            return
        if connection.relay is not None:
            assert isinstance(connection.process, SimulatedExecutor)
            self._relayed.setdefault(connection.relay, []).append((connection.process, action))
        else:
            self.network.link(self.controller, connection.process).send(action)

    def _flush(self) -> None:
        """What one event makes the controller say goes out: to each relay at once, and about peers to each executor."""
        for peer in list(self._news_of_peers):
            self._tell_news(peer)
        if self._relayed:
            relayed, self._relayed = self._relayed, {}
            for relay, deliveries in relayed.items():
                relay.pass_on(deliveries)

    def _to_executors(self, peers: tuple[PeerId, ...], action_of: Callable[[SimulatedExecutor], Action]) -> None:
        for peer in peers:
            self._to_process(peer, action_of(self._executor(peer)))

    # connections of proxies

    def _to_proxy(self, executor: SimulatedExecutor, client: SimulatedClient, deliver: Action) -> None:
        self.network.link(executor, client, "session").send(deliver)

    def _to_client(self, client: SimulatedClient, deliver: Action) -> None:
        self.network.link(self.controller, client).send(deliver)

    def _feed(self, session: SessionId, event: sev.Event) -> None:
        client = self._clients[session]
        self._to_client(client, functools.partial(client.feed, event))

    def _from_client(self, client: SimulatedClient, event: Callable[[], ev.Event]) -> None:
        self.network.link(client, self.controller).send(lambda: self.tell(event()))

    def _peer(self, client: SimulatedClient) -> PeerId:
        return PeerId(self.clients.index(client) + 1)


def _learn(executor: SimulatedExecutor, news: list[Callable[[SimulatedExecutor], None]]) -> None:
    for tell in news:
        tell(executor)
