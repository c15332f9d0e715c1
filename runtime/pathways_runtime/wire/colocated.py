"""Functions of colocated Python: as the client sends them, and as executors are sent them.

JAX pickles a function and hands the bytes to jaxlib, which sends them unread. Python's and JAX's versions must be the
same where it is unpickled, and nothing in the bytes says which they are, so our client writes them in front
(``with_origin``). A client without our plugin does not; its functions are taken as they are.
"""

import msgspec

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.wire.messages import ProgramMetadata

_MARK = b"slurm_pathways.origin\n"

#: What an executor says of a function that it has loaded: all that is known of it came with it.
FUNCTION_METADATA = ProgramMetadata(
    name="",
    fingerprint=b"",
    parameter_shardings=None,
    output_shardings=None,
    parameter_layouts=(),
    output_layouts=(),
    output_memory_kinds=(),
    output_dtypes=(),
    output_shapes=(),
    donated_inputs=(),
    memory_stats={},
    generated_code_bytes=0,
    cost_analysis={},
    text="",
)


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Where a function was pickled.

    Attributes:
        python, jax: versions.
        module_path: folders and archives in which modules are looked for there.
        enable_x64: JAX's ``jax_enable_x64`` when it was pickled.
    """

    python: str
    jax: str
    module_path: tuple[str, ...]
    enable_x64: bool


class FunctionSpec(msgspec.Struct, frozen=True, array_like=True):
    """One argument or result: element type (a ``DType``), global shape, and its devices in shard order."""

    dtype: int
    shape: tuple[int, ...]
    devices: tuple[DeviceId, ...]


class FunctionProgram(msgspec.Struct, frozen=True, array_like=True):
    """What executors are sent as the program.

    Attributes:
        pickled: by ``jax.experimental.colocated_python``, less the origin.
        origin: None if the client has not said it.
    """

    name: str
    pickled: bytes
    inputs: tuple[FunctionSpec, ...]
    outputs: tuple[FunctionSpec, ...]
    origin: Origin | None


_encode = msgspec.msgpack.Encoder().encode
_decode_origin = msgspec.msgpack.Decoder(Origin).decode
_decode_program = msgspec.msgpack.Decoder(FunctionProgram).decode


def with_origin(pickled: bytes, origin: Origin) -> bytes:
    """What the client sends."""
    head = _encode(origin)
    return _MARK + len(head).to_bytes(4, "little") + head + pickled


def split_origin(sent: bytes) -> tuple[Origin | None, bytes]:
    """The origin, if there is one, and what JAX has pickled.

    Raises:
        ValueError: it begins like an origin and is none.
    """
    if not sent.startswith(_MARK):
        return None, sent
    at = len(_MARK) + 4
    size = int.from_bytes(sent[at - 4 : at], "little")
    try:
        return _decode_origin(sent[at : at + size]), sent[at + size :]
    except msgspec.MsgspecError as failure:
        raise ValueError(f"the origin of a function of colocated Python cannot be read: {failure}") from failure


def encode_program(program: FunctionProgram) -> bytes:
    """As executors are sent it."""
    return _encode(program)


def decode_program(content: bytes) -> FunctionProgram:
    """The inverse of ``encode_program``.

    Raises:
        ValueError: it is no such thing.
    """
    try:
        return _decode_program(content)
    except msgspec.MsgspecError as failure:
        raise ValueError(f"no function of colocated Python: {failure}") from failure
