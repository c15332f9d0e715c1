"""The executor's core, event by event: exact instructions."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from pathways_runtime.core import operations as ops
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, SessionId, WaitId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.core.worker import instructions as do
from pathways_runtime.core.worker.arrays import Program, ShardRef
from pathways_runtime.core.worker.events import (
    ArrayCopied,
    ArrayFailed,
    ArrayMade,
    ArraysRetained,
    BufferArrived,
    Event,
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

SESSION = SessionId(3)
LOCAL, GANG, DONATING = Handle(1001), Handle(1002), Handle(1003)
LOST = Status(Code.DATA_LOSS, "host-1 was lost")


class Driver:
    """A core on host 0 of two hosts of two devices, with a session and three programs."""

    def __init__(self) -> None:
        self.core = WorkerCore(HostIndex(0), Topology(1, 2, 2, "cpu"), "host-0")
        self.feed(SessionOpened(SESSION))
        here = (DeviceId(0), DeviceId(1))
        self.feed(ProgramLoaded(SESSION, LOCAL, Program(here, (), False, "local")))
        self.feed(ProgramLoaded(SESSION, GANG, Program(here, (), True, "gang")))
        self.feed(ProgramLoaded(SESSION, DONATING, Program(here, (0,), False, "donating")))
        self._op_id = 0

    def feed(self, event: Event) -> list[do.Instruction]:
        instructions = self.core.handle(event)
        self.core.check_invariants()
        return instructions

    def op_id(self) -> OpId:
        self._op_id += 1
        return OpId(self._op_id)

    def submit(self, kind: Callable[..., Any], *fields: Any, **named: Any) -> list[do.Instruction]:
        return self.feed(OperationReceived(SESSION, kind(self.op_id(), *fields, **named), now_ns=self._op_id))

    def array(self, handle: int) -> Any:
        return self.core.sessions[SESSION].arrays[Handle(handle)]

    def present(self, handle: int) -> Any:
        """An array that is there."""
        self.feed(BufferArrived(SESSION, OpId(self._op_id + 1), 0, "bytes"))
        (made,) = self.submit(ops.MakeArrays, (result(handle),), ((0, 0),))
        assert isinstance(made, do.MakeArray)
        assert self.feed(ArrayMade(SESSION, made.array, f"value {handle}")) == []
        return made.array

    def pending(self, handle: int) -> OpId:
        """An array whose buffer has not come; the op id of its MakeArrays."""
        assert self.submit(ops.MakeArrays, (result(handle),), ((0, 0),)) == []
        return OpId(self._op_id)

    def launch(self, executable: Handle, arguments: list[int], results: list[int], **named: Any) -> list[Any]:
        handles = tuple(map(Handle, arguments)), tuple(map(Handle, results))
        return self.submit(ops.Launch, executable, *handles, **named)

    def arrive(self, op_id: OpId) -> list[do.Instruction]:
        """The buffer of a pending array comes, and the array is made."""
        (made,) = self.feed(BufferArrived(SESSION, op_id, 0, "bytes"))
        assert isinstance(made, do.MakeArray)
        return self.feed(ArrayMade(SESSION, made.array, "late value"))


def result(handle: int, devices: tuple[int, ...] = (0, 1)) -> ops.ShardedResult:
    return ops.ShardedResult(Handle(handle), DType.F32, (4,), None, tuple(map(DeviceId, devices)))


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.core.check_invariants()


def test_a_launch_is_enqueued_and_its_results_are_there(driver: Driver) -> None:
    x = driver.present(1)
    (enqueue,) = driver.launch(LOCAL, [1], [2, 3])
    assert isinstance(enqueue, do.EnqueueLaunch)
    assert (enqueue.copied, enqueue.absent) == ((), ())
    assert enqueue.launch.arguments == (x,)
    assert driver.array(2).is_pending
    assert driver.feed(LaunchEnqueued(enqueue.launch, ("a", "b"))) == []
    assert (driver.array(2).value, driver.array(3).value) == ("a", "b")


def test_at_most_one_launch_is_outstanding_and_they_stay_in_order(driver: Driver) -> None:
    driver.present(1)
    (first,) = driver.launch(LOCAL, [1], [2])
    assert driver.launch(LOCAL, [1], [3]) == []
    (second,) = driver.feed(LaunchEnqueued(first.launch, ("a",)))
    assert second.launch.results[0].handle == 3
    assert driver.feed(LaunchEnqueued(second.launch, ("b",))) == []


def test_a_launch_that_waits_holds_back_launches_and_nothing_else(driver: Driver) -> None:
    x = driver.present(1)
    late = driver.pending(2)
    assert driver.launch(LOCAL, [2], [3]) == []
    assert driver.launch(LOCAL, [1], [4]) == []
    (await_,) = driver.submit(ops.Await, WaitId(1), (Handle(1),))
    assert await_ == do.AwaitReady(SESSION, WaitId(1), (x,))
    (first,) = driver.arrive(late)
    assert first.launch.results[0].handle == 3
    (second,) = driver.feed(LaunchEnqueued(first.launch, ("a",)))
    assert second.launch.results[0].handle == 4


def test_what_names_an_array_keeps_it_though_it_is_deleted(driver: Driver) -> None:
    late = driver.pending(1)
    assert driver.launch(LOCAL, [1], [2]) == []
    assert driver.submit(ops.Fetch, WaitId(1), Handle(2), DeviceId(1)) == []
    assert driver.submit(ops.Delete, (Handle(1), Handle(2))) == []
    (enqueue,) = driver.arrive(late)
    (send,) = driver.feed(LaunchEnqueued(enqueue.launch, ("a",)))
    assert send == do.SendValue(SESSION, WaitId(1), ShardRef(enqueue.launch.results[0], 1))
    assert driver.core.sessions[SESSION].arrays == {}


def test_a_buffer_may_come_before_its_operation(driver: Driver) -> None:
    assert driver.feed(BufferArrived(SESSION, OpId(1), 1, "second")) == []
    assert driver.submit(ops.MakeArrays, (result(1),), ((0, 1),)) == []
    (made,) = driver.feed(BufferArrived(SESSION, OpId(1), 0, "first"))
    assert made == do.MakeArray(SESSION, OpId(1), driver.array(1), result(1), ("first", "second"))


def test_only_shards_of_this_host_are_made(driver: Driver) -> None:
    assert driver.submit(ops.MakeArrays, (result(1, (2, 1)), result(2, (2, 3))), ((0, 1), (0, 1))) == []
    (made,) = driver.feed(BufferArrived(SESSION, OpId(1), 1, "bytes"))
    assert isinstance(made, do.MakeArray)
    assert (made.array.devices, made.payloads) == ((1,), ("bytes",))
    assert Handle(2) not in driver.core.sessions[SESSION].arrays


def test_failures_are_inherited_reported_and_counted(driver: Driver) -> None:
    driver.present(1)
    driver.submit(ops.Poison, (Handle(2),), LOST)
    count, report = driver.launch(LOCAL, [1, 2], [3])
    assert (count, report) == (do.CountLaunch(), do.Report(SESSION, OpId(3), (Handle(3),), LOST))
    (report,) = driver.submit(ops.Alias, (result(4),), ((Handle(3), Handle(3)),))
    # The results of launches lie on the program's devices, so the alias finds its shards.
    assert report == do.Report(SESSION, OpId(4), (Handle(4),), LOST)
    assert driver.submit(ops.Await, WaitId(1), (Handle(1), Handle(4))) == [do.AnswerAwait(SESSION, WaitId(1), LOST)]
    (answer,) = driver.submit(ops.Fetch, WaitId(2), Handle(3), DeviceId(0))
    assert answer == do.AnswerFetch(SESSION, WaitId(2), LOST)


def test_a_gang_launch_is_enqueued_although_an_argument_failed(driver: Driver) -> None:
    driver.present(1)
    driver.submit(ops.Poison, (Handle(2),), LOST)
    (enqueue,) = driver.launch(GANG, [1, 2], [3])
    assert isinstance(enqueue, do.EnqueueLaunch)
    assert enqueue.absent == (1,)
    (report,) = driver.feed(LaunchEnqueued(enqueue.launch, ("meaningless",)))
    assert report == do.Report(SESSION, OpId(3), (Handle(3),), LOST)
    assert driver.array(3).failure == LOST
    # What the execution says of stand-ins is no news.
    assert driver.feed(LaunchFailed(enqueue.launch, Status(Code.INTERNAL, "nan"))) == []


def test_a_launch_that_fails_later_fails_its_results_with_the_first_cause(driver: Driver) -> None:
    driver.present(1)
    (first,) = driver.launch(LOCAL, [1], [2])
    driver.feed(LaunchEnqueued(first.launch, ("a",)))
    (second,) = driver.launch(LOCAL, [2], [3])
    driver.feed(LaunchEnqueued(second.launch, ("b",)))
    cause = Status(Code.RESOURCE_EXHAUSTED, "no memory")
    assert driver.feed(LaunchFailed(first.launch, cause)) == [do.Report(SESSION, OpId(2), (Handle(2),), cause)]
    (report,) = driver.feed(LaunchFailed(second.launch, Status(Code.INTERNAL, "an input failed")))
    assert report == do.Report(SESSION, OpId(3), (Handle(3),), cause)


def test_a_launch_that_fails_at_once_lets_the_next_one_go(driver: Driver) -> None:
    driver.present(1)
    (first,) = driver.launch(LOCAL, [1], [2])
    assert driver.launch(LOCAL, [1], [3]) == []
    report, second = driver.feed(LaunchFailed(first.launch, LOST))
    assert isinstance(report, do.Report)
    assert isinstance(second, do.EnqueueLaunch)


def test_a_launch_of_an_unknown_executable_fails(driver: Driver) -> None:
    driver.submit(ops.DeleteExecutable, LOCAL)
    driver.present(1)
    count, report = driver.launch(LOCAL, [1], [2])
    assert count == do.CountLaunch()
    assert "has not loaded" in report.failure.message


def test_readers_under_way_are_protected_from_donation(driver: Driver) -> None:
    x = driver.present(1)
    (send,) = driver.submit(ops.Fetch, WaitId(1), Handle(1), DeviceId(0))
    (enqueue,) = driver.launch(DONATING, [1], [2])
    assert enqueue.copied == (0,)
    driver.feed(LaunchEnqueued(enqueue.launch, ("a",)))
    driver.feed(ReadTaken((send.source.array,)))
    assert x.num_readers == 0
    (enqueue,) = driver.launch(DONATING, [2], [3])
    assert enqueue.copied == ()


@pytest.mark.parametrize(("arguments", "named"), [([1, 1], {}), ([1], {"non_donatable": (0,)})])
def test_a_donated_argument_is_copied_when_somebody_keeps_it(driver: Driver, arguments: list[int], named: Any) -> None:
    driver.present(1)
    (enqueue,) = driver.launch(DONATING, arguments, [2], **named)
    assert enqueue.copied == (0,)


def test_alias_waits_and_protects_its_sources(driver: Driver) -> None:
    late = driver.pending(1)
    assert driver.submit(ops.Alias, (result(2, (1,)),), ((Handle(1),),)) == []
    (share,) = driver.arrive(late)
    x = driver.array(1)
    assert share == do.ShareShards(SESSION, OpId(2), driver.array(2), result(2, (1,)), (ShardRef(x, 1),))
    assert x.num_readers == 1
    driver.feed(ArrayMade(SESSION, driver.array(2), "shared"))
    driver.feed(ReadTaken((x,)))
    assert driver.array(2).value == "shared"


WAITING_FOR_ANOTHER: dict[str, Callable[[], tuple[Any, ...]]] = {
    "an alias": lambda: (ops.Alias, (result(3, (0, 1)),), ((Handle(1), Handle(2)),)),
    "a copy": lambda: (ops.Transfer, (result(3, (0, 1)),), (move(1, 0, 0), move(2, 1, 1))),
    "a copy and a piece from elsewhere": lambda: (ops.Transfer, (result(3, (0, 1)),), (move(1, 0, 0), move(2, 2, 1))),
    "a send": lambda: (ops.Transfer, (result(3, (2, 3)),), (move(1, 0, 2), move(2, 1, 3))),
}


@pytest.mark.parametrize("kind", WAITING_FOR_ANOTHER)
@pytest.mark.parametrize("end", ["comes", "fails"])
def test_what_waits_for_one_array_protects_another_from_donation(driver: Driver, kind: str, end: str) -> None:
    x = driver.present(1)
    late = driver.pending(2)
    instructions = driver.submit(*WAITING_FOR_ANOTHER[kind]())
    assert all(isinstance(one, do.ExpectPiece) for one in instructions)
    (enqueue,) = driver.launch(DONATING, [1], [4])
    assert enqueue.copied == (0,)
    driver.feed(LaunchEnqueued(enqueue.launch, ("a",)))
    if instructions and end == "comes":
        (done,) = driver.feed(PieceArrived(SESSION, OpId(3), 1, "bytes", None))
    elif instructions:
        driver.feed(PieceArrived(SESSION, OpId(3), 1, None, LOST))
    elif end == "comes":
        (done,) = driver.arrive(late)
    else:
        driver.submit(ops.Poison, (Handle(2),), LOST)
    if end == "comes":
        assert isinstance(done, do.ShareShards | do.AssembleArray | do.SendPieces)
        assert x.num_readers == 1
    else:
        # What was present is still sent: the receiver waits for it.
        assert x.num_readers == int(kind == "a send")


def test_an_array_that_cannot_be_made_fails(driver: Driver) -> None:
    op_id = driver.pending(1)
    (made,) = driver.feed(BufferArrived(SESSION, op_id, 0, "bytes"))
    wrong = Status(Code.INVALID_ARGUMENT, "too short")
    (report,) = driver.feed(ArrayFailed(SESSION, op_id, made.array, wrong))
    assert report == do.Report(SESSION, op_id, (Handle(1),), wrong)


def move(source: int, source_device: int, target_device: int, box: Any = None) -> ops.Move:
    return ops.Move(Handle(source), DeviceId(source_device), 0, DeviceId(target_device), box, box)


def test_a_transfer_sends_receives_and_copies(driver: Driver) -> None:
    x = driver.present(1)
    half = ((0, 2),)
    moves = (move(1, 0, 3), move(1, 2, 0, half), move(1, 1, 0, half), move(1, 2, 3))
    expect, send = driver.submit(ops.Transfer, (result(2, (3, 0)),), moves)
    assert expect == do.ExpectPiece(SESSION, OpId(2), 1, HostIndex(1), 8)
    assert send == do.SendPieces(SESSION, OpId(2), (do.OutgoingPiece(0, HostIndex(1), 16, ShardRef(x, 0), None, None),))
    assert x.num_readers == 2
    (assemble,) = driver.feed(PieceArrived(SESSION, OpId(2), 1, "bytes", None))
    parts = (do.Part(None, "bytes", half, half), do.Part(ShardRef(x, 1), None, half, half))
    assert assemble == do.AssembleArray(SESSION, OpId(2), driver.array(2), result(2, (3, 0)), (parts,))
    assert x.num_readers == 2


def test_a_move_that_never_comes_fails_the_array(driver: Driver) -> None:
    driver.submit(ops.Transfer, (result(2, (0, 1)),), (move(1, 2, 0), move(1, 3, 1)))
    (report,) = driver.feed(PieceArrived(SESSION, OpId(1), 0, None, LOST))
    assert report == do.Report(SESSION, OpId(1), (Handle(2),), LOST)
    assert driver.feed(PieceArrived(SESSION, OpId(1), 1, "bytes", None)) == []


@pytest.mark.parametrize("comes_first", [True, False])
def test_nobody_sees_an_array_of_which_a_part_never_came(driver: Driver, comes_first: bool) -> None:
    """The sender is lost after it has begun: what waits or comes later gets the failure, never what is there."""
    moves = (move(1, 2, 0, ((0, 2),)), move(1, 3, 0, ((2, 4),)))
    driver.submit(ops.Transfer, (result(2, (0,)),), moves)
    driver.submit(ops.Alias, (result(3, (0,)),), ((Handle(2),),))
    assert driver.submit(ops.Await, WaitId(1), (Handle(3),)) == []
    assert driver.submit(ops.Fetch, WaitId(2), Handle(2), DeviceId(0)) == []
    pieces = [PieceArrived(SESSION, OpId(1), 0, "bytes", None), PieceArrived(SESSION, OpId(1), 1, None, LOST)]
    told = [i for piece in (pieces if comes_first else pieces[::-1]) for i in driver.feed(piece)]
    assert not any(isinstance(i, do.AssembleArray | do.ShareShards | do.SendValue | do.AwaitReady) for i in told)
    assert do.AnswerAwait(SESSION, WaitId(1), LOST) in told and do.AnswerFetch(SESSION, WaitId(2), LOST) in told
    assert driver.submit(ops.Fetch, WaitId(3), Handle(3), DeviceId(0)) == [do.AnswerFetch(SESSION, WaitId(3), LOST)]
    (send,) = driver.submit(ops.Transfer, (result(4, (2,)),), (move(2, 0, 2),))
    assert send.pieces == (do.OutgoingPiece(0, HostIndex(1), 16, None, None, LOST),)


def test_a_failed_source_is_told_to_the_receiver(driver: Driver) -> None:
    driver.submit(ops.Poison, (Handle(1),), LOST)
    (send,) = driver.submit(ops.Transfer, (result(2, (2,)),), (move(1, 0, 2),))
    assert send.pieces == (do.OutgoingPiece(0, HostIndex(1), 16, None, None, LOST),)


def test_poison_ends_waiting_for_pieces(driver: Driver) -> None:
    x = driver.present(5)
    driver.submit(ops.Transfer, (result(2, (0, 1)),), (move(1, 2, 0), move(5, 1, 1)))
    assert driver.submit(ops.Await, WaitId(1), (Handle(2),)) == []
    assert [entry[2:4] for entry in driver.core.waiting()] == [
        ("transfer", "bytes from hosts 1"),
        ("await", "arrays 2"),
    ]
    assert driver.submit(ops.Poison, (Handle(2),), LOST) == [do.AnswerAwait(SESSION, WaitId(1), LOST)]
    assert driver.feed(PieceArrived(SESSION, OpId(2), 0, "bytes", None)) == []
    assert driver.core.waiting() == []
    assert x.num_readers == 0


def test_an_await_of_nothing_here_is_answered_at_once(driver: Driver) -> None:
    assert driver.submit(ops.Await, WaitId(1), (Handle(9),)) == [do.AnswerAwait(SESSION, WaitId(1), None)]


def test_a_fetch_of_nothing_here_says_so(driver: Driver) -> None:
    (answer,) = driver.submit(ops.Fetch, WaitId(1), Handle(9), DeviceId(0))
    assert "host-0 has no array 9" in answer.failure.message


def test_closing_a_session_lets_its_launches_end(driver: Driver) -> None:
    driver.present(1)
    late = driver.pending(2)
    for executable, handle in ((LOCAL, 3), (GANG, 4), (LOCAL, 5)):
        assert driver.launch(executable, [2], [handle]) == []
    assert driver.submit(ops.Await, WaitId(1), (Handle(2), Handle(5))) == []
    forget, count, report, gang = driver.feed(SessionClosed(SESSION))
    assert forget == do.ForgetTransfers(SESSION)
    assert count == do.CountLaunch()
    assert report.failure.code is Code.CANCELLED
    assert (gang.absent, gang.launch.results[0].handle) == ((0,), 4)
    report, count, last = driver.feed(LaunchEnqueued(gang.launch, ("a",)))
    assert (report.handles, count, last.handles) == ((4,), do.CountLaunch(), (5,))
    # What comes too late changes nothing; launches still count.
    assert driver.feed(BufferArrived(SESSION, late, 0, "bytes")) == []
    assert driver.launch(LOCAL, [1], [6]) == [do.CountLaunch()]
    assert (driver.core.sessions, driver.core.waiting()) == ({}, [])


def test_an_answer_that_nobody_asked_for_is_loud(driver: Driver) -> None:
    driver.present(1)
    (enqueue,) = driver.launch(LOCAL, [1], [2])
    driver.feed(LaunchEnqueued(enqueue.launch, ("a",)))
    with pytest.raises(ValueError, match="was asked for"):
        driver.core.handle(LaunchEnqueued(enqueue.launch, ("a",)))


def _on_host(handle: int) -> ops.ShardedResult:
    return msgspec.structs.replace(result(handle), memory_kind="pinned_host")


def _made_on_host(driver: Driver, handle: int) -> Any:
    driver.feed(BufferArrived(SESSION, OpId(driver._op_id + 1), 0, "bytes"))
    (made,) = driver.submit(ops.MakeArrays, (_on_host(handle),), ((0, 0),))
    assert driver.feed(ArrayMade(SESSION, made.array, "value")) == [do.RetainArray(SESSION, made.array)]
    return made.array


def test_an_array_in_host_memory_is_retained_until_it_is_deleted(driver: Driver) -> None:
    array = _made_on_host(driver, 7)
    assert driver.feed(ArrayCopied(SESSION, array, "in place", "copy")) == [do.RecordArray(SESSION, array, "copy")]
    assert array.value == "in place"
    assert driver.submit(ops.Delete, (Handle(7),)) == [do.DropArray(SESSION, Handle(7))]


def test_an_array_that_is_gone_before_it_is_copied_is_not_recorded(driver: Driver) -> None:
    array, failed = _made_on_host(driver, 7), _made_on_host(driver, 8)
    assert driver.submit(ops.Delete, (Handle(7),)) == []
    assert driver.feed(ArrayCopied(SESSION, array, None, "copy")) == []
    driver.submit(ops.Poison, (Handle(8),), LOST)
    assert driver.feed(ArrayCopied(SESSION, failed, "in place", "copy")) == []
    assert (failed.value, failed.failure) == (None, LOST)
    driver.feed(SessionClosed(SESSION))
    assert driver.feed(ArrayCopied(SESSION, array, None, "copy")) == []


def test_arrays_of_the_executor_before_are_there_and_are_dropped_when_deleted(driver: Driver) -> None:
    devices = (DeviceId(0), DeviceId(1))
    assert driver.feed(ArraysRetained(SESSION, ((Handle(7), devices, "value"),))) == []
    assert (driver.array(7).value, driver.array(7).devices) == ("value", devices)
    assert driver.submit(ops.Await, WaitId(1), (Handle(7),)) == [do.AwaitReady(SESSION, WaitId(1), (driver.array(7),))]
    assert driver.submit(ops.Delete, (Handle(7),)) == [do.DropArray(SESSION, Handle(7))]
