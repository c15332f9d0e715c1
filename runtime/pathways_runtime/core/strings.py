"""Arrays of strings (KIND_STRING): their host buffers, ``xla.ifrt.proto.StringArrayContents`` (field 1, repeated)."""

import math
from collections.abc import Iterable

from pathways_runtime.core.sharding import Box, Shape

_TAG = 0x0A


def encode(strings: Iterable[bytes]) -> bytes:
    """The host buffer of strings, in row-major order."""
    parts = bytearray()
    for string in strings:
        parts.append(_TAG)
        size = len(string)
        while size > 0x7F:
            parts.append(size & 0x7F | 0x80)
            size >>= 7
        parts.append(size)
        parts += string
    return bytes(parts)


def decode(content: bytes | bytearray | memoryview) -> list[bytes]:
    """The strings of a host buffer.

    Raises:
        ValueError: it is none.
    """
    whole = bytes(content)
    found, at = [], 0
    while at < len(whole):
        if whole[at] != _TAG:
            raise ValueError(f"no StringArrayContents: byte {at} of {len(whole)} is {whole[at]:#x}")
        at += 1
        size = shift = 0
        while True:
            if at == len(whole):
                raise ValueError("a StringArrayContents ends within a length")
            byte = whole[at]
            at += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if at + size > len(whole):
            raise ValueError("a StringArrayContents ends within a string")
        found.append(whole[at : at + size])
        at += size
    return found


def part(strings: list[bytes], shape: Shape, box: Box, padded_shape: Shape) -> list[bytes]:
    """The part ``box`` of an array of strings, with empty strings behind it up to ``padded_shape``.

    ``strings`` are ``prod(shape)``, row-major.
    """
    if not shape:
        return strings
    (start, stop), rows = box[0], math.prod(shape[1:])
    taken: list[bytes] = []
    for row in range(start, stop):
        taken += part(strings[row * rows : (row + 1) * rows], shape[1:], box[1:], padded_shape[1:])
    return taken + [b""] * ((padded_shape[0] - (stop - start)) * math.prod(padded_shape[1:]))
