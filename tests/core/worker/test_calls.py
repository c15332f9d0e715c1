"""Calls of functions in an executor's core: their order, what they wait for, and what their ends bring."""

from collections.abc import Iterator
from typing import Any

import pytest

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
    CallReturned,
    Event,
    OperationReceived,
    ProgramLoaded,
    ReadTaken,
    SessionClosed,
    SessionOpened,
)
from pathways_runtime.core.worker.worker import WorkerCore

SESSION = SessionId(1)
F, G = Handle(100), Handle(101)
BOOM = Status(Code.UNKNOWN, "ValueError: boom")
HERE = (DeviceId(0), DeviceId(1))
FUNCTIONS = {handle: Program(HERE, (), False, name, is_function=True) for handle, name in ((F, "f"), (G, "g"))}


class Host:
    """Host 0 of two, with two functions loaded."""

    def __init__(self) -> None:
        self.core = WorkerCore(HostIndex(0), Topology(1, 2, 2, "cpu"), "host-0")
        self.feed(SessionOpened(SESSION))
        for handle, program in FUNCTIONS.items():
            self.feed(ProgramLoaded(SESSION, handle, program))
        self.op_id = OpId(0)

    def feed(self, event: Event) -> list[do.Instruction]:
        told = self.core.handle(event)
        self.core.check_invariants()
        return told

    def submit(self, kind: Any, *fields: Any) -> list[do.Instruction]:
        self.op_id = OpId(self.op_id + 1)
        return self.feed(OperationReceived(SESSION, kind(self.op_id, *fields), now_ns=0))

    def call(self, function: Handle, arguments: list[int], results: list[ops.ShardedResult], stream: int = 1) -> Any:
        return self.submit(ops.CallFunction, function, tuple(map(Handle, arguments)), tuple(results), stream)

    def array(self, handle: int) -> Any:
        return self.core.sessions[SESSION].arrays[Handle(handle)]

    def pending(self, handle: int) -> OpId:
        assert self.submit(ops.MakeArrays, (result(handle),), ((0, 0),)) == []
        return self.op_id

    def arrive(self, op_id: OpId) -> list[do.Instruction]:
        (made,) = self.feed(BufferArrived(SESSION, op_id, 0, b""))
        assert isinstance(made, do.MakeArray)
        return self.feed(ArrayMade(SESSION, made.array, "value"))

    def present(self, handle: int) -> Any:
        self.arrive(self.pending(handle))
        return self.array(handle)

    def returned(self, call: Any, *values: Any, failure: Status | None = None) -> list[do.Instruction]:
        arrays = tuple(array for array, _ in call.results)
        return self.feed(CallReturned(SESSION, call.op_id, arrays, values, failure))


def result(handle: int, devices: tuple[int, ...] = (0, 1)) -> ops.ShardedResult:
    return ops.ShardedResult(Handle(handle), DType.F32, (4,), None, tuple(map(DeviceId, devices)))


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.core.check_invariants()


def test_a_call_is_made_and_its_results_are_there(host: Host) -> None:
    x = host.present(1)
    (call,) = host.call(F, [1], [result(2)])
    assert call == do.MakeCall(SESSION, host.op_id, FUNCTIONS[F], 1, (x,), (Handle(2),), ((host.array(2), result(2)),))
    assert x.num_readers == 1 and host.array(2).is_pending
    assert host.feed(ReadTaken((x,))) == [] and x.num_readers == 0
    assert host.returned(call, "two") == [do.CountCall(SESSION, host.op_id)]
    assert host.array(2).value == "two"


def test_calls_of_a_stream_stay_in_order_and_streams_do_not_wait_for_one_another(host: Host) -> None:
    host.present(1)
    late = host.pending(2)
    assert host.call(F, [2], [result(3)]) == []
    assert host.call(F, [1], [result(4)]) == [], "behind the one that waits"
    (other,) = host.call(F, [1], [result(5)], stream=2)
    assert other.handles == (5,)
    first, second = host.arrive(late)
    assert (first.handles, second.handles) == ((3,), (4,))
    assert host.core.sessions[SESSION].calls == {}


def test_a_call_holds_back_no_launch_and_what_reads_its_results_waits(host: Host) -> None:
    host.present(1)
    (call,) = host.call(F, [1], [result(2)])
    assert host.submit(ops.Await, WaitId(1), (Handle(2),)) == []
    assert host.call(G, [2], [result(3)]) == []
    told = host.returned(call, "two")
    assert told[0] == do.AwaitReady(SESSION, WaitId(1), (host.array(2),))
    assert isinstance(told[1], do.MakeCall) and told[1].program is FUNCTIONS[G]
    assert told[2] == do.CountCall(SESSION, call.op_id)


def test_only_shards_of_this_host_are_passed_and_wanted(host: Host) -> None:
    host.submit(ops.MakeArrays, (result(1, (2, 3)),), ((0, 0),))
    (call,) = host.call(F, [1], [result(2, (3, 0)), result(3, (2,))])
    assert call.arguments == (None,)
    assert call.handles == (Handle(2), Handle(3))
    assert call.results == ((host.array(2), result(2, (3, 0))),)
    assert host.array(2).devices == (DeviceId(0),)


def test_a_failed_argument_fails_the_results_without_a_call(host: Host) -> None:
    x = host.present(1)
    late = host.pending(2)
    assert host.call(F, [1, 2], [result(3)]) == []
    told = host.submit(ops.Poison, (Handle(2),), BOOM)
    assert told == [do.Report(SESSION, OpId(3), (Handle(3),), BOOM), do.CountCall(SESSION, OpId(3))]
    assert host.array(3).failure == BOOM and x.num_readers == 0
    assert late == OpId(2)


def test_a_failed_call_fails_its_results_and_the_order_goes_on(host: Host) -> None:
    host.present(1)
    (first,) = host.call(F, [1], [result(2), result(3)])
    (second,) = host.call(G, [1], [result(4)])
    told = host.returned(first, failure=BOOM)
    assert told == [do.Report(SESSION, first.op_id, (Handle(2), Handle(3)), BOOM), do.CountCall(SESSION, first.op_id)]
    assert host.array(2).failure == host.array(3).failure == BOOM
    host.returned(second, "four")
    assert host.array(4).value == "four"


def test_a_poison_that_comes_while_it_runs_stays(host: Host) -> None:
    (call,) = host.call(F, [], [result(1)])
    host.submit(ops.Poison, (Handle(1),), BOOM)
    assert host.returned(call, "late") == [do.CountCall(SESSION, call.op_id)]
    assert host.array(1).failure == BOOM and host.array(1).value is None


def test_a_function_that_is_not_here_fails_its_calls(host: Host) -> None:
    report, count = host.call(Handle(999), [], [result(1)])
    assert isinstance(report, do.Report) and report.failure.code is Code.INTERNAL
    assert "host-0 was asked to call function 999, which it has not loaded" in report.failure.message
    assert count == do.CountCall(SESSION, host.op_id)


def test_a_function_goes_after_the_calls_that_were_received_before(host: Host) -> None:
    late = host.pending(1)
    assert host.submit(ops.DeleteExecutable, G) == [do.ForgetFunction(SESSION, FUNCTIONS[G])]
    assert host.call(F, [1], [result(2)]) == []
    assert host.call(F, [], [result(3)], stream=2) != []
    assert host.submit(ops.DeleteExecutable, F) == []
    call, forget = host.arrive(late)
    assert isinstance(call, do.MakeCall)
    assert forget == do.ForgetFunction(SESSION, FUNCTIONS[F])
    assert host.core.sessions[SESSION].forgotten == []


def test_calls_of_a_closed_session_are_not_made(host: Host) -> None:
    late = host.pending(1)
    host.call(F, [1], [result(2)])
    host.feed(SessionClosed(SESSION))
    assert host.feed(BufferArrived(SESSION, late, 0, b"")) == []
