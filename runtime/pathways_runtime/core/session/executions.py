"""What executions of all kinds have in common: results that cannot be made, the outcome that is kept, the answer.

Kinds are XLA's programs (``launches``), functions of colocated Python (``functions``), and plugin programs
(``plugins``).
"""

from pathways_runtime.core.ids import Handle, OpId
from pathways_runtime.core.session import requests, responses
from pathways_runtime.core.session.dataflow import ExecutionOutcome, SessionState
from pathways_runtime.core.session.executables import OutputSpec
from pathways_runtime.core.session.readback import submit_await
from pathways_runtime.core.status import Code, Status, error

_EXECUTED = responses.Executed(Handle(0), ())


def status_handle_of(state: SessionState, request: requests.LoadedExecutableExecute) -> Handle:
    """Where the outcome is to be kept; 0 if nobody will ask for it.

    Raises:
        StatusError: ALREADY_EXISTS if one is kept there.
    """
    handle = request.result_status_handle
    if request.fill_status and not handle:
        return state.mint()
    if handle in state.outcomes:
        raise error(Code.ALREADY_EXISTS, f"handle {handle} already keeps the outcome of an execution")
    return handle


def keep_outcome(state: SessionState, status_handle: Handle, outcome: ExecutionOutcome) -> None:
    """Keep an outcome if somebody will ask for it."""
    if status_handle:
        state.outcomes[status_handle] = outcome


def await_outcome(state: SessionState, status_handle: Handle, op_id: OpId, results: tuple[Handle, ...]) -> None:
    """Keep the outcome of an operation, if somebody will ask for it: it is known when the results are."""
    if not status_handle:
        return
    wait = None
    if results:
        records = state.arrays.records
        wait = submit_await(state, {handle: records[handle] for handle in results}, status_handle=status_handle)
    # Without results nothing can be awaited; a failure is reported by OperationFailed, late at worst.
    state.outcomes[status_handle] = ExecutionOutcome(op_id, wait, None)


def poison(
    state: SessionState,
    results: tuple[Handle, ...],
    outputs: tuple[OutputSpec, ...],
    status_handle: Handle,
    cause: Status,
) -> None:
    """An execution cannot run: its results and its outcome are the cause."""
    for handle, output in zip(results, outputs, strict=True):
        state.new_poisoned(handle, output.dtype, output.shape, output.placement, cause)
    keep_outcome(state, status_handle, ExecutionOutcome(OpId(0), None, cause))


def keep_refusal(state: SessionState, status_handle: Handle, status: Status) -> None:
    """An execution was refused: whoever asks for its outcome is told why."""
    state.outcomes.setdefault(status_handle, ExecutionOutcome(OpId(0), None, status))


def fail_outcomes(state: SessionState, op_id: OpId, failure: Status) -> None:
    """An execution has failed: the outcome that is kept for it, if no wait tells it, is this failure."""
    for outcome in state.outcomes.values():
        if outcome.op_id == op_id and outcome.wait is None and outcome.failure is None:
            outcome.failure = failure


def answer(
    state: SessionState,
    request: requests.LoadedExecutableExecute,
    results: tuple[Handle, ...],
    status_handle: Handle,
) -> responses.Executed:
    """The answer: says what the results are like if the client did not name them."""
    if request.result_array_handles:
        return responses.Executed(status_handle, ()) if status_handle else _EXECUTED
    outputs = []
    for handle in results:
        made = state.arrays.records[handle]
        assert made.placement is not None
        outputs.append(responses.Output(made.dtype, made.shape, made.placement.sharding, handle))
    return responses.Executed(status_handle, tuple(outputs))
