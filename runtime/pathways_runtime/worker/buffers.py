"""Host buffers: bytes as arrays, memory that XLA can use in place, and ranges copied between them."""

import math
from types import EllipsisType
from typing import Any

import numpy as np

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.sharding import Box, Shape
from pathways_runtime.core.status import Code, error
from pathways_runtime.worker import pjrt

HostArray = np.ndarray[Any, np.dtype[Any]]


def from_bytes(payload: bytes | bytearray | memoryview | HostArray, kind: DType, shape: Shape) -> HostArray:
    """Row-major, dense bytes as an array, without a copy.

    Raises:
        StatusError: it is not as many bytes as shape and type say, or the type has no host representation.
    """
    try:
        dtype = pjrt.dtype_of(kind)
    except ValueError as failure:
        raise error(Code.UNIMPLEMENTED, str(failure)) from failure
    raw = payload if isinstance(payload, np.ndarray) else np.frombuffer(payload, np.uint8)
    wanted = math.prod(shape) * dtype.itemsize
    if raw.nbytes != wanted:
        raise error(
            Code.INVALID_ARGUMENT, f"a host buffer has {raw.nbytes} bytes, {kind.name}{list(shape)} needs {wanted}"
        )
    return raw.view(dtype).reshape(shape)


def aligned_memory(num_bytes: int) -> memoryview:
    """Memory that XLA can use in place, of no particular contents."""
    memory = np.empty(num_bytes + pjrt.ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % pjrt.ALIGNMENT_BYTES
    return memory[start : start + num_bytes].data


def zeros(dtype: np.dtype[Any], shape: Shape) -> HostArray:
    """A new array that XLA can use in place; the system gives it zero pages lazily."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + pjrt.ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % pjrt.ALIGNMENT_BYTES
    return memory[start : start + size].view(dtype).reshape(shape)


def section(array: HostArray, box: Box | None) -> HostArray:
    """A range of an array, without a copy."""
    if box is None:
        return array
    # The dots: without them, a part of what has no dimension would be a copy.
    index: tuple[slice | EllipsisType, ...] = (*(slice(start, stop) for start, stop in box), ...)
    return array[index]
