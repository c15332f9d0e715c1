"""Failures that travel on the data plane in place of a move's bytes.

The data plane knows only bytes, and the receiver of a move knows how many to expect. A failure is a payload that begins
with a mark and has another size, so neither can be taken for the other.
"""

import msgspec
import numpy as np

from pathways_runtime.core.status import Status
from pathways_runtime.core.worker.instructions import ANY_SIZE
from pathways_runtime.worker.buffers import HostArray

_MARK = b"pathways-move-failed\n"
_decoder = msgspec.msgpack.Decoder(Status)


def encode(failure: Status, num_bytes: int) -> HostArray:
    """What is sent for a move that would have had ``num_bytes``."""
    text = msgspec.msgpack.encode(failure)
    size = len(_MARK) + 4 + len(text)
    padding = b"\0" if size == num_bytes else b""
    return np.frombuffer(_MARK + len(text).to_bytes(4, "little") + text + padding, np.uint8)


def decode(payload: HostArray, num_bytes: int) -> Status | None:
    """The failure that a payload of a move of ``num_bytes`` is; None if it is the bytes themselves.

    ``ANY_SIZE`` is that of strings: their bytes do not begin like the mark.

    Raises:
        ValueError: it is neither.
    """
    if payload.nbytes == num_bytes:
        return None
    if num_bytes == ANY_SIZE and payload[: len(_MARK)].tobytes() != _MARK:
        return None
    content = payload.tobytes()
    if not content.startswith(_MARK):
        raise ValueError(f"a move of {num_bytes} bytes came as {payload.nbytes} bytes")
    at = len(_MARK) + 4
    size = int.from_bytes(content[at - 4 : at], "little")
    return _decoder.decode(content[at : at + size])
