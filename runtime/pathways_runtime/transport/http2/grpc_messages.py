"""gRPC on HTTP/2: messages in DATA frames, requests and statuses in headers.

See https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md. Messages are not compressed: the server announces no
encoding, so a client that compresses is told UNIMPLEMENTED.
"""

import base64
import binascii
import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from pathways_runtime.core.status import Code
from pathways_runtime.transport.frames import Buffer
from pathways_runtime.transport.http2 import headers
from pathways_runtime.transport.http2.headers import Headers

# Compressed flag and length, in front of every message.
MESSAGE_PREFIX = struct.Struct(">BI")
MESSAGE_PREFIX_BYTES = 5

# Memory for a message is taken as it arrives, at least this much at once: a length alone must not reserve gigabytes.
_FIRST_ALLOCATION_BYTES = 1 << 23

Metadata = tuple[tuple[str, str | bytes], ...]


class CallFault(Exception):
    """One call cannot go on; its stream ends with this status."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


class MalformedRequest(Exception):
    """The headers are no HTTP/2 request (RFC 9113, section 8.1.1)."""


class NotGrpc(Exception):
    """An HTTP request, but not a gRPC call; ``http_status`` answers it."""

    def __init__(self, http_status: int, message: str) -> None:
        super().__init__(message)
        self.http_status = http_status


class MessageReader:
    """Cuts the bytes of one stream into messages.

    Feed it in pieces of any size with ``feed``. While a message is incomplete, its missing bytes may also be received
    straight into ``vacant()`` and reported with ``filled()``, which spares large messages a copy.

    Args:
        max_message_bytes: a longer message ends the call with RESOURCE_EXHAUSTED.
    """

    __slots__ = (
        "_filled",
        "_length",
        "_max_message_bytes",
        "_message",
        "_prefix",
        "allocate",
        "is_at_boundary",
        "is_discarding",
    )

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._prefix = b""
        # The message being received, where it is not complete; may be shorter than _length for now.
        self._message: bytearray | memoryview | None = None
        self._filled = 0
        self._length = 0
        #: Where the consumer wants a message of so many bytes; None: no matter.
        self.allocate: Callable[[int], memoryview | None] | None = None
        #: The next byte is a message's first, and wanted.
        self.is_at_boundary = True
        #: Nothing that comes is wanted any more.
        self.is_discarding = False

    def discard(self) -> None:
        """Drop what is there and what comes."""
        self.is_discarding = True
        self.is_at_boundary = False
        self._message = None

    def feed(self, view: memoryview, messages: list[Buffer], is_up_to_date: bool = False) -> None:
        """Take bytes; completed messages are appended to ``messages``. Nothing keeps ``view``.

        Args:
            is_up_to_date: the consumer has all messages before these, so ``allocate`` may be asked about the next.

        Raises:
            CallFault: a message is compressed or too long. Nothing is wanted after it.
        """
        if self.is_discarding:
            return
        at, end = 0, len(view)
        while at < end:
            if self._message is None:
                if self._prefix or end - at < MESSAGE_PREFIX_BYTES:
                    taken = MESSAGE_PREFIX_BYTES - len(self._prefix)
                    self._prefix += view[at : at + taken]
                    at += taken
                    if len(self._prefix) < MESSAGE_PREFIX_BYTES:
                        self.is_at_boundary = False
                        return
                    compressed, length = MESSAGE_PREFIX.unpack(self._prefix)
                    self._prefix = b""
                else:
                    compressed, length = MESSAGE_PREFIX.unpack_from(view, at)
                    at += MESSAGE_PREFIX_BYTES
                self.is_at_boundary = True
                if compressed:
                    self.discard()
                    raise CallFault(Code.UNIMPLEMENTED, "compressed messages are not supported")
                if length > self._max_message_bytes:
                    self.discard()
                    raise CallFault(
                        Code.RESOURCE_EXHAUSTED,
                        f"a message of {length} bytes is longer than the limit of {self._max_message_bytes}",
                    )
                if end - at >= length:
                    messages.append(bytes(view[at : at + length]))
                    at += length
                    continue
                if self.allocate is not None and is_up_to_date and not messages:
                    self._message = self.allocate(length)
                if self._message is None:
                    self._message = bytearray(min(length, _FIRST_ALLOCATION_BYTES))
                self._filled, self._length = 0, length
                self.is_at_boundary = False
            vacant = self.vacant()
            taken = min(len(vacant), end - at)
            vacant[:taken] = view[at : at + taken]
            at += taken
            self.filled(taken, messages)

    def vacant(self) -> memoryview:
        """Memory for the next bytes of the stream; empty between messages. Valid until the next call."""
        message = self._message
        if message is None:
            return memoryview(b"")
        if self._filled == len(message):
            larger = bytearray(min(self._length, 2 * len(message)))
            larger[: self._filled] = message
            self._message = message = larger
        return memoryview(message)[self._filled :]

    def filled(self, num_bytes: int, messages: list[Buffer]) -> None:
        """``num_bytes`` of the stream were put into ``vacant()``; a completed message is appended to ``messages``."""
        assert self._message is not None
        self._filled += num_bytes
        if self._filled == self._length:
            messages.append(self._message)
            self._message = None
            self.is_at_boundary = True


class Request(NamedTuple):
    """What the headers of a call say."""

    path: str
    metadata: Metadata


_CONNECTION_HEADERS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_RESERVED = frozenset(
    (
        b"content-type",
        b"te",
        b"grpc-encoding",
        b"grpc-accept-encoding",
        b"accept-encoding",
        b"grpc-timeout",
        b"content-length",
    )
)
_PSEUDO_HEADERS = frozenset((b":method", b":scheme", b":path", b":authority"))
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_FORBIDDEN_IN_VALUES = re.compile(rb"[\x00\r\n]")


def parse_request(fields: Headers) -> Request:
    """Read the headers of a call. Deadlines (``grpc-timeout``) are the client's to keep: it resets the stream.

    Raises:
        MalformedRequest: a stream error. NotGrpc: an HTTP answer. CallFault: a gRPC status.
    """
    pseudo: dict[bytes, bytes] = {}
    regular: list[tuple[bytes, bytes]] = []
    content_type = b""
    encoding = b"identity"
    for name, value in fields:
        if _FORBIDDEN_IN_VALUES.search(value):
            raise MalformedRequest(f"header {name!r} has a value with a line break or NUL")
        if name.startswith(b":"):
            if regular or name not in _PSEUDO_HEADERS or name in pseudo:
                raise MalformedRequest(f"pseudo header {name!r} is unknown, repeated or misplaced")
            pseudo[name] = value
            continue
        if not _NAME.fullmatch(name) or name in _CONNECTION_HEADERS or (name == b"te" and value != b"trailers"):
            raise MalformedRequest(f"header {name!r} is not one of HTTP/2")
        regular.append((name, value))
        if name == b"content-type":
            content_type = value
        elif name == b"grpc-encoding":
            encoding = value
    if not pseudo.get(b":path") or not pseudo.get(b":scheme") or b":method" not in pseudo:
        raise MalformedRequest("a request needs :method, :scheme and :path")
    if pseudo[b":method"] != b"POST":
        raise NotGrpc(405, "a gRPC call is a POST")
    if not re.match(rb"application/grpc(?:[+;]|$)", content_type):
        raise NotGrpc(415, "a gRPC call has content-type application/grpc")
    if encoding != b"identity":
        raise CallFault(Code.UNIMPLEMENTED, f"messages encoded with {encoding.decode('latin-1')} are not supported")
    metadata = tuple(item for field in regular if field[0] not in _RESERVED for item in _metadata(*field))
    return Request(pseudo[b":path"].decode("latin-1"), metadata)


def _metadata(name: bytes, value: bytes) -> list[tuple[str, str | bytes]]:
    text = name.decode("ascii")
    if not name.endswith(b"-bin"):
        return [(text, value.decode("latin-1"))]
    # Several values of one name may have been joined by commas on the way.
    return [(text, _decode_base64(text, item)) for item in value.split(b",")]


def _decode_base64(name: str, value: bytes) -> bytes:
    stripped = value.strip().rstrip(b"=")
    try:
        return base64.b64decode(stripped + b"=" * (-len(stripped) % 4), validate=True)
    except binascii.Error as failure:
        raise CallFault(Code.INTERNAL, f"metadata {name} is not base64: {failure}") from failure


def encode_metadata(metadata: Metadata) -> Headers:
    """Metadata as headers; values of ``-bin`` names are bytes, the others ASCII text.

    Raises:
        ValueError: a name or a value cannot be a header.
    """
    fields = []
    for name, value in metadata:
        raw_name = name.encode("ascii")
        if isinstance(value, bytes) != name.endswith("-bin"):
            raise ValueError(f"metadata {name}: names of bytes end in -bin, and only they")
        raw = base64.b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode("ascii")
        if not _NAME.fullmatch(raw_name) or not re.fullmatch(rb"[\x20-\x7e]*", raw):
            raise ValueError(f"metadata {name} is not printable ASCII in lower case")
        fields.append((raw_name, raw))
    return tuple(fields)


_RESPONSE_FIELDS: Headers = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_RESPONSE = headers.encode(_RESPONSE_FIELDS)
_TRAILERS_OK = headers.encode(((b"grpc-status", b"0"),))


def response_block(metadata: Metadata = ()) -> bytes:
    """The header block that opens an answer."""
    return _RESPONSE + headers.encode(encode_metadata(metadata)) if metadata else _RESPONSE


def trailers_block(code: Code | int, message: str = "", metadata: Metadata = (), *, is_only: bool = False) -> bytes:
    """The header block that ends an answer. ``is_only``: no ``response_block`` went before."""
    if code == Code.OK and not message and not metadata and not is_only:
        return _TRAILERS_OK
    fields: Headers = ((b"grpc-status", b"%d" % code),)
    if message:
        fields += ((b"grpc-message", percent_encode(message)),)
    return (_RESPONSE if is_only else b"") + headers.encode(fields + encode_metadata(metadata))


def http_error_block(http_status: int, message: str) -> bytes:
    """The whole answer to what is no gRPC call; it also carries a gRPC status for clients that look for one."""
    return headers.encode(
        (
            (b":status", b"%d" % http_status),
            (b"content-type", b"application/grpc"),
            (b"grpc-status", b"%d" % Code.UNKNOWN),
            (b"grpc-message", percent_encode(message)),
        )
    )


_MAX_STATUS_MESSAGE_BYTES = 2048


def percent_encode(message: str) -> bytes:
    """A status message as gRPC writes it in a header: UTF-8, all but printable ASCII and ``%`` itself escaped.

    Cut to 2 KiB, three times as much when all is escaped: clients may refuse header lists of more than 8 KiB.
    """
    raw = message.encode("utf-8", "replace")
    if len(raw) > _MAX_STATUS_MESSAGE_BYTES:
        raw = raw[:_MAX_STATUS_MESSAGE_BYTES].decode("utf-8", "ignore").encode() + b" ..."
    return re.sub(rb"[^\x20-\x24\x26-\x7e]", lambda match: b"%%%02X" % match[0][0], raw)
