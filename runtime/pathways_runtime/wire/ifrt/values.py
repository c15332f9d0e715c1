"""Small IFRT values: element types, shapes, strides, statuses, attribute maps."""

from collections.abc import Mapping, Sequence
from typing import Any

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.sharding import Shape
from pathways_runtime.core.status import Code, Status, error
from pathways_runtime.wire.ifrt import schema

_DTYPES = {int(kind): kind for kind in DType}
_CODES = {int(code): code for code in Code}

#: What an attribute of a device or client, or a figure of an analysis, may be.
Attribute = str | bytes | bool | int | float | Sequence[int]


def decode_dtype(proto: Any) -> DType:
    """The element type of a DTypeProto.

    Raises:
        StatusError: a kind that we do not know.
    """
    kind = _DTYPES.get(proto.kind)
    if kind is None:
        raise error(Code.UNIMPLEMENTED, f"element type {proto.kind} of IFRT's DTypeProto is not supported")
    return kind


def decode_shape(proto: Any) -> Shape:
    """The dimensions of a ShapeProto, in elements."""
    return tuple(proto.dims)


def decode_byte_strides(holder: Any) -> tuple[int, ...] | None:
    """The ``byte_strides`` of a message that may have some; None says row-major and dense."""
    return tuple(holder.byte_strides.strides) if holder.HasField("byte_strides") else None


def decode_status(proto: Any) -> Status | None:
    """The failure of a StatusProto; None if it is OK. A code that absl does not have reads as UNKNOWN."""
    if proto.code == Code.OK:
        return None
    return Status(_CODES.get(proto.code, Code.UNKNOWN), proto.message)


def encode_status(status: Status, proto: Any) -> None:
    """Write a failure into a StatusProto."""
    proto.code = int(status.code)
    proto.message = status.message


def encode_attributes(attributes: Mapping[str, Attribute], proto: Any) -> None:
    """Write attributes into an AttributeMapProto.

    Raises:
        TypeError: a value of a type that IFRT has no attribute for.
    """
    for name, value in attributes.items():
        target = proto.attributes[name]
        match value:
            # bool before int: it is one.
            case bool():
                target.bool_value = value
            case int():
                target.int64_value = value
            case float():
                target.float_value = value
            case str():
                target.string_value = value.encode()
            case bytes():
                target.string_value = value
            case list() | tuple():
                target.int64_list_value.SetInParent()
                target.int64_list_value.elements.extend(value)
            case _:
                raise TypeError(f"attribute {name}: IFRT has no attribute of type {type(value).__name__}")


def decode_attributes(proto: Any) -> dict[str, bytes | bool | int | float | tuple[int, ...]]:
    """The attributes of an AttributeMapProto; strings stay bytes."""
    decoded: dict[str, bytes | bool | int | float | tuple[int, ...]] = {}
    for name, value in proto.attributes.items():
        which = value.WhichOneof("value")
        if which is not None:
            decoded[name] = (
                tuple(value.int64_list_value.elements) if which == "int64_list_value" else getattr(value, which)
            )
    return decoded


def layout_text(minor_to_major: Sequence[int]) -> str:
    """A layout as XLA writes it, ``{1,0}``: how a PjRtLayout is serialized."""
    return "{" + ",".join(map(str, minor_to_major)) + "}"


def encode_xla_layout(minor_to_major: Sequence[int]) -> Any:
    """A dense ``xla.LayoutProto``."""
    return schema.XlaLayoutProto(minor_to_major=minor_to_major, tail_padding_alignment_in_elements=1)
