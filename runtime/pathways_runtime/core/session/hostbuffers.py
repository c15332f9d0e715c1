"""Arrays from host buffers, and arrays that only carry an error."""

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import Handle, HostIndex, RequestId
from pathways_runtime.core.operations import MakeArrays
from pathways_runtime.core.session import requests, responses
from pathways_runtime.core.session.arrays import Placement
from pathways_runtime.core.session.dataflow import SessionState, sharded_result
from pathways_runtime.core.session.instructions import DropHostBuffer, SendHostBuffer
from pathways_runtime.core.session.requests import ArraySpec, HostBuffer
from pathways_runtime.core.sharding import Box, Shape
from pathways_runtime.core.status import Code, error


class _BufferPart:
    """A part of a host buffer that becomes a shard on ``hosts``; it crosses to each of them once."""

    __slots__ = ("box", "buffer", "hosts", "sent_shape")

    def __init__(self, buffer: HostBuffer, box: Box | None, sent_shape: Shape) -> None:
        self.buffer = buffer
        self.box = box
        self.sent_shape = sent_shape
        self.hosts: set[HostIndex] = set()


def make_array_from_host_buffer(
    state: SessionState, _: RequestId, request: requests.MakeArrayFromHostBuffer
) -> responses.Response:
    """MakeArrayFromHostBuffer: one buffer, cut into the boxes of the sharding; equal boxes are sent once."""
    placement = _placement(state, ArraySpec(request.dtype, request.shape, request.sharding))
    handle = request.array_handle or state.mint()
    state.arrays.check_new((handle,))
    if placement.loss is not None:
        state.new_poisoned(handle, request.dtype, request.shape, placement, placement.loss)
    else:
        buffer = HostBuffer(request.dtype, request.shape, request.host_buffer_handle, request.byte_strides)
        _check_strides(buffer)
        whole: Box = tuple((0, dim) for dim in request.shape)
        shard_shape = request.sharding.shard_shape(request.shape)
        parts: dict[Box, _BufferPart] = {}
        indices: dict[Box, int] = {}
        shards = []
        for device, box in zip(placement.devices, request.sharding.boxes(request.shape), strict=True):
            part = parts.get(box)
            if part is None:
                part = parts[box] = _BufferPart(buffer, None if box == whole else box, shard_shape)
                indices[box] = len(indices)
            part.hosts.add(state.topology.host_of(device))
            shards.append(indices[box])
        _submit(state, [(handle, request.dtype, request.shape, placement)], [tuple(shards)], list(parts.values()))
    state.out.append(DropHostBuffer(request.host_buffer_handle))
    return responses.ArrayHandle(handle)


def make_arrays_from_host_buffer_shards(
    state: SessionState, _: RequestId, request: requests.MakeArraysFromHostBufferShards
) -> responses.Response:
    """MakeArraysFromHostBufferShards: each buffer is the contents of the shards that name it."""
    specs = request.specs
    if request.array_handles and len(request.array_handles) != len(specs):
        raise error(Code.INVALID_ARGUMENT, f"{len(request.array_handles)} handles for {len(specs)} arrays")
    state.arrays.check_new(request.array_handles)
    placements = [_placement(state, spec.array_spec) for spec in specs]
    shard_buffers = [_shard_buffers(spec) for spec in specs]
    handles = state.mint_unless_given(request.array_handles, len(specs))
    news: list[tuple[Handle, DType, Shape, Placement]] = []
    shards: list[tuple[int, ...]] = []
    parts: list[_BufferPart] = []
    for handle, spec, placement, buffers in zip(handles, specs, placements, shard_buffers, strict=True):
        array = spec.array_spec
        if placement.loss is not None:
            state.new_poisoned(handle, array.dtype, array.shape, placement, placement.loss)
            continue
        shard_shape = array.sharding.shard_shape(array.shape)
        first = len(parts)
        parts.extend(_BufferPart(buffer, None, shard_shape) for buffer in spec.host_buffers)
        for device, buffer_index in zip(placement.devices, buffers, strict=True):
            parts[first + buffer_index].hosts.add(state.topology.host_of(device))
        shards.append(tuple(first + buffer_index for buffer_index in buffers))
        news.append((handle, array.dtype, array.shape, placement))
    if news:
        _submit(state, news, shards, parts)
    drop_host_buffers(state, request)
    return responses.ArrayHandles(handles)


def make_error_arrays(state: SessionState, _: RequestId, request: requests.MakeErrorArrays) -> responses.Response:
    """MakeErrorArrays: nothing reaches workers, as the core answers every use of a poisoned array itself."""
    specs = request.array_specs
    if request.array_handles and len(request.array_handles) != len(specs):
        raise error(Code.INVALID_ARGUMENT, f"{len(request.array_handles)} handles for {len(specs)} arrays")
    state.arrays.check_new(request.array_handles)
    placements = [state.placements.intern(spec.sharding) for spec in specs]
    handles = state.mint_unless_given(request.array_handles, len(specs))
    for handle, spec, placement in zip(handles, specs, placements, strict=True):
        state.new_poisoned(handle, spec.dtype, spec.shape, placement, request.error)
    return responses.ArrayHandles(handles)


def drop_host_buffers(
    state: SessionState, request: requests.MakeArrayFromHostBuffer | requests.MakeArraysFromHostBufferShards
) -> None:
    """Drop the buffers of a request, each once; a request that is refused drops them too."""
    if isinstance(request, requests.MakeArrayFromHostBuffer):
        named = [request.host_buffer_handle]
    else:
        named = [buffer.host_buffer_handle for spec in request.specs for buffer in spec.host_buffers]
    state.out.extend(DropHostBuffer(handle) for handle in dict.fromkeys(named))


def _placement(state: SessionState, spec: ArraySpec) -> Placement:
    if spec.dtype in (DType.TOKEN, DType.OPAQUE):
        raise error(Code.INVALID_ARGUMENT, f"an array of {spec.dtype.name} cannot be made from a host buffer")
    placement = state.placements.intern(spec.sharding)
    try:
        spec.sharding.shard_shape(spec.shape)
    except ValueError as mismatch:
        raise error(Code.INVALID_ARGUMENT, str(mismatch)) from mismatch
    return placement


def _check_strides(buffer: HostBuffer) -> None:
    strides = buffer.byte_strides
    if strides is not None and len(strides) != len(buffer.shape):
        raise error(Code.INVALID_ARGUMENT, f"{len(strides)} byte strides for a buffer of shape {list(buffer.shape)}")


def _shard_buffers(spec: requests.HostBufferShards) -> list[int]:
    """Per shard, the buffer that holds it."""
    array = spec.array_spec
    if len(spec.addressable_shard_indices) != len(spec.host_buffers):
        raise error(
            Code.INVALID_ARGUMENT,
            f"{len(spec.addressable_shard_indices)} lists of shards for {len(spec.host_buffers)} host buffers",
        )
    num_shards = len(array.sharding.devices)
    shard_shape = array.sharding.shard_shape(array.shape)
    owner: list[int | None] = [None] * num_shards
    for index, (buffer, shards) in enumerate(zip(spec.host_buffers, spec.addressable_shard_indices, strict=True)):
        if buffer.dtype is not array.dtype or len(buffer.shape) != len(shard_shape):
            raise error(
                Code.INVALID_ARGUMENT,
                f"a host buffer of {buffer.dtype.name}{list(buffer.shape)} is no shard of"
                f" {array.dtype.name}{list(array.shape)}",
            )
        if any(dim > limit for dim, limit in zip(buffer.shape, shard_shape, strict=True)):
            raise error(
                Code.INVALID_ARGUMENT,
                f"a host buffer of shape {list(buffer.shape)} is larger than a shard, {list(shard_shape)}",
            )
        _check_strides(buffer)
        for shard in shards:
            if not 0 <= shard < num_shards or owner[shard] is not None:
                raise error(Code.INVALID_ARGUMENT, f"shard {shard} of {num_shards} is unknown or filled twice")
            owner[shard] = index
    filled = [index for index in owner if index is not None]
    if len(filled) != num_shards:
        raise error(Code.INVALID_ARGUMENT, f"host buffers for {len(filled)} of {num_shards} shards")
    return filled


def _submit(
    state: SessionState,
    news: list[tuple[Handle, DType, Shape, Placement]],
    shards: list[tuple[int, ...]],
    parts: list[_BufferPart],
) -> None:
    op_id = state.next_op()
    results = tuple(sharded_result(new[0], state.new_array(*new)) for new in news)
    hosts = news[0][3].hosts
    if any(new[3].hosts != hosts for new in news):
        hosts = tuple(sorted({host for new in news for host in new[3].hosts}))
    state.submit(MakeArrays(op_id, results, tuple(shards)), hosts, writes=tuple(new[0] for new in news))
    for index, part in enumerate(parts):
        if part.hosts:
            buffer = part.buffer
            state.out.append(
                SendHostBuffer(
                    buffer.host_buffer_handle,
                    op_id,
                    index,
                    tuple(sorted(part.hosts)),
                    buffer.dtype,
                    buffer.shape,
                    buffer.byte_strides,
                    part.box,
                    part.sent_shape,
                )
            )
