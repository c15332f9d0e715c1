"""Functions of colocated Python: programs that a Python process on each of their hosts runs.

Their types and shapes come with them, so that nothing has to be asked of workers to answer a client, and they can be
compiled and called while hosts are lost. A call is no launch: it is dispatched at once, may take any time, and is
treated as a transfer that every host of it sends. What reads its results waits until it has ended on all of them, and
nothing else does.
"""

from collections.abc import Iterable

from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, RequestId
from pathways_runtime.core.operations import CallFunction
from pathways_runtime.core.session import executions, requests, responses
from pathways_runtime.core.session.arrays import ArrayRecord, describe
from pathways_runtime.core.session.dataflow import SessionState, first_poison, sharded_result
from pathways_runtime.core.session.events import CompiledProgram
from pathways_runtime.core.session.executables import ExecutableRecord, Function, OutputSpec
from pathways_runtime.core.session.instructions import SubmitOperation
from pathways_runtime.core.session.lifetime import new_future
from pathways_runtime.core.session.programs import load
from pathways_runtime.core.session.requests import ArraySpec
from pathways_runtime.core.status import Code, error


class CompileFunction(requests.Request, frozen=True):
    """Compile a function of colocated Python. Answer: Compiled.

    Attributes:
        program, options: what workers are sent.
        devices: their hosts run it.
        inputs, outputs: what it takes and gives.
    """

    name: str
    program: bytes
    options: bytes
    devices: tuple[DeviceId, ...]
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]


def compile_function(state: SessionState, request_id: RequestId, request: CompileFunction) -> responses.Response | None:
    """CompileFunction: answered when all its hosts have loaded it; at once if one of them is lost."""
    devices, hosts = state.placements.device_list(request.devices)
    function = Function(request.name, _specs(state, request, "argument", request.inputs, hosts))
    handle = state.mint()
    record = ExecutableRecord(
        handle, request.program, request.options, devices, hosts, hosts, waiting=request_id, function=function
    )
    record.outputs = _specs(state, request, "result", request.outputs, hosts)
    record.unloaded = state.placements.first_loss(hosts)
    state.executables.records[handle] = record
    if record.unloaded is None:
        load(state, record, handle)
        return None
    record.waiting = None
    record.compiled = CompiledProgram(request.name, b"", ())
    return responses.Compiled(handle, request.name, devices, b"", new_future(state, None).future_handle)


def _specs(
    state: SessionState, request: CompileFunction, what: str, specs: Iterable[ArraySpec], hosts: tuple[HostIndex, ...]
) -> tuple[OutputSpec, ...]:
    made = []
    for index, spec in enumerate(specs):
        placement = state.placements.intern(spec.sharding)
        try:
            spec.sharding.shard_shape(spec.shape)
        except ValueError as mismatch:
            raise error(Code.INVALID_ARGUMENT, f"{what} {index} of {request.name}: {mismatch}") from mismatch
        elsewhere = [host for host in placement.hosts if host not in hosts]
        if elsewhere:
            raise error(
                Code.INVALID_ARGUMENT,
                f"{request.name} runs on the hosts of devices {list(request.devices)}, but its {what} {index} lies on "
                f"{list(placement.devices)}, some of which are on host {elsewhere[0]}. Specialize it with devices of "
                "all hosts of its arguments and results",
            )
        made.append(OutputSpec(spec.dtype, spec.shape, placement))
    return tuple(made)


def execute(
    state: SessionState, request: requests.LoadedExecutableExecute, executable: ExecutableRecord
) -> responses.Response:
    """LoadedExecutableExecute of a function; poisoned arguments poison the results, and it is not called."""
    function = executable.function
    assert function is not None
    arguments = _arguments(state, request, function)
    results, outputs = request.result_array_handles, executable.outputs
    if not results:
        results = tuple(state.mint() for _ in outputs)
    elif len(results) != len(outputs):
        raise error(
            Code.INVALID_ARGUMENT, f"{function.name} has {len(outputs)} results, but {len(results)} result handles"
        )
    else:
        state.arrays.check_new(results)
    status_handle = executions.status_handle_of(state, request)
    cause = executable.unloaded or first_poison(arguments)
    if cause is None:
        _call(state, request, executable, arguments, results, status_handle)
    else:
        executions.poison(state, results, outputs, status_handle, cause)
    return executions.answer(state, request, results, status_handle)


def _arguments(state: SessionState, request: requests.LoadedExecutableExecute, function: Function) -> list[ArrayRecord]:
    args = request.args_handles
    if len(args) != len(function.inputs):
        raise error(Code.INVALID_ARGUMENT, f"{function.name} takes {len(function.inputs)} arguments, not {len(args)}")
    records = state.arrays.find_all(args)
    for index, (handle, record, spec) in enumerate(zip(args, records, function.inputs, strict=True)):
        if record.poison is None and not _lies_as(record, spec):
            raise error(
                Code.INVALID_ARGUMENT,
                f"argument {index} of {function.name}, {describe(handle, record)}, is not of the type, shape or "
                f"sharding for which it was specialized: {spec.dtype.name}[{','.join(map(str, spec.shape))}]",
            )
    return records


def _lies_as(record: ArrayRecord, spec: OutputSpec) -> bool:
    if record.dtype is not spec.dtype or record.shape != spec.shape:
        return False
    placement = record.placement
    if placement is spec.placement:
        return True
    assert placement is not None
    ours, wanted = placement.sharding, spec.placement.sharding
    # One sharding can be written in several ways.
    return ours.devices == wanted.devices and ours.boxes(record.shape) == wanted.boxes(spec.shape)


def _call(
    state: SessionState,
    request: requests.LoadedExecutableExecute,
    executable: ExecutableRecord,
    arguments: list[ArrayRecord],
    results: tuple[Handle, ...],
    status_handle: Handle,
) -> None:
    op_id = state.next_op()
    made = []
    for handle, output in zip(results, executable.outputs, strict=True):
        record = state.new_array(handle, output.dtype, output.shape, output.placement)
        record.via_transfers = (op_id,)
        made.append(sharded_result(handle, record))
    handles = (executable.on_workers, *request.args_handles)
    state.out.append(
        SubmitOperation(
            CallFunction(op_id, executable.on_workers, request.args_handles, tuple(made), request.execution_stream),
            executable.hosts,
            is_transfer=True,
            reads=state.order_reads(handles, arguments),
            writes=results,
            senders=executable.hosts,
        )
    )
    executions.await_outcome(state, status_handle, op_id, results)
