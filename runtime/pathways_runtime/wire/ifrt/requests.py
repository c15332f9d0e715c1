"""IfrtRequest to the values of ``core.session.requests``."""

from collections.abc import Callable
from typing import Any

from pathways_runtime.core.ids import DeviceId, Handle
from pathways_runtime.core.session import requests as core
from pathways_runtime.core.status import Code, Status, error
from pathways_runtime.wire.ifrt.programs import decode_compile
from pathways_runtime.wire.ifrt.shardings import decode_sharding
from pathways_runtime.wire.ifrt.values import decode_byte_strides, decode_dtype, decode_shape, decode_status

_COPY_SEMANTICS = {int(kind): kind for kind in core.ArrayCopySemantics}


def decode_request(kind: str, proto: Any) -> core.Request:
    """The request that ``proto``, the field ``kind`` of an IfrtRequest, states.

    Raises:
        StatusError: UNIMPLEMENTED with its name for a kind that the core has no request for, or for what we do not take
            inside it; INVALID_ARGUMENT for what contradicts itself.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise error(Code.UNIMPLEMENTED, f"IFRT request {kind} is not supported")
    return decoder(proto)


def result_handles(kind: str, proto: Any) -> tuple[Handle, ...]:
    """The array handles that the client has minted for the results of a request, which carry its error if it fails."""
    name = _RESULT_FIELDS.get(kind)
    if name is None:
        return ()
    value = getattr(proto, name)
    handles = (value,) if isinstance(value, int) else tuple(value)
    return tuple(Handle(handle) for handle in handles if handle)


def sent_host_buffers(kind: str, proto: Any) -> tuple[Handle, ...]:
    """The host buffers that come with a request, whether it decodes or not; their bytes may arrive after it."""
    if kind == "make_array_from_host_buffer_request":
        return (Handle(proto.host_buffer_handle),)
    if kind == "make_arrays_from_host_buffer_shards_request":
        return tuple(Handle(buffer.host_buffer_handle) for spec in proto.specs for buffer in spec.host_buffers)
    return ()


def decode_array_spec(proto: Any) -> core.ArraySpec:
    """An ArraySpecProto. Its layout is left aside: it does not change values."""
    return core.ArraySpec(decode_dtype(proto.dtype), decode_shape(proto.shape), decode_sharding(proto.sharding))


def _array_specs(protos: Any) -> tuple[core.ArraySpec, ...]:
    return tuple(map(decode_array_spec, protos))


def _semantics(number: int) -> core.ArrayCopySemantics:
    kind = _COPY_SEMANTICS.get(number)
    if kind is None:
        raise error(Code.INVALID_ARGUMENT, f"{number} is none of IFRT's ArrayCopySemantics")
    return kind


def _make_array_from_host_buffer(proto: Any) -> core.Request:
    return core.MakeArrayFromHostBuffer(
        decode_dtype(proto.dtype),
        decode_shape(proto.shape),
        decode_sharding(proto.sharding),
        Handle(proto.host_buffer_handle),
        decode_byte_strides(proto),
        Handle(proto.array_handle),
    )


def _make_arrays_from_host_buffer_shards(proto: Any) -> core.Request:
    return core.MakeArraysFromHostBufferShards(
        tuple(
            core.HostBufferShards(
                decode_array_spec(spec.array_spec),
                tuple(
                    core.HostBuffer(
                        decode_dtype(buffer.dtype),
                        decode_shape(buffer.shape),
                        Handle(buffer.host_buffer_handle),
                        decode_byte_strides(buffer),
                    )
                    for buffer in spec.host_buffers
                ),
                tuple(tuple(entry.indices) for entry in spec.addressable_shard_indices),
            )
            for spec in proto.specs
        ),
        tuple(proto.array_handles),
    )


def _make_error_arrays(proto: Any) -> core.Request:
    failure = decode_status(proto.error) or Status(
        Code.INVALID_ARGUMENT, "an error array was asked for without an error"
    )
    return core.MakeErrorArrays(failure, _array_specs(proto.array_specs), tuple(proto.array_handles))


def _assemble(proto: Any) -> core.Request:
    return core.AssembleArrayFromSingleDeviceArrays(
        decode_shape(proto.shape),
        decode_sharding(proto.sharding),
        tuple(proto.single_device_array_handles),
        _semantics(proto.copy_semantics),
        Handle(proto.result_handle),
        decode_dtype(proto.dtype) if proto.HasField("dtype") else None,
    )


def _remap_arrays(proto: Any) -> core.Request:
    plan = core.RemapPlan(
        _array_specs(proto.plan.input_specs),
        _array_specs(proto.plan.output_specs),
        tuple(
            core.RemapMapping(
                mapping.in_array,
                mapping.out_array,
                _intervals(mapping.from_start, mapping.from_end, mapping.from_step),
                _intervals(mapping.to_start, mapping.to_end, mapping.to_step),
            )
            for mapping in proto.plan.mappings
        ),
        tuple(
            core.InputDevicesForOutput(
                output.out_array,
                tuple(
                    core.InputDevices(each.in_array, tuple(map(DeviceId, each.device_list.device_ids)))
                    for each in output.input_devices
                ),
            )
            for output in proto.plan.input_devices_for_output
        ),
    )
    return core.RemapArrays(
        plan, tuple(proto.array_handles), _semantics(proto.copy_semantics), tuple(proto.result_handles)
    )


def _intervals(starts: Any, ends: Any, steps: Any) -> tuple[core.Interval, ...]:
    if not len(starts) == len(ends) == len(steps):
        raise error(Code.INVALID_ARGUMENT, "a RemapPlan's starts, ends and steps differ in number")
    return tuple(core.Interval(*each) for each in zip(starts, ends, steps, strict=True))


def _bitcast_arrays(proto: Any) -> core.Request:
    return core.BitcastArrays(
        tuple(proto.array_handles),
        _array_specs(proto.array_specs),
        _semantics(proto.copy_semantics),
        tuple(proto.result_handles),
    )


def _reshard_arrays(proto: Any) -> core.Request:
    return core.ReshardArrays(
        tuple(proto.array_handles),
        _array_specs(proto.array_specs),
        _semantics(proto.copy_semantics),
        tuple(proto.result_handles),
    )


def _copy_arrays(proto: Any) -> core.Request:
    return core.CopyArrays(
        tuple(proto.array_handles),
        tuple(map(DeviceId, proto.device_ids)),
        proto.memory_kind if proto.HasField("memory_kind") else None,
        _semantics(proto.copy_semantics),
        tuple(proto.result_handles),
    )


def _disassemble(proto: Any) -> core.Request:
    return core.DisassembleIntoSingleDeviceArrays(
        Handle(proto.array_handle), _semantics(proto.copy_semantics), tuple(proto.result_handles)
    )


def _fully_replicated_shard(proto: Any) -> core.Request:
    return core.FullyReplicatedShard(
        Handle(proto.array_handle), _semantics(proto.copy_semantics), Handle(proto.result_handle)
    )


def _copy_to_host_buffer(proto: Any) -> core.Request:
    return core.CopyToHostBuffer(
        Handle(proto.array_handle), Handle(proto.host_buffer_handle), decode_byte_strides(proto)
    )


def _execute(proto: Any) -> core.Request:
    options = proto.execute_options
    return core.LoadedExecutableExecute(
        proto.loaded_executable_handle,
        tuple(proto.args_handles),
        tuple(proto.result_array_handle),
        proto.result_status_handle,
        options.fill_status,
        tuple(options.non_donatable_input_indices),
        tuple(proto.device_ids),
        options.execution_stream_id,
    )


_DECODERS: dict[str, Callable[[Any], core.Request]] = {
    "check_future_request": lambda proto: core.CheckFuture(Handle(proto.future_handle)),
    "check_value_ready_request": lambda proto: core.CheckValueReady(tuple(proto.value_handles)),
    "make_array_from_host_buffer_request": _make_array_from_host_buffer,
    "make_arrays_from_host_buffer_shards_request": _make_arrays_from_host_buffer_shards,
    "make_error_arrays_request": _make_error_arrays,
    "assemble_array_from_single_device_arrays_request": _assemble,
    "remap_arrays_request": _remap_arrays,
    "bitcast_arrays_request": _bitcast_arrays,
    "reshard_arrays_request": _reshard_arrays,
    "copy_to_host_buffer_request": _copy_to_host_buffer,
    "disassemble_into_single_device_arrays_request": _disassemble,
    "delete_array_request": lambda proto: core.DeleteArray(tuple(proto.array_handle)),
    "copy_arrays_request": _copy_arrays,
    "fully_replicated_shard_request": _fully_replicated_shard,
    "is_array_deleted_request": lambda proto: core.IsArrayDeleted(Handle(proto.array_handle)),
    "destruct_array_request": lambda proto: core.DestructArray(tuple(proto.array_handle)),
    "compile_request": decode_compile,
    "loaded_executable_metadata_request": lambda proto: core.LoadedExecutableMetadata(
        Handle(proto.loaded_executable_handle)
    ),
    "loaded_executable_execute_request": _execute,
    "loaded_executable_fetch_execute_result_request": lambda proto: core.LoadedExecutableFetchExecuteResult(
        Handle(proto.result_status_handle)
    ),
    "loaded_executable_cost_analysis_request": lambda proto: core.LoadedExecutableCostAnalysis(
        Handle(proto.loaded_executable_handle)
    ),
    "loaded_executable_human_readable_program_text_request": lambda proto: (
        core.LoadedExecutableHumanReadableProgramText(Handle(proto.loaded_executable_handle))
    ),
    "loaded_executable_delete_request": lambda proto: core.LoadedExecutableDelete(
        Handle(proto.loaded_executable_handle)
    ),
    "loaded_executable_is_deleted_request": lambda proto: core.LoadedExecutableIsDeleted(
        Handle(proto.loaded_executable_handle)
    ),
    "loaded_executable_destruct_request": lambda proto: core.LoadedExecutableDestruct(
        Handle(proto.loaded_executable_handle)
    ),
    "get_default_device_assignment_request": lambda proto: core.GetDefaultDeviceAssignment(
        proto.num_replicas, proto.num_partitions
    ),
    "get_default_layout_request": lambda proto: core.GetDefaultLayout(
        decode_dtype(proto.dtype), tuple(proto.dims), DeviceId(proto.device_id), proto.memory_kind
    ),
}

#: Where each kind of request names the arrays that it makes.
_RESULT_FIELDS: dict[str, str] = {
    "make_array_from_host_buffer_request": "array_handle",
    "make_arrays_from_host_buffer_shards_request": "array_handles",
    "make_error_arrays_request": "array_handles",
    "assemble_array_from_single_device_arrays_request": "result_handle",
    "remap_arrays_request": "result_handles",
    "bitcast_arrays_request": "result_handles",
    "reshard_arrays_request": "result_handles",
    "disassemble_into_single_device_arrays_request": "result_handles",
    "copy_arrays_request": "result_handles",
    "fully_replicated_shard_request": "result_handle",
    "loaded_executable_execute_request": "result_array_handle",
}
