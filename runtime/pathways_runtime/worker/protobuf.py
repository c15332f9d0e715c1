"""Serialized protobufs whose schema we do not carry, read, cut and written: XLA's own, of which we need few fields."""

from collections.abc import Iterator
from typing import NamedTuple


class Field(NamedTuple):
    """One field of a message: its number, its value, and the bytes ``[start, stop)`` that it takes with its tag.

    ``value`` is an int for varints and bytes for everything else.
    """

    number: int
    value: int | bytes
    start: int
    stop: int


def fields(message: bytes) -> Iterator[Field]:
    """The fields of a message in order.

    Raises:
        ValueError: this is no protobuf.
    """
    at = 0
    while at < len(message):
        start = at
        tag, at = _varint(message, at)
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(message, at)
        elif kind in (1, 2, 5):
            size = 8 if kind == 1 else 4
            if kind == 2:
                size, at = _varint(message, at)
            value = message[at : at + size]
            if len(value) != size:
                raise ValueError("a protobuf ends within a field")
            at += size
        else:
            raise ValueError(f"a protobuf field of wire type {kind}")
        yield Field(tag >> 3, value, start, at)


def ints(value: int | bytes) -> list[int]:
    """A repeated integer field's value, packed or not."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return found


def without(message: bytes, *path: int) -> bytes:
    """The message less all occurrences of the field at ``path``: field numbers from the outermost message inwards."""
    kept = []
    for field in fields(message):
        if field.number != path[0]:
            kept.append(message[field.start : field.stop])
        elif len(path) > 1:
            assert isinstance(field.value, bytes)
            inner = without(field.value, *path[1:])
            kept.append(bytes_field(field.number, inner))
    return b"".join(kept)


def int_field(number: int, value: int) -> bytes:
    """A varint field; nothing for zero, as in version 3."""
    return _encode_varint(number << 3) + _encode_varint(value) if value else b""


def bytes_field(number: int, value: bytes) -> bytes:
    """A field that holds a string, bytes or a message."""
    return _encode_varint(number << 3 | 2) + _encode_varint(len(value)) + value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("a protobuf ends within a number")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
