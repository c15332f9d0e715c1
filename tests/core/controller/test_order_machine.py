"""Random sessions, losses, returns of hosts and acknowledgements, against a second statement of the contract."""

from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.relay import Aggregation
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.controller_driver import SECOND_NS, Driver, Operation

NUM_HOSTS = 4
LIMIT = 3
#: No operation makes so many arrays.
FIRST_PROGRAM = 1_000_000
NO_ROOM = Status(Code.RESOURCE_EXHAUSTED, "no room")
host_sets = st.sets(st.integers(0, NUM_HOSTS - 1), min_size=1).map(lambda hosts: tuple(sorted(hosts)))


class OrderMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")
    options: ClassVar[dict[str, int]] = {}
    hosts_come_back: ClassVar[bool] = True

    @initialize()
    def start(self):
        # Nobody beats here, however long the machine waits.
        limits = {"max_launches_in_flight": LIMIT, "heartbeat_timeout_ns": 3600 * SECOND_NS}
        self.driver = Driver(Topology(2, 2, 1, "cpu"), **limits, **self.options).start()
        # By host: worker, epoch and connection of the executor that serves for it, or did so last.
        self.executor = {host: (host, 1, 1000 + host) for host in range(NUM_HOSTS)}
        # By worker: the epoch of the executor that its supervisor was told to start.
        self.starting = {}
        self.num_changes = 0
        # By host: the change by which it was lost last.
        self.lost_by = {}
        # By session: the changes that it has said it knows.
        self.aware = {}
        # By operation: hosts that it must not reach, whoever serves for them.
        self.barred = {}
        # Senders that were lost after they were sent a transfer.
        self.excused = set()
        # By program: how its last compilation ended, None until it has; and who was asked to compile it, unanswered.
        self.programs = {}
        self.asked = []
        self.submitted = {}
        self.next_op = {}
        self.next_handle = {}
        # What the machine knows by itself, from instructions only.
        self.place = {}
        self.in_flight = [0] * NUM_HOSTS
        self.started = set()
        self.lost = set()
        # Hosts whose connection is closed: nothing comes from them, even before they are declared lost.
        self.silent = set()
        self.abandoned = set()
        self.num_attached = 0

    def note(self, out):
        for instruction in out:
            if isinstance(instruction, ins.Dispatch):
                operation = instruction.submission
                key = (operation.session, operation.op_id)
                assert key not in self.place, f"{key} went out twice"
                self.place[key] = instruction.seq
                unreachable = self.lost | self.barred[key]
                assert instruction.group.hosts == tuple(h for h in operation.hosts if h not in unreachable)
                assert not (operation.writes and unreachable & set(operation.hosts))
                if operation.is_launch:
                    assert not unreachable & set(operation.hosts)
                    for host in instruction.group.hosts:
                        self.in_flight[host] += 1
                    for handle in operation.reads:
                        assert self.programs.get((operation.session, handle), "loaded") == "loaded"
                self.check_ready(operation)
            elif isinstance(instruction, ins.Substitute):
                key = (instruction.session, instruction.operation.op_id)
                assert not (self.lost | self.barred[key]) & set(instruction.group.hosts)
                self.abandoned.add(key)
                self.place.setdefault(key, instruction.seq)
            elif isinstance(instruction, ins.CompileMember):
                self.asked += [(peer, instruction.session, instruction.executable) for peer in instruction.peers]
            elif isinstance(instruction, ins.ReportCompiled):
                key = (instruction.session, instruction.executable)
                assert self.programs[key] is None, f"program {key} is reported twice"
                self.programs[key] = instruction.failure or "loaded"
            elif isinstance(instruction, ins.ChangeHost):
                self.num_changes += 1
                assert instruction.change == self.num_changes
                if instruction.worker is None:
                    self.note_loss(instruction.host)
                else:
                    self.lost.remove(instruction.host)
                    self.silent.discard(instruction.host)
                    self.in_flight[instruction.host] = 0
            elif isinstance(instruction, ins.StartExecutor):
                self.starting[instruction.peer - 10000] = instruction.epoch
            elif isinstance(instruction, ins.BindExecutors):
                for bound in instruction.executors:
                    epoch = (bound.peer - 1000) // 100_000 + 1
                    self.executor[bound.host] = (bound.worker, epoch, bound.peer)

    def note_loss(self, host):
        self.lost.add(host)
        self.lost_by[host] = self.num_changes
        for key, operation in self.submitted.items():
            if key not in self.place and host in operation.hosts:
                self.barred[key].add(host)
            elif host in operation.senders:
                self.excused.add((*key, host))

    def check_ready(self, operation):
        session, op_id = operation.session, operation.op_id
        earlier = [o for (s, n), o in self.submitted.items() if s == session and n < op_id]
        for other in earlier:
            touches = set(operation.reads) | set(operation.consumes) | set(operation.writes)
            changes = set(operation.consumes) | set(operation.writes)
            must_precede = touches & (set(other.writes) | set(other.consumes)) or changes & set(other.reads)
            if must_precede:
                assert (session, other.op_id) in self.place, f"{operation} went out before {other}"
        for transfer in operation.after_transfers:
            key = (session, transfer)
            assert key in self.place
            if key not in self.abandoned:
                for sender in self.submitted[key].senders:
                    start = (*key, sender)
                    assert start in self.started | self.excused or sender in self.lost | self.barred[key]

    @rule(target=sessions)
    def attach(self):
        self.num_attached += 1
        session = self.driver.attach(self.num_attached)
        assert session == self.num_attached
        self.next_op[session] = self.next_handle[session] = 1
        self.aware[session] = self.num_changes
        return session

    @rule(session=sessions, data=st.data())
    def see_changes(self, session, data):
        self.aware[session] = data.draw(st.integers(self.aware[session], self.num_changes), label="seen")
        self.note(self.driver.send(ev.HostChangesSeen(session, self.aware[session])))

    @rule(session=sessions, data=st.data())
    def submit(self, session, data):
        batch = []
        for _ in range(data.draw(st.integers(1, 4), label="operations")):
            op_id = self.next_op[session]
            self.next_op[session] += 1
            handles = list(range(1, self.next_handle[session]))
            some = st.lists(st.sampled_from(handles), max_size=3, unique=True) if handles else st.just([])
            reads = tuple(data.draw(some, label="reads"))
            programs = sorted(handle for s, handle in self.programs if s == session)
            if programs:
                reads += tuple(data.draw(st.lists(st.sampled_from(programs), max_size=1), label="program"))
            consumed = tuple(data.draw(some, label="consumes"))
            hosts = data.draw(host_sets, label="hosts")
            kind = data.draw(st.sampled_from(["launch", "transfer", "make", "delete"]), label="kind")
            has_results = kind != "delete" and (kind != "launch" or data.draw(st.booleans(), label="results"))
            writes = (self.next_handle[session],) if has_results else ()
            self.next_handle[session] += len(writes)
            transfers = [n for (s, n), o in self.submitted.items() if s == session and o.is_transfer]
            after = data.draw(st.lists(st.sampled_from(transfers), max_size=2, unique=True)) if transfers else []
            senders = tuple(h for h in hosts if data.draw(st.booleans(), label="sends")) if kind == "transfer" else ()
            operation = Operation(
                session,
                op_id,
                hosts,
                is_launch=kind == "launch",
                is_transfer=kind == "transfer",
                senders=senders,
                reads=reads,
                writes=writes,
                consumes=consumed,
                after_transfers=tuple(after),
            )
            self.submitted[session, op_id] = operation
            unknown = {host for host, change in self.lost_by.items() if change > self.aware[session]}
            self.barred[session, op_id] = (self.lost | unknown) & set(hosts)
            batch.append(operation)
        out = self.driver.send(ev.OperationsSubmitted(session, batch, self.driver.now_ns))
        assert not any(isinstance(i, ins.Refuse) for i in out)
        self.note(out)

    @rule(session=sessions, hosts=st.sampled_from([(0,), (2,), (0, 1), (2, 3)]))
    def compile(self, session, hosts):
        program = FIRST_PROGRAM + len(self.programs)
        self.programs[session, program] = None
        self.note(self.driver.send(ev.ProgramRequested(session, session, program, b"", b"", hosts, 0)))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), is_done=st.booleans())
    def answer_compilation(self, data, is_done):
        self.answer(data.draw(st.sampled_from(self.asked), label="who"), None if is_done else NO_ROOM)

    def answer(self, asked, failure):
        self.asked.remove(asked)
        peer, session, program = asked
        self.note(self.driver.send(ev.MemberCompiled(peer, session, program, "metadata", failure)))

    @rule(host=st.integers(0, NUM_HOSTS - 1), data=st.data())
    def complete(self, host, data):
        if host not in self.silent and self.completable(host):
            count = data.draw(st.integers(1, self.completable(host)), label="completed")
            self.acknowledge(host, count, ())

    def completable(self, host):
        return self.in_flight[host]

    @rule(data=st.data())
    def start_transfers(self, data):
        pending = self.pending_starts()
        if pending:
            session, op_id, host = data.draw(st.sampled_from(pending), label="started")
            self.acknowledge(host, 0, ((session, op_id),))

    def pending_starts(self):
        return [
            (*key, host)
            for key in self.place
            if key not in self.abandoned and (operation := self.submitted[key]).is_transfer
            for host in operation.senders
            if host not in self.silent | self.barred[key] and (*key, host) not in self.started | self.excused
        ]

    def settle(self):
        """Nothing that was acknowledged is on its way any more."""

    def acknowledge(self, host, count, transfers):
        self.in_flight[host] -= count
        self.started |= {(*key, host) for key in transfers}
        self.note(self.driver.send(ev.Acknowledged(self.executor[host][2], count, transfers)))

    @precondition(lambda self: len(self.silent) < NUM_HOSTS - 1)
    @rule(host=st.integers(0, NUM_HOSTS - 1), knows_why=st.booleans(), comes_back=st.booleans())
    def lose(self, host, knows_why, comes_back):
        if host in self.silent:
            return
        self.silent.add(host)
        worker, epoch, peer = self.executor[host]
        self.note(self.driver.send(ev.PeerClosed(peer, "closed", self.driver.now_ns)))
        if knows_why:
            self.note(self.driver.send(ev.ExecutorExited(worker, epoch, -11, "", self.driver.now_ns)))
            assert host in self.lost
            if comes_back and self.hosts_come_back:
                for started in sorted(self.starting):
                    self.start_of(started)

    @precondition(lambda self: self.hosts_come_back and self.starting)
    @rule(data=st.data())
    def start_executor(self, data):
        self.start_of(data.draw(st.sampled_from(sorted(self.starting)), label="worker"))

    def start_of(self, worker):
        """An executor comes, takes a lost host's place, and its slice is formed if it is complete now."""
        out = self.driver.register_executor(worker, self.starting.pop(worker))
        assert not any(isinstance(i, ins.Refuse) for i in out)
        self.note(out)
        for started in out:
            if isinstance(started, ins.StartCoordination):
                formed = self.driver.send(ev.CoordinationStarted(started.world, "somewhere"))
                self.note(formed)
                self.note(self.driver.form_members(formed))
        if not self.lost | self.silent:
            assert all(device["state"] in ("idle", "running") for device in self.driver.core.report(0)["devices"])

    @rule(host=st.integers(0, NUM_HOSTS - 1), data=st.data())
    def hear_of_a_former_executor(self, host, data):
        """What an executor that was given up still says has no effect."""
        _, epoch, peer = self.executor[host]
        if epoch > 1:
            former = data.draw(st.integers(1, epoch - 1), label="epoch")
            assert self.driver.send(ev.Acknowledged(peer - 100_000 * (epoch - former), 1, ())) == []

    @rule(seconds=st.sampled_from([0.25, 0.75]))
    def wait(self, seconds):
        self.note(self.driver.pass_time(seconds))

    @rule(session=consumes(sessions))
    def detach(self, session):
        self.note(self.driver.send(ev.SessionDetached(session, session)))
        self.submitted = {key: o for key, o in self.submitted.items() if key[0] != session or key in self.place}

    @invariant()
    def nobody_has_too_much_in_flight(self):
        if hasattr(self, "driver"):
            queues = self.driver.core.report(self.driver.now_ns)["queues"]
            for host in range(NUM_HOSTS):
                assert self.in_flight[host] <= LIMIT
                if host not in self.lost:
                    assert queues[host]["launches_in_flight"] == self.in_flight[host]

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        self.note(self.driver.pass_time(1.0))
        for _ in range(4 * len(self.submitted) + 4):
            if not self.driver.waiting():
                break
            for host in range(NUM_HOSTS):
                if host not in self.lost and self.completable(host):
                    self.acknowledge(host, self.completable(host), ())
            for session, op_id, host in self.pending_starts():
                self.acknowledge(host, 0, ((session, op_id),))
            for asked in list(self.asked):
                self.answer(asked, None)
            self.settle()
        assert self.driver.waiting() == {}, "something waits though everybody has done what was asked"
        attached = {entry["id"] for entry in self.driver.core.report(0)["sessions"]}
        assert {key for key in self.submitted if key[0] in attached} <= self.place.keys()
        for session in attached:
            self.note(self.driver.send(ev.HostChangesSeen(session, self.num_changes)))
        for session, op_id, host in self.pending_starts():
            self.acknowledge(host, 0, ((session, op_id),))
        while self.asked:
            self.answer(self.asked[0], None)
        self.settle()
        if not self.lost and not any(self.in_flight):
            self.driver.core.check_at_rest()
        orders = [[seq for seq, _ in self.driver.streams[host]] for host in range(NUM_HOSTS)]
        assert all(order == sorted(set(order)) for order in orders)


class RelayedOrderMachine(OrderMachine):
    """The same, and every executor is behind a relay, which adds up what it says; a relay may be lost too."""

    options: ClassVar[dict[str, int]] = {"relay_fanout": 2}
    hosts_come_back: ClassVar[bool] = False

    @initialize()
    def start(self):
        super().start()
        places = self.driver.places
        assert [places[host][0] for host in range(NUM_HOSTS)] == [10000, 10000, 10002, 10002]
        self.aggregations = {10000: Aggregation(), 10002: Aggregation()}
        for relay, child in places.values():
            self.aggregations[relay].add_child(child)
        # Said to the relay, not yet to the controller.
        self.untold = [0] * NUM_HOSTS
        self.untold_starts = set()

    def completable(self, host):
        return self.in_flight[host] - self.untold[host]

    def pending_starts(self):
        return [start for start in super().pending_starts() if start not in self.untold_starts]

    def acknowledge(self, host, count, transfers):
        relay, child = self.driver.places[host]
        self.aggregations[relay].acknowledge(child, count, transfers, now_ns=0)
        self.untold[host] += count
        self.untold_starts |= {(*key, host) for key in transfers}
        if self.aggregations[relay].is_due(now_ns=0):
            self.tell(relay)

    @rule(relay=st.sampled_from([10000, 10002]))
    def tell(self, relay):
        told = self.aggregations[relay].take()
        for host in range(NUM_HOSTS):
            if self.driver.places[host][0] == relay:
                if host not in self.silent:
                    self.in_flight[host] -= self.untold[host]
                    self.started |= {start for start in self.untold_starts if start[2] == host}
                self.untold[host] = 0
                self.untold_starts = {start for start in self.untold_starts if start[2] != host}
        if any(self.driver.places[host][0] == relay and host not in self.gone_relays for host in range(NUM_HOSTS)):
            out = self.driver.send(ev.ChildrenAcknowledged(relay, told.completed, told.transfers_started, told.ready))
            assert not any(isinstance(i, ins.Refuse) for i in out)
            self.note(out)

    def settle(self):
        for relay in self.aggregations:
            self.tell(relay)

    @property
    def gone_relays(self):
        """Hosts whose relay is gone."""
        return getattr(self, "_gone", set())

    @precondition(lambda self: not self.silent)
    @rule(relay=st.sampled_from([10000, 10002]))
    def lose_relay(self, relay):
        self._gone = {host for host in range(NUM_HOSTS) if self.driver.places[host][0] == relay}
        self.silent |= self._gone
        self.note(self.driver.send(ev.PeerClosed(relay, "gone", self.driver.now_ns)))
        assert self.lost == self._gone


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
OrderMachine.TestCase.settings = SETTINGS
RelayedOrderMachine.TestCase.settings = SETTINGS
TestOrderMachine = OrderMachine.TestCase
TestRelayedOrderMachine = RelayedOrderMachine.TestCase
