"""Functions of colocated Python, as clients ask to compile them: IFRT's CustomCallProgram."""

from typing import Any

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.operations import FUNCTION_OPTIONS
from pathways_runtime.core.session.functions import CompileFunction
from pathways_runtime.core.session.requests import ArraySpec
from pathways_runtime.core.status import Code, error
from pathways_runtime.wire.colocated import (
    FunctionProgram,
    FunctionSpec,
    encode_program,
    split_origin,
)
from pathways_runtime.wire.ifrt import schema
from pathways_runtime.wire.ifrt.shardings import decode_sharding
from pathways_runtime.wire.ifrt.values import decode_dtype, decode_shape

CUSTOM_CALL_PROGRAM = "xla::ifrt::CustomCallProgram"
#: The version is of what is pickled; JAX's own, which must be the same on both ends, says more.
_TYPE_PREFIX = "jax_colocated_python_v"
#: What JAX adds to the name of a function whose results it does not know beforehand.
_SUFFIXES = ("_output_specs_and_push_result", "_pop_result")


def decode_function(content: bytes) -> CompileFunction:
    """The request that a CustomCallProgram states.

    Raises:
        StatusError: UNIMPLEMENTED for another type of custom calls than colocated Python's; INVALID_ARGUMENT for bytes
            that cannot be read.
    """
    try:
        proto = schema.CustomCallProgramProto.FromString(content)
        origin, pickled = split_origin(proto.serialized_program_text)
    except (schema.DecodeError, ValueError) as failure:
        raise error(
            Code.INVALID_ARGUMENT, f"the bytes of a {CUSTOM_CALL_PROGRAM} cannot be parsed: {failure}"
        ) from failure
    if not proto.type.startswith(_TYPE_PREFIX):
        raise error(Code.UNIMPLEMENTED, f"custom calls of type {proto.type!r} are not supported")
    name = proto.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    inputs, outputs = tuple(map(_spec, proto.input_specs)), tuple(map(_spec, proto.output_specs))
    program = FunctionProgram(name, pickled, tuple(map(_sent_spec, inputs)), tuple(map(_sent_spec, outputs)), origin)
    devices = tuple(map(DeviceId, proto.devices.device_ids))
    return CompileFunction(name, encode_program(program), FUNCTION_OPTIONS, devices, inputs, outputs)


def _spec(proto: Any) -> ArraySpec:
    return ArraySpec(decode_dtype(proto.dtype), decode_shape(proto.shape), decode_sharding(proto.sharding))


def _sent_spec(spec: ArraySpec) -> FunctionSpec:
    return FunctionSpec(int(spec.dtype), spec.shape, spec.sharding.devices)
