import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_runtime.core.status import Code
from pathways_runtime.transport.http2 import grpc_messages, headers
from pathways_runtime.transport.http2.frames import ConnectionFault, ErrorCode
from pathways_runtime.transport.http2.grpc_messages import (
    CallFault,
    MalformedRequest,
    MessageReader,
    NotGrpc,
)


def prefixed(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


@given(st.lists(st.binary(max_size=60), max_size=8), st.lists(st.integers(1, 40), min_size=1), st.booleans())
def test_messages_are_cut_the_same_however_they_arrive(contents: list[bytes], sizes: list[int], direct: bool) -> None:
    reader = MessageReader(1000)
    stream = b"".join(map(prefixed, contents))
    got: list[bytes] = []
    at = turn = 0
    while at < len(stream):
        piece = stream[at : at + sizes[turn % len(sizes)]]
        vacant = reader.vacant()
        if direct and len(vacant):
            piece = piece[: len(vacant)]
            vacant[: len(piece)] = piece
            reader.filled(len(piece), got)
        else:
            reader.feed(memoryview(piece), got)
        at += len(piece)
        turn += 1
    assert [bytes(message) for message in got] == contents
    assert reader.is_at_boundary


def test_a_message_takes_memory_as_it_arrives() -> None:
    reader = MessageReader((1 << 31) - 1)
    got: list[bytes] = []
    reader.feed(memoryview(b"\0\x7f\xff\xff\xff" + b"x" * 100), got)
    assert len(reader.vacant()) < 1 << 24
    assert not got and not reader.is_at_boundary


def test_a_message_longer_than_the_first_allocation_is_whole() -> None:
    content = bytes(range(256)) * (80 << 10)
    reader = MessageReader(1 << 30)
    got: list[bytes] = []
    view = memoryview(prefixed(content))
    for at in range(0, len(view), 1 << 20):
        reader.feed(view[at : at + (1 << 20)], got)
    assert [bytes(message) for message in got] == [content]


@pytest.mark.parametrize(
    ("wire", "code"),
    [(b"\1\0\0\0\2ab", Code.UNIMPLEMENTED), (prefixed(b"x" * 11), Code.RESOURCE_EXHAUSTED)],
)
def test_messages_that_are_not_taken(wire: bytes, code: Code) -> None:
    reader = MessageReader(10)
    got: list[bytes] = []
    with pytest.raises(CallFault) as caught:
        reader.feed(memoryview(prefixed(b"good") + wire), got)
    assert caught.value.code == code
    assert got == [b"good"]
    reader.feed(memoryview(prefixed(b"late")), got)
    assert got == [b"good"], "nothing is wanted after a fault"


GOOD = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b":authority", b"x"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
    (b"grpc-timeout", b"1S"),
)


def test_request_metadata() -> None:
    request = grpc_messages.parse_request((*GOOD, (b"who", b"me"), (b"key-bin", b"AAE,/w=="), (b"key-bin", b"")))
    assert request.path == "/a.B/C"
    assert request.metadata == (("who", "me"), ("key-bin", b"\0\1"), ("key-bin", b"\xff"), ("key-bin", b""))


@pytest.mark.parametrize(
    ("fields", "failure"),
    [
        (GOOD[1:], MalformedRequest),
        ((*GOOD, (b":path", b"/late")), MalformedRequest),
        ((GOOD[0], *GOOD), MalformedRequest),
        (((b":status", b"200"), *GOOD), MalformedRequest),
        ((*GOOD, (b"Upper", b"x")), MalformedRequest),
        ((*GOOD, (b"", b"x")), MalformedRequest),
        ((*GOOD, (b"connection", b"close")), MalformedRequest),
        ((*GOOD, (b"x", b"a\nb")), MalformedRequest),
        (((b":method", b"GET"), *GOOD[1:]), NotGrpc),
        ((*GOOD[:5], (b"content-type", b"text/html")), NotGrpc),
        ((*GOOD[:5], (b"content-type", b"application/grpcish")), NotGrpc),
        (GOOD[:5], NotGrpc),
        ((*GOOD, (b"grpc-encoding", b"gzip")), CallFault),
        ((*GOOD, (b"key-bin", b"!")), CallFault),
    ],
)
def test_requests_that_are_not_taken(fields: headers.Headers, failure: type[Exception]) -> None:
    with pytest.raises(failure):
        grpc_messages.parse_request(fields)


def test_content_type_may_name_the_message_format() -> None:
    fields = (*GOOD[:5], (b"content-type", b"application/grpc+proto"))
    assert grpc_messages.parse_request(fields).path == "/a.B/C"


def test_trailers() -> None:
    block = grpc_messages.trailers_block(Code.NOT_FOUND, "no 100% é\n", (("x-bin", b"\0\1"), ("y", "z")))
    assert hpack.Decoder().decode(block) == [
        ("grpc-status", "5"),
        ("grpc-message", "no 100%25 %C3%A9%0A"),
        ("x-bin", "AAE"),
        ("y", "z"),
    ]
    alone = hpack.Decoder().decode(grpc_messages.trailers_block(0, is_only=True))
    assert alone == [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "0")]


def test_status_messages_are_cut() -> None:
    assert len(grpc_messages.percent_encode("é" * 10_000)) < 8192


@pytest.mark.parametrize("item", [("x", b"bytes"), ("x-bin", "text"), ("Upper", "x"), ("x", "a\nb")])
def test_metadata_that_cannot_be_sent(item: tuple[str, str | bytes]) -> None:
    with pytest.raises(ValueError, match="metadata"):
        grpc_messages.encode_metadata((item,))


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=300)), max_size=5))
def test_literals_are_read_back(fields: list[tuple[bytes, bytes]]) -> None:
    decoded = hpack.Decoder().decode(headers.NO_TABLE + headers.encode(tuple(fields)), raw=True)
    assert [tuple(field) for field in decoded] == fields


def test_a_block_means_the_same_only_while_the_table_is_the_same() -> None:
    seen: list[headers.Headers] = []

    def parse(fields: headers.Headers) -> headers.Headers:
        seen.append(fields)
        return fields

    encoder, decoder = hpack.Encoder(), headers.HeaderDecoder(1 << 16, parse)
    first = encoder.encode([("name", "one")])
    second = encoder.encode([("name", "one")])
    assert decoder.parsed(first) == decoder.parsed(second) == decoder.parsed(second) == ((b"name", b"one"),)
    assert len(seen) == 2, "the second block was looked up the last time"
    # Pushes "one" further back in the table, so that the same bytes mean something else.
    decoder.parsed(encoder.encode([("other", "two")]))
    assert decoder.parsed(second) == ((b"other", b"two"),)
    decoder.decode(b"\x20")
    with pytest.raises(ConnectionFault) as caught:
        decoder.parsed(second)
    assert caught.value.code == ErrorCode.COMPRESSION_ERROR


def test_header_lists_are_limited() -> None:
    decoder = headers.HeaderDecoder(1000, lambda fields: fields)
    bomb = hpack.Encoder().encode([("x", "y" * 400)]) + b"\xbe" * 100
    with pytest.raises(ConnectionFault) as caught:
        decoder.decode(bomb)
    assert caught.value.code == ErrorCode.ENHANCE_YOUR_CALM
