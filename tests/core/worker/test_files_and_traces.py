"""The executor's core: arrays to and from files, and traces."""

from typing import Any

from pathways_runtime.core import operations as ops
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, SessionId, WaitId
from pathways_runtime.core.sharding import REPLICATED, Sharding, TileAssignment, TileKind
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.stored import StoredArray
from pathways_runtime.core.topology import Topology
from pathways_runtime.core.worker import instructions as do
from pathways_runtime.core.worker.arrays import ShardRef
from pathways_runtime.core.worker.events import (
    ArrayFailed,
    ArrayMade,
    BufferArrived,
    OperationReceived,
    ReadTaken,
    SessionOpened,
)
from pathways_runtime.core.worker.worker import WorkerCore

SESSION = SessionId(3)
DEVICES = tuple(map(DeviceId, range(4)))
ROWS = Sharding(DEVICES, TileAssignment(TileKind.TILED, (4, 1), places=(0, 1, 2, 3)))
COPIES = Sharding(DEVICES, REPLICATED)


class Driver:
    """A core on host 1, devices 2 and 3, of two hosts."""

    def __init__(self) -> None:
        self.core = WorkerCore(HostIndex(1), Topology(1, 2, 2, "cpu"), "host-1")
        self.feed(SessionOpened(SESSION))

    def feed(self, event: Any) -> list[do.Instruction]:
        told = self.core.handle(event)
        self.core.check_invariants()
        return told

    def submit(self, operation: Any) -> list[do.Instruction]:
        return self.feed(OperationReceived(SESSION, operation, now_ns=1))

    def array(self, handle: int, *, is_present: bool = True) -> Any:
        """An array of four rows, there or still to come."""
        result = ops.ShardedResult(Handle(handle), DType.F32, (1, 2), None, DEVICES)
        told = self.submit(ops.MakeArrays(OpId(handle), (result,), ((0, 0, 0, 0),)))
        if is_present:
            (made,) = self.feed(BufferArrived(SESSION, OpId(handle), 0, b"bytes"))
            assert isinstance(made, do.MakeArray)
            self.feed(ArrayMade(SESSION, made.array, "value"))
        else:
            assert told == []
        return self.core.sessions[SESSION].arrays[Handle(handle)]


def stored(sharding: Sharding) -> StoredArray:
    return StoredArray("/a", DType.F32, (4, 2), sharding)


def test_a_host_writes_its_part() -> None:
    driver = Driver()
    rows, copies = driver.array(1), driver.array(2)
    targets = (stored(ROWS), stored(COPIES))
    (told,) = driver.submit(ops.WriteArrays(OpId(3), WaitId(5), (Handle(1), Handle(2)), targets, 9.0))
    # Of the copies, the second array's turn is device 1, which is another host's.
    tiles = (
        do.Tile(targets[0], (2, 0), False, ShardRef(rows, 0)),
        do.Tile(targets[0], (3, 0), False, ShardRef(rows, 1)),
    )
    assert told == do.StoreTiles(SESSION, WaitId(5), tiles, (rows, rows), 9.0)
    assert (rows.num_readers, copies.num_readers) == (2, 0)
    assert driver.feed(ReadTaken((rows, rows))) == [] and rows.num_readers == 0


def test_who_has_nothing_to_write_says_so_at_once() -> None:
    driver = Driver()
    driver.array(1)
    told = driver.submit(ops.WriteArrays(OpId(2), WaitId(5), (Handle(1),), (stored(COPIES),), 9.0))
    assert told == [do.AnswerAwait(SESSION, WaitId(5), None)]


def test_writing_waits_for_its_arrays_and_inherits_their_failure() -> None:
    driver = Driver()
    rows = driver.array(1, is_present=False)
    assert driver.submit(ops.WriteArrays(OpId(2), WaitId(5), (Handle(1),), (stored(ROWS),), 9.0)) == []
    failure = Status(Code.INTERNAL, "it broke")
    told = driver.submit(ops.Poison(OpId(3), (Handle(1),), failure))
    assert told == [do.AnswerAwait(SESSION, WaitId(5), failure)]
    assert rows.num_readers == 0


def test_an_array_without_elements_is_described_by_one_host() -> None:
    first = Sharding(DEVICES[2:], REPLICATED)
    nothing = StoredArray("/a", DType.F32, (0, 2), first)
    driver = Driver()
    (told,) = driver.submit(ops.WriteArrays(OpId(1), WaitId(5), (Handle(9),), (nothing,), 9.0))
    assert told == do.StoreTiles(SESSION, WaitId(5), (do.Tile(nothing, (), True, None),), (), 9.0)


def test_a_host_reads_its_part() -> None:
    driver = Driver()
    result = ops.ShardedResult(Handle(1), DType.F32, (1, 2), None, DEVICES)
    (told,) = driver.submit(ops.ReadArrays(OpId(1), (result,), (stored(ROWS),), 9.0))
    array = driver.core.sessions[SESSION].arrays[Handle(1)]
    boxes = (((2, 3), (0, 2)), ((3, 4), (0, 2)))
    assert told == do.LoadArray(SESSION, OpId(1), array, result, stored(ROWS), boxes, 9.0)
    failure = Status(Code.FAILED_PRECONDITION, "there is no file")
    assert driver.feed(ArrayFailed(SESSION, OpId(1), array, failure)) == [
        do.Report(SESSION, OpId(1), (Handle(1),), failure)
    ]


def test_traces() -> None:
    driver = Driver()
    assert driver.submit(ops.StartTrace(OpId(1), WaitId(1), 2, 0)) == [do.BeginTrace(SESSION, WaitId(1), 2, 0)]
    assert driver.submit(ops.StopTrace(OpId(2), WaitId(2), "/t", "run")) == [
        do.EndTrace(SESSION, WaitId(2), "/t", "run")
    ]
