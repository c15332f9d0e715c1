"""IFRT's requests as values, one type per kind and named after it (``<Name>Request`` of ``ifrt_service.proto``).

A handle of 0, or an empty tuple of result handles, means that the client leaves it to the server to mint them.
"""

import enum

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle
from pathways_runtime.core.sharding import Shape, Sharding
from pathways_runtime.core.status import Status


class ArrayCopySemantics(enum.IntEnum):
    """What happens to the input (``xla.ifrt.proto.ArrayCopySemantics``)."""

    ALWAYS_COPY = 1
    REUSE_INPUT = 2
    DONATE_INPUT = 3


class ArraySpec(msgspec.Struct, frozen=True, gc=False):
    """``xla.ifrt.ArraySpecProto``: element type, global shape in elements, and how it is laid over devices."""

    dtype: DType
    shape: Shape
    sharding: Sharding


class HostBuffer(msgspec.Struct, frozen=True, gc=False):
    """Bytes that the client stored before. ``byte_strides`` per dimension; None for row-major and dense."""

    dtype: DType
    shape: Shape
    host_buffer_handle: Handle
    byte_strides: tuple[int, ...] | None = None


class HostBufferShards(msgspec.Struct, frozen=True, gc=False):
    """One array of MakeArraysFromHostBufferShards.

    Attributes:
        addressable_shard_indices: per entry of ``host_buffers``, the shards that have its contents.
    """

    array_spec: ArraySpec
    host_buffers: tuple[HostBuffer, ...]
    addressable_shard_indices: tuple[tuple[int, ...], ...]


class Interval(msgspec.Struct, frozen=True, gc=False):
    """Shard indices ``range(start, end, step)``."""

    start: int
    end: int
    step: int


class RemapMapping(msgspec.Struct, frozen=True, gc=False):
    """Shards of one input that become shards of one output: the intervals of ``from_`` and ``to`` match pairwise."""

    in_array: int
    out_array: int
    from_: tuple[Interval, ...]
    to: tuple[Interval, ...]


class InputDevices(msgspec.Struct, frozen=True, gc=False):
    """The devices whose shards one output takes from input ``in_array``."""

    in_array: int
    devices: tuple[DeviceId, ...]


class InputDevicesForOutput(msgspec.Struct, frozen=True, gc=False):
    """Where every shard of output ``out_array`` comes from; each stays on its device."""

    out_array: int
    input_devices: tuple[InputDevices, ...]


class RemapPlan(msgspec.Struct, frozen=True, gc=False):
    """``xla.ifrt.RemapPlanProto``: what goes where, by ``input_devices_for_output`` or, older, by ``mappings``.

    Where both speak of an output they agree.
    """

    input_specs: tuple[ArraySpec, ...]
    output_specs: tuple[ArraySpec, ...]
    mappings: tuple[RemapMapping, ...] = ()
    input_devices_for_output: tuple[InputDevicesForOutput, ...] = ()


class Request(msgspec.Struct, frozen=True, gc=False):
    """Base of all requests."""


# host buffers to arrays


class MakeArrayFromHostBuffer(Request, frozen=True):
    """An array whose global contents are one host buffer, cut by ``sharding``. Answer: ArrayHandle.

    The shell hands this over only when the buffer is complete.
    """

    dtype: DType
    shape: Shape
    sharding: Sharding
    host_buffer_handle: Handle
    byte_strides: tuple[int, ...] | None = None
    array_handle: Handle = Handle(0)


class MakeArraysFromHostBufferShards(Request, frozen=True):
    """Arrays from per-shard host buffers. Answer: ArrayHandles.

    The shell hands this over only when all buffers are complete.
    """

    specs: tuple[HostBufferShards, ...]
    array_handles: tuple[Handle, ...] = ()


class MakeErrorArrays(Request, frozen=True):
    """Arrays that carry ``error``. Answer: ArrayHandles."""

    error: Status
    array_specs: tuple[ArraySpec, ...]
    array_handles: tuple[Handle, ...] = ()


# arrays to arrays


class AssembleArrayFromSingleDeviceArrays(Request, frozen=True):
    """One array out of one single-device array per device. Answer: ArrayHandle. ``dtype`` is None if not sent."""

    shape: Shape
    sharding: Sharding
    single_device_array_handles: tuple[Handle, ...]
    copy_semantics: ArrayCopySemantics
    result_handle: Handle = Handle(0)
    dtype: DType | None = None


class RemapArrays(Request, frozen=True):
    """Rearrange shards between arrays without moving them. Answer: ArrayHandles."""

    plan: RemapPlan
    array_handles: tuple[Handle, ...]
    copy_semantics: ArrayCopySemantics
    result_handles: tuple[Handle, ...] = ()


class BitcastArrays(Request, frozen=True):
    """Reinterpret bytes as other types. Answer: ArrayHandles."""

    array_handles: tuple[Handle, ...]
    array_specs: tuple[ArraySpec, ...]
    copy_semantics: ArrayCopySemantics
    result_handles: tuple[Handle, ...] = ()


class ReshardArrays(Request, frozen=True):
    """The same global values laid out as ``array_specs`` say. Answer: ArrayHandles."""

    array_handles: tuple[Handle, ...]
    array_specs: tuple[ArraySpec, ...]
    copy_semantics: ArrayCopySemantics
    result_handles: tuple[Handle, ...] = ()


class CopyArrays(Request, frozen=True):
    """The same partitioning on other devices or in another memory. Answer: ArrayHandles.

    No devices: they stay. ``memory_kind`` None: it stays; "": the devices' default.
    """

    array_handles: tuple[Handle, ...]
    device_ids: tuple[DeviceId, ...]
    memory_kind: str | None
    copy_semantics: ArrayCopySemantics
    result_handles: tuple[Handle, ...] = ()


class DisassembleIntoSingleDeviceArrays(Request, frozen=True):
    """One single-device array per shard. Answer: ArrayHandles."""

    array_handle: Handle
    copy_semantics: ArrayCopySemantics
    result_handles: tuple[Handle, ...] = ()


class FullyReplicatedShard(Request, frozen=True):
    """One shard of a fully replicated array as an array. Answer: ArrayHandle."""

    array_handle: Handle
    copy_semantics: ArrayCopySemantics
    result_handle: Handle = Handle(0)


class DeleteArray(Request, frozen=True):
    """Delete; the handles stay known as deleted until they are destructed. Answer: FutureHandle."""

    array_handles: tuple[Handle, ...]


class IsArrayDeleted(Request, frozen=True):
    """Answer: Deleted."""

    array_handle: Handle


class DestructArray(Request, frozen=True):
    """Delete, and forget the handles. Answer: Empty."""

    array_handles: tuple[Handle, ...]


# values back


class CheckValueReady(Request, frozen=True):
    """Answer: Empty once all are ready, or the first failure among them."""

    value_handles: tuple[Handle, ...]


class CheckFuture(Request, frozen=True):
    """Answer: Empty once the future is done, or its failure. A future can be asked once."""

    future_handle: Handle


class CopyToHostBuffer(Request, frozen=True):
    """Contents of a single-device or fully replicated array, stored under ``host_buffer_handle``. Answer: Empty."""

    array_handle: Handle
    host_buffer_handle: Handle
    byte_strides: tuple[int, ...] | None = None


# executables


class Compile(Request, frozen=True):
    """Compile an XlaProgram. Answer: Compiled.

    Attributes:
        program: the program's bytes as the client sent them.
        options: serialized ``xla.CompileOptionsProto``.
        devices: the device assignment, flattened in IFRT order.
    """

    program: bytes
    options: bytes
    devices: tuple[DeviceId, ...]


class LoadedExecutableMetadata(Request, frozen=True):
    """Answer: ExecutableMetadata."""

    loaded_executable_handle: Handle


class LoadedExecutableCostAnalysis(Request, frozen=True):
    """Answer: CostAnalysis."""

    loaded_executable_handle: Handle


class LoadedExecutableHumanReadableProgramText(Request, frozen=True):
    """Answer: HumanReadableProgramText."""

    loaded_executable_handle: Handle


class LoadedExecutableExecute(Request, frozen=True):
    """Run. Answer: Executed.

    Attributes:
        device_ids: empty unless the client overrides the devices.
        result_array_handles: empty on the first execution of an executable.
        non_donatable_input_indices: arguments that must survive.
        fill_status: the client will ask for the outcome with LoadedExecutableFetchExecuteResult, once.
        result_status_handle: where the outcome is kept.
        execution_stream: executions of one stream, which is a thread of the client, are made one after another.
    """

    loaded_executable_handle: Handle
    args_handles: tuple[Handle, ...]
    result_array_handles: tuple[Handle, ...] = ()
    result_status_handle: Handle = Handle(0)
    fill_status: bool = False
    non_donatable_input_indices: tuple[int, ...] = ()
    device_ids: tuple[DeviceId, ...] = ()
    execution_stream: int = 0


class LoadedExecutableFetchExecuteResult(Request, frozen=True):
    """Answer: Empty once the execution is done, or its failure."""

    result_status_handle: Handle


class LoadedExecutableDelete(Request, frozen=True):
    """Answer: FutureHandle. The handle stays known as deleted until it is destructed."""

    loaded_executable_handle: Handle


class LoadedExecutableIsDeleted(Request, frozen=True):
    """Answer: Deleted."""

    loaded_executable_handle: Handle


class LoadedExecutableDestruct(Request, frozen=True):
    """Delete, and forget the handle. Answer: Empty."""

    loaded_executable_handle: Handle


# defaults


class GetDefaultDeviceAssignment(Request, frozen=True):
    """Answer: DeviceAssignment."""

    num_replicas: int
    num_partitions: int


class GetDefaultLayout(Request, frozen=True):
    """Answer: DefaultLayout."""

    dtype: DType
    dims: Shape
    device_id: DeviceId
    memory_kind: str
