"""Host buffers as the messages that carry them: one field of bytes each, by hand, so that bytes are copied once."""

from collections.abc import Iterator

from pathways_runtime.core.status import Code, error
from pathways_runtime.proxy.host_buffers import Buffer
from pathways_runtime.wire.ifrt import schema
from pathways_runtime.wire.ifrt.responses import varint

#: What JAX's client sends and expects.
CHUNK_BYTES = 1 << 20

#: Field 1, length-delimited: ``data`` of GrpcHostBufferStoreRequest and GrpcHostBufferLookupResponse.
_TAG_DATA = b"\x0a"


def chunk_of(message: Buffer) -> Buffer:
    """The ``data`` of a GrpcHostBufferStoreRequest, not copied.

    Raises:
        StatusError: the message is none.
    """
    if len(message) >= 2 and message[0] == _TAG_DATA[0]:
        size = shift = 0
        for position in range(1, min(len(message), 11)):
            byte = message[position]
            size |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                if position + 1 + size == len(message):
                    return memoryview(message)[position + 1 :]
                break
    try:
        content: bytes = schema.HostBufferStoreRequest.FromString(bytes(message)).data
    except schema.DecodeError as failure:
        raise error(Code.INVALID_ARGUMENT, "a host buffer came in something that is no message") from failure
    return content


def header_bytes(message_bytes: int) -> int:
    """How much of a GrpcHostBufferStoreRequest of so many bytes comes before ``data``, if that is its only field."""
    for num_bytes in range(2, 12):
        if len(varint(message_bytes - num_bytes)) == num_bytes - 1:
            return num_bytes
    return message_bytes


def lookup_messages(content: Buffer) -> Iterator[tuple[Buffer, Buffer]]:
    """The GrpcHostBufferLookupResponse messages of a buffer, in parts of which the second is not copied.

    One empty message if the buffer is empty.
    """
    view = memoryview(content)
    if not len(view):
        yield b"", b""
    for start in range(0, len(view), CHUNK_BYTES):
        chunk = view[start : start + CHUNK_BYTES]
        yield _TAG_DATA + varint(len(chunk)), chunk
