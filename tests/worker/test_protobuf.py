"""Protobufs without their schema: read, cut and written."""

import pytest

from pathways_runtime.worker import protobuf

#: 1: 150, 2: "abc", 3: {1: 7, 2: "x"}, 4: fixed64, 5: fixed32, 3: {1: 9}
MESSAGE = (
    b"\x08\x96\x01"
    b"\x12\x03abc"
    b"\x1a\x05\x08\x07\x12\x01x"
    b"\x21\x01\x02\x03\x04\x05\x06\x07\x08"
    b"\x2d\x01\x02\x03\x04"
    b"\x1a\x02\x08\x09"
)


def test_fields() -> None:
    found = [(field.number, field.value) for field in protobuf.fields(MESSAGE)]
    assert found == [
        (1, 150),
        (2, b"abc"),
        (3, b"\x08\x07\x12\x01x"),
        (4, b"\x01\x02\x03\x04\x05\x06\x07\x08"),
        (5, b"\x01\x02\x03\x04"),
        (3, b"\x08\x09"),
    ]


def test_fields_tell_where_they_are() -> None:
    assert b"".join(MESSAGE[f.start : f.stop] for f in protobuf.fields(MESSAGE)) == MESSAGE


@pytest.mark.parametrize("cut", [1, 2, 4, 6, 9, 17, 20])
def test_a_cut_message_is_no_message(cut: int) -> None:
    with pytest.raises(ValueError, match="ends within"):
        list(protobuf.fields(MESSAGE[:cut]))


def test_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="wire type 3"):
        list(protobuf.fields(b"\x0b"))


def test_repeated_integers_packed_or_not() -> None:
    assert protobuf.ints(5) == [5]
    assert protobuf.ints(b"\x05\x96\x01\x00") == [5, 150, 0]


def test_without_a_field() -> None:
    assert protobuf.without(MESSAGE, 2) == MESSAGE[:3] + MESSAGE[8:]
    assert protobuf.without(MESSAGE, 9) == MESSAGE


def test_without_an_inner_field() -> None:
    expected = MESSAGE[:8] + b"\x1a\x03\x12\x01x" + MESSAGE[15:-4] + b"\x1a\x00"
    assert protobuf.without(MESSAGE, 3, 1) == expected


def test_fields_that_are_written() -> None:
    inner = protobuf.int_field(1, 7) + protobuf.bytes_field(2, b"x")
    written = protobuf.int_field(1, 150) + protobuf.bytes_field(2, b"abc") + protobuf.bytes_field(3, inner)
    assert written == MESSAGE[:15]
    assert protobuf.int_field(1, 0) == b""


def test_inner_messages_of_any_length() -> None:
    long = b"\x12\xac\x02" + b"y" * 300
    message = b"\x1a\xb1\x02" + long + b"\x08\x01"
    assert protobuf.without(message, 3, 1) == b"\x1a\xaf\x02" + long
