"""The end of arrays, and futures. A deletion is done, as far as the session can see, when it is asked for."""

from pathways_runtime.core.ids import RequestId
from pathways_runtime.core.session import requests, responses
from pathways_runtime.core.session.dataflow import SessionState
from pathways_runtime.core.status import Code, Status, error


def delete_array(state: SessionState, _: RequestId, request: requests.DeleteArray) -> responses.Response:
    """DeleteArray: the handles stay, deleted; the future fails if one of them is unknown."""
    records = state.arrays.records
    handles = tuple(dict.fromkeys(request.array_handles))
    known = [handle for handle in handles if handle in records]
    for handle in known:
        records[handle].is_deleted = True
    state.free(known)
    unknown = [handle for handle in handles if handle not in records]
    outcome = Status(Code.NOT_FOUND, f"there is no array {unknown[0]}") if unknown else None
    return new_future(state, outcome)


def destruct_array(state: SessionState, _: RequestId, request: requests.DestructArray) -> responses.Response:
    """DestructArray: forget the handles."""
    records = state.arrays.records
    known = [handle for handle in request.array_handles if handle in records]
    state.free(known)
    for handle in known:
        records.pop(handle, None)
    if len(known) != len(request.array_handles):
        unknown = [handle for handle in request.array_handles if handle not in known]
        raise error(Code.NOT_FOUND, f"there is no array {', '.join(map(str, unknown))}")
    return responses.EMPTY


def is_array_deleted(state: SessionState, _: RequestId, request: requests.IsArrayDeleted) -> responses.Response:
    """IsArrayDeleted: donated counts as deleted."""
    record = state.arrays.records.get(request.array_handle)
    if record is None:
        raise error(Code.NOT_FOUND, f"there is no array {request.array_handle}")
    return responses.Deleted(record.is_deleted)


def check_future(state: SessionState, _: RequestId, request: requests.CheckFuture) -> responses.Response:
    """CheckFuture: the outcome, once."""
    if request.future_handle not in state.futures:
        raise error(Code.NOT_FOUND, f"there is no future {request.future_handle}, or it was asked before")
    outcome = state.futures.pop(request.future_handle)
    if outcome is not None:
        raise error(outcome.code, outcome.message)
    return responses.EMPTY


def new_future(state: SessionState, outcome: Status | None) -> responses.FutureHandle:
    """A future that is done."""
    handle = state.mint()
    state.futures[handle] = outcome
    return responses.FutureHandle(handle)
