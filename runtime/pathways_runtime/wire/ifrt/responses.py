"""Answers to IfrtResponse bytes.

Most answers of a running program say next to nothing (an execution is under way, an array is forgotten), so those are
put together by hand: a message object would cost more than all the rest of the answer.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf import message_factory

from pathways_runtime.core.session import responses as core
from pathways_runtime.core.status import Status
from pathways_runtime.wire.ifrt import schema
from pathways_runtime.wire.ifrt.programs import encode_metadata
from pathways_runtime.wire.ifrt.shardings import encode_sharding
from pathways_runtime.wire.ifrt.values import encode_attributes, encode_status, layout_text

_LENGTH_DELIMITED = 2
_ONE_BYTE = tuple(bytes((value,)) for value in range(0x80))


def varint(value: int) -> bytes:
    """A non-negative number as protobuf writes it."""
    if value < 0x80:
        return _ONE_BYTE[value]
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if value < 0x20_0000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _response_fields() -> dict[str, Any]:
    """The response field of each kind of request, by the request's field name."""
    fields = schema.IfrtResponse.DESCRIPTOR.fields_by_name
    kinds = schema.IfrtRequest.DESCRIPTOR.oneofs_by_name["request"].fields
    return {kind.name: fields[kind.name.removesuffix("_request") + "_response"] for kind in kinds}


_FIELDS = _response_fields()
_TAGS = {kind: varint(field.number << 3 | _LENGTH_DELIMITED) for kind, field in _FIELDS.items()}
_EMPTY_BODIES = {kind: tag + b"\x00" for kind, tag in _TAGS.items()}
_CLASSES: dict[str, Any] = {
    kind: message_factory.GetMessageClass(field.message_type) for kind, field in _FIELDS.items()
}

#: Field 1 of IfrtResponse, length-delimited: response_metadata.
_TAG_METADATA = b"\x0a"
#: Field 1, fixed64: ResponseMetadata.op_id, and the handle in each message that answers with one.
_FIELD_1_FIXED64 = struct.Struct("<BQ")
_TAG_FIXED64 = 0x09
#: Field 3, varint: ResponseMetadata.seq_num. Field 4, packed fixed64: destroyed_user_context_ids.
_TAG_SEQ_NUM = b"\x18"
_TAG_DESTROYED = b"\x22"


def encode_response(
    kind: str, op_id: int, response: core.Response, seq_num: int, destroyed_user_contexts: Sequence[int] = ()
) -> bytes:
    """The IfrtResponse that answers a request of ``kind`` (its field name in IfrtRequest) with success.

    Raises:
        KeyError: no request of this kind, or no response of this type.
    """
    metadata = _FIELD_1_FIXED64.pack(_TAG_FIXED64, op_id) + _TAG_SEQ_NUM + varint(seq_num)
    if destroyed_user_contexts:
        count = len(destroyed_user_contexts)
        metadata += _TAG_DESTROYED + varint(count * 8) + struct.pack(f"<{count}Q", *destroyed_user_contexts)
    head = _TAG_METADATA + varint(len(metadata)) + metadata
    body = _BODIES[type(response)](kind, response)
    return head + _TAGS[kind] + varint(len(body)) + body if body else head + _EMPTY_BODIES[kind]


def encode_error(op_id: int, status: Status) -> bytes:
    """The IfrtResponse that answers a request with a failure; it takes no sequence number."""
    proto = schema.IfrtResponse()
    proto.response_metadata.op_id = op_id
    encode_status(status, proto.response_metadata.status)
    encoded: bytes = proto.SerializeToString()
    return encoded


def encode_init(op_id: int, init_response: Any, seq_num: int) -> bytes:
    """The IfrtResponse that answers InitRequest."""
    proto = schema.IfrtResponse()
    proto.response_metadata.op_id = op_id
    proto.response_metadata.seq_num = seq_num
    proto.init_response.CopyFrom(init_response)
    encoded: bytes = proto.SerializeToString()
    return encoded


def _empty(kind: str, response: core.Response) -> bytes:
    return b""


def _one_handle(handle: int) -> bytes:
    return _FIELD_1_FIXED64.pack(_TAG_FIXED64, handle)


def _array_handles(kind: str, response: core.ArrayHandles) -> bytes:
    count = len(response.array_handles)
    return b"\x0a" + varint(count * 8) + struct.pack(f"<{count}Q", *response.array_handles) if count else b""


def _executed(kind: str, response: core.Executed) -> bytes:
    if not response.outputs:
        return _one_handle(response.status_handle) if response.status_handle else b""
    proto = _CLASSES[kind](status_handle=response.status_handle)
    for output in response.outputs:
        target = proto.outputs.add(array_handle=output.array_handle)
        target.dtype.kind = int(output.dtype)
        target.shape.SetInParent()
        target.shape.dims.extend(output.shape)
        target.sharding.CopyFrom(encode_sharding(output.sharding))
    return _serialized(proto)


def _deleted(kind: str, response: core.Deleted) -> bytes:
    # Both messages that say so have it as field 1.
    return b"\x08\x01" if response.deleted else b""


def _compiled(kind: str, response: core.Compiled) -> bytes:
    return _serialized(
        _CLASSES[kind](
            loaded_executable_handle=response.loaded_executable_handle,
            name=response.name,
            num_devices=len(response.devices),
            device_ids=response.devices,
            addressable_device_ids=response.devices,
            fingerprint_value=response.fingerprint,
            ready_future_handle=response.ready_future_handle,
        )
    )


def _metadata(kind: str, response: core.ExecutableMetadata) -> bytes:
    proto = _CLASSES[kind]()
    encode_metadata(response.metadata, proto)
    return _serialized(proto)


def _cost_analysis(kind: str, response: core.CostAnalysis) -> bytes:
    proto = _CLASSES[kind]()
    proto.attributes.SetInParent()
    encode_attributes(response.attributes, proto.attributes)
    return _serialized(proto)


def _text(kind: str, response: core.HumanReadableProgramText) -> bytes:
    return _serialized(_CLASSES[kind](human_readable_program_text=response.text))


def _device_assignment(kind: str, response: core.DeviceAssignment) -> bytes:
    proto = _CLASSES[kind]()
    assignment = proto.device_assignment
    assignment.replica_count = len(response.devices)
    assignment.computation_count = len(response.devices[0]) if response.devices else 0
    for partition in zip(*response.devices, strict=True):
        assignment.computation_devices.add(replica_device_ids=partition)
    return _serialized(proto)


def _default_layout(kind: str, response: core.DefaultLayout) -> bytes:
    return _serialized(_CLASSES[kind](serialized_pjrt_layout=layout_text(response.minor_to_major).encode()))


def _serialized(proto: Any) -> bytes:
    encoded: bytes = proto.SerializeToString()
    return encoded


_BODIES: dict[type[core.Response], Callable[[str, Any], bytes]] = {
    core.Empty: _empty,
    core.ArrayHandle: lambda kind, response: _one_handle(response.array_handle),
    core.ArrayHandles: _array_handles,
    core.FutureHandle: lambda kind, response: _one_handle(response.future_handle),
    core.Deleted: _deleted,
    core.Compiled: _compiled,
    core.ExecutableMetadata: _metadata,
    core.CostAnalysis: _cost_analysis,
    core.HumanReadableProgramText: _text,
    core.Executed: _executed,
    core.DeviceAssignment: _device_assignment,
    core.DefaultLayout: _default_layout,
}
