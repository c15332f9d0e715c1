"""Host buffers: bytes that the client stores before an array is made of them, or looks up after one was fetched."""

import math
from typing import Any

import numpy as np

from pathways_runtime.core import strings
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import Handle
from pathways_runtime.core.sharding import Box, Shape, box_shape
from pathways_runtime.core.status import Code, error

Buffer = bytes | bytearray | memoryview


class HostBufferStore:
    """The host buffers of one session, by handle."""

    def __init__(self) -> None:
        self._buffers: dict[Handle, Buffer] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._buffers)

    def __contains__(self, handle: Handle) -> bool:
        return handle in self._buffers

    def store(self, handle: Handle, content: Buffer) -> None:
        """Keep bytes under a handle.

        Raises:
            StatusError: ALREADY_EXISTS.
        """
        if handle in self._buffers:
            raise error(Code.ALREADY_EXISTS, f"host buffer {handle} is stored already")
        self._buffers[handle] = content
        self.num_bytes += len(content)

    def get(self, handle: Handle) -> Buffer:
        """The bytes under a handle.

        Raises:
            StatusError: NOT_FOUND.
        """
        content = self._buffers.get(handle)
        if content is None:
            raise error(Code.NOT_FOUND, f"there is no host buffer {handle}")
        return content

    def drop(self, handle: Handle) -> bool:
        """Forget a buffer; whether there was one."""
        content = self._buffers.pop(handle, None)
        if content is None:
            return False
        self.num_bytes -= len(content)
        return True


# Copying needs an element type of the right size; which one makes no difference to the bytes.
_CARRIERS: dict[int, Any] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


def check_size(content: Buffer, dtype: DType, shape: Shape, byte_strides: tuple[int, ...] | None) -> None:
    """Make sure that bytes hold such an array. Strings have no strides: what is said of theirs is left aside.

    Raises:
        StatusError: UNIMPLEMENTED for types without a fixed size, INVALID_ARGUMENT if the sizes do not match.
    """
    if dtype in (DType.TOKEN, DType.OPAQUE):
        raise error(Code.UNIMPLEMENTED, f"host buffers of type {dtype.name} are not supported")
    if dtype is DType.STRING:
        _check_strings(content, shape)
        return
    if byte_strides is not None and (len(byte_strides) != len(shape) or min(byte_strides, default=0) < 0):
        raise error(Code.INVALID_ARGUMENT, f"byte strides {list(byte_strides)} do not suit the shape {list(shape)}")
    expected = region_bytes(dtype, shape, byte_strides)
    if len(content) != expected:
        raise error(
            Code.INVALID_ARGUMENT,
            f"a host buffer of {len(content)} bytes cannot hold {dtype.name}{list(shape)}, which takes {expected}",
        )


def _check_strings(content: Buffer, shape: Shape) -> None:
    try:
        count = len(strings.decode(content))
    except ValueError as failure:
        raise error(Code.INVALID_ARGUMENT, f"a host buffer of strings: {failure}") from failure
    if count != math.prod(shape):
        raise error(Code.INVALID_ARGUMENT, f"a host buffer of {count} strings cannot hold STRING{list(shape)}")


def region_bytes(dtype: DType, shape: Shape, byte_strides: tuple[int, ...] | None) -> int:
    """From the first byte of an array's first element to the last byte of its last."""
    if 0 in shape:
        return 0
    if byte_strides is None:
        return math.prod(shape) * dtype.itemsize_bytes
    return sum((dim - 1) * stride for dim, stride in zip(shape, byte_strides, strict=True)) + dtype.itemsize_bytes


def is_row_major(dtype: DType, shape: Shape, byte_strides: tuple[int, ...] | None) -> bool:
    """Whether these strides mean row-major and dense. Dimensions of one element do not matter, nor do empty arrays."""
    if byte_strides is None or 0 in shape:
        return True
    expected = dtype.itemsize_bytes
    for dim, stride in zip(reversed(shape), reversed(byte_strides), strict=True):
        if dim != 1 and stride != expected:
            return False
        expected *= dim
    return True


def read_part(
    content: Buffer,
    dtype: DType,
    shape: Shape,
    byte_strides: tuple[int, ...] | None,
    box: Box | None,
    sent_shape: Shape,
) -> Buffer:
    """The part ``box`` of an array in ``content``, row-major and dense, with zeros behind it up to ``sent_shape``.

    Copies nothing when the bytes lie as they should. ``content`` has passed ``check_size``.
    """
    part_shape = shape if box is None else box_shape(box)
    if dtype is DType.STRING:
        if part_shape == shape == sent_shape:
            return content
        whole: Box = tuple((0, dim) for dim in shape)
        return strings.encode(strings.part(strings.decode(content), shape, box or whole, sent_shape))
    if is_row_major(dtype, shape, byte_strides) and part_shape == shape == sent_shape:
        return content
    carrier = _CARRIERS[dtype.itemsize_bytes]
    strides = None if 0 in shape else byte_strides
    part = np.ndarray(shape, carrier, buffer=content, strides=strides)
    if box is not None:
        part = part[tuple(slice(start, stop) for start, stop in box)]
    if sent_shape != part_shape:
        padded = np.zeros(sent_shape, carrier)
        padded[tuple(slice(0, dim) for dim in part_shape)] = part
        part = padded
    return _bytes_of(np.ascontiguousarray(part))


def lay_out(content: Buffer, dtype: DType, shape: Shape, byte_strides: tuple[int, ...] | None) -> Buffer:
    """Row-major, dense bytes laid out with strides. Copies nothing when they lie as they should.

    Raises:
        StatusError: see ``check_size``.
    """
    check_size(content, dtype, shape, None)
    if dtype is DType.STRING:
        return content
    if is_row_major(dtype, shape, byte_strides):
        return content
    assert byte_strides is not None
    if len(byte_strides) != len(shape) or min(byte_strides) < 0:
        raise error(Code.INVALID_ARGUMENT, f"byte strides {list(byte_strides)} do not suit the shape {list(shape)}")
    carrier = _CARRIERS[dtype.itemsize_bytes]
    region = np.zeros(region_bytes(dtype, shape, byte_strides), np.uint8)
    target = np.ndarray(shape, carrier, buffer=region, strides=byte_strides)
    target[...] = np.ndarray(shape, carrier, buffer=content)
    return _bytes_of(region)


def _bytes_of(array: Any) -> memoryview:
    # Through uint8: not every element type can be had as a memoryview of bytes, nor can an empty array.
    return memoryview(array.reshape(-1).view(np.uint8)) if array.size else memoryview(b"")
