"""Executors whose values are integers, and whose collectives meet in the order of each host's stream, as gloo's do.

A shard is one integer. Programs are ``F(x) = sum over all shards`` and ``G(x) = 3 * F(x)``, on every device of a mesh,
modulo ``MODULUS``. Two hosts that start F and G in different orders put their contributions together wrongly and get
wrong numbers, without any error: that is what the simulation looks for.

A transfer is said to have started once nothing but the receiver's end can keep its shards from arriving. Real senders
say it as soon as they send: if they are lost before all has left, a gang of which one member lacks its argument makes
nonsense for the others, until the session hears of that member's failure.
"""

import functools
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from pathways_runtime.core import operations as ops
from pathways_runtime.core.controller.events import (
    MemberCompiled,
    MemberFailed,
    MemberFormed,
    MemberLeft,
    PeerEvent,
    PeerId,
)
from pathways_runtime.core.controller.instructions import CompileMember
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, SessionId, WaitId, WorkerId, WorldId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.manual_clock import ManualClock
from pathways_runtime.testing.simulated_cells import Cell, when_all_ready
from pathways_runtime.testing.simulated_network import Process
from pathways_runtime.testing.simulated_parts import SharedOperation, devices_by_host
from pathways_runtime.testing.simulated_worlds import MODULUS, SimulatedWorld

PROGRAM_FACTORS = {b"F": 1, b"G": 3, b"N": 0}

#: It gives nothing; its hosts meet all the same.
WITHOUT_RESULT = b"N"

#: How long a completed launch waits for others to be acknowledged with it.
_ACKNOWLEDGE_AFTER_NS = 50_000
_LONGEST_RUN_NS = 100_000
_LONGEST_COMPILE_NS = 200_000
_LONGEST_LEAVE_NS = 400_000


class Surroundings(Protocol):
    """What an executor can do to the rest of the cluster."""

    how_often_stuck: float

    def world(self, world: WorldId) -> SimulatedWorld: ...
    def tell_controller(self, executor: "SimulatedExecutor", event: PeerEvent) -> None: ...
    def executor_ended(self, executor: "SimulatedExecutor", is_silent: bool) -> None: ...
    def open_link(self, executor: "SimulatedExecutor", session: SessionId, change: int) -> None: ...
    def send_shard(
        self,
        source: "SimulatedExecutor",
        target: "SimulatedExecutor",
        key: "MoveKey",
        cell: Cell,
        on_way: Callable[[], None],
    ) -> None: ...
    def acknowledge(
        self, executor: "SimulatedExecutor", launches: int, transfers: tuple[tuple[SessionId, OpId], ...]
    ) -> None: ...
    def arrays_ready(
        self, executor: "SimulatedExecutor", session: SessionId, wait_id: WaitId, failure: Status | None
    ) -> None: ...
    def fetched(
        self,
        executor: "SimulatedExecutor",
        session: SessionId,
        wait_id: WaitId,
        value: int | None,
        failure: Status | None,
    ) -> None: ...


MoveKey = tuple[SessionId, OpId, int]
_ArrayKey = tuple[SessionId, Handle]


class _Program(NamedTuple):
    factor: int
    devices: tuple[DeviceId, ...]
    mine: tuple[DeviceId, ...]
    world: SimulatedWorld


class _Launch:
    """A launch on this host's devices, which run one after the other in the order of the stream."""

    def __init__(self, session: SessionId, operation: ops.Launch, program: _Program, inputs: list[Cell]) -> None:
        self.session = session
        self.operation = operation
        self.program = program
        self.inputs = inputs
        self.outputs: list[Cell] = []


class SimulatedExecutor(Process):
    """Starts operations in the order of its stream; raises on whatever a real executor could not do.

    Attributes:
        host: the virtual host that it stands behind; -1 before it is told.
        sessions: those that are open here.
    """

    def __init__(
        self,
        worker: WorkerId,
        epoch: int,
        peer: PeerId,
        topology: Topology,
        clock: ManualClock,
        rng: random.Random,
        surroundings: Surroundings,
    ) -> None:
        super().__init__(f"executor-{worker}-{peer}", f"node-{worker}")
        self.worker = worker
        self.epoch = epoch
        self.peer = peer
        self.host = HostIndex(-1)
        self.sessions: set[SessionId] = set()
        self._topology = topology
        self._clock = clock
        self._rng = rng
        self._surroundings = surroundings
        self._worlds: dict[WorldId, SimulatedWorld] = {}
        self._forming: set[WorldId] = set()
        self._over: set[WorldId] = set()
        self._closed_sessions: set[SessionId] = set()
        self._arrays: dict[_ArrayKey, dict[DeviceId, Cell]] = {}
        self._programs: dict[_ArrayKey, _Program] = {}
        self._host_buffers: dict[tuple[SessionId, OpId, int], Cell] = {}
        self._incoming: dict[MoveKey, Cell] = {}
        self._on_way: set[MoveKey] = set()
        self._expected_from: dict[HostIndex, dict[MoveKey, Cell]] = {}
        self._lost_peers: dict[HostIndex, Status] = {}
        self._given_up: set[SimulatedExecutor] = set()
        self._queue: deque[_Launch] = deque()
        self._is_busy = False
        #: Who stands behind the hosts, as it was told at first, and what has changed since. The former is one value for
        #: all executors.
        self._first_peers: Mapping[HostIndex, SimulatedExecutor] = {}
        self._changed_peers: dict[HostIndex, SimulatedExecutor | None] = {}
        self._num_unacknowledged = 0
        self._last_seq = 0

    def end(self, *, is_silent: bool = False) -> None:
        """The process ends, now; ``is_silent``: with its machine, so that no socket tells."""
        if not self.is_dead:
            self.is_dead = True
            for world in self._worlds.values():
                world.lose(self.host, is_silent=is_silent)
            self._surroundings.executor_ended(self, is_silent)

    # who and where

    def bind(self, host: HostIndex, peers: Mapping[HostIndex, "SimulatedExecutor"]) -> None:
        """It stands behind ``host``, and who stands behind all hosts."""
        assert self.host in (-1, host), f"{self.name} is bound to host {self.host} and now to {host}"
        self.host, self._first_peers, self._changed_peers = host, peers, {}

    def lose_peers(self, lost: tuple[tuple[HostIndex, Status], ...]) -> None:
        """Other hosts are gone: what they have not sent will never come. What is under way still does."""
        for host, failure in lost:
            self._lose_peer(host, failure)

    def _lose_peer(self, host: HostIndex, failure: Status) -> None:
        self._lost_peers[host] = failure
        if (gone := self._peer(host)) is not None:
            self._given_up.add(gone)
        self._changed_peers[host] = None
        for key, cell in self._expected_from.pop(host, {}).items():
            if not cell.is_ready and key not in self._on_way:
                cell.settle(None, failure)

    def replace_peer(self, host: HostIndex, executor: "SimulatedExecutor") -> None:
        """Another executor stands behind a host that was lost."""
        self._changed_peers[host] = executor
        self._lost_peers.pop(host, None)

    def _peer(self, host: HostIndex) -> "SimulatedExecutor | None":
        if host in self._changed_peers:
            return self._changed_peers[host]
        return self._first_peers.get(host)

    def form(self, world_id: WorldId) -> None:
        """Make the client of a world; MemberFormed follows."""
        world = self._worlds[world_id] = self._surroundings.world(world_id)
        self._forming.add(world_id)
        world.join(self.host, self, functools.partial(self._formed, world))

    def _formed(self, world: SimulatedWorld, failure: Status | None) -> None:
        if self.is_dead:
            return
        self._forming.discard(world.world)
        if failure is None:
            failure = world.take_failure()
            if failure is not None:
                world.leave(self.host)
        if failure is not None:
            del self._worlds[world.world]
        elif world.world in self._over:
            self._leave(world)
        formed = MemberFormed(self.peer, world.world, failure, self._clock.now_ns)
        self._surroundings.tell_controller(self, formed)

    def leave_world(self, world_id: WorldId) -> None:
        """A world is over; MemberLeft follows, unless it cannot be formed any more, of which MemberFormed tells."""
        self._over.add(world_id)
        world = self._worlds.get(world_id)
        if world is None:
            return
        if world_id in self._forming:
            # One that is being formed is left once it is.
            world.give_up(self.host)
            return
        is_busy = any(launch.program.world is world for launch in self._queue)
        world.break_off()
        if is_busy and self._rng.random() < self._surroundings.how_often_stuck:
            # What frees a program that does not end is the end of its process.
            self._clock.call_later(self._rng.randrange(_LONGEST_LEAVE_NS), self.end)
        else:
            self._clock.call_later(self._rng.randrange(_LONGEST_LEAVE_NS), lambda: self._leave(world))

    def _leave(self, world: SimulatedWorld) -> None:
        if not self.is_dead:
            world.leave(self.host)
            self._surroundings.tell_controller(self, MemberLeft(self.peer, world.world))

    # sessions and programs

    def open_session(self, session: SessionId, change: int) -> None:
        """Operations of a session may come."""
        assert session not in self.sessions, f"session {session} is opened twice on {self.name}"
        self.sessions.add(session)
        self._surroundings.open_link(self, session, change)

    def close_session(self, session: SessionId) -> None:
        """Forget everything of a session; launches under way go on."""
        self.sessions.discard(session)
        self._closed_sessions.add(session)
        self._arrays = {key: array for key, array in self._arrays.items() if key[0] != session}
        self._programs = {key: program for key, program in self._programs.items() if key[0] != session}
        gone = Status(Code.CANCELLED, f"session {session} was closed")
        buffers = [cell for key, cell in self._host_buffers.items() if key[0] == session]
        for cell in [*buffers, *(cell for key, cell in self._incoming.items() if key[0] == session)]:
            if not cell.is_ready:
                cell.settle(None, gone)

    def load(self, told: CompileMember) -> None:
        """Compile a program; MemberCompiled follows after a while."""
        self._clock.call_later(self._rng.randrange(_LONGEST_COMPILE_NS), functools.partial(self._load, told))

    def _load(self, told: CompileMember) -> None:
        if self.is_dead:
            return
        world = self._worlds.get(told.world)
        failure = None
        if world is None or (told.world in self._over and len(self._topology.hosts_of(told.devices)) > 1):
            failure = Status(Code.INVALID_ARGUMENT, f"world {told.world} is not formed on {self.name}")
        elif told.session in self.sessions:
            mine = devices_by_host(self._topology, told.devices)[self.host]
            program = _Program(PROGRAM_FACTORS[told.program], told.devices, mine, world)
            self._programs[told.session, told.executable] = program
        # The devices stand in for the metadata, which only the client reads.
        where = told.session, told.executable
        compiled = MemberCompiled(self.peer, *where, None if failure else told.devices, failure)
        self._surroundings.tell_controller(self, compiled)

    # from the proxy and other executors

    def receive_host_buffer(self, session: SessionId, op_id: OpId, index: int, value: int) -> None:
        """A host buffer is there, before or after the operation that makes arrays of it."""
        cell = self._host_buffers.setdefault((session, op_id, index), Cell())
        if not cell.is_ready:
            cell.settle(value, None)

    def note_on_way(self, source: "SimulatedExecutor", key: "MoveKey") -> None:
        """Another host has sent a shard, which arrives unless the sender was given up before."""
        if source not in self._given_up:
            self._on_way.add(key)

    def receive_shard(self, key: "MoveKey", value: int | None, failure: Status | None) -> None:
        """A shard is there that another host has sent."""
        if key not in self._on_way:
            # Its sender was given up: the connection is closed.
            return
        cell = self._incoming.setdefault(key, Cell())
        # The array that it belongs to may have been poisoned meanwhile.
        if not cell.is_ready:
            cell.settle(value, failure)

    def start(self, seq: int, session: SessionId, shared: SharedOperation) -> None:
        """The next operation of this host's stream."""
        operation = shared.operation
        assert seq > self._last_seq, f"{self.name}: seq {seq} comes after {self._last_seq}"
        self._last_seq = seq
        if session in self._closed_sessions:
            # What was on its way when the session was closed; its launches still count.
            if isinstance(operation, ops.Launch):
                self._count_launch()
            return
        assert session in self.sessions, f"{self.name} is sent {operation} of session {session}, which is not open"
        match operation:
            case ops.Launch():
                self._launch(session, operation)
            case ops.MakeArrays(op_id):
                for handle, device, index in shared.shards_on(self.host):
                    buffer = self._host_buffers.setdefault((session, op_id, index), Cell())
                    self._add(session, handle, device, buffer)
            case ops.Alias():
                for handle, device, source in shared.shards_on(self.host):
                    self._add(session, handle, device, self._cell(session, source, device))
            case ops.Transfer(op_id):
                self._transfer(session, op_id, shared)
            case ops.Delete(_, handles):
                for handle in handles:
                    self._arrays.pop((session, handle), None)
            case ops.Await(_, wait_id, handles):
                self._await(session, wait_id, handles)
            case ops.Fetch(_, wait_id, handle, device):
                self._fetch(session, wait_id, self._cell(session, handle, device))
            case ops.DeleteExecutable(_, executable):
                self._programs.pop((session, executable), None)
            case ops.Poison(_, handles, status):
                for handle in handles:
                    self._poison(session, handle, status)
            case _:
                raise TypeError(f"host {self.host} cannot start {operation!r}")

    def describe(self) -> str:
        """What it is at, for messages."""
        if not self._queue:
            return "nothing queued"
        head = self._queue[0]
        missing = [] if all(cell.is_ready for cell in head.inputs) else ["its inputs"]
        return f"op {head.operation.op_id} of session {head.session} waits for {missing or ['its peers']}"

    # operations

    def _launch(self, session: SessionId, operation: ops.Launch) -> None:
        program = self._programs.get((session, operation.executable))
        assert program is not None, f"{self.name} is to run {operation} of session {session}, which it has not loaded"
        mine = program.mine
        inputs = [self._cell(session, handle, device) for handle in operation.arguments for device in mine]
        launch = _Launch(session, operation, program, inputs)
        for handle in operation.results:
            for device in mine:
                cell = Cell()
                launch.outputs.append(cell)
                self._add(session, handle, device, cell)
        self._queue.append(launch)
        self._run_next()

    def _run_next(self) -> None:
        if self._queue and not self._is_busy:
            self._is_busy = True
            when_all_ready(self._queue[0].inputs, self._contribute)

    def _contribute(self) -> None:
        if self.is_dead:
            return
        launch = self._queue[0]
        program = launch.program
        # Whatever failed here, the peers wait for this host: it takes part with what it has, and fails its own results.
        failure = next((cell.failure for cell in launch.inputs if cell.failure is not None), None)
        value = program.factor * sum(cell.value or 0 for cell in launch.inputs) % MODULUS

        def on_result(result: int | None) -> None:
            cause = failure
            if cause is None and result is None:
                cause = Status(Code.INTERNAL, "a peer of a collective is gone")
            run_ns = self._rng.randrange(_LONGEST_RUN_NS)
            self._clock.call_later(run_ns, lambda: self._finish(launch, None if cause else result, cause))

        program.world.contribute(self.host, self, program.devices, value, on_result)

    def _finish(self, launch: _Launch, result: int | None, failure: Status | None) -> None:
        if self.is_dead:
            return
        for cell in launch.outputs:
            # A Poison may have come meanwhile.
            if not cell.is_ready:
                cell.settle(result, failure)
        if failure is not None:
            operation = launch.operation
            failed = MemberFailed(self.peer, launch.session, operation.op_id, operation.results, failure)
            self._surroundings.tell_controller(self, failed)
        self._queue.popleft()
        self._is_busy = False
        self._count_launch()
        self._run_next()

    def _count_launch(self) -> None:
        self._num_unacknowledged += 1
        if self._num_unacknowledged == 1:
            self._clock.call_later(_ACKNOWLEDGE_AFTER_NS, self._acknowledge)

    def _acknowledge(self) -> None:
        if not self.is_dead:
            count, self._num_unacknowledged = self._num_unacknowledged, 0
            self._surroundings.acknowledge(self, count, ())

    def _transfer(self, session: SessionId, op_id: OpId, shared: SharedOperation) -> None:
        outgoing: list[tuple[HostIndex, MoveKey, Cell]] = []
        for index, move, handle, source_host, target_host in shared.passages_on(self.host):
            key = (session, op_id, index)
            if source_host == self.host:
                source = self._cell(session, move.source, move.source_device)
                if target_host == self.host:
                    self._add(session, handle, move.target_device, source)
                else:
                    outgoing.append((target_host, key, source))
            else:
                self._add(session, handle, move.target_device, self._expect(source_host, key))
        left = len(outgoing)

        def on_way() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._surroundings.acknowledge(self, 0, ((session, op_id),))

        for target_host, key, source in outgoing:
            source.when_ready(self._sender(target_host, key, source, on_way))

    def _expect(self, source: HostIndex, key: MoveKey) -> Cell:
        cell = self._incoming.setdefault(key, Cell())
        if not cell.is_ready:
            if source in self._lost_peers and key not in self._on_way:
                cell.settle(None, self._lost_peers[source])
            else:
                self._expected_from.setdefault(source, {})[key] = cell
        return cell

    def _sender(self, target: HostIndex, key: MoveKey, source: Cell, on_way: Callable[[], None]) -> Callable[[], None]:
        # As it is reached now: who comes there later knows nothing of this transfer.
        receiver = self._peer(target)

        def send() -> None:
            if receiver is not None:
                self._surroundings.send_shard(self, receiver, key, source, on_way)
            else:
                on_way()

        return send

    def _await(self, session: SessionId, wait_id: WaitId, handles: tuple[Handle, ...]) -> None:
        # Not every array has shards here.
        cells = [cell for handle in handles for cell in self._arrays.get((session, handle), {}).values()]

        def tell() -> None:
            failure = next((cell.failure for cell in cells if cell.failure is not None), None)
            self._surroundings.arrays_ready(self, session, wait_id, failure)

        when_all_ready(cells, tell)

    def _fetch(self, session: SessionId, wait_id: WaitId, cell: Cell) -> None:
        cell.when_ready(lambda: self._surroundings.fetched(self, session, wait_id, cell.value, cell.failure))

    def _poison(self, session: SessionId, handle: Handle, failure: Status) -> None:
        """An error in place of an array, whether it is awaited, or there, or was never made."""
        array = self._arrays.setdefault((session, handle), {})
        for local_index in range(self._topology.devices_per_host):
            device = self._topology.device_at(self.host, local_index)
            cell = array.get(device)
            if cell is None or cell.is_ready:
                # Who has read it keeps what there was.
                cell = array[device] = Cell()
            cell.settle(None, failure)

    # shards

    def _add(self, session: SessionId, handle: Handle, device: DeviceId, cell: Cell) -> None:
        array = self._arrays.setdefault((session, handle), {})
        assert device not in array, f"host {self.host}: array {handle} has a shard on device {device} already"
        array[device] = cell

    def _cell(self, session: SessionId, handle: int, device: DeviceId) -> Cell:
        array = self._arrays.get((session, Handle(handle)))
        assert array is not None, f"host {self.host}: array {handle} of session {session} is not there"
        return array[device]
