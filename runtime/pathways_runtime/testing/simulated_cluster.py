"""A whole runtime in one process: the real cores of controller and sessions, simulated executors and network."""

import functools
import random
from collections.abc import Callable, Sequence

from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.controller.core import ControllerCore
from pathways_runtime.core.controller.events import PeerId
from pathways_runtime.core.controller.relays import RELAY_FANOUT
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, SessionId, WaitId, WorkerId
from pathways_runtime.core.operations import Launch, Operation
from pathways_runtime.core.session import events as sev
from pathways_runtime.core.session import instructions as sins
from pathways_runtime.core.status import Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.manual_clock import ManualClock
from pathways_runtime.testing.simulated_client import Mesh, SimulatedClient, SimulatedSubmit
from pathways_runtime.testing.simulated_executor import Cell, Communicator, MoveKey, SimulatedExecutor
from pathways_runtime.testing.simulated_network import Network
from pathways_runtime.testing.simulated_relay import SimulatedRelay

_LONGEST_REORDERING_NS = 500_000
_COMPILE_NS = 200_000
#: How long executors go on after their relay is gone.
_LONGEST_ENDING_NS = 200_000
_FIRST_EXECUTOR = 1_000_000
_FIRST_SUPERVISOR = 2_000_000


class Stuck(AssertionError):
    """Nothing can happen any more, and something still waits."""


class SimulatedCluster:
    """The same seed gives the same run.

    Args:
        reordering: hosts that break the order on purpose: they let launches of one session overtake another's.
        check_every: check the controller's invariants after every so many events.
        relay_fanout: up to so many hosts are reached directly, more through relays.
    """

    def __init__(
        self,
        seed: int,
        num_slices: int,
        hosts_per_slice: int,
        devices_per_host: int = 1,
        *,
        reordering: Sequence[HostIndex] = (),
        check_every: int = 50,
        max_launches_in_flight: int = 24,
        relay_fanout: int = RELAY_FANOUT,
    ) -> None:
        self.topology = Topology(num_slices, hosts_per_slice, devices_per_host, "simulated")
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.network = Network(self.clock, self.rng)
        self.core = ControllerCore(
            self.topology, max_launches_in_flight=max_launches_in_flight, relay_fanout=relay_fanout
        )
        self.clients: list[SimulatedClient] = []
        self.lost_hosts: dict[HostIndex, Status] = {}
        self.num_dispatched = 0
        self.executors = [
            SimulatedExecutor(HostIndex(host), self.topology, self.clock, self.rng, self)
            for host in range(self.topology.num_hosts)
        ]
        #: By the host where each runs.
        self.relays: dict[HostIndex, SimulatedRelay] = {}
        #: The relay that each host is reached through; None: directly.
        self._relay_of: list[SimulatedRelay | None] = [None] * self.topology.num_hosts
        self._communicators: dict[Mesh, Communicator] = {}
        self._sent: set[MoveKey] = set()
        self._clients: dict[SessionId, SimulatedClient] = {}
        self._reordering = {host: _Reordering(self.executors[host], self.clock) for host in reordering}
        self._check_every = check_every
        self._num_events = 0
        self._start()

    def _start(self) -> None:
        self._tell(ev.Started(0, 0.0))
        topology = self.topology
        for host in range(topology.num_hosts):
            supervisor, worker = PeerId(_FIRST_SUPERVISOR + host), WorkerId(host)
            self._tell(ev.WorkerRegistered(supervisor, worker, f"node-{host}", host, topology.devices_per_host, 0))
        for host in range(topology.num_hosts):
            executor = PeerId(_FIRST_EXECUTOR + host)
            platform = (topology.platform, "version", "kind", topology.devices_per_host)
            relay = self._relay_of[host]
            place = (None, 0) if relay is None else (relay.supervisor, relay.add_child(HostIndex(host)))
            self._tell(ev.ExecutorRegistered(executor, WorkerId(host), 1, host, "", "", *platform, 0, *place))
        self.clock.run()

    # clients

    def add_client(self, name: str) -> SimulatedClient:
        """A client whose session is open."""
        client = SimulatedClient(name, self.topology, random.Random(self.rng.random()), self)
        self.clients.append(client)
        peer = PeerId(len(self.clients))
        for instruction in self.core.handle(ev.SessionRequested(peer, name, 0, "", self.clock.now_ns)):
            if isinstance(instruction, ins.AcceptSession):
                client.attached(instruction.session, instruction.max_undispatched)
                self._clients[instruction.session] = client
        assert client.session, "the cluster is not ready"
        return client

    def submit(self, client: SimulatedClient, submit: SimulatedSubmit) -> None:
        self._to_controller(client.name, ev.OperationsSubmitted(self._peer(client), (submit,), self.clock.now_ns))

    def compile(self, client: SimulatedClient, told: sins.CompileProgram) -> None:
        requested = ev.ProgramRequested(
            self._peer(client),
            client.session,
            told.executable,
            told.program,
            told.options,
            told.devices,
            self.clock.now_ns,
        )
        self._to_controller(client.name, requested)

    def send_host_buffer(
        self, client: SimulatedClient, op_id: OpId, index: int, hosts: tuple[HostIndex, ...], value: int
    ) -> None:
        for host in hosts:
            receive = self.executors[host].receive_host_buffer
            link = self.network.link("links", client.name, str(host))
            link.send(functools.partial(receive, client.session, op_id, index, value))

    # executors

    def communicator(self, devices: tuple[DeviceId, ...]) -> Communicator:
        communicator = self._communicators.get(devices)
        if communicator is None:
            hosts = self.topology.hosts_of(devices)
            communicator = self._communicators[devices] = Communicator(hosts)
            if not self.lost_hosts.keys().isdisjoint(hosts):
                communicator.break_off()
        return communicator

    def send_shard(self, source: HostIndex, target: HostIndex, key: MoveKey, cell: Cell) -> None:
        if not self.executors[source].is_lost:
            self._sent.add(key)
            receive = self.executors[target].receive_shard
            self.network.link("data", str(source), str(target)).send(
                functools.partial(receive, key, cell.value, cell.failure)
            )

    def is_sent(self, key: MoveKey) -> bool:
        return key in self._sent

    def acknowledge(self, host: HostIndex, launches: int, transfers: tuple[tuple[SessionId, OpId], ...]) -> None:
        relay = self._relay_of[host]
        if relay is None:
            self._from_executor(host, ev.Acknowledged(PeerId(_FIRST_EXECUTOR + host), launches, transfers))
        elif not self.executors[host].is_lost:
            relay.acknowledge(host, launches, transfers)

    def report_failed(
        self, host: HostIndex, session: SessionId, op_id: OpId, handles: tuple[Handle, ...], failure: Status
    ) -> None:
        self._from_executor(host, ev.MemberFailed(PeerId(_FIRST_EXECUTOR + host), session, op_id, handles, failure))

    def arrays_ready(self, host: HostIndex, session: SessionId, wait_id: WaitId, failure: Status | None) -> None:
        client, relay = self._clients[session], self._relay_of[host]
        if relay is None or failure is not None:
            self._to_proxy(host, client, lambda: client.feed(sev.ArraysReady(wait_id, host, failure)))
        elif not self.executors[host].is_lost:
            relay.arrays_ready(host, session, wait_id)

    def fetched(
        self, host: HostIndex, session: SessionId, wait_id: WaitId, value: int | None, failure: Status | None
    ) -> None:
        client = self._clients[session]
        self._to_proxy(host, client, lambda: client.fetched(wait_id, host, value, failure))

    def lose_host(self, host: HostIndex) -> None:
        """A host is gone, now: nothing comes from it any more, and its supervisor is gone too.

        If that is a relay, executors behind it end when they notice.
        """
        self.executors[host].is_lost = True
        own, relay = self.relays.get(host), self._relay_of[host]
        if own is not None:
            own.is_lost = True
            for child in own.children:
                end = functools.partial(setattr, self.executors[child], "is_lost", True)
                self.clock.call_later(self.rng.randrange(_LONGEST_ENDING_NS), end)
        elif relay is not None:
            relay.remove_child(host)
        peers = [PeerId(_FIRST_SUPERVISOR + host)]
        if own is None or own is not relay:
            peers.insert(0, PeerId(_FIRST_EXECUTOR + host))
        for peer in peers:
            self._tell(ev.PeerClosed(peer, "gone", self.clock.now_ns))

    # running

    def run(self) -> None:
        """Let everything happen that can happen.

        Raises:
            WrongValue: an order was broken. Stuck: a request is not answered, or an operation never went out.
        """
        self.clock.run()
        self.core.check_invariants()
        waiting = self.core.report(self.clock.now_ns)["waiting"]
        unanswered = [f"{c.name}: {what}" for c in self.clients for what, _ in c.open_requests.values()]
        if waiting or unanswered:
            queues = {h: e.describe() for h, e in enumerate(self.executors) if e.describe() != "nothing queued"}
            raise Stuck(
                f"unanswered: {unanswered[:5]}; held: {waiting[:5]}; executors: {dict(list(queues.items())[:5])}"
            )
        for client in self.clients:
            assert client.num_undispatched == 0, f"{client.name} was not told that everything went out"

    def _tell(self, event: ev.Event) -> None:
        for instruction in self.core.handle(event):
            self._perform(instruction)
        self._num_events += 1
        if self._num_events % self._check_every == 0:
            self.core.check_invariants()

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
                self._from_controller(client, functools.partial(client.dispatched, count))
            case ins.ReportFailed(_, session, op_id, handles, failure):
                client = self._clients[session]
                self._from_controller(
                    client, functools.partial(client.feed, sev.OperationFailed(op_id, handles, failure))
                )
            case ins.ReportCompiled(_, session, executable, devices, failure):
                client = self._clients[session]
                self._from_controller(client, functools.partial(client.compiled, executable, devices, failure))
            case ins.CompileMember():
                for peer in instruction.peers:
                    self._compile_on(HostIndex(peer - _FIRST_EXECUTOR), instruction)
            case ins.StartCoordination(world, _):
                self.clock.call_later(0, lambda: self._tell(ev.CoordinationStarted(world, "somewhere")))
            case ins.FormMember(peer, world, _, _, _):
                host = HostIndex(peer - _FIRST_EXECUTOR)
                self._to_executor(
                    host, lambda: self._from_executor(host, ev.MemberFormed(peer, world, None, self.clock.now_ns))
                )
            case ins.ChangeHost(host, _, name, failure):
                assert failure is not None
                self._note_loss(host, failure)
                for client in self.clients:
                    changed = sev.HostChanged(host, False, name, failure)
                    self._from_controller(client, functools.partial(client.feed, changed))
            case ins.CloseSession(peers, session):
                for peer in peers:
                    executor = self.executors[peer - _FIRST_EXECUTOR]
                    self._to_executor(
                        HostIndex(peer - _FIRST_EXECUTOR), functools.partial(executor.close_session, session)
                    )
            case ins.ReportReady(_, session, wait_id, hosts):
                client = self._clients[session]
                self._from_controller(client, functools.partial(client.feed, sev.ReadyOnHosts(wait_id, hosts)))
            case ins.StartRelay(peer):
                host = HostIndex(peer - _FIRST_SUPERVISOR)
                self.relays[host] = SimulatedRelay(host, peer, self.clock, self.network, self._tell)
                self._tell(ev.RelayListening(peer, str(host)))
            case ins.StartExecutor(peer, _, relay_address):
                if relay_address:
                    self._relay_of[peer - _FIRST_SUPERVISOR] = self.relays[HostIndex(int(relay_address))]
            case ins.Refuse(peer, reason):
                host = HostIndex(peer - _FIRST_EXECUTOR)
                relay = self._relay_of[host] if 0 <= host < len(self.executors) else None
                assert host >= 0 and (self.executors[host].is_lost or (relay is not None and relay.is_lost)), reason
            case (
                ins.StopExecutor()
                | ins.BindExecutors()
                | ins.LosePeer()
                | ins.ReplacePeer()
                | ins.LeaveWorld()
                | ins.OpenSession()
                | ins.EndSession()
                | ins.StopCoordination()
                | ins.Announce()
            ):
                pass
            case _:
                raise TypeError(f"nobody performs {instruction!r}")

    def _start_on(self, hosts: tuple[HostIndex, ...], seq: int, session: SessionId, operation: Operation) -> None:
        relayed: dict[HostIndex, dict[HostIndex, Callable[[], None]]] = {}
        for host in hosts:
            start: Callable[[], None] = functools.partial(self.executors[host].start, seq, session, operation)
            if (reordering := self._reordering.get(host)) is not None:
                start = functools.partial(reordering.start, session, operation)
            relay = self._relay_of[host]
            if relay is None:
                self._to_executor(host, start)
            else:
                relayed.setdefault(relay.host, {})[host] = start
        for relay_host, starts in relayed.items():
            self.relays[relay_host].pass_on(starts)

    def _compile_on(self, host: HostIndex, told: ins.CompileMember) -> None:
        def load() -> None:
            self.executors[host].load(told.session, told.executable, told.program, told.devices)
            peer = PeerId(_FIRST_EXECUTOR + host)
            # The devices stand in for the metadata, which only the client reads.
            compiled = ev.MemberCompiled(peer, told.session, told.executable, told.devices, None)
            self._from_executor(host, compiled)

        self._to_executor(host, lambda: self.clock.call_later(self.rng.randrange(_COMPILE_NS), load))

    def _note_loss(self, host: HostIndex, failure: Status) -> None:
        self.lost_hosts[host] = failure
        for devices, communicator in self._communicators.items():
            if host in self.topology.hosts_of(devices):
                communicator.break_off()
        for executor in self.executors:
            executor.lose_peer(host, failure)

    # links; a lost host neither sends nor receives

    def _to_controller(self, sender: str, event: ev.Event) -> None:
        self.network.link(sender, "controller").send(functools.partial(self._tell, event))

    def _from_executor(self, host: HostIndex, event: ev.PeerEvent) -> None:
        if self.executors[host].is_lost:
            return
        relay = self._relay_of[host]
        if relay is None:
            self._to_controller(str(host), event)
        else:
            relay.forward(host, event)

    def _to_executor(self, host: HostIndex, deliver: Callable[[], None]) -> None:
        relay = self._relay_of[host]
        if relay is not None:
            relay.pass_on({host: deliver})
        elif not self.executors[host].is_lost:
            self.network.link("controller", str(host)).send(deliver)

    def _to_proxy(self, host: HostIndex, client: SimulatedClient, deliver: Callable[[], None]) -> None:
        if not self.executors[host].is_lost:
            self.network.link("links", str(host), client.name).send(deliver)

    def _from_controller(self, client: SimulatedClient, deliver: Callable[[], None]) -> None:
        self.network.link("controller", client.name).send(deliver)

    def _peer(self, client: SimulatedClient) -> PeerId:
        return PeerId(self.clients.index(client) + 1)


class _Reordering:
    """Keeps a launch, and what its session sends behind it, until another session's launch has overtaken it."""

    def __init__(self, executor: SimulatedExecutor, clock: ManualClock) -> None:
        self._executor = executor
        self._clock = clock
        self._kept: list[tuple[SessionId, Operation]] = []
        self._num_started = 0

    def start(self, session: SessionId, operation: Operation) -> None:
        """What the executor's ``start`` is in good times."""
        if not self._kept:
            if isinstance(operation, Launch):
                self._kept = [(session, operation)]
                self._clock.call_later(_LONGEST_REORDERING_NS, functools.partial(self._let_go, self._kept))
            else:
                self._start(session, operation)
        elif session == self._kept[0][0]:
            self._kept.append((session, operation))
        else:
            self._start(session, operation)
            if isinstance(operation, Launch):
                self._let_go(self._kept)

    def _let_go(self, kept: list[tuple[SessionId, Operation]]) -> None:
        if kept is self._kept:
            self._kept = []
            for session, operation in kept:
                self._start(session, operation)

    def _start(self, session: SessionId, operation: Operation) -> None:
        # Numbers ascend all the same: the executor must not notice.
        self._num_started += 1
        self._executor.start(self._num_started, session, operation)
