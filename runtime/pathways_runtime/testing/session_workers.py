"""Workers as numpy, for tests of the session core: they run what it submits, in any order that the order's contract
allows.

A shard is a ``Buffer``; aliases share it, and a launch that takes it destroys it for everybody, as PJRT does.
"""

import random
from collections.abc import Callable

import numpy as np

from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, WaitId
from pathways_runtime.core.operations import (
    HOST_MEMORY_KINDS,
    Alias,
    Await,
    CallFunction,
    Delete,
    DeleteExecutable,
    Fetch,
    Launch,
    MakeArrays,
    Move,
    Poison,
    ShardedResult,
    Transfer,
)
from pathways_runtime.core.session.instructions import SendHostBuffer, SubmitOperation
from pathways_runtime.core.sharding import Box, Sharding
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology

MISSING = -999


class UseAfterFree(AssertionError):
    """An operation reads what is not there any more, or not yet."""


class Buffer:
    """One shard's contents on one device."""

    def __init__(self, values: np.ndarray) -> None:
        self._values: np.ndarray | None = values

    def read(self) -> np.ndarray:
        if self._values is None:
            raise UseAfterFree("a shard is read that a launch has taken")
        return self._values

    def destroy(self) -> None:
        self._values = None


def scatter(values: np.ndarray, sharding: Sharding) -> list[np.ndarray]:
    """Shards of a global array, padding as MISSING."""
    shards = []
    for box in sharding.boxes(values.shape):
        shard = np.full(sharding.shard_shape(values.shape), MISSING, values.dtype)
        part = values[_index(box)]
        shard[tuple(slice(0, n) for n in part.shape)] = part
        shards.append(shard)
    return shards


def gather(shards: list[np.ndarray], sharding: Sharding, shape: tuple[int, ...]) -> np.ndarray:
    """The global array of shards; replicas must agree and every element must be there."""
    values = np.full(shape, MISSING, np.int32)
    for shard, box in zip(shards, sharding.boxes(shape), strict=True):
        part = shard[tuple(slice(0, stop - start) for start, stop in box)]
        target = values[_index(box)]
        assert np.all((target == MISSING) | (target == part)), "replicas differ"
        values[_index(box)] = part
    assert not np.any(values == MISSING), "elements are missing"
    return values


def apply_moves(
    moves: tuple[Move, ...],
    result: ShardedResult,
    result_index: int,
    read: Callable[[Handle, DeviceId], Buffer],
    memory_kind_of: Callable[[Handle], str],
) -> list[Buffer]:
    """Shards of one result of a Transfer; a whole shard that stays on its device and in its memory is kept as it is."""
    shards: dict[DeviceId, Buffer] = {}
    written: dict[DeviceId, np.ndarray] = {}
    for move in moves:
        if move.result_index != result_index:
            continue
        source = read(move.source, move.source_device)
        target = move.target_device
        if move.source_box is None:
            assert move.target_box is None
            is_kept = move.source_device == target and memory_kind_of(move.source) == (result.memory_kind or "device")
            assert target not in shards and target not in written
            shards[target] = source if is_kept else Buffer(source.read().copy())
            continue
        assert move.target_box is not None and target not in shards
        into = written.setdefault(target, np.full(result.shape, MISSING, np.int32))
        assert np.all(into[_index(move.target_box)] == MISSING), "an element is written twice"
        into[_index(move.target_box)] = source.read()[_index(move.source_box)]
    return [
        shards[device] if device in shards else Buffer(written.get(device, np.full(result.shape, MISSING, np.int32)))
        for device in result.devices
    ]


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


class Workers:
    """All workers of a topology at once, and the controller's order.

    An operation that waits when a host is lost runs without it: its results are what the other hosts have of them.

    Args:
        rng: chooses among what may be dispatched.

    Attributes:
        waiting: submitted and not dispatched.
        loading: programs that are not loaded yet; what reads them waits.
        unloadable: programs that could not be loaded; what reads them makes nothing.
        results: what Await and Fetch have brought: (wait, hosts, value, None or failure), to be reported.
        reports: failures: (operation, handles, cause), to be reported.
        to_fail: operations that fail when they start.
        fetches: (wait, host) of all Fetches.
    """

    def __init__(self, topology: Topology, rng: random.Random) -> None:
        self.topology = topology
        self.rng = rng
        self.programs: dict[Handle, Program] = {}
        self.loading: set[Handle] = set()
        self.unloadable: dict[Handle, Status] = {}
        self.waiting: list[SubmitOperation] = []
        self.arrays: dict[Handle, WorkerArray] = {}
        self.failures: dict[Handle, Status] = {}
        self.host_buffers: dict[tuple[OpId, int], np.ndarray] = {}
        self.results: list[tuple[WaitId, tuple[HostIndex, ...], np.ndarray | Status | None]] = []
        self.to_fail: dict[OpId, Status] = {}
        self.reports: list[tuple[OpId, tuple[Handle, ...], Status]] = []
        self.fetches: set[tuple[WaitId, HostIndex]] = set()
        self.lost_hosts: set[HostIndex] = set()
        #: Lost hosts whose memory is still there, and why they are lost.
        self._kept_behind: dict[HostIndex, Status] = {}
        self._transfers_started: set[OpId] = set()
        # Operations that wait and have lost hosts, with the hosts; and who holds something of an array.
        self._hit: dict[OpId, tuple[Status, set[HostIndex]]] = {}
        self._holders: dict[Handle, set[HostIndex]] = {}
        self._last_op = 0

    # what the session's shell does

    def submit(self, instruction: SubmitOperation) -> None:
        """An operation arrives at the controller; op ids are dense and increasing."""
        assert instruction.operation.op_id == self._last_op + 1, "operations are submitted in order, none left out"
        self._last_op += 1
        assert instruction.hosts == tuple(sorted(set(instruction.hosts))) and instruction.hosts
        assert instruction.is_launch == isinstance(instruction.operation, Launch)
        assert instruction.is_transfer == isinstance(instruction.operation, Transfer | CallFunction)
        self.waiting.append(instruction)

    def send(self, instruction: SendHostBuffer, stored: np.ndarray) -> None:
        """The bytes of a host buffer arrive."""
        part = stored if instruction.box is None else stored[_index(instruction.box)]
        sent = np.full(instruction.sent_shape, 0, stored.dtype)
        sent[tuple(slice(0, n) for n in part.shape)] = part
        key = (instruction.op_id, instruction.index)
        assert key not in self.host_buffers
        self.host_buffers[key] = sent

    def lose(self, host: HostIndex, loss: Status, *, keeps_host_memory: bool = False) -> None:
        """A host goes with all that it holds; operations that wait for their turn lose its part."""
        self.lost_hosts.add(host)
        if keeps_host_memory:
            self._kept_behind[host] = loss
        for submit in self.waiting:
            if host in submit.hosts:
                self._hit.setdefault(submit.operation.op_id, (loss, set()))[1].add(host)
        for handle, holders in self._holders.items():
            if host in holders:
                array = self.arrays.get(handle)
                if keeps_host_memory and array is not None and array.memory_kind in HOST_MEMORY_KINDS:
                    continue
                holders.discard(host)
                if self.arrays.pop(handle, None) is not None:
                    self.failures[handle] = loss

    def forget_but(self, host: HostIndex, retained: tuple[Handle, ...]) -> None:
        """A host is there again and has only these arrays."""
        for handle, holders in self._holders.items():
            if host in holders and handle not in retained:
                holders.discard(host)
                if self.arrays.pop(handle, None) is not None:
                    self.failures[handle] = self._kept_behind[host]
        del self._kept_behind[host]

    def in_host_memory(self, host: HostIndex) -> tuple[Handle, ...]:
        """The arrays whose shards on a host are in its memory."""
        return tuple(
            handle
            for handle, array in self.arrays.items()
            if array.memory_kind in HOST_MEMORY_KINDS and host in self._holders[handle]
        )

    def held(self) -> set[Handle]:
        """Arrays of which a host holds something, if only a failure."""
        return {handle for handle in self.arrays.keys() | self.failures.keys() if self._holders[handle]}

    # the order

    def dispatch_some(self, most: int) -> None:
        """Dispatch up to ``most`` operations, chosen at random among those whose turn may come."""
        for _ in range(most):
            ready = [i for i in range(len(self.waiting)) if self._may_go(i)]
            if not ready:
                assert self.loading or not self.waiting, f"nothing can go: {self.waiting}"
                return
            self._start(self.waiting.pop(self.rng.choice(ready)))

    def _may_go(self, place: int) -> bool:
        submit = self.waiting[place]
        if not self.loading.isdisjoint(submit.reads):
            return False
        for earlier in self.waiting[:place]:
            if not set(earlier.writes).isdisjoint((*submit.reads, *submit.consumes)):
                return False
            if not set(submit.consumes).isdisjoint((*earlier.reads, *earlier.consumes)):
                return False
        return all(op_id in self._transfers_started for op_id in submit.after_transfers)

    def _start(self, submit: SubmitOperation) -> None:
        operation = submit.operation
        if submit.is_transfer:
            self._transfers_started.add(operation.op_id)
        injected = self.to_fail.pop(operation.op_id, None)
        loss, lost = self._hit.pop(operation.op_id, (None, set()))
        for handle in submit.writes:
            self._holders[handle] = set(submit.hosts) - lost
        if (not_loaded := next((self.unloadable[h] for h in submit.reads if h in self.unloadable), None)) is not None:
            for handle in submit.consumes:
                self.arrays.pop(handle, None)
                self.failures.pop(handle, None)
            self._fail(operation.op_id, submit.writes, not_loaded)
            return
        if isinstance(operation, MakeArrays | Alias | Transfer | CallFunction):
            for result in operation.results:
                self._holders[result.handle] = set(self.topology.hosts_of(result.devices)) - lost
        match operation:
            case MakeArrays(results=results, buffers=buffers):
                for result, indices in zip(results, buffers, strict=True):
                    if loss is not None and self._is_hit(result, loss, lost):
                        continue
                    if injected is not None:
                        self._fail(operation.op_id, (result.handle,), injected)
                        continue
                    shards = []
                    for index in indices:
                        sent = self.host_buffers[operation.op_id, index]
                        assert sent.shape == result.shape
                        shards.append(Buffer(sent.copy()))
                    self._add(result.handle, result.devices, shards, result.memory_kind)
            case Launch():
                self._launch(operation, submit, injected or loss)
            case CallFunction():
                self._call(operation, injected or loss)
            case Alias(results=results, sources=sources):
                for result, handles in zip(results, sources, strict=True):
                    cause = injected or self._cause(handles)
                    if loss is not None and self._is_hit(result, loss, lost):
                        continue
                    if cause is not None:
                        self._fail(operation.op_id, (result.handle,), cause)
                        continue
                    shards = [self._read(h, d) for h, d in zip(handles, result.devices, strict=True)]
                    assert all(shard.read().shape == result.shape for shard in shards)
                    self._add(result.handle, result.devices, shards, result.memory_kind)
            case Transfer(results=results, moves=moves):
                for index, result in enumerate(results):
                    own = [move for move in moves if move.result_index == index]
                    cause = injected or self._cause(tuple(move.source for move in own))
                    if loss is not None and self._is_hit(result, loss, lost):
                        continue
                    if cause is not None:
                        self._fail(operation.op_id, (result.handle,), cause)
                        continue
                    shards = apply_moves(moves, result, index, self._read, lambda h: self.arrays[h].memory_kind)
                    self._add(result.handle, result.devices, shards, result.memory_kind)
            case Delete(handles=handles):
                assert submit.consumes == handles
                for handle in handles:
                    if handle not in self.arrays and handle not in self.failures:
                        raise UseAfterFree(f"array {handle} is deleted but not there")
                    # A host that was lost before its turn is not told; it may be back, with the array.
                    self._holders[handle].difference_update(set(submit.hosts) - lost)
                    if not self._holders[handle]:
                        self.arrays.pop(handle, None)
                        self.failures.pop(handle, None)
            case Await(wait_id=wait_id, handles=handles):
                for handle in handles:
                    self._check_there(handle)
                self.results.append((wait_id, submit.hosts, self._cause(handles)))
            case Fetch(wait_id=wait_id, handle=handle, device=device):
                self._check_there(handle)
                cause = self._cause((handle,))
                self.fetches.update((wait_id, host) for host in submit.hosts)
                value: np.ndarray | Status = cause if cause is not None else self._read(handle, device).read().copy()
                self.results.append((wait_id, submit.hosts, value))
            case DeleteExecutable(executable=executable):
                self.programs.pop(executable, None)
                self.unloadable.pop(executable, None)
            case Poison():
                raise AssertionError("the session core poisons on its own")

    def _launch(self, launch: Launch, submit: SubmitOperation, injected: Status | None) -> None:
        program = self.programs[launch.executable]
        for handle in launch.arguments:
            self._check_there(handle)
        cause = injected or self._cause(launch.arguments)
        if cause is None:
            values = []
            for handle in launch.arguments:
                array = self.arrays[handle]
                assert array.devices == program.devices, "a launch reads arrays of other devices"
                values.append([array.shards[d].read() for d in array.devices])
            outputs = program.run(values)
            for handle, shards in zip(launch.results, outputs, strict=True):
                self._add(handle, program.devices, [Buffer(shard) for shard in shards], "device")
        taken = [p for p in program.donated if p not in launch.non_donatable]
        for position in taken:
            handle = launch.arguments[position]
            assert handle in submit.consumes
            if handle in self.arrays:
                for buffer in self.arrays[handle].shards.values():
                    buffer.destroy()
        for position in taken:
            self.arrays.pop(launch.arguments[position], None)
            self.failures.pop(launch.arguments[position], None)
        if cause is not None:
            self._fail(launch.op_id, launch.results, cause)

    def _call(self, call: CallFunction, injected: Status | None) -> None:
        program = self.programs[call.executable]
        for handle in call.arguments:
            self._check_there(handle)
        handles = tuple(result.handle for result in call.results)
        cause = injected or self._cause(call.arguments)
        if cause is not None:
            self._fail(call.op_id, handles, cause)
            return
        read = [self.arrays[handle] for handle in call.arguments]
        values = [[array.shards[device].read() for device in array.devices] for array in read]
        for result, shards in zip(call.results, program.run(values), strict=True):
            made = [Buffer(shard) for shard in shards]
            self._add(result.handle, result.devices, made, result.memory_kind)

    def _is_hit(self, result: ShardedResult, loss: Status, lost: set[HostIndex]) -> bool:
        """Whether a result was to have a shard on a host that was lost before the operation started."""
        if lost.isdisjoint(self.topology.hosts_of(result.devices)):
            return False
        self.failures[result.handle] = loss
        return True

    def _check_there(self, handle: Handle) -> None:
        if handle not in self.arrays and handle not in self.failures:
            raise UseAfterFree(f"array {handle} is used but not there")

    def _read(self, handle: Handle, device: DeviceId) -> Buffer:
        self._check_there(handle)
        return self.arrays[handle].shards[device]

    def _cause(self, handles: tuple[Handle, ...]) -> Status | None:
        for handle in handles:
            self._check_there(handle)
        return next((self.failures[handle] for handle in handles if handle in self.failures), None)

    def _add(
        self, handle: Handle, devices: tuple[DeviceId, ...], shards: list[Buffer], memory_kind: str | None
    ) -> None:
        assert handle not in self.arrays and handle not in self.failures
        self.arrays[handle] = WorkerArray(devices, dict(zip(devices, shards, strict=True)), memory_kind or "device")

    def _fail(self, op_id: OpId, handles: tuple[Handle, ...], cause: Status) -> None:
        for handle in handles:
            self.failures[handle] = cause
        self.reports.append((op_id, handles, cause))


class WorkerArray:
    """An array's shards by device."""

    def __init__(self, devices: tuple[DeviceId, ...], shards: dict[DeviceId, Buffer], memory_kind: str) -> None:
        self.devices = devices
        self.shards = shards
        self.memory_kind = memory_kind


class Program:
    """A program as workers see it: shards of all arguments in, shards of all outputs out."""

    def __init__(
        self,
        devices: tuple[DeviceId, ...],
        run: Callable[[list[list[np.ndarray]]], list[list[np.ndarray]]],
        donated: tuple[int, ...],
    ) -> None:
        self.devices = devices
        self.run = run
        self.donated = donated


def failure(text: str) -> Status:
    """A cause that can be told from others."""
    return Status(Code.RESOURCE_EXHAUSTED, text)
