"""Calls of functions of colocated Python on this host: when each may begin, and what its end brings.

Calls of one stream begin in the order of their receipt: the head of its queue waits until its arguments are settled,
and nothing of the stream overtakes it. Whoever makes the calls keeps that order.
"""

from collections import deque
from collections.abc import Callable, Iterable

from pathways_runtime.core.operations import CallFunction, ShardedResult
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.worker.arrays import LocalArray, Program, first_failure, hold, release
from pathways_runtime.core.worker.events import CallReturned
from pathways_runtime.core.worker.instructions import CountCall, ForgetFunction, Instruction, MakeCall, Report
from pathways_runtime.core.worker.sessions import Session, WaitingOperation

Instructions = list[Instruction]
#: ``(array, failure, out)``: an array has failed, or is there; those who waited for it go on.
Fail = Callable[[LocalArray, Status, Instructions], None]
Settled = Callable[[LocalArray, Instructions], None]


class PendingCall:
    """A call that was received and has not begun.

    Attributes:
        program: None if the function is not known here.
        arguments: None for an array that has no shards here.
        results: those with shards here.
    """

    __slots__ = ("arguments", "program", "results")

    def __init__(
        self,
        program: Program | None,
        arguments: tuple[LocalArray | None, ...],
        results: tuple[tuple[LocalArray, ShardedResult], ...],
    ) -> None:
        self.program = program
        self.arguments = arguments
        self.results = results


class Calls:
    """The calls of all sessions of an executor. State lies in ``Session.calls``.

    Args:
        name: the host's name for people.
    """

    def __init__(self, name: str, fail: Fail, settled: Settled) -> None:
        self._name = name
        self._fail = fail
        self._settled = settled

    def receive(
        self,
        session: Session,
        operation: CallFunction,
        results: Iterable[tuple[LocalArray, ShardedResult]],
        now_ns: int,
    ) -> WaitingOperation:
        """A call is the last one of its stream now. ``begin`` follows once its arguments are settled."""
        arguments = tuple([session.arrays.get(handle) for handle in operation.arguments])
        here = tuple([argument for argument in arguments if argument is not None])
        hold(here)
        call = PendingCall(session.programs.get(operation.executable), arguments, tuple(results))
        waiting = WaitingOperation(session, operation, here, now_ns, call)
        session.calls.setdefault(operation.stream, deque()).append(waiting)
        return waiting

    def begin(self, session: Session, stream: int, out: Instructions) -> None:
        """Arguments of a stream's calls are settled: those begin that nothing is before."""
        queue = session.calls[stream]
        while queue and not queue[0].missing:
            waiting = queue.popleft()
            self._begin(waiting, out)
            if session.forgotten:
                self._forget_after(session, waiting, out)
        if not queue:
            del session.calls[stream]

    def forget(self, session: Session, program: Program, out: Instructions) -> None:
        """Nobody names a function any more. It goes when the calls that were received before have begun: also those of
        other functions, as what it refers to may be what they look for."""
        before = {waiting for queue in session.calls.values() for waiting in queue}
        if before:
            session.forgotten.append((program, before))
        else:
            out.append(ForgetFunction(session.id, program))

    @staticmethod
    def _forget_after(session: Session, begun: WaitingOperation, out: Instructions) -> None:
        for program, before in session.forgotten:
            before.discard(begun)
            if not before:
                out.append(ForgetFunction(session.id, program))
        session.forgotten = [entry for entry in session.forgotten if entry[1]]

    def _begin(self, waiting: WaitingOperation, out: Instructions) -> None:
        call: PendingCall = waiting.subject
        operation = waiting.operation
        assert isinstance(operation, CallFunction)
        session = waiting.session
        failure = first_failure(waiting.arrays)
        program = call.program
        if program is None:
            failure = Status(
                Code.INTERNAL,
                f"{self._name} was asked to call function {operation.executable}, which it has not loaded",
            )
        elif failure is None:
            handles = tuple([result.handle for result in operation.results])
            out.append(
                MakeCall(session.id, operation.op_id, program, operation.stream, call.arguments, handles, call.results)
            )
            return
        assert failure is not None
        release(waiting.arrays)
        self._fail_results(session, operation, call.results, failure, out)

    def _fail_results(
        self,
        session: Session,
        operation: CallFunction,
        results: tuple[tuple[LocalArray, ShardedResult], ...],
        failure: Status,
        out: Instructions,
    ) -> None:
        handles = tuple(result.handle for result in operation.results)
        out.append(Report(session.id, operation.op_id, handles, failure))
        for array, _ in results:
            if array.failure is None:
                self._fail(array, failure, out)
        out.append(CountCall(session.id, operation.op_id))

    def returned(self, event: CallReturned, out: Instructions) -> None:
        """A call is over."""
        if event.failure is not None:
            handles = tuple(array.handle for array in event.results)
            out.append(Report(event.session, event.op_id, handles, event.failure))
            for array in event.results:
                if array.failure is None:
                    self._fail(array, event.failure, out)
        else:
            for array, value in zip(event.results, event.values, strict=True):
                # A Poison may have come while it ran.
                if array.failure is None:
                    array.value = value
                    self._settled(array, out)
        out.append(CountCall(event.session, event.op_id))
