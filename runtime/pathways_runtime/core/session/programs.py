"""Programs: compiling them, loading them again behind a new host, what they say of themselves, and their end."""

from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, RequestId
from pathways_runtime.core.operations import DeleteExecutable
from pathways_runtime.core.session import requests, responses
from pathways_runtime.core.session.dataflow import SessionState
from pathways_runtime.core.session.events import CompiledProgram, ProgramCompiled
from pathways_runtime.core.session.executables import ExecutableRecord, OutputSpec, StandIn, stand_in_devices
from pathways_runtime.core.session.instructions import CompileProgram
from pathways_runtime.core.session.lifetime import new_future
from pathways_runtime.core.sharding import Sharding
from pathways_runtime.core.status import Code, Status, StatusError, error


def compile_program(state: SessionState, request_id: RequestId, request: requests.Compile) -> None:
    """Compile: answered by ProgramCompiled.

    While a host of the program is lost, other devices tell what it is like, so that the client gets its answer and can
    go on. If no whole slices can stand in, the controller is asked all the same, and its failure is the answer.
    """
    devices, hosts = state.placements.device_list(request.devices)
    handle = state.mint()
    needed = hosts
    if len(hosts) > 1:
        slices = state.topology.slices_of(devices)
        needed = tuple(host for slice_index in slices for host in state.topology.hosts_of_slice(slice_index))
    record = ExecutableRecord(handle, request.program, request.options, devices, hosts, needed, waiting=request_id)
    record.unloaded = state.placements.first_loss(needed)
    state.executables.records[handle] = record
    if record.unloaded is not None:
        substitutes = stand_in_devices(devices, state.topology, frozenset(state.placements.losses))
        if substitutes is not None:
            stand_in = state.mint()
            stand_in_hosts = state.topology.hosts_of(substitutes)
            state.executables.stand_ins[stand_in] = StandIn(handle, stand_in_hosts)
            state.out.append(CompileProgram(stand_in, request.program, request.options, substitutes))
            return
    load(state, record, handle)


def program_compiled(state: SessionState, event: ProgramCompiled) -> None:
    """The answer to a CompileProgram: of a first compilation, of a stand-in, or of a load behind a new host.

    Raises:
        LookupError: nobody asked for it.
    """
    table = state.executables
    handle = event.executable
    if event.program is None and event.failure is None:
        raise LookupError(f"program {handle} is compiled, but nothing is said of it")
    if handle in table.stand_ins:
        _stand_in_compiled(state, handle, event)
        return
    record = table.loads.pop(handle, None)
    if record is None:
        raise LookupError(f"program {handle} is compiled, but nobody asked for it")
    is_newest = handle == record.on_workers
    if record.is_deleted or not is_newest:
        # If it has failed somewhere, it may be there all the same on other hosts.
        _submit_delete(state, handle, record.hosts)
    elif event.failure is not None:
        record.unloaded = event.failure
    if record.waiting is not None and (event.program is not None or is_newest):
        # Else a host was replaced meanwhile, and it is being compiled again.
        _answer(state, record, event.program, event.failure)


def _stand_in_compiled(state: SessionState, stand_in_handle: Handle, event: ProgramCompiled) -> None:
    table = state.executables
    stand_in = table.stand_ins.pop(stand_in_handle)
    record = table.records[stand_in.executable]
    _submit_delete(state, stand_in_handle, stand_in.hosts)
    _answer(state, record, event.program, event.failure)
    if not record.is_deleted and state.placements.first_loss(record.needed_hosts) is None:
        load(state, record, state.mint())


def _answer(
    state: SessionState, record: ExecutableRecord, program: CompiledProgram | None, failure: Status | None
) -> None:
    """Answer the Compile request; a program that nothing is known of is forgotten."""
    request_id, record.waiting = record.waiting, None
    assert request_id is not None
    if record.function is not None:
        if program is not None or state.placements.first_loss(record.hosts) is not None:
            # What it is like is known already, and workers know no more of it.
            program = CompiledProgram(record.function.name, b"", ())
    elif program is not None:
        try:
            record.outputs = _output_specs(state, record, program)
        except StatusError as wrong:
            program, failure = None, wrong.status
    if program is None:
        assert failure is not None
        del state.executables.records[record.handle]
        _delete(state, record)
        state.respond_error(request_id, failure)
        return
    record.compiled = program
    record.donated = tuple(sorted(program.donated_inputs))
    ready = new_future(state, None).future_handle
    state.respond(
        request_id, responses.Compiled(record.handle, program.name, record.devices, program.fingerprint, ready)
    )


def _output_specs(state: SessionState, record: ExecutableRecord, program: CompiledProgram) -> tuple[OutputSpec, ...]:
    specs = []
    for index, output in enumerate(program.outputs):
        try:
            placement = state.placements.intern(Sharding(record.devices, output.tiles, output.memory_kind))
            placement.sharding.shard_shape(output.shape)
        except (StatusError, ValueError) as wrong:
            raise error(Code.INTERNAL, f"output {index} of {program.name} makes no sense: {wrong}") from wrong
        specs.append(OutputSpec(output.dtype, output.shape, placement))
    return tuple(specs)


def load(state: SessionState, record: ExecutableRecord, handle: Handle) -> None:
    """Have all hosts of a program load it, by that name; ProgramCompiled answers.

    What it was called before goes as soon as it is known whether it was loaded.
    """
    table = state.executables
    former, record.on_workers = record.on_workers, handle
    record.unloaded = state.placements.first_loss(record.needed_hosts)
    table.loads[handle] = record
    state.out.append(CompileProgram(handle, record.program, record.options, record.devices))
    if former and former not in table.loads:
        _submit_delete(state, former, record.hosts)


def _submit_delete(state: SessionState, handle: Handle, hosts: tuple[HostIndex, ...]) -> None:
    present = tuple(host for host in hosts if host not in state.placements.losses)
    if present:
        state.submit(DeleteExecutable(state.next_op(), handle), present, consumes=(handle,))


def lose_host(state: SessionState, host: HostIndex, loss: Status) -> None:
    """What was loaded on a host is not any more."""
    for record in state.executables.records.values():
        if host in record.needed_hosts and record.unloaded is None:
            record.unloaded = loss


def load_again(state: SessionState, host: HostIndex) -> None:
    """A worker stands behind a host that was lost: load what needs it and has all its hosts.

    A program on other hosts of its slice may have failed to load because their world did not form without it.

    Executions name what is being loaded from now on, and the controller holds them until it is. It has another name on
    workers: so a launch that is on its way runs what was loaded before on all its hosts, and fails on all of them,
    instead of meeting the one on some and the other on others.
    """
    loading = set(map(id, state.executables.loads.values()))
    slice_of_host = state.topology.slice_of_host
    for record in list(state.executables.records.values()):
        is_concerned = host in record.needed_hosts or (
            record.unloaded is not None and slice_of_host(host) in map(slice_of_host, record.hosts)
        )
        if not is_concerned or record.is_deleted or state.placements.first_loss(record.needed_hosts) is not None:
            continue
        if record.compiled is not None or id(record) in loading:
            load(state, record, state.mint())


def delete(state: SessionState, _: RequestId, request: requests.LoadedExecutableDelete) -> responses.Response:
    """LoadedExecutableDelete: launches before it still run."""
    _delete(state, state.executables.find(request.loaded_executable_handle))
    return new_future(state, None)


def destruct(state: SessionState, _: RequestId, request: requests.LoadedExecutableDestruct) -> responses.Response:
    """LoadedExecutableDestruct: delete and forget."""
    handle = request.loaded_executable_handle
    record = state.executables.find(handle)
    _delete(state, record)
    del state.executables.records[handle]
    if state.tracing is not None and state.tracing.executable == handle:
        # Nobody can end the trace that it has begun.
        state.tracing = None
    return responses.EMPTY


def _delete(state: SessionState, record: ExecutableRecord) -> None:
    if not record.is_deleted:
        record.is_deleted = True
        record.program = record.options = b""
        # What is being loaded goes once it is.
        if record.on_workers and record.on_workers not in state.executables.loads:
            _submit_delete(state, record.on_workers, record.hosts)


def is_deleted(state: SessionState, _: RequestId, request: requests.LoadedExecutableIsDeleted) -> responses.Response:
    """LoadedExecutableIsDeleted."""
    return responses.Deleted(state.executables.find(request.loaded_executable_handle).is_deleted)


def metadata(state: SessionState, _: RequestId, request: requests.LoadedExecutableMetadata) -> responses.Response:
    """LoadedExecutableMetadata."""
    _record, compiled = state.executables.find_live(request.loaded_executable_handle)
    return responses.ExecutableMetadata(compiled.metadata)


def cost_analysis(
    state: SessionState, _: RequestId, request: requests.LoadedExecutableCostAnalysis
) -> responses.Response:
    """LoadedExecutableCostAnalysis."""
    _record, compiled = state.executables.find_live(request.loaded_executable_handle)
    return responses.CostAnalysis(compiled.cost_analysis)


def program_text(
    state: SessionState, _: RequestId, request: requests.LoadedExecutableHumanReadableProgramText
) -> responses.Response:
    """LoadedExecutableHumanReadableProgramText."""
    _record, compiled = state.executables.find_live(request.loaded_executable_handle)
    return responses.HumanReadableProgramText(compiled.text)


def default_device_assignment(
    state: SessionState, _: RequestId, request: requests.GetDefaultDeviceAssignment
) -> responses.Response:
    """GetDefaultDeviceAssignment: the first devices, replica by replica."""
    replicas, partitions = request.num_replicas, request.num_partitions
    if replicas <= 0 or partitions <= 0 or replicas * partitions > state.topology.num_devices:
        raise error(
            Code.INVALID_ARGUMENT,
            f"{replicas} replicas of {partitions} partitions do not fit {state.topology.num_devices} devices",
        )
    return responses.DeviceAssignment(
        tuple(
            tuple(DeviceId(replica * partitions + partition) for partition in range(partitions))
            for replica in range(replicas)
        )
    )


def default_layout(_: SessionState, __: RequestId, request: requests.GetDefaultLayout) -> responses.Response:
    """GetDefaultLayout: row-major."""
    return responses.DefaultLayout(tuple(range(len(request.dims) - 1, -1, -1)))
