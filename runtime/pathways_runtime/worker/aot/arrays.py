"""Arrays that have no contents: what a session's operations do where nothing is executed. No I/O."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pathways_runtime.core import operations as ops
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, WaitId
from pathways_runtime.core.sharding import Shape
from pathways_runtime.core.status import Code, Status

#: Host buffers up to this size are kept, so that sizes, counters and the like read as they were put. A program's loops
#: may depend on them.
KEPT_BYTES = 4096


class Ready(NamedTuple):
    """The part of ``host`` of an Await is done, or cannot be."""

    host: HostIndex
    wait_id: WaitId
    failure: Status | None = None


class Value(NamedTuple):
    """The answer to a Fetch. ``contents``: dense bytes, None: ``num_bytes`` zeros."""

    host: HostIndex
    wait_id: WaitId
    contents: bytes | None
    num_bytes: int


Answer = Ready | Value

#: Their host buffers, if they have some, say themselves how long they are.
_WITHOUT_SIZE = frozenset({DType.TOKEN, DType.OPAQUE, DType.STRING})


class _Cell:
    """One small host buffer of one host: None until it is here."""

    __slots__ = ("contents", "waiting")

    def __init__(self) -> None:
        self.contents: bytes | None = None
        self.waiting: list[Value] = []


class _Array:
    """Shape and type of every shard, and the host buffers that some are made of; others are zeros."""

    __slots__ = ("cells", "num_bytes")

    def __init__(self, shape: Shape, dtype: DType) -> None:
        self.num_bytes = 0 if dtype in _WITHOUT_SIZE else math.prod(shape) * dtype.itemsize_bytes
        self.cells: dict[DeviceId, _Cell] = {}


class AbstractSession:
    """One session's arrays and programs, and what reads them.

    Args:
        host_of: a device's host.
    """

    def __init__(self, host_of: Callable[[DeviceId], HostIndex]) -> None:
        self._host_of = host_of
        self._arrays: dict[Handle, _Array] = {}
        self._outputs: dict[Handle, tuple[tuple[Shape, DType], ...]] = {}
        #: Of host buffers that are not here yet, or that no MakeArrays has named yet.
        self._cells: dict[tuple[HostIndex, OpId, int], _Cell] = {}
        self._perform: dict[type[ops.Operation], Callable[..., Sequence[Answer]]] = {
            ops.Launch: self._launch,
            ops.MakeArrays: self._make_arrays,
            ops.Alias: self._alias,
            ops.Transfer: self._transfer,
            ops.Delete: self._delete,
            ops.DeleteExecutable: self._delete_executable,
            ops.Await: self._await,
            ops.Fetch: self._fetch,
        }

    def num_kept_apart(self) -> int:
        """Host buffers that no array has taken yet, or that an array waits for."""
        return len(self._cells)

    def add_program(self, executable: Handle, outputs: Sequence[tuple[Shape, DType]]) -> None:
        """A program is loaded. ``outputs``: shape and type of one device's shards."""
        self._outputs[executable] = tuple(outputs)

    def perform(self, operation: ops.Operation, hosts: Sequence[HostIndex]) -> Sequence[Answer]:
        """The next operation; ``hosts`` take part in it. Returns whom to tell what."""
        perform = self._perform.get(type(operation))
        if perform is not None:
            return perform(operation, hosts)
        return self._refuse(operation, hosts)

    def take_buffer(
        self, host: HostIndex, op_id: OpId, index: int, contents: bytes | bytearray | memoryview
    ) -> Sequence[Answer]:
        """A host buffer has come to a host."""
        key = (host, op_id, index)
        if len(contents) > KEPT_BYTES:
            return ()
        cell = self._cells.pop(key, None)
        if cell is None:
            cell = self._cells[key] = _Cell()
        cell.contents = bytes(contents)
        waiting, cell.waiting = cell.waiting, []
        return [value._replace(contents=cell.contents) for value in waiting]

    def _launch(self, launch: ops.Launch, _: Sequence[HostIndex]) -> Sequence[Answer]:
        for handle, (shape, dtype) in zip(launch.results, self._outputs[launch.executable], strict=True):
            self._arrays[handle] = _Array(shape, dtype)
        return ()

    def _make_arrays(self, operation: ops.MakeArrays, _: Sequence[HostIndex]) -> Sequence[Answer]:
        named: set[tuple[HostIndex, OpId, int]] = set()
        for result, indices in zip(operation.results, operation.buffers, strict=True):
            array = self._arrays[result.handle] = _Array(result.shape, result.dtype)
            if result.dtype in _WITHOUT_SIZE or array.num_bytes > KEPT_BYTES:
                continue
            for device, index in zip(result.devices, indices, strict=True):
                key = (self._host_of(device), operation.op_id, index)
                named.add(key)
                array.cells[device] = self._cells.setdefault(key, _Cell())
        for key in named:
            if self._cells[key].contents is not None:
                del self._cells[key]
        return ()

    def _alias(self, operation: ops.Alias, _: Sequence[HostIndex]) -> Sequence[Answer]:
        for result, sources in zip(operation.results, operation.sources, strict=True):
            array = _Array(result.shape, result.dtype)
            for device, source in zip(result.devices, sources, strict=True):
                cell = self._arrays[source].cells.get(device)
                if cell is not None:
                    array.cells[device] = cell
            self._arrays[result.handle] = array
        return ()

    def _transfer(self, operation: ops.Transfer, _: Sequence[HostIndex]) -> Sequence[Answer]:
        made = [_Array(result.shape, result.dtype) for result in operation.results]
        for move in operation.moves:
            if move.source_box is None and move.target_box is None:
                cell = self._arrays[move.source].cells.get(move.source_device)
                if cell is not None:
                    made[move.result_index].cells[move.target_device] = cell
        for result, array in zip(operation.results, made, strict=True):
            self._arrays[result.handle] = array
        return ()

    def _delete(self, operation: ops.Delete, _: Sequence[HostIndex]) -> Sequence[Answer]:
        for handle in operation.handles:
            self._arrays.pop(handle, None)
        return ()

    def _delete_executable(self, operation: ops.DeleteExecutable, _: Sequence[HostIndex]) -> Sequence[Answer]:
        self._outputs.pop(operation.executable, None)
        return ()

    def _await(self, operation: ops.Await, hosts: Sequence[HostIndex]) -> Sequence[Answer]:
        return [Ready(host, operation.wait_id) for host in hosts]

    def _fetch(self, operation: ops.Fetch, hosts: Sequence[HostIndex]) -> Sequence[Answer]:
        (host,) = hosts
        array = self._arrays[operation.handle]
        cell = array.cells.get(operation.device)
        value = Value(host, operation.wait_id, None if cell is None else cell.contents, array.num_bytes)
        if cell is not None and cell.contents is None:
            cell.waiting.append(value)
            return ()
        return [value]

    def _refuse(self, operation: ops.Operation, hosts: Sequence[HostIndex]) -> Sequence[Answer]:
        """What reads or writes contents elsewhere than in the client: whoever waits for it is told; results are zeros.

        Raises:
            TypeError: nobody waits for it, and it makes nothing that is known here.
        """
        name = type(operation).__name__
        wait_id: WaitId | None = getattr(operation, "wait_id", None)
        results = getattr(operation, "results", ())
        made = [result for result in results if isinstance(result, ops.ShardedResult)]
        if len(made) != len(results) or (wait_id is None and not made):
            raise TypeError(f"a runtime that only compiles does not know {name}")
        for result in made:
            self._arrays[result.handle] = _Array(result.shape, result.dtype)
        if wait_id is None:
            return ()
        failure = Status(Code.UNIMPLEMENTED, f"{name}: this runtime only compiles, and has no contents of arrays")
        return [Ready(host, wait_id, failure) for host in hosts]
