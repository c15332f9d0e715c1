"""Calls of a client's Python functions from within programs: executor → proxy → client, and the results back.

Between executor and proxy they are frames of the session link. The client's end is a connection of its own: the proxy
listens beside the socket of the IFRT proxy protocol (``callbacks_address``), and the client connects once a program of
it has callbacks, and says by ``CallbacksHello`` which functions are its own.

Values travel as one payload: dense and row-major, one after another, each at a multiple of ``_ALIGNMENT_BYTES``. A
token, which stands for the order of an effect, is None; it has no bytes.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - registers the names of its types with numpy
import msgspec
import numpy as np

from pathways_runtime.core.dtype import DTYPE_OF_NUMPY, DType
from pathways_runtime.core.status import Status

#: Attribute of a module with callbacks: what ``callbacks_attribute`` gives.
ATTRIBUTE = "slurm_pathways.callbacks"
# Strings stand as they are in MLIR's bytecode, which the proxy cannot read.
_ATTRIBUTE_VALUE = re.compile(rb"slurm_pathways\.callbacks=([0-9a-f]+):([0-9]+)\+([0-9]+)", re.ASCII)

CALLBACKS_VERSION = 2

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


class CallbacksDropped(CallbackMessage, frozen=True, tag="CD"):
    """Proxy to executor: the client has deleted the program with these functions, and no other has them."""

    client: str
    numbers: tuple[int, ...]


class CallbacksUnused(CallbackMessage, frozen=True, tag="CU"):
    """The answer to ``CallbacksDropped`` once no execution can call them any more; then the proxy's, for all executors,
    to the client."""

    client: str
    numbers: tuple[int, ...]


AnyCallbackMessage = CallbacksHello | CallbackCall | CallbackResult | CallbacksDropped | CallbacksUnused


class Functions(NamedTuple):
    """The functions of one program, by the ``index`` of its custom calls.

    Attributes:
        client: an id that a client makes up.
        numbers: theirs at that client, one after another.
    """

    client: str
    numbers: tuple[int, ...]


def callbacks_attribute(functions: Functions) -> str:
    """What a module says of its callbacks."""
    return f"{ATTRIBUTE}={functions.client}:{functions.numbers[0]}+{len(functions.numbers)}"


def find_functions(program: bytes) -> Functions | None:
    """What ``callbacks_attribute`` gave for a program, in MLIR's bytecode or text; None: it has no callbacks."""
    # The pattern takes fifty times as long as a plain search.
    found = _ATTRIBUTE_VALUE.search(program) if ATTRIBUTE.encode() in program else None
    if found is None:
        return None
    first = int(found[2])
    return Functions(found[1].decode(), tuple(range(first, first + int(found[3]))))


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
