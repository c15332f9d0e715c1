"""Plugin programs: what clients ask of the runtime itself in the clothes of a program.

pathwaysutils, orbax and our own client compile a text instead of an XLA program and execute it: to record profiles, to
write arrays to files and read them, to lay arrays out anew. Workers compile nothing of it.
"""

from collections.abc import Iterable

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, RequestId
from pathways_runtime.core.operations import ReadArrays, StartTrace, StopTrace, WriteArrays
from pathways_runtime.core.session import executions, plugin_programs, rearrange, requests, responses
from pathways_runtime.core.session.arrays import ArrayRecord, describe
from pathways_runtime.core.session.dataflow import ExecutionOutcome, SessionState, Tracing, first_poison, sharded_result
from pathways_runtime.core.session.events import CompiledProgram
from pathways_runtime.core.session.executables import ExecutableRecord
from pathways_runtime.core.session.lifetime import new_future
from pathways_runtime.core.session.readback import submit_await
from pathways_runtime.core.session.requests import ArrayCopySemantics, ArraySpec
from pathways_runtime.core.session.waits import Wait
from pathways_runtime.core.status import Code, Status, error
from pathways_runtime.core.stored import StoredArray

#: The array that a ``Trace`` is answered with.
_NO_VALUE = Status(Code.UNIMPLEMENTED, "the array that a profiling request is answered with has no value")
_NO_VALUE_SHAPE = (1,)
_FIRST_DEVICE = DeviceId(0)
#: Stands for the executable in ``Tracing`` when the trace was begun by ``HostTrace``.
_BY_HOST_TRACE = Handle(0)


def compile_plugin(state: SessionState, _: RequestId, request: plugin_programs.CompilePlugin) -> responses.Response:
    """CompilePlugin: ready at once."""
    every = tuple(device.id for device in state.topology.devices())
    devices, _hosts = state.placements.device_list(request.devices or every)
    handle = state.mint()
    # No hosts: nothing is loaded anywhere.
    record = ExecutableRecord(handle, b"", b"", devices, (), (), plugin=request.plugin)
    # Our client learns from the fingerprint what the location stands for that it has named.
    fingerprint = request.plugin.folder.encode() if isinstance(request.plugin, plugin_programs.HostTrace) else b""
    record.compiled = CompiledProgram(request.name, fingerprint, (), (), None, {}, request.text, request.metadata)
    state.executables.records[handle] = record
    ready = new_future(state, None).future_handle
    return responses.Compiled(handle, request.name, devices, fingerprint, ready)


def execute(
    state: SessionState, request_id: RequestId, request: requests.LoadedExecutableExecute, record: ExecutableRecord
) -> responses.Response:
    """LoadedExecutableExecute of a plugin program. If its outcome is kept, it is known when all is done."""
    status_handle = executions.status_handle_of(state, request)
    results: tuple[Handle, ...] = ()
    match record.plugin:
        case plugin_programs.Trace() as plugin:
            results = _trace(state, request, plugin, status_handle)
        case plugin_programs.HostTrace() as plugin:
            _host_trace(state, plugin, status_handle)
        case plugin_programs.Write() as plugin:
            _write(state, request.args_handles, plugin, status_handle)
        case plugin_programs.Read() as plugin:
            results = _read(state, request.result_array_handles, plugin, status_handle)
        case plugin_programs.Reshard() as plugin:
            results = _reshard(state, request_id, request, plugin, status_handle)
    return executions.answer(state, request, results, status_handle)


# Traces


def _trace(
    state: SessionState,
    request: requests.LoadedExecutableExecute,
    plugin: plugin_programs.Trace,
    status_handle: Handle,
) -> tuple[Handle, ...]:
    results = _new_results(state, request.result_array_handles, int(plugin.gives_array))
    executable = request.loaded_executable_handle
    if state.tracing is not None and state.tracing.executable == executable:
        _stop_trace(state, plugin, status_handle)
    else:
        _start_trace(state, executable, plugin, status_handle)
    for handle in results:
        placement = state.placements.single(_FIRST_DEVICE, None)
        state.new_poisoned(handle, DType.F32, _NO_VALUE_SHAPE, placement, _NO_VALUE)
    return results


def _host_trace(state: SessionState, plugin: plugin_programs.HostTrace, status_handle: Handle) -> None:
    is_anothers = state.tracing is not None and state.tracing.executable != _BY_HOST_TRACE
    if plugin.starts and not is_anothers:
        _start_trace(state, _BY_HOST_TRACE, plugin, status_handle)
    elif not plugin.starts and not is_anothers and state.tracing is not None:
        _stop_trace(state, plugin, status_handle)
    else:
        executions.keep_outcome(state, status_handle, ExecutionOutcome(OpId(0), None, None))


def _start_trace(
    state: SessionState,
    executable: Handle,
    plugin: plugin_programs.Trace | plugin_programs.HostTrace,
    status_handle: Handle,
) -> None:
    hosts = tuple(map(HostIndex, range(state.topology.num_hosts)))
    hosts = _present(state, hosts)[: plugin.max_hosts or None]
    state.tracing = Tracing(executable, hosts)
    levels = (plugin.host_tracer_level, plugin.python_tracer_level)
    _submit(state, StartTrace(state.next_op(), state.waits.mint(), *levels), hosts, (), (), status_handle)


def _stop_trace(
    state: SessionState, plugin: plugin_programs.Trace | plugin_programs.HostTrace, status_handle: Handle
) -> None:
    tracing = state.tracing
    assert tracing is not None
    if plugin.folder:
        state.tracing = None
    hosts = _present(state, tracing.hosts)
    operation = StopTrace(state.next_op(), state.waits.mint(), plugin.folder, plugin.run)
    _submit(state, operation, hosts, (), (), status_handle)


def _present(state: SessionState, hosts: tuple[HostIndex, ...]) -> tuple[HostIndex, ...]:
    present = tuple(host for host in hosts if host not in state.placements.losses)
    if not present:
        raise error(Code.DATA_LOSS, "of the hosts that are to be traced none is left")
    return present


# Files


def _write(
    state: SessionState, handles: tuple[Handle, ...], plugin: plugin_programs.Write, status_handle: Handle
) -> None:
    records = state.arrays.find_all(handles)
    if len(records) != len(plugin.targets):
        raise error(Code.INVALID_ARGUMENT, f"{len(plugin.targets)} arrays are to be written, but {len(records)} given")
    if (cause := first_poison(records)) is not None:
        executions.keep_outcome(state, status_handle, ExecutionOutcome(OpId(0), None, cause))
        return
    targets = []
    for handle, record, target in zip(handles, records, plugin.targets, strict=True):
        placement = record.placement
        assert placement is not None
        if record.shape != target.shape:
            raise error(
                Code.INVALID_ARGUMENT, f"{describe(handle, record)} is to be written as one of shape {target.shape}"
            )
        if placement.sharding.tiles.holds_partial_sums():
            raise error(
                Code.UNIMPLEMENTED,
                f"{describe(handle, record)} is unreduced: its devices hold terms of a sum. Add them up in a program, "
                "with jax.sharding.reshard, and write the sum",
            )
        targets.append(StoredArray(target.folder, record.dtype, record.shape, placement.sharding))
    hosts = _hosts_of(records)
    operation = WriteArrays(state.next_op(), state.waits.mint(), handles, tuple(targets), plugin.timeout_s)
    _submit(state, operation, hosts, handles, state.order_reads(handles, records), status_handle)


def _read(
    state: SessionState, given: tuple[Handle, ...], plugin: plugin_programs.Read, status_handle: Handle
) -> tuple[Handle, ...]:
    placements = [state.placements.intern(source.sharding) for source in plugin.sources]
    for source in plugin.sources:
        source.sharding.shard_shape(source.shape)
    results = _new_results(state, given, len(placements))
    loss = next((placement.loss for placement in placements if placement.loss is not None), None)
    made: dict[Handle, ArrayRecord] = {}
    for handle, source, placement in zip(results, plugin.sources, placements, strict=True):
        if loss is None:
            made[handle] = state.new_array(handle, source.dtype, source.shape, placement)
        else:
            state.new_poisoned(handle, source.dtype, source.shape, placement, loss)
    if loss is not None or not made:
        executions.keep_outcome(state, status_handle, ExecutionOutcome(OpId(0), None, loss))
        return results
    shards = tuple(sharded_result(handle, record) for handle, record in made.items())
    op_id = state.next_op()
    state.submit(ReadArrays(op_id, shards, plugin.sources, plugin.timeout_s), _hosts_of(made.values()), writes=results)
    executions.await_outcome(state, status_handle, op_id, results)
    return results


def _hosts_of(records: Iterable[ArrayRecord]) -> tuple[HostIndex, ...]:
    groups = {id(record.hosts): record.hosts for record in records}
    if len(groups) == 1:
        return next(iter(groups.values()))
    return tuple(sorted({host for group in groups.values() for host in group}))


# Resharding


def _reshard(
    state: SessionState,
    request_id: RequestId,
    request: requests.LoadedExecutableExecute,
    plugin: plugin_programs.Reshard,
    status_handle: Handle,
) -> tuple[Handle, ...]:
    handles = request.args_handles
    records = state.arrays.find_all(handles)
    if len(records) != len(plugin.targets):
        raise error(
            Code.INVALID_ARGUMENT, f"{len(plugin.targets)} arrays are to be resharded, but {len(records)} given"
        )
    specs = tuple(
        ArraySpec(record.dtype, record.shape, target) for record, target in zip(records, plugin.targets, strict=True)
    )
    semantics = ArrayCopySemantics.DONATE_INPUT if plugin.donates else ArrayCopySemantics.ALWAYS_COPY
    answer = rearrange.reshard_arrays(
        state, request_id, requests.ReshardArrays(handles, specs, semantics, request.result_array_handles)
    )
    assert isinstance(answer, responses.ArrayHandles)
    results = answer.array_handles
    if status_handle:
        made = {handle: state.arrays.records[handle] for handle in results}
        cause = first_poison(made.values())
        if cause is not None or not made:
            state.outcomes[status_handle] = ExecutionOutcome(OpId(0), None, cause)
        else:
            wait = submit_await(state, made, status_handle=status_handle)
            state.outcomes[status_handle] = ExecutionOutcome(wait.op_id, wait, None)
    return results


# Outcomes


def _new_results(state: SessionState, given: tuple[Handle, ...], count: int) -> tuple[Handle, ...]:
    if given:
        if len(given) != count:
            raise error(Code.INVALID_ARGUMENT, f"there are {count} results, but {len(given)} result handles")
        state.arrays.check_new(given)
    return state.mint_unless_given(given, count)


def _submit(
    state: SessionState,
    operation: StartTrace | StopTrace | WriteArrays,
    hosts: tuple[HostIndex, ...],
    handles: tuple[Handle, ...],
    reads: tuple[Handle, ...],
    status_handle: Handle,
) -> None:
    """Submit what every host tells of when it is done."""
    wait = Wait(operation.wait_id, operation.op_id, hosts, handles, status_handle=status_handle)
    state.waits.add(wait)
    state.submit(operation, hosts, reads=reads)
    executions.keep_outcome(state, status_handle, ExecutionOutcome(operation.op_id, wait, None))
