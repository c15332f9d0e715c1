"""A client's side of HTTP/2 that can also do what no decent client does."""

import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

import hpack
import pytest

from pathways_runtime.transport.http2 import frames
from pathways_runtime.transport.http2.connection import Limits, ServerConnection
from pathways_runtime.transport.http2.events import AnyEvent

REQUEST = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test.Service/Method"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


class Frame(NamedTuple):
    """A frame that the server sent."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


class Peer:
    """Feeds a ServerConnection, and reads what it sends. Starts with preface and SETTINGS unless told not to."""

    def __init__(
        self, limits: Limits | None = None, *, settings: dict[int, int] | None = None, opens: bool = True
    ) -> None:
        self.connection = ServerConnection(limits or Limits())
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()
        self._unparsed = b""
        if opens:
            assert self.feed(frames.PREFACE + frames.settings(settings or {})) == []
            kinds = [frame.kind for frame in self.output()]
            assert kinds == [frames.SETTINGS, frames.WINDOW_UPDATE, frames.SETTINGS]

    def feed(self, wire: bytes, piece_bytes: int = 1 << 30) -> list[AnyEvent]:
        """What happens when these bytes come, at most ``piece_bytes`` at once."""
        events = []
        at = 0
        while at < len(wire):
            memory = self.connection.writable()
            piece = wire[at : at + min(piece_bytes, len(memory))]
            memory[: len(piece)] = piece
            memory.release()
            events += self.connection.advance(len(piece))
            at += len(piece)
        return events

    def resume(self, stream_id: int) -> list[AnyEvent]:
        """What a stream that was paused has held."""
        self.connection.resume(stream_id)
        held = []
        while (event := self.connection.next_held(stream_id)) is not None:
            held.append(event)
        return held

    def output(self, limit_bytes: int = 1 << 30) -> list[Frame]:
        """The frames that the server sends now."""
        wire = self._unparsed + b"".join(self.connection.take_output(limit_bytes))
        out = []
        while len(wire) >= 9:
            length_and_kind, flags, stream_id = frames.HEADER.unpack_from(wire)
            end = 9 + (length_and_kind >> 8)
            assert len(wire) >= end, "the server sends whole frames"
            out.append(Frame(length_and_kind & 0xFF, flags, stream_id, wire[9:end]))
            wire = wire[end:]
        assert not wire
        return out

    def headers(self, stream_id: int, fields: Iterable[tuple[str, str]] = REQUEST, *, ends: bool = False) -> bytes:
        """A HEADERS frame; feed it before the next one is made, as the table goes with it."""
        return frames.header_block(stream_id, self.encoder.encode(list(fields)), ends, 1 << 14)

    def decode(self, frame: Frame) -> dict[str, str]:
        """The fields of a HEADERS frame of the server."""
        assert frame.kind == frames.HEADERS and frame.flags & frames.END_HEADERS
        return dict(self.decoder.decode(frame.payload))

    def open(self, stream_id: int) -> None:
        """Begin a call that is still to send its messages."""
        events = self.feed(self.headers(stream_id))
        assert [type(event).__name__ for event in events] == ["RequestReceived"]


def message(content: bytes, *, compressed: int = 0) -> bytes:
    """A gRPC message."""
    return struct.pack(">BI", compressed, len(content)) + content


def data(stream_id: int, payload: bytes, *, ends: bool = False, padding: int | None = None) -> bytes:
    """A DATA frame."""
    flags = frames.END_STREAM if ends else 0
    if padding is not None:
        payload = bytes((padding,)) + payload + bytes(padding)
        flags |= frames.PADDED
    return frames.frame_header(len(payload), frames.DATA, flags, stream_id) + payload


class Wire(NamedTuple):
    """What tests build bytes and peers with."""

    peer: Callable[..., Peer] = Peer
    message: Callable[..., bytes] = message
    data: Callable[..., bytes] = data
    request: tuple[tuple[str, str], ...] = REQUEST


@pytest.fixture(scope="session")
def wire() -> Wire:
    return Wire()
