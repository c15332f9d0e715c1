"""Programs: what a client asks to compile, and what a compiled program says of itself."""

import re
from typing import Any

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.session.events import CompiledProgram, ProgramOutput
from pathways_runtime.core.session.functions import CompileFunction
from pathways_runtime.core.session.plugin_programs import CompilePlugin
from pathways_runtime.core.session.requests import Compile
from pathways_runtime.core.sharding import REPLICATED
from pathways_runtime.core.status import Code, error
from pathways_runtime.wire.ifrt import schema
from pathways_runtime.wire.ifrt.functions import CUSTOM_CALL_PROGRAM, decode_function
from pathways_runtime.wire.ifrt.plugins import PLUGIN_PROGRAM, decode_plugin
from pathways_runtime.wire.ifrt.shardings import decode_op_sharding_bytes
from pathways_runtime.wire.ifrt.values import encode_xla_layout
from pathways_runtime.wire.messages import ProgramMetadata

XLA_PROGRAM = "xla::ifrt::XlaProgram"
XLA_COMPILE_OPTIONS = "xla::ifrt::XlaCompileOptions"

#: Custom calls for which XLA, while it compiles, calls Python functions of the client: by their addresses, which in a
#: worker ends the process, or by a number that a worker knows nothing of. Our plugin gives them other names
#: (``wire.partitioning``). The names stand NUL-terminated in MLIR's bytecode.
_CALLS_TO_CLIENT = {
    b"InspectSharding": "jax.debug.inspect_array_sharding (also visualize_array_sharding inside of jit). Outside of "
    "jit it works, as does the .sharding of results",
    b"CustomSPMDPartitioning": "custom_partitioning. Use shard_map for what must be partitioned in a way of its own",
}
_NAME_OF_CALL_TO_CLIENT = re.compile(rb"(?<!\w)(" + b"|".join(_CALLS_TO_CLIENT) + rb")\x00", re.ASCII)

_MEMORY_STATS = frozenset(schema.CompiledMemoryStatsProto.DESCRIPTOR.fields_by_name) - {"serialized_buffer_assignment"}


def decode_compile(proto: Any) -> Compile | CompilePlugin | CompileFunction:
    """The request that a CompileRequest states.

    Raises:
        StatusError: UNIMPLEMENTED for programs that are neither XLA's nor plugin programs nor functions of colocated
            Python, host callbacks, functions that the compiler would have to call in the client, and outputs in
            bundles; INVALID_ARGUMENT if no devices are assigned.
    """
    if proto.program.type_name == PLUGIN_PROGRAM:
        return decode_plugin(proto.program.data)
    if proto.program.type_name == CUSTOM_CALL_PROGRAM:
        return decode_function(proto.program.data)
    if proto.program.type_name != XLA_PROGRAM:
        raise error(Code.UNIMPLEMENTED, f"programs of type {proto.program.type_name} are not supported")
    if proto.compile_options.type_name != XLA_COMPILE_OPTIONS:
        raise error(Code.UNIMPLEMENTED, f"compile options of type {proto.compile_options.type_name} are not supported")
    if proto.host_callbacks:
        raise error(
            Code.UNIMPLEMENTED, "host callbacks sent with the program (xla::ifrt::LoadedHostCallback) are not supported"
        )
    if (named := _find_call_to_client(proto.program.data)) is not None:
        raise error(
            Code.UNIMPLEMENTED,
            "the compiler, which is not in the client's process, can call its Python functions only by way of the JAX "
            "plugin of Slurm Pathways, which this client has not, or not for its version of jax. "
            f"Therefore not supported in its programs is {_CALLS_TO_CLIENT[named]}",
        )
    try:
        wrapped = schema.XlaCompileOptionsProto.FromString(proto.compile_options.data)
    except schema.DecodeError as failure:
        raise error(Code.INVALID_ARGUMENT, f"the bytes of an {XLA_COMPILE_OPTIONS} cannot be parsed") from failure
    if wrapped.outputs_bundle_slice_sizes:
        raise error(Code.UNIMPLEMENTED, "outputs in bundles (outputs_bundle_slice_sizes) are not supported")
    options = wrapped.compile_options
    return Compile(proto.program.data, options.SerializeToString(), assigned_devices(options))


def _find_call_to_client(program: bytes) -> bytes | None:
    # The pattern takes fifty times as long as a plain search, and this is the proxy's loop.
    if not any(name in program for name in _CALLS_TO_CLIENT):
        return None
    found = _NAME_OF_CALL_TO_CLIENT.search(program)
    return None if found is None else found[1]


def assigned_devices(options: Any) -> tuple[DeviceId, ...]:
    """The device assignment of an ``xla.CompileOptionsProto`` in IFRT's order: by replica, then by partition.

    Raises:
        StatusError: INVALID_ARGUMENT if there is none, or it contradicts itself.
    """
    assignment = options.executable_build_options.device_assignment
    partitions = assignment.computation_devices
    if not partitions or any(len(each.replica_device_ids) != assignment.replica_count for each in partitions):
        raise error(
            Code.INVALID_ARGUMENT, "the compile options do not assign a device to every replica of every partition"
        )
    return tuple(
        DeviceId(partition.replica_device_ids[replica])
        for replica in range(assignment.replica_count)
        for partition in partitions
    )


def compiled_program(metadata: ProgramMetadata, num_devices: int) -> CompiledProgram:
    """What the session core needs of a program on ``num_devices`` devices.

    Raises:
        StatusError: it has outputs of a kind that we do not take.
    """
    shardings = metadata.output_shardings
    outputs = tuple(
        ProgramOutput(
            DType(dtype),
            shape,
            REPLICATED if shardings is None else decode_op_sharding_bytes(shardings[position], num_devices),
            metadata.output_memory_kinds[position],
        )
        for position, (dtype, shape) in enumerate(zip(metadata.output_dtypes, metadata.output_shapes, strict=True))
    )
    return CompiledProgram(
        name=metadata.name,
        fingerprint=metadata.fingerprint,
        outputs=outputs,
        donated_inputs=metadata.donated_inputs,
        num_parameters=len(metadata.parameter_layouts),
        cost_analysis=metadata.cost_analysis,
        text=metadata.text,
        metadata=metadata,
    )


def encode_metadata(metadata: ProgramMetadata | None, proto: Any) -> None:
    """Write into a LoadedExecutableMetadataResponse. None, of what is no program of XLA: nothing is known of it."""
    if metadata is None:
        for failure in (proto.parameter_layouts_error, proto.output_layouts_error):
            # The client takes default layouts then; an empty list would have to fit the outputs.
            failure.code = int(Code.UNIMPLEMENTED)
            failure.message = "only programs of XLA have layouts"
        proto.donated_input_indices.SetInParent()
        return
    if metadata.parameter_shardings is not None:
        proto.parameter_shardings.SetInParent()
        proto.parameter_shardings.shardings.extend(map(schema.OpSharding.FromString, metadata.parameter_shardings))
    if metadata.output_shardings is not None:
        proto.output_shardings.SetInParent()
        proto.output_shardings.shardings.extend(map(schema.OpSharding.FromString, metadata.output_shardings))
    proto.parameter_layouts_list.SetInParent()
    proto.parameter_layouts_list.layouts.extend(map(encode_xla_layout, metadata.parameter_layouts))
    proto.output_layouts_list.SetInParent()
    proto.output_layouts_list.layouts.extend(map(encode_xla_layout, metadata.output_layouts))
    # One list: of the one module that a program has here.
    proto.output_memory_kinds.memory_kind_lists.add().memory_kinds.extend(metadata.output_memory_kinds)
    proto.donated_input_indices.SetInParent()
    proto.donated_input_indices.donated_input_indices.extend(metadata.donated_inputs)
    proto.compiled_memory_stats.SetInParent()
    for name, num_bytes in metadata.memory_stats.items():
        if name in _MEMORY_STATS:
            setattr(proto.compiled_memory_stats, name, num_bytes)
    proto.size_of_generated_code_in_bytes = metadata.generated_code_bytes
