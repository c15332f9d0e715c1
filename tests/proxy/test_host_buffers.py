"""Host buffers: storing, cutting, laying out, and the messages that carry them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_runtime.core import strings
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import Handle
from pathways_runtime.core.sharding import Box, box_shape
from pathways_runtime.core.status import StatusError
from pathways_runtime.proxy import host_buffers
from pathways_runtime.proxy.host_buffer_messages import CHUNK_BYTES, chunk_of, header_bytes, lookup_messages
from pathways_runtime.wire.ifrt import schema

DTYPES = {
    DType.S8: np.int8,
    DType.U16: np.uint16,
    DType.F32: np.float32,
    DType.F64: np.float64,
    DType.C128: np.complex128,
}


@st.composite
def arrays(draw: st.DrawFn) -> tuple[DType, np.ndarray]:
    """An array with memory of its own whose dimensions lie in any order, with gaps."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    gaps = tuple(dim + draw(st.integers(0, 1)) for dim in shape)
    order = draw(st.permutations(range(len(shape))))
    base = np.arange(np.prod([gaps[axis] for axis in order], dtype=int)).astype(DTYPES[dtype])
    array = base.reshape([gaps[axis] for axis in order]).transpose(np.argsort(order))
    return dtype, array[tuple(slice(dim) for dim in shape)]


def region(dtype: DType, array: np.ndarray) -> bytes:
    """The bytes from an array's first element to its last, as the client sends them."""
    size = host_buffers.region_bytes(dtype, array.shape, array.strides)
    if not size:
        return b""
    base = array
    while base.base is not None:
        base = base.base
    return base.tobytes()[:size]


@given(arrays(), st.data())
def test_a_part_is_what_numpy_cuts(case: tuple[DType, np.ndarray], data: st.DataObject) -> None:
    dtype, array = case
    box: Box = tuple(
        (start, data.draw(st.integers(start, dim))) for dim in array.shape for start in [data.draw(st.integers(0, dim))]
    )
    padded_shape = tuple(dim + data.draw(st.integers(0, 2)) for dim in box_shape(box))
    content = region(dtype, array)
    host_buffers.check_size(content, dtype, array.shape, array.strides)
    part = host_buffers.read_part(content, dtype, array.shape, array.strides, box, padded_shape)
    cut = array[tuple(slice(start, stop) for start, stop in box)]
    expected = np.zeros(padded_shape, array.dtype)
    expected[tuple(slice(dim) for dim in cut.shape)] = cut
    assert bytes(part) == expected.tobytes()


@given(arrays())
def test_laying_out_undoes_reading(case: tuple[DType, np.ndarray]) -> None:
    dtype, array = case
    laid_out = host_buffers.lay_out(array.tobytes(), dtype, array.shape, array.strides)
    back = host_buffers.read_part(laid_out, dtype, array.shape, array.strides, None, array.shape)
    assert bytes(back) == array.tobytes()


def test_bytes_that_lie_as_they_should_are_not_copied() -> None:
    content = bytearray(range(24))
    for strides in (None, (12, 4), (99, 4)):
        shape = (1, 6) if strides == (99, 4) else (2, 3)
        assert host_buffers.read_part(content, DType.F32, shape, strides, None, shape) is content
        assert host_buffers.lay_out(content, DType.F32, shape, strides) is content


@pytest.mark.parametrize(
    ("dtype", "shape", "strides", "num_bytes", "message"),
    [
        (DType.F32, (2, 3), None, 23, "a host buffer of 23 bytes cannot hold F32.2, 3., which takes 24"),
        (DType.F32, (2, 3), (4, 8), 23, "INVALID_ARGUMENT: a host buffer of 23 bytes"),
        (DType.F32, (2, 3), (4, 8), 25, "which takes 24"),
        (DType.F32, (2,), (4, 8), 8, "byte strides .4, 8. do not suit the shape .2."),
        (DType.F32, (2,), (-4,), 8, "byte strides .-4. do not suit"),
        (DType.STRING, (2,), None, 8, "INVALID_ARGUMENT: a host buffer of strings: no StringArrayContents"),
        (DType.STRING, (2,), None, 0, "a host buffer of 0 strings cannot hold STRING.2."),
        (DType.TOKEN, (), None, 8, "UNIMPLEMENTED: host buffers of type TOKEN"),
    ],
)
def test_bytes_that_cannot_be_such_an_array(
    dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...] | None, num_bytes: int, message: str
) -> None:
    with pytest.raises(StatusError, match=message):
        host_buffers.check_size(bytes(num_bytes), dtype, shape, strides)


def test_the_store_counts_bytes_and_refuses_a_second_time() -> None:
    store = host_buffers.HostBufferStore()
    store.store(Handle(1), b"abc")
    store.store(Handle(2), b"")
    with pytest.raises(StatusError, match="ALREADY_EXISTS: host buffer 1"):
        store.store(Handle(1), b"x")
    assert (len(store), store.num_bytes, store.get(Handle(1))) == (2, 3, b"abc")
    assert store.drop(Handle(1))
    assert not store.drop(Handle(1))
    assert (len(store), store.num_bytes) == (1, 0)
    with pytest.raises(StatusError, match="NOT_FOUND: there is no host buffer 1"):
        store.get(Handle(1))


@pytest.mark.parametrize("num_bytes", [0, 1, 127, 128, CHUNK_BYTES - 1, CHUNK_BYTES])
def test_a_chunk_is_taken_out_of_its_message(num_bytes: int) -> None:
    data = bytes(num_bytes)
    assert bytes(chunk_of(schema.HostBufferStoreRequest(data=data).SerializeToString())) == data


def test_a_chunk_behind_fields_that_we_do_not_know() -> None:
    assert bytes(chunk_of(b"\x10\x01" + schema.HostBufferStoreRequest(data=b"abc").SerializeToString())) == b"abc"


@pytest.mark.parametrize("message", [b"\x0a\x05abc", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\xff"])
def test_what_is_no_chunk(message: bytes) -> None:
    with pytest.raises(StatusError, match="INVALID_ARGUMENT: a host buffer came in something that is no message"):
        chunk_of(message)


@given(st.integers(1, 1 << 24))
def test_what_comes_before_a_chunk(num_bytes: int) -> None:
    message = schema.HostBufferStoreRequest(data=bytes(num_bytes)).SerializeToString()
    assert header_bytes(len(message)) == len(message) - num_bytes


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_lookup_messages(num_bytes: int) -> None:
    content = np.arange(num_bytes, dtype=np.uint8).tobytes()
    messages = [b"".join(parts) for parts in lookup_messages(content)]
    chunks = [schema.HostBufferLookupResponse.FromString(message).data for message in messages]
    assert b"".join(chunks) == content
    assert len(chunks) == max(1, -(-num_bytes // CHUNK_BYTES))


def test_parts_of_strings_are_cut_and_padded() -> None:
    content = strings.encode([b"a", b"bb", b"", b"d" * 200, b"e", b"\xff"])
    assert host_buffers.read_part(content, DType.STRING, (2, 3), None, None, (2, 3)) is content
    cut = host_buffers.read_part(content, DType.STRING, (2, 3), None, ((0, 2), (1, 3)), (2, 2))
    assert strings.decode(cut) == [b"bb", b"", b"e", b"\xff"]
    padded = host_buffers.read_part(content, DType.STRING, (2, 3), None, ((1, 2), (2, 3)), (2, 2))
    assert strings.decode(padded) == [b"\xff", b"", b"", b""]
    host_buffers.check_size(content, DType.STRING, (3, 2), (8, 4))


def test_a_scalar_string_is_one() -> None:
    content = strings.encode([b"one"])
    assert host_buffers.lay_out(content, DType.STRING, (), None) is content
    assert strings.decode(host_buffers.read_part(content, DType.STRING, (), None, (), ())) == [b"one"]
