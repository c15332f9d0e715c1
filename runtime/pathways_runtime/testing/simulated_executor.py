"""Executors whose values are integers, and whose collectives meet in the order of each host's stream, as gloo's do.

A shard is one integer. Programs are ``F(x) = sum over all shards`` and ``G(x) = 3 * F(x)``, on every device of a mesh,
modulo ``MODULUS``. Two hosts that start F and G in different orders put their contributions together wrongly and get
wrong numbers, without any error: that is what the simulation looks for.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from pathways_runtime.core import operations as ops
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, SessionId, WaitId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.manual_clock import ManualClock

MODULUS = 2**31 - 1
PROGRAM_FACTORS = {b"F": 1, b"G": 3}

#: How long a completed launch waits for others to be acknowledged with it.
_ACKNOWLEDGE_AFTER_NS = 50_000
_LONGEST_RUN_NS = 100_000


class Cell:
    """One shard: a value or a failure, now or later."""

    __slots__ = ("_waiting", "failure", "value")

    def __init__(self) -> None:
        self.value: int | None = None
        self.failure: Status | None = None
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_ready(self) -> bool:
        """Whether it has a value or a failure."""
        return self.value is not None or self.failure is not None

    def settle(self, value: int | None, failure: Status | None) -> None:
        """Give it a value or a failure; whoever waits is called."""
        assert not self.is_ready, "a shard has one value"
        self.value, self.failure = value, failure
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back once it is ready, perhaps at once."""
        if self.is_ready:
            callback()
        else:
            self._waiting.append(callback)


def when_all_ready(cells: Iterable[Cell], callback: Callable[[], None]) -> None:
    """Call back once all are ready, perhaps at once."""
    waiting = [cell for cell in cells if not cell.is_ready]
    if not waiting:
        callback()
        return
    left = len(waiting)

    def one_ready() -> None:
        nonlocal left
        left -= 1
        if not left:
            callback()

    for cell in waiting:
        cell.when_ready(one_ready)


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


class Surroundings(Protocol):
    """What an executor can do to the rest of the cluster."""

    def communicator(self, devices: tuple[DeviceId, ...]) -> Communicator: ...
    def send_shard(self, source: HostIndex, target: HostIndex, key: "MoveKey", cell: Cell) -> None: ...
    def is_sent(self, key: "MoveKey") -> bool: ...
    def acknowledge(self, host: HostIndex, launches: int, transfers: tuple[tuple[SessionId, OpId], ...]) -> None: ...
    def report_failed(
        self, host: HostIndex, session: SessionId, op_id: OpId, handles: tuple[Handle, ...], failure: Status
    ) -> None: ...
    def arrays_ready(self, host: HostIndex, session: SessionId, wait_id: WaitId, failure: Status | None) -> None: ...
    def fetched(
        self, host: HostIndex, session: SessionId, wait_id: WaitId, value: int | None, failure: Status | None
    ) -> None: ...


MoveKey = tuple[SessionId, OpId, int]
_ArrayKey = tuple[SessionId, Handle]


class _Launch:
    """A launch on this host's devices, which run one after the other in the order of the stream."""

    def __init__(
        self, session: SessionId, operation: ops.Launch, factor: int, devices: tuple[DeviceId, ...], inputs: list[Cell]
    ) -> None:
        self.session = session
        self.operation = operation
        self.factor = factor
        self.devices = devices
        self.inputs = inputs
        self.outputs: list[Cell] = []


class SimulatedExecutor:
    """Starts operations in the order of its stream; raises on whatever a real executor could not do."""

    def __init__(
        self, host: HostIndex, topology: Topology, clock: ManualClock, rng: random.Random, surroundings: Surroundings
    ) -> None:
        self._host = host
        self._topology = topology
        self._clock = clock
        self._rng = rng
        self._surroundings = surroundings
        self._arrays: dict[_ArrayKey, dict[DeviceId, Cell]] = {}
        self._programs: dict[_ArrayKey, tuple[int, tuple[DeviceId, ...]]] = {}
        self._host_buffers: dict[tuple[SessionId, OpId, int], Cell] = {}
        self._incoming: dict[MoveKey, Cell] = {}
        self._expected_from: dict[HostIndex, dict[MoveKey, Cell]] = {}
        self._lost_peers: dict[HostIndex, Status] = {}
        self._queue: deque[_Launch] = deque()
        self._is_busy = False
        self._num_unacknowledged = 0
        self._last_seq = 0
        self.is_lost = False

    # from the controller and the proxy

    def load(self, session: SessionId, executable: Handle, program: bytes, devices: tuple[DeviceId, ...]) -> None:
        """Compile a program."""
        self._programs[session, executable] = (PROGRAM_FACTORS[program], devices)

    def receive_host_buffer(self, session: SessionId, op_id: OpId, index: int, value: int) -> None:
        """A host buffer is there, before or after the operation that makes arrays of it."""
        self._host_buffers.setdefault((session, op_id, index), Cell()).settle(value, None)

    def receive_shard(self, key: MoveKey, value: int | None, failure: Status | None) -> None:
        """A shard is there that another host has sent."""
        cell = self._incoming.setdefault(key, Cell())
        # The array that it belongs to may have been poisoned meanwhile.
        if not cell.is_ready:
            cell.settle(value, failure)

    def lose_peer(self, host: HostIndex, failure: Status) -> None:
        """Another host is gone: what it has not sent will never come. What is under way still does."""
        self._lost_peers[host] = failure
        for key, cell in self._expected_from.pop(host, {}).items():
            if not cell.is_ready and not self._surroundings.is_sent(key):
                cell.settle(None, failure)

    def close_session(self, session: SessionId) -> None:
        """Forget everything of a session; launches under way go on."""
        self._arrays = {key: array for key, array in self._arrays.items() if key[0] != session}
        self._programs = {key: program for key, program in self._programs.items() if key[0] != session}

    def start(self, seq: int, session: SessionId, operation: ops.Operation) -> None:
        """The next operation of this host's stream."""
        if self.is_lost:
            return
        assert seq > self._last_seq, f"host {self._host}: seq {seq} comes after {self._last_seq}"
        self._last_seq = seq
        match operation:
            case ops.Launch():
                self._launch(session, operation)
            case ops.MakeArrays(op_id, results, buffers):
                for result, indices in zip(results, buffers, strict=True):
                    for device, index in self._mine(result.devices, indices):
                        buffer = self._host_buffers.setdefault((session, op_id, index), Cell())
                        self._add(session, result.handle, device, buffer)
            case ops.Alias(_, results, sources):
                for result, handles in zip(results, sources, strict=True):
                    for device, handle in self._mine(result.devices, handles):
                        self._add(session, result.handle, device, self._cell(session, handle, device))
            case ops.Transfer():
                self._transfer(session, operation)
            case ops.Delete(_, handles):
                for handle in handles:
                    self._arrays.pop((session, handle), None)
            case ops.Await(_, wait_id, handles):
                self._await(session, wait_id, handles)
            case ops.Fetch(_, wait_id, handle, device):
                self._fetch(session, wait_id, self._cell(session, handle, device))
            case ops.DeleteExecutable(_, executable):
                del self._programs[session, executable]
            case ops.Poison(_, handles, status):
                for handle in handles:
                    self._poison(session, handle, status)
            case _:
                raise TypeError(f"host {self._host} cannot start {operation!r}")

    def describe(self) -> str:
        """What it is at, for messages."""
        if not self._queue:
            return "nothing queued"
        head = self._queue[0]
        missing = [] if all(cell.is_ready for cell in head.inputs) else ["its inputs"]
        return f"op {head.operation.op_id} of session {head.session} waits for {missing or ['its peers']}"

    # operations

    def _launch(self, session: SessionId, operation: ops.Launch) -> None:
        factor, devices = self._programs[session, operation.executable]
        mine = [device for device in devices if self._topology.host_of(device) == self._host]
        inputs = [self._cell(session, handle, device) for handle in operation.arguments for device in mine]
        launch = _Launch(session, operation, factor, devices, inputs)
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
        launch = self._queue[0]
        # Whatever failed here, the peers wait for this host: it takes part with what it has, and fails its own results.
        failure = next((cell.failure for cell in launch.inputs if cell.failure is not None), None)
        value = launch.factor * sum(cell.value or 0 for cell in launch.inputs) % MODULUS
        communicator = self._surroundings.communicator(launch.devices)

        def on_result(result: int | None) -> None:
            cause = failure
            if cause is None and result is None:
                cause = Status(Code.INTERNAL, "a peer of a collective is gone")
            run_ns = self._rng.randrange(_LONGEST_RUN_NS)
            self._clock.call_later(run_ns, lambda: self._finish(launch, None if cause else result, cause))

        communicator.contribute(self._host, value, on_result)

    def _finish(self, launch: _Launch, result: int | None, failure: Status | None) -> None:
        if self.is_lost:
            return
        for cell in launch.outputs:
            # A Poison may have come meanwhile.
            if not cell.is_ready:
                cell.settle(result, failure)
        if failure is not None:
            operation = launch.operation
            self._surroundings.report_failed(self._host, launch.session, operation.op_id, operation.results, failure)
        self._queue.popleft()
        self._is_busy = False
        self._num_unacknowledged += 1
        if self._num_unacknowledged == 1:
            self._clock.call_later(_ACKNOWLEDGE_AFTER_NS, self._acknowledge)
        self._run_next()

    def _acknowledge(self) -> None:
        count, self._num_unacknowledged = self._num_unacknowledged, 0
        self._surroundings.acknowledge(self._host, count, ())

    def _transfer(self, session: SessionId, operation: ops.Transfer) -> None:
        outgoing: list[Cell] = []
        for index, move in enumerate(operation.moves):
            source_host = self._topology.host_of(move.source_device)
            target_host = self._topology.host_of(move.target_device)
            assert move.source_box is None and move.target_box is None, "whole shards only"
            key = (session, operation.op_id, index)
            handle = operation.results[move.result_index].handle
            if source_host == self._host:
                source = self._cell(session, move.source, move.source_device)
                if target_host == self._host:
                    self._add(session, handle, move.target_device, source)
                else:
                    outgoing.append(source)
                    source.when_ready(self._sender(target_host, key, source))
            elif target_host == self._host:
                self._add(session, handle, move.target_device, self._expect(source_host, key))
        if outgoing:
            started = ((session, operation.op_id),)
            when_all_ready(outgoing, lambda: self._surroundings.acknowledge(self._host, 0, started))

    def _expect(self, source: HostIndex, key: MoveKey) -> Cell:
        cell = self._incoming.setdefault(key, Cell())
        if not cell.is_ready:
            if source in self._lost_peers and not self._surroundings.is_sent(key):
                cell.settle(None, self._lost_peers[source])
            else:
                self._expected_from.setdefault(source, {})[key] = cell
        return cell

    def _sender(self, target: HostIndex, key: MoveKey, source: Cell) -> Callable[[], None]:
        return lambda: self._surroundings.send_shard(self._host, target, key, source)

    def _await(self, session: SessionId, wait_id: WaitId, handles: tuple[Handle, ...]) -> None:
        cells = [cell for handle in handles for cell in self._arrays[session, handle].values()]

        def tell() -> None:
            failure = next((cell.failure for cell in cells if cell.failure is not None), None)
            self._surroundings.arrays_ready(self._host, session, wait_id, failure)

        when_all_ready(cells, tell)

    def _fetch(self, session: SessionId, wait_id: WaitId, cell: Cell) -> None:
        cell.when_ready(lambda: self._surroundings.fetched(self._host, session, wait_id, cell.value, cell.failure))

    def _poison(self, session: SessionId, handle: Handle, failure: Status) -> None:
        """An error in place of an array, whether it is awaited, or there, or was never made."""
        array = self._arrays.setdefault((session, handle), {})
        for local_index in range(self._topology.devices_per_host):
            device = self._topology.device_at(self._host, local_index)
            cell = array.get(device)
            if cell is None or cell.is_ready:
                # Who has read it keeps what there was.
                cell = array[device] = Cell()
            cell.settle(None, failure)

    # shards

    def _mine(self, devices: tuple[DeviceId, ...], values: tuple[int, ...]) -> list[tuple[DeviceId, int]]:
        pairs = zip(devices, values, strict=True)
        return [(device, value) for device, value in pairs if self._topology.host_of(device) == self._host]

    def _add(self, session: SessionId, handle: Handle, device: DeviceId, cell: Cell) -> None:
        array = self._arrays.setdefault((session, handle), {})
        assert device not in array, f"host {self._host}: array {handle} has a shard on device {device} already"
        array[device] = cell

    def _cell(self, session: SessionId, handle: int, device: DeviceId) -> Cell:
        array = self._arrays.get((session, Handle(handle)))
        assert array is not None, f"host {self._host}: array {handle} of session {session} is not there"
        return array[device]
