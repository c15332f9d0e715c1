"""Executions. The way of every step of a training loop: what is here costs the same for any number of devices."""

from pathways_runtime.core.ids import Handle, OpId, RequestId
from pathways_runtime.core.operations import Launch
from pathways_runtime.core.session import executions, functions, plugins, requests, responses
from pathways_runtime.core.session.arrays import ArrayRecord, describe
from pathways_runtime.core.session.dataflow import SessionState
from pathways_runtime.core.session.executables import ExecutableRecord
from pathways_runtime.core.session.instructions import SubmitOperation
from pathways_runtime.core.status import Code, error


def execute(
    state: SessionState, request_id: RequestId, request: requests.LoadedExecutableExecute
) -> responses.Response:
    """LoadedExecutableExecute.

    An execution that cannot run because of what failed earlier (an argument is poisoned, the executable is not loaded)
    is answered OK, and its outputs carry the first cause: the executable's, else the first poisoned argument's. Its
    donated arguments stay. A request that is wrong in itself is refused.
    """
    executable_handle = request.loaded_executable_handle
    executable, compiled = state.executables.find_live(executable_handle)
    if executable.plugin is not None:
        return plugins.execute(state, request_id, request, executable)
    if executable.function is not None:
        return functions.execute(state, request, executable)
    args = request.args_handles
    if request.device_ids and request.device_ids != executable.devices:
        raise error(
            Code.INVALID_ARGUMENT,
            f"{compiled.name} is loaded on devices {list(executable.devices)}, not on {list(request.device_ids)}",
        )
    if compiled.num_parameters is not None and len(args) != compiled.num_parameters:
        raise error(
            Code.INVALID_ARGUMENT, f"{compiled.name} takes {compiled.num_parameters} arguments, not {len(args)}"
        )

    cause = executable.unloaded
    records = state.arrays.records
    devices = executable.devices
    after: tuple[OpId, ...] = ()
    has_storages = False
    for handle in args:
        record = records.get(handle)
        if record is None or record.is_deleted:
            record = state.arrays.find(handle)
        if record.poison is not None:
            if cause is None:
                cause = record.poison
        elif record.placement.devices is not devices:  # type: ignore[union-attr]  # only a poisoned record has none
            _raise_wrong_devices(compiled.name, executable, handle, record)
        if record.via_transfers:
            after += record.via_transfers
        if record.storages is not None:
            has_storages = True

    results = request.result_array_handles
    outputs = executable.outputs
    if not results:
        results = tuple(state.mint() for _ in outputs)
    else:
        if len(results) != len(outputs):
            raise error(
                Code.INVALID_ARGUMENT, f"{compiled.name} has {len(outputs)} outputs, but {len(results)} result handles"
            )
        state.arrays.check_new(results)

    status_handle = executions.status_handle_of(state, request)
    if cause is None:
        _launch(state, request, executable, results, after, has_storages, status_handle)
    else:
        executions.poison(state, results, outputs, status_handle, cause)
    return executions.answer(state, request, results, status_handle)


def _launch(
    state: SessionState,
    request: requests.LoadedExecutableExecute,
    executable: ExecutableRecord,
    results: tuple[Handle, ...],
    after: tuple[OpId, ...],
    has_storages: bool,
    status_handle: Handle,
) -> None:
    args = request.args_handles
    records = state.arrays.records
    non_donatable = request.non_donatable_input_indices
    reads: tuple[Handle, ...] = (executable.on_workers, *args)
    if has_storages:
        reads = state.order_reads(reads, [records[handle] for handle in args])
    consumes: tuple[Handle, ...] = ()
    left_over: list[Handle] = []
    if executable.donated:
        taken: list[Handle] = []
        kept: list[int] = []
        is_repeated = len(set(args)) != len(args)
        for position in executable.donated:
            if position in non_donatable:
                continue
            handle = args[position]
            record = records[handle]
            if record.is_deleted:
                continue  # it stands at a donated position before
            record.is_deleted = True
            if record.is_shared() or (is_repeated and args.count(handle) > 1):
                kept.extend(place for place in executable.donated if args[place] == handle)
                left_over.append(handle)
                continue
            taken.append(handle)
            if record.storages is not None:
                for storage in record.storages:
                    taken.append(storage.token)
                    if storage.founder != handle:
                        taken.append(storage.founder)
            record.leave_workers()
        consumes = tuple(taken)
        if kept:
            non_donatable = tuple(sorted({*non_donatable, *kept}))
    op_id = state.next_op()
    for handle, output in zip(results, executable.outputs, strict=True):
        records[handle] = ArrayRecord(output.dtype, output.shape, output.placement, output.placement.hosts)
    state.out.append(
        SubmitOperation(
            Launch(op_id, executable.on_workers, args, results, non_donatable),
            executable.hosts,
            True,
            False,
            reads,
            results,
            consumes,
            tuple(dict.fromkeys(after)) if after else (),
        )
    )
    if left_over:
        state.free(left_over)
    executions.await_outcome(state, status_handle, op_id, results)


def _raise_wrong_devices(name: str, executable: ExecutableRecord, handle: Handle, record: ArrayRecord) -> None:
    placement = record.placement
    assert placement is not None
    raise error(
        Code.INVALID_ARGUMENT,
        f"{name} runs on devices {list(executable.devices)}, but its argument {describe(handle, record)} lies on"
        f" {list(placement.devices)}",
    )
