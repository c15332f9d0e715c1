"""The IFRT proxy schema that the installed jaxlib speaks, read out of its shared library.

C++ protobuf embeds the serialized FileDescriptorProto of every .proto file that a library was built from. Comparing
ours with them is how a jaxlib whose protocol has moved on is found out before it is spoken to.
"""

import importlib.util
import mmap
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError

#: A length-delimited field 1 (``name``) that holds a path below a folder that XLA is built from.
_FILE_NAME = re.compile(rb"\x0a([\x08-\x7f])((?:xla|tsl)/[\w/.\-]{1,120}\.proto)")
#: The fields of a FileDescriptorProto by number; a tag of any other number lies behind its end.
_FIELDS = frozenset(field.number for field in descriptor_pb2.FileDescriptorProto.DESCRIPTOR.fields)
_WIRE_VARINT, _WIRE_BYTES = 0, 2
_MAX_FIELD_BYTES = 1 << 21


def jaxlib_library() -> pathlib.Path:
    """The shared library of the installed jaxlib.

    Raises:
        FileNotFoundError: there is no jaxlib, or it is laid out in another way.
    """
    spec = importlib.util.find_spec("jaxlib")
    locations = (spec.submodule_search_locations or []) if spec else []
    for location in locations:
        library = pathlib.Path(location) / "libjax_common.so"
        if library.exists():
            return library
    raise FileNotFoundError(f"no libjax_common.so in {list(locations)}")


def embedded_files(library: pathlib.Path) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """The file descriptors found in a shared library, by file name."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {parsed.name: parsed for parsed in _scan(content)}


def messages(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> Iterator[tuple[str, descriptor_pb2.DescriptorProto]]:
    """Every message with its full name, nested ones included."""
    for file in files:
        for message in file.message_type:
            yield from _nested(f"{file.package}.{message.name}", message)


class Differences(NamedTuple):
    """Where our schema says something that theirs does not.

    Fields, messages and enum values that only they have are no difference: protobuf keeps what it does not know.

    Attributes:
        conflicts: what both have and mean differently, also a number that they use for something else; one line each.
            Such a jaxlib would be misunderstood.
        missing: full names of what only we have. Harmless: an older or newer jaxlib does not send it.
    """

    conflicts: list[str]
    missing: list[str]


def differences(
    ours: list[descriptor_pb2.FileDescriptorProto], theirs: list[descriptor_pb2.FileDescriptorProto]
) -> Differences:
    """Compare every message, field and enum value of ours."""
    found = Differences([], [])
    known = dict(messages(theirs))
    for name, message in messages(ours):
        if name not in known:
            found.missing.append(name)
            continue
        fields = {field.name: field for field in known[name].field}
        numbers = {field.number: field.name for field in known[name].field}
        for field in message.field:
            if field.name in fields:
                mine, other = _signature(message, field), _signature(known[name], fields[field.name])
                if mine != other:
                    found.conflicts.append(f"{name}.{field.name} is {mine}, in theirs {other}")
            elif field.number in numbers:
                found.conflicts.append(f"{name}.{field.name} is {field.number}, in theirs {numbers[field.number]}")
            else:
                found.missing.append(f"{name}.{field.name}")
    known_enums = dict(_enums(theirs))
    for name, enum in _enums(ours):
        if name not in known_enums:
            found.missing.append(name)
            continue
        values = {value.name: value.number for value in known_enums[name].value}
        numbers = {value.number: value.name for value in known_enums[name].value}
        for value in enum.value:
            if value.name in values:
                if values[value.name] != value.number:
                    found.conflicts.append(f"{name}.{value.name} is {value.number}, in theirs {values[value.name]}")
            elif value.number in numbers:
                found.conflicts.append(f"{name}.{value.name} is {value.number}, in theirs {numbers[value.number]}")
            else:
                found.missing.append(f"{name}.{value.name}")
    return found


def _signature(
    message: descriptor_pb2.DescriptorProto, field: descriptor_pb2.FieldDescriptorProto
) -> tuple[int, str, str, str, str]:
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    kind = descriptor_pb2.FieldDescriptorProto
    return (field.number, kind.Type.Name(field.type), kind.Label.Name(field.label), field.type_name, oneof)


def _nested(name: str, message: descriptor_pb2.DescriptorProto) -> Iterator[tuple[str, descriptor_pb2.DescriptorProto]]:
    yield name, message
    for nested in message.nested_type:
        yield from _nested(f"{name}.{nested.name}", nested)


def _enums(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> Iterator[tuple[str, descriptor_pb2.EnumDescriptorProto]]:
    for file in files:
        for enum in file.enum_type:
            yield f"{file.package}.{enum.name}", enum
    for name, message in messages(files):
        for enum in message.enum_type:
            yield f"{name}.{enum.name}", enum


def _scan(content: mmap.mmap) -> Iterator[descriptor_pb2.FileDescriptorProto]:
    for match in _FILE_NAME.finditer(content):
        if match.group(1)[0] != len(match.group(2)):
            continue
        try:
            parsed = descriptor_pb2.FileDescriptorProto.FromString(
                content[match.start() : _end(content, match.start())]
            )
        except DecodeError:
            # A file name elsewhere in the library, such as in the list of what another file imports.
            continue
        if parsed.message_type or parsed.enum_type or parsed.service:
            yield parsed


def _end(content: mmap.mmap, start: int) -> int:
    """Where the FileDescriptorProto that begins at ``start`` ends: before the first thing that is no field of one."""
    position = end = start
    named = False
    while position < len(content) - 20:
        tag, position = _varint(content, position)
        number, wire_type = tag >> 3, tag & 7
        if number not in _FIELDS or wire_type not in (_WIRE_VARINT, _WIRE_BYTES) or (number == 1 and named):
            break
        named = named or number == 1
        value, position = _varint(content, position)
        if wire_type == _WIRE_BYTES:
            if value > _MAX_FIELD_BYTES:
                break
            position += value
        end = position
    return end


def _varint(content: mmap.mmap, position: int) -> tuple[int, int]:
    """The varint at a position, and where it ends. Ten bytes at most; what is longer is no varint and reads as 0."""
    value = 0
    for shift in range(0, 70, 7):
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, position
    return 0, position
