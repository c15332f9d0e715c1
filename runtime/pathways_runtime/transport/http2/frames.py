"""HTTP/2 frames (RFC 9113, sections 4, 6 and 7): their numbers, and the bytes of those that a server sends."""

import enum
import struct
from collections.abc import Iterable, Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# Frame types. Plain ints: the parser compares one for every frame.
DATA = 0x0
HEADERS = 0x1
PRIORITY = 0x2
RST_STREAM = 0x3
SETTINGS = 0x4
PUSH_PROMISE = 0x5
PING = 0x6
GOAWAY = 0x7
WINDOW_UPDATE = 0x8
CONTINUATION = 0x9

# Flags.
ACK = 0x1
END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY_FLAG = 0x20

# Settings.
HEADER_TABLE_SIZE = 0x1
ENABLE_PUSH = 0x2
MAX_CONCURRENT_STREAMS = 0x3
INITIAL_WINDOW_SIZE = 0x4
MAX_FRAME_SIZE = 0x5
MAX_HEADER_LIST_SIZE = 0x6

DEFAULT_WINDOW_BYTES = 65_535
MAX_WINDOW_BYTES = (1 << 31) - 1
MIN_FRAME_BYTES = 1 << 14
MAX_FRAME_BYTES = (1 << 24) - 1
MAX_STREAM_ID = (1 << 31) - 1

HEADER_BYTES = 9
# Length (24 bits) and type (8 bits) as one number, flags, stream.
HEADER = struct.Struct(">IBI")

_U32 = struct.Struct(">I")
_U32_PAIR = struct.Struct(">II")
_SETTING = struct.Struct(">HI")
_WINDOW_UPDATE = struct.Struct(">IBII")


class ErrorCode(enum.IntEnum):
    """Why a stream or a connection ends (RFC 9113, section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class ConnectionFault(Exception):
    """The peer broke the protocol; the connection ends with GOAWAY of this code."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(f"{code.name}: {reason}")
        self.code = code
        self.reason = reason


class StreamFault(Exception):
    """The peer broke the protocol in one stream, which ends with RST_STREAM of this code; the connection goes on."""

    def __init__(self, stream_id: int, code: ErrorCode, reason: str) -> None:
        super().__init__(f"stream {stream_id}: {code.name}: {reason}")
        self.stream_id = stream_id
        self.code = code


def frame_header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """The nine bytes in front of a payload of ``length`` bytes."""
    return HEADER.pack(length << 8 | kind, flags, stream_id)


def settings(values: Mapping[int, int]) -> bytes:
    """A SETTINGS frame."""
    payload = b"".join(_SETTING.pack(setting, value) for setting, value in values.items())
    return frame_header(len(payload), SETTINGS, 0, 0) + payload


SETTINGS_ACK = frame_header(0, SETTINGS, ACK, 0)


def parse_settings(payload: bytes) -> Iterable[tuple[int, int]]:
    """The (setting, value) pairs of a SETTINGS payload, in its order."""
    return _SETTING.iter_unpack(payload)


def ping(opaque: bytes, is_ack: bool) -> bytes:
    """A PING frame around eight bytes."""
    return frame_header(8, PING, ACK if is_ack else 0, 0) + opaque


def goaway(last_stream_id: int, code: ErrorCode, reason: str) -> bytes:
    """A GOAWAY frame; ``reason`` is for who reads the peer's log."""
    debug = reason.encode()[:256]
    return frame_header(8 + len(debug), GOAWAY, 0, 0) + _U32_PAIR.pack(last_stream_id, code) + debug


def rst_stream(stream_id: int, code: int) -> bytes:
    """A RST_STREAM frame."""
    return frame_header(4, RST_STREAM, 0, stream_id) + _U32.pack(code)


def window_update(stream_id: int, increment_bytes: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0 is the connection."""
    return _WINDOW_UPDATE.pack(4 << 8 | WINDOW_UPDATE, 0, stream_id, increment_bytes)


def header_block(stream_id: int, block: bytes, end_stream: bool, max_frame_bytes: int) -> bytes:
    """HEADERS, and CONTINUATION frames where the block is longer than a frame may be."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= max_frame_bytes:
        return frame_header(len(block), HEADERS, flags | END_HEADERS, stream_id) + block
    pieces = [block[at : at + max_frame_bytes] for at in range(0, len(block), max_frame_bytes)]
    out = [frame_header(len(pieces[0]), HEADERS, flags, stream_id), pieces[0]]
    for piece in pieces[1:-1]:
        out += (frame_header(len(piece), CONTINUATION, 0, stream_id), piece)
    out += (frame_header(len(pieces[-1]), CONTINUATION, END_HEADERS, stream_id), pieces[-1])
    return b"".join(out)
