"""Calls of a client's Python functions from within programs: executor → proxy → client, and the results back.

Between executor and proxy they are frames of the session link. The client's end is a connection of its own: the proxy
listens beside the socket of the IFRT proxy protocol (``callbacks_address``), and the client connects once a program of
it has callbacks, and says by ``CallbacksHello`` which functions are its own.

Values travel as one payload: dense and row-major, one after another, each at a multiple of ``_ALIGNMENT_BYTES``. A
token, which stands for the order of an effect, is None; it has no bytes.
"""

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes  # noqa: F401 - registers the names of its types with numpy
import msgspec
import numpy as np

from pathways_runtime.core.dtype import DTYPE_OF_NUMPY, DType
from pathways_runtime.core.status import Status

#: Attribute of a module: whose callbacks it has, an id that a client makes up.
CLIENT_ATTRIBUTE = "slurm_pathways.callback_client"
#: Attribute of a module: their numbers at that client, by the ``index`` of the custom calls.
NUMBERS_ATTRIBUTE = "slurm_pathways.callback_numbers"

CALLBACKS_VERSION = 1

_ALIGNMENT_BYTES = 16
_SOCKET_SUFFIX = ".sock"
_CALLBACKS_SUFFIX = ".cb"

Value = tuple[int, tuple[int, ...]]
_TOKEN: Value = (int(DType.TOKEN), ())


class CallbackMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all headers."""


class CallbacksHello(CallbackMessage, frozen=True, tag="CH"):
    """Client to proxy, first: whose calls come here."""

    client: str
    version: int


class CallbackCall(CallbackMessage, frozen=True, tag="CC"):
    """Call function ``number`` of ``client``; payload: the operands.

    Attributes:
        call: names the call to who sent this.
        operands: (type, shape) each; the type is a ``DType``.
    """

    call: int
    client: str
    number: int
    operands: tuple[Value, ...]


class CallbackResult(CallbackMessage, frozen=True, tag="CR"):
    """The answer; payload: the results, unless ``failure``."""

    call: int
    failure: Status | None
    results: tuple[Value, ...]


AnyCallbackMessage = CallbacksHello | CallbackCall | CallbackResult


def callbacks_address(address: str) -> str:
    """Where a proxy whose clients connect to ``address`` (``unix:/path.sock``) takes callback connections.

    Not longer than it: paths of Unix sockets are short.
    """
    return address.removesuffix(_SOCKET_SUFFIX) + _CALLBACKS_SUFFIX


def pack(arrays: Sequence["np.ndarray[Any, Any] | None"]) -> tuple[tuple[Value, ...], bytearray]:
    """(types and shapes, payload) of arrays and tokens.

    Raises:
        ValueError: one is of a type that arrays on devices do not have.
    """
    specs = tuple(_TOKEN if array is None else (int(_dtype(array.dtype)), array.shape) for array in arrays)
    payload = bytearray(sum(_padded(array.nbytes) for array in arrays if array is not None))
    start = 0
    for array in arrays:
        if array is None:
            continue
        if array.nbytes:
            place = np.frombuffer(payload, array.dtype, array.size, start).reshape(array.shape)
            place[...] = array
        start += _padded(array.nbytes)
    return specs, payload


def unpack(specs: Sequence[Value], payload: Any) -> list["np.ndarray[Any, Any] | None"]:
    """What ``pack`` was given, over the payload's memory.

    Raises:
        ValueError: the payload is too short, or there is no such type.
    """
    arrays: list[np.ndarray[Any, Any] | None] = []
    start = 0
    for kind, shape in specs:
        if kind == DType.TOKEN:
            arrays.append(None)
            continue
        dtype = np.dtype(DType(kind).numpy_name)
        size = math.prod(shape)
        array = np.frombuffer(payload, dtype, size, start).reshape(shape) if size else np.empty(shape, dtype)
        array.flags.writeable = False
        arrays.append(array)
        start += _padded(array.nbytes)
    return arrays


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _dtype(dtype: "np.dtype[Any]") -> DType:
    kind = DTYPE_OF_NUMPY.get(dtype.name)
    if kind is None:
        raise ValueError(f"a callback cannot pass values of type {dtype}")
    return kind
