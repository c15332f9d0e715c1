"""Functions of colocated Python: from a client's CompileRequest to what executors are sent."""

from typing import Any

import pytest

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.operations import FUNCTION_OPTIONS
from pathways_runtime.core.session.functions import CompileFunction
from pathways_runtime.core.sharding import REPLICATED, Sharding
from pathways_runtime.core.status import StatusError
from pathways_runtime.wire.colocated import (
    FunctionProgram,
    FunctionSpec,
    Origin,
    decode_program,
    split_origin,
    with_origin,
)
from pathways_runtime.wire.ifrt import schema
from pathways_runtime.wire.ifrt.requests import decode_request
from pathways_runtime.wire.ifrt.shardings import encode_sharding

ORIGIN = Origin("3.11.7", "0.10.2", ("/home/someone",), True)
ON_3 = Sharding((3,), REPLICATED, "device", is_single_device=True)


def compile_request(**changes: Any) -> Any:
    program = schema.CustomCallProgramProto(
        type="jax_colocated_python_v0.0.1", name="f", serialized_program_text=b"pickle"
    )
    program.devices.device_ids.extend((3, 2))
    for specs, dtype in ((program.input_specs, DType.F32), (program.output_specs, DType.STRING)):
        spec = specs.add()
        spec.dtype.kind = int(dtype)
        spec.shape.dims.extend((4,))
        spec.sharding.CopyFrom(encode_sharding(ON_3))
    for name, value in changes.items():
        setattr(program, name, value)
    request = schema.IfrtRequest().compile_request
    request.program.type_name = "xla::ifrt::CustomCallProgram"
    request.program.data = program.SerializeToString()
    request.compile_options.type_name = "xla::ifrt::CustomCallCompileOptions"
    return request


def decoded(**changes: Any) -> CompileFunction:
    request = decode_request("compile_request", compile_request(**changes))
    assert isinstance(request, CompileFunction)
    return request


def test_a_function_says_what_it_takes_and_gives() -> None:
    request = decoded(serialized_program_text=with_origin(b"pickle", ORIGIN))
    assert (request.name, request.devices, request.options) == ("f", (3, 2), FUNCTION_OPTIONS)
    assert [(spec.dtype, spec.shape, spec.sharding) for spec in request.inputs] == [(DType.F32, (4,), ON_3)]
    assert [spec.dtype for spec in request.outputs] == [DType.STRING]
    assert decode_program(request.program) == FunctionProgram(
        "f", b"pickle", (FunctionSpec(11, (4,), (3,)),), (FunctionSpec(99, (4,), (3,)),), ORIGIN
    )


def test_what_jax_adds_to_a_name_is_left_out() -> None:
    for suffix in ("_output_specs_and_push_result", "_pop_result"):
        assert decoded(name=f"load_batch{suffix}").name == "load_batch"


def test_clients_need_not_say_where_it_comes_from() -> None:
    assert decode_program(decoded().program).origin is None
    assert split_origin(b"anything") == (None, b"anything")
    assert split_origin(with_origin(b"", ORIGIN)) == (ORIGIN, b"")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "something_else"}, "UNIMPLEMENTED: custom calls of type 'something_else' are not supported"),
        (
            {"serialized_program_text": b"slurm_pathways.origin\n\x02\x00\x00\x00zz"},
            "INVALID_ARGUMENT: .*the origin of a function of colocated Python cannot be read",
        ),
    ],
)
def test_what_cannot_be_a_function_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StatusError, match=message):
        decoded(**changes)


def test_other_bytes_are_no_program() -> None:
    with pytest.raises(ValueError, match="no function of colocated Python"):
        decode_program(b"\x93\x01")
