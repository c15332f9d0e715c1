"""What a compiler asks a client's Python functions while it compiles, on a worker: how to partition an operation.

``custom_partitioning`` and ``inspect_array_sharding`` give the compiler Python functions. The client's plugin writes
into the operations whom to ask (``asked_attribute``). A question is a call of that function (``wire.callbacks``) with
one operand, the bytes of a ``Question``, and one result, those of an ``Answer``.
"""

import re
from typing import Any, Literal

import msgspec
import numpy as np

#: What the plugin calls these operations, by their target in JAX. The server refuses those that it does not know of.
PARTITIONED_TARGET = "slurm_pathways.partitioned"
INSPECTED_TARGET = "slurm_pathways.inspected"

_ASKED = re.compile(rb"slurm_pathways\.asked=([0-9a-f]+):([0-9]+)", re.ASCII)


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """(numpy's name of the type, dimensions) of an array, or of all parts of a tuple."""

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    is_tuple: bool = False


class Question(msgspec.Struct, frozen=True, array_like=True):
    """Shardings are serialized ``OpSharding`` values.

    Attributes:
        about: ``user``: the sharding of a result, given what it is used as; ``operands``: the same, given those of the
            operands; ``partition``: how the operation is done in parts; ``inspect``: nothing, this is the operand's.
    """

    about: Literal["user", "operands", "partition", "inspect"]
    operands: tuple[Shape, ...]
    operand_shardings: tuple[bytes, ...]
    result: Shape | None
    result_sharding: bytes | None


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """``program``: MLIR's bytecode of one part; it and ``operand_shardings`` answer ``partition`` only."""

    result_sharding: bytes = b""
    program: bytes = b""
    operand_shardings: tuple[bytes, ...] = ()


def asked_attribute(client: str, number: int) -> str:
    """What an operation says of whom to ask: function ``number`` of ``client``."""
    return f"slurm_pathways.asked={client}:{number}"


def whom_to_ask(attribute: bytes) -> tuple[str, int]:
    """What ``asked_attribute`` was given.

    Raises:
        ValueError: it did not give this.
    """
    found = _ASKED.fullmatch(attribute)
    if found is None:
        raise ValueError(f"{attribute!r} does not say whose function is to be asked")
    return found[1].decode(), int(found[2])


def functions_asked(program: bytes) -> frozenset[tuple[str, int]]:
    """(client, number) of all functions that the compiler of a program, in MLIR's bytecode or text, will ask."""
    # The pattern takes fifty times as long as a plain search.
    found = _ASKED.findall(program) if b"slurm_pathways.asked" in program else ()
    return frozenset((client.decode(), int(number)) for client, number in found)


def to_array(message: Question | Answer) -> "np.ndarray[Any, Any]":
    """As the operand or the result of a call."""
    return np.frombuffer(msgspec.msgpack.encode(message), np.uint8)


def question_of(array: "np.ndarray[Any, Any]") -> Question:
    """What ``to_array`` was given.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: it is none.
    """
    return msgspec.msgpack.decode(array.tobytes(), type=Question)


def answer_of(array: "np.ndarray[Any, Any]") -> Answer:
    """See ``question_of``."""
    return msgspec.msgpack.decode(array.tobytes(), type=Answer)
