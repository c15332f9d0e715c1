"""Values and outcomes back to the client: readiness, contents, results of executions."""

from pathways_runtime.core.ids import Handle, HostIndex, RequestId
from pathways_runtime.core.operations import Await, Fetch
from pathways_runtime.core.session import events, requests, responses
from pathways_runtime.core.session.arrays import ArrayRecord, describe
from pathways_runtime.core.session.dataflow import SessionState, first_poison
from pathways_runtime.core.session.instructions import StoreFetched
from pathways_runtime.core.session.waits import FetchTarget, Wait
from pathways_runtime.core.status import Code, Status, StatusError, error

_NO_STATUS = Handle(0)


def check_value_ready(
    state: SessionState, request_id: RequestId, request: requests.CheckValueReady
) -> responses.Response | None:
    """CheckValueReady: at once if nothing is left to wait for, else one Await for all that is."""
    records = state.arrays.find_all(request.value_handles)
    cause = first_poison(records)
    if cause is not None:
        raise StatusError(cause)
    pending = {h: r for h, r in zip(request.value_handles, records, strict=True) if not r.is_ready}
    if not pending:
        return responses.EMPTY
    submit_await(state, pending, request_id=request_id)
    return None


def copy_to_host_buffer(
    state: SessionState, request_id: RequestId, request: requests.CopyToHostBuffer
) -> responses.Response | None:
    """CopyToHostBuffer: one shard has it all."""
    handle = request.array_handle
    record = state.arrays.find(handle)
    if record.poison is not None:
        raise StatusError(record.poison)
    placement = record.placement
    assert placement is not None
    if not placement.sharding.is_fully_replicated():
        raise error(Code.INVALID_ARGUMENT, f"no device holds all of {describe(handle, record)}: take it apart first")
    strides = request.byte_strides
    if strides is not None and len(strides) != len(record.shape):
        raise error(Code.INVALID_ARGUMENT, f"{len(strides)} byte strides for {describe(handle, record)}")
    device = placement.devices[0]
    hosts = (state.topology.host_of(device),)
    wait_id = state.waits.mint()
    operation = Fetch(state.next_op(), wait_id, handle, device)
    target = FetchTarget(request.host_buffer_handle, record.dtype, record.shape, strides)
    state.waits.add(Wait(wait_id, operation.op_id, hosts, (handle,), request_id=request_id, target=target))
    state.submit(operation, hosts, reads=state.order_reads((handle,), (record,)))
    return None


def fetch_execute_result(
    state: SessionState, request_id: RequestId, request: requests.LoadedExecutableFetchExecuteResult
) -> responses.Response | None:
    """LoadedExecutableFetchExecuteResult: once per execution that was asked to keep its outcome."""
    outcome = state.outcomes.pop(request.result_status_handle, None)
    if outcome is None:
        raise error(
            Code.NOT_FOUND, f"there is no outcome of an execution at {request.result_status_handle}, or it was fetched"
        )
    if outcome.wait is not None:
        outcome.wait.request_id = request_id
        return None
    if outcome.failure is not None:
        raise StatusError(outcome.failure)
    return responses.EMPTY


def submit_await(
    state: SessionState,
    pending: dict[Handle, ArrayRecord],
    request_id: RequestId | None = None,
    status_handle: Handle = _NO_STATUS,
) -> Wait:
    """Wait for live arrays that are not poisoned."""
    handles = tuple(pending)
    groups = {id(record.hosts): record.hosts for record in pending.values()}
    hosts = next(iter(groups.values()))
    if len(groups) > 1:
        hosts = tuple(sorted({host for group in groups.values() for host in group}))
    wait_id = state.waits.mint()
    operation = Await(state.next_op(), wait_id, handles)
    wait = Wait(wait_id, operation.op_id, hosts, handles, request_id=request_id, status_handle=status_handle)
    state.waits.add(wait)
    state.submit(operation, hosts, reads=state.order_reads(handles, pending.values()))
    return wait


def arrays_ready(state: SessionState, event: events.ArraysReady) -> None:
    """A host's part of an Await is done."""
    _note_ready(state, state.waits.report(event.wait_id, event.host), event.failure)


def ready_on_hosts(state: SessionState, event: events.ReadyOnHosts) -> None:
    """The parts of several hosts of an Await are done."""
    _note_ready(state, state.waits.report_all(event.wait_id, event.hosts), None)


def _note_ready(state: SessionState, wait: Wait | None, failure: Status | None) -> None:
    if wait is None or wait.has_concluded:
        return
    if wait.target is not None:
        raise LookupError(f"arrays are said to be ready to wait {wait.wait_id}, which fetches a value")
    if failure is not None:
        conclude(state, wait, failure)
    elif wait.is_over():
        for handle in wait.handles:
            record = state.arrays.records.get(handle)
            if record is not None and record.poison is None:
                record.is_ready = True
                record.via_transfers = ()
        conclude(state, wait, None)


def shard_fetched(state: SessionState, event: events.ShardFetched) -> None:
    """A fetched value is in the shell, or cannot be had."""
    wait = state.waits.report(event.wait_id, event.host)
    if wait is None:
        return
    target = wait.target
    if target is None:
        raise LookupError(f"host {event.host} sends a value to wait {wait.wait_id}, which only waits for readiness")
    if event.failure is None:
        state.out.append(
            StoreFetched(wait.wait_id, target.host_buffer_handle, target.dtype, target.shape, target.byte_strides)
        )
    conclude(state, wait, event.failure)


def conclude(state: SessionState, wait: Wait, failure: Status | None) -> None:
    """Answer what waits, or keep the outcome until it is asked for.

    The cause that an array already has goes before what a worker says now. If the wait is for the readiness of one
    array, its failure is the array's; of several, OperationFailed says which.
    """
    wait.has_concluded = True
    if failure is not None:
        records = [state.arrays.records[handle] for handle in wait.handles if handle in state.arrays.records]
        if len(records) == len(wait.handles) == 1 and wait.target is None and records[0].poison is None:
            records[0].poison = failure
            records[0].is_ready = False
        failure = first_poison(records) or failure
    if wait.status_handle:
        outcome = state.outcomes.get(wait.status_handle)
        if outcome is not None:
            outcome.wait = None
            outcome.failure = failure
    if wait.request_id is not None:
        if failure is None:
            state.respond(wait.request_id, responses.EMPTY)
        else:
            state.respond_error(wait.request_id, failure)


def lose_host(state: SessionState, host: HostIndex, loss: Status) -> None:
    """Waits that still need a host end with its loss."""
    for wait in state.waits.lose(host):
        conclude(state, wait, loss)
