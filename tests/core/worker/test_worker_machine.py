"""Two cores under random arrivals: whatever their order, the values are those of sequential execution."""

import random
from collections import deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_runtime.core import operations as ops
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, SessionId, WaitId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.core.worker import instructions as do
from pathways_runtime.core.worker.arrays import Program
from pathways_runtime.core.worker.events import (
    ArrayMade,
    BufferArrived,
    LaunchEnqueued,
    LaunchFailed,
    OperationReceived,
    PieceArrived,
    ProgramLoaded,
    ReadTaken,
    SessionClosed,
    SessionOpened,
)
from pathways_runtime.core.worker.worker import WorkerCore

SESSION = SessionId(1)
TOPOLOGY = Topology(1, 2, 2, "cpu")
DEVICES = (0, 1, 2, 3)
LOST = Status(Code.DATA_LOSS, "lost")
#: Programs by the devices that they run on; the first argument of donating ones is donated.
PROGRAMS = {
    Handle(9001): ((0, 1), ()),
    Handle(9002): ((2, 3), ()),
    Handle(9003): ((0, 1, 2, 3), ()),
    Handle(9004): ((0, 1), (0,)),
    Handle(9005): ((0, 1, 2, 3), (0,)),
    Handle(9006): ((1,), (0,)),
}
GANG = Handle(9003)
#: Launches with these op ids (modulo) fail on the host that runs them.
FAILING = 7


class Cell:
    """What a shell would hold for an array: symbolic shards, until a donating program takes them over."""

    def __init__(self, shards: dict[int, Any]) -> None:
        self._shards = shards
        self.is_taken = False

    def read(self, device: int) -> Any:
        assert not self.is_taken, "read after its memory was taken over"
        return self._shards[device]


def computed(op_id: int, index: int, device: int, arguments: list[Any]) -> Any:
    """A launch's result on one device, as a symbol."""
    return ("computed", op_id, index, device, *arguments)


def fails(op_id: int, executable: int) -> bool:
    return op_id % FAILING == 0 and executable in (9001, 9002)


class Model:
    """Executes operations one after the other. Per handle and host: the shards there, or the failure of that part."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[int, int], dict[int, Any] | Status] = {}
        self.answers: dict[tuple[int, int], Any] = {}

    def run(self, operation: Any) -> None:
        for host in involved(operation):
            self._run(operation, host)
        if isinstance(operation, ops.Delete):
            for host in (0, 1):
                for handle in operation.handles:
                    self.arrays.pop((handle, host), None)

    def _run(self, operation: Any, host: int) -> None:
        match operation:
            case ops.MakeArrays():
                for result, buffers in zip(operation.results, operation.buffers, strict=True):
                    self._set(
                        result,
                        host,
                        {d: ("buffer", operation.op_id, i) for d, i in zip(result.devices, buffers, strict=True)},
                    )
            case ops.Launch():
                arguments = [self.arrays[(handle, host)] for handle in operation.arguments]
                failure = next((a for a in arguments if isinstance(a, Status)), None)
                if failure is None and fails(operation.op_id, operation.executable):
                    failure = LOST
                for index, handle in enumerate(operation.results):
                    self.arrays[(handle, host)] = failure or {
                        device: computed(operation.op_id, index, device, [a[device] for a in arguments])  # type: ignore[index]
                        for device in PROGRAMS[operation.executable][0]
                        if host_of(device) == host
                    }
            case ops.Alias():
                for result, sources in zip(operation.results, operation.sources, strict=True):
                    self._assemble(result, host, [(s, d, d) for s, d in zip(sources, result.devices, strict=True)])
            case ops.Transfer():
                moves = [(m.source, m.source_device, m.target_device) for m in operation.moves]
                self._assemble(operation.results[0], host, moves)
            case ops.Poison():
                for handle in operation.handles:
                    self.arrays[(handle, host)] = operation.status
            case ops.Fetch():
                array = self.arrays[(operation.handle, host)]
                value = array if isinstance(array, Status) else array[operation.device]
                self.answers[(host, operation.wait_id)] = value

    def _set(self, result: Any, host: int, shards: dict[int, Any]) -> None:
        here = {device: value for device, value in shards.items() if host_of(device) == host}
        if here:
            self.arrays[(result.handle, host)] = here

    def _assemble(self, result: Any, host: int, moves: list[tuple[int, int, int]]) -> None:
        shards = {}
        for source, source_device, target_device in moves:
            if host_of(target_device) != host:
                continue
            array = self.arrays[(source, host_of(source_device))]
            if isinstance(array, Status):
                self.arrays[(result.handle, host)] = array
                return
            shards[target_device] = array[source_device]
        self._set(result, host, shards)


def host_of(device: int) -> int:
    return TOPOLOGY.host_of(DeviceId(device))


class Host:
    """A core with a shell whose work is done when the test says so."""

    def __init__(self, host: int) -> None:
        self.core = WorkerCore(HostIndex(host), TOPOLOGY, f"host-{host}")
        self.stream: deque[Any] = deque()
        self.todo: list[Any] = []
        self.enqueued: list[int] = []
        self.core.handle(SessionOpened(SESSION))
        for handle, (devices, donated) in PROGRAMS.items():
            here = tuple(DeviceId(d) for d in devices if host_of(d) == host)
            if here:
                program = Program(here, donated, len(here) != len(devices), handle)
                self.core.handle(ProgramLoaded(SESSION, handle, program))


class Cluster:
    """Two hosts, the proxy's buffers and the data plane between them."""

    def __init__(self) -> None:
        self.hosts = [Host(0), Host(1)]
        self.buffers: list[tuple[int, Any]] = []
        self.sent: dict[tuple[int, int], Any] = {}
        self.expected: dict[tuple[int, int], int] = {}
        self.answers: dict[tuple[int, int], Any] = {}
        self.num_counted = 0

    def submit(self, operation: Any) -> None:
        """To all hosts that take part."""
        for host in involved(operation):
            self.hosts[host].stream.append(operation)
            if isinstance(operation, ops.MakeArrays):
                indices = {
                    index
                    for result, buffers in zip(operation.results, operation.buffers, strict=True)
                    for device, index in zip(result.devices, buffers, strict=True)
                    if host_of(device) == host
                }
                for index in sorted(indices):
                    value = ("buffer", operation.op_id, index)
                    self.buffers.append((host, BufferArrived(SESSION, operation.op_id, index, value)))

    def choices(self) -> list[Any]:
        """What may happen next."""
        found: list[Any] = []
        for index, host in enumerate(self.hosts):
            if host.stream:
                found.append(("receive", index))
            # Instructions may be under way on several threads; launches are one at a time by themselves.
            found += [("perform", index, place) for place in range(len(host.todo))]
        found += [("buffer", place) for place in range(len(self.buffers))]
        found += [("deliver", key) for key in self.expected if key in self.sent]
        return found

    def step(self, choice: Any) -> None:
        match choice:
            case ("receive", index):
                self._feed(index, OperationReceived(SESSION, self.hosts[index].stream.popleft(), 0))
            case ("perform", index, place):
                self._perform(index, self.hosts[index].todo.pop(place))
            case ("buffer", place):
                self._feed(*self.buffers.pop(place))
            case ("deliver", key):
                payload = self.sent.pop(key)
                failure = payload if isinstance(payload, Status) else None
                event = PieceArrived(SESSION, OpId(key[0]), key[1], None if failure else payload, failure)
                self._feed(self.expected.pop(key), event)

    def _feed(self, index: int, event: Any) -> None:
        host = self.hosts[index]
        host.todo += host.core.handle(event)
        host.core.check_invariants()

    def _perform(self, index: int, instruction: Any) -> None:
        match instruction:
            case do.EnqueueLaunch(launch=launch):
                assert launch.program is not None
                cells = [None if i in instruction.absent else a.value for i, a in enumerate(launch.arguments)]
                executable = launch.program.value
                if len(PROGRAMS[executable][0]) == len(DEVICES):
                    self.hosts[index].enqueued.append(launch.op_id)
                if not instruction.absent and fails(launch.op_id, executable):
                    self.num_counted += 1
                    self._feed(index, LaunchFailed(launch, Status(Code.INTERNAL, f"launch {launch.op_id}")))
                    return
                values = [
                    Cell(
                        {
                            device: computed(launch.op_id, number, device, [c and c.read(device) for c in cells])
                            for device in launch.program.devices
                        }
                    )
                    for number in range(len(launch.results))
                ]
                for position in launch.program.donated:
                    cell = cells[position]
                    if position not in instruction.copied and cell is not None:
                        cell.is_taken = True
                self.num_counted += 1
                self._feed(index, LaunchEnqueued(launch, tuple(values)))
            case do.CountLaunch():
                self.num_counted += 1
            case do.MakeArray(array=array):
                value = Cell(dict(zip(array.devices, instruction.payloads, strict=True)))
                self._feed(index, ArrayMade(SESSION, array, value))
            case do.ShareShards(array=array):
                shards = [s.array.value.read(s.array.devices[s.position]) for s in instruction.sources]
                self._feed(index, ArrayMade(SESSION, array, Cell(dict(zip(array.devices, shards, strict=True)))))
                self._feed(index, ReadTaken(tuple(source.array for source in instruction.sources)))
            case do.AssembleArray(array=array):
                shards = {}
                for device, (part,) in zip(array.devices, instruction.parts, strict=True):
                    source = part.source
                    shards[device] = (
                        part.payload
                        if source is None
                        else source.array.value.read(source.array.devices[source.position])
                    )
                read = [part.source.array for (part,) in instruction.parts if part.source is not None]
                self._feed(index, ReadTaken(tuple(read)))
                self._feed(index, ArrayMade(SESSION, array, Cell(shards)))
            case do.ExpectPiece():
                self.expected[(instruction.op_id, instruction.move_index)] = index
            case do.SendPieces():
                for piece in instruction.pieces:
                    key = (instruction.op_id, piece.move_index)
                    if piece.source is None:
                        self.sent[key] = piece.failure
                        continue
                    array = piece.source.array
                    self.sent[key] = array.value.read(array.devices[piece.source.position])
                    self._feed(index, ReadTaken((array,)))
            case do.SendValue(source=source):
                self.answers[(index, instruction.wait_id)] = source.array.value.read(
                    source.array.devices[source.position]
                )
                self._feed(index, ReadTaken((source.array,)))
            case do.AnswerFetch():
                self.answers[(index, instruction.wait_id)] = instruction.failure
            case do.Report() | do.ForgetTransfers():
                pass
            case _:
                raise AssertionError(f"unknown instruction {instruction}")


def involved(operation: Any) -> list[int]:
    """The hosts that an operation is sent to."""
    match operation:
        case ops.Launch():
            devices: Any = PROGRAMS[operation.executable][0]
        case ops.MakeArrays() | ops.Alias():
            devices = [d for result in operation.results for d in result.devices]
        case ops.Transfer():
            moves = operation.moves
            devices = [*operation.results[0].devices, *(m.source_device for m in moves)]
        case ops.Fetch():
            devices = [operation.device]
        case _:
            devices = DEVICES
    return sorted({host_of(d) for d in devices})


@st.composite
def streams(draw: st.DrawFn) -> list[Any]:
    """Operations in the one order, each reading only arrays that exist where it reads them."""
    operations: list[Any] = []
    #: Devices of the arrays that may be named.
    live: dict[Handle, tuple[int, ...]] = {}
    next_handle = 0

    def fresh(devices: tuple[int, ...]) -> Handle:
        nonlocal next_handle
        next_handle += 1
        live[Handle(next_handle)] = devices
        return Handle(next_handle)

    def result(devices: tuple[int, ...]) -> ops.ShardedResult:
        return ops.ShardedResult(fresh(devices), DType.F32, (1,), None, tuple(map(DeviceId, devices)))

    places = st.lists(st.sampled_from(DEVICES), min_size=1, max_size=4, unique=True).map(tuple)
    for number in range(1, draw(st.integers(1, 25)) + 1):
        op_id = OpId(number)
        kinds = ["make", "make gang"]
        if live:
            kinds += ["launch"] * 6 + ["alias", "transfer", "transfer", "delete", "fetch", "poison"]
        kind = draw(st.sampled_from(kinds))
        if kind == "make" or kind == "make gang":
            devices = draw(places) if kind == "make" else DEVICES
            buffers = tuple(draw(st.integers(0, 1)) for _ in devices)
            operations.append(ops.MakeArrays(op_id, (result(devices),), (buffers,)))
        elif kind == "launch":
            executable = draw(st.sampled_from(sorted(PROGRAMS) + [GANG] * 3))
            devices, donated = PROGRAMS[executable]
            fitting = sorted(h for h, d in live.items() if sorted(d) == sorted(devices))
            if not fitting:
                continue
            arguments = tuple(draw(st.sampled_from(fitting)) for _ in range(draw(st.integers(1, 2))))
            keeps = tuple(p for p in donated if draw(st.booleans()))
            results = tuple(fresh(devices) for _ in range(draw(st.integers(0, 2))))
            operations.append(ops.Launch(op_id, executable, arguments, results, keeps))
            for position in donated:
                if position not in keeps and arguments.count(arguments[position]) == 1:
                    del live[arguments[position]]
        elif kind == "alias":
            devices = draw(places)
            sources = [draw(st.sampled_from(sorted(live))) for _ in devices]
            if not all(device in live[source] for source, device in zip(sources, devices, strict=True)):
                continue
            operations.append(ops.Alias(op_id, (result(devices),), (tuple(sources),)))
        elif kind == "transfer":
            devices = draw(places)
            moves = []
            for device in devices:
                source = draw(st.sampled_from(sorted(live)))
                moves.append(ops.Move(source, DeviceId(draw(st.sampled_from(live[source]))), 0, DeviceId(device)))
            operations.append(ops.Transfer(op_id, (result(devices),), tuple(moves)))
        elif kind == "delete":
            handle = draw(st.sampled_from(sorted(live)))
            del live[handle]
            operations.append(ops.Delete(op_id, (handle,)))
        elif kind == "poison":
            operations.append(ops.Poison(op_id, (fresh(draw(places)),), LOST))
        else:
            handle = draw(st.sampled_from(sorted(live)))
            device = draw(st.sampled_from(live[handle]))
            operations.append(ops.Fetch(op_id, WaitId(number), handle, DeviceId(device)))
    for offset, (handle, devices) in enumerate(sorted(live.items())):
        operations.append(ops.Fetch(OpId(100 + offset), WaitId(100 + offset), handle, DeviceId(devices[0])))
    return operations


def run(cluster: Cluster, chance: random.Random, max_steps: int) -> None:
    """Have things happen in some order."""
    for _ in range(max_steps):
        choices = cluster.choices()
        if not choices:
            return
        cluster.step(chance.choice(choices))


#: A whole run takes fewer.
ALL_STEPS = 100_000


@settings(max_examples=150, deadline=None)
@given(streams(), st.integers())
def test_any_order_of_arrival_gives_the_values_of_sequential_execution(operations: list[Any], seed: int) -> None:
    model, cluster = Model(), Cluster()
    for operation in operations:
        model.run(operation)
        cluster.submit(operation)
    run(cluster, random.Random(seed), ALL_STEPS)
    assert cluster.choices() == []
    failures = {key for key, value in model.answers.items() if isinstance(value, Status)}
    assert cluster.answers.keys() == model.answers.keys()
    assert {key for key, value in cluster.answers.items() if isinstance(value, Status)} == failures
    for key in model.answers.keys() - failures:
        assert cluster.answers[key] == model.answers[key]
    # Every launch was counted once on each of its hosts, and gangs were enqueued in one order.
    launches = [operation for operation in operations if isinstance(operation, ops.Launch)]
    assert cluster.num_counted == sum(len(involved(launch)) for launch in launches)
    assert cluster.hosts[0].enqueued == cluster.hosts[1].enqueued
    for host in cluster.hosts:
        assert host.core.waiting() == []
        session = host.core.sessions[SESSION]
        assert not session.early_buffers
        assert not session.wanted_pieces
        assert all(array.num_readers == 0 for array in session.arrays.values())


@settings(max_examples=50, deadline=None)
@given(streams(), st.integers(), st.integers(0, 60))
def test_a_session_may_be_closed_at_any_time(operations: list[Any], seed: int, num_steps: int) -> None:
    cluster = Cluster()
    for operation in operations:
        cluster.submit(operation)
    run(cluster, random.Random(seed), num_steps)
    # The close follows all operations on every stream, as the controller sends it; what is under way answers late.
    for index, host in enumerate(cluster.hosts):
        while host.stream:
            cluster.step(("receive", index))
        cluster._feed(index, SessionClosed(SESSION))
    # What is under way ends; what waited for something of the session does not wait any more.
    for host in cluster.hosts:
        assert [entry[2] for entry in host.core.waiting()] in ([], ["launch"] * len(host.core.waiting()))
    run(cluster, random.Random(seed), ALL_STEPS)
    launches = [operation for operation in operations if isinstance(operation, ops.Launch)]
    assert cluster.num_counted == sum(len(involved(launch)) for launch in launches)
    assert cluster.hosts[0].enqueued == cluster.hosts[1].enqueued
    assert [host.core.waiting() for host in cluster.hosts] == [[], []]
