"""StableHLO before it is compiled, read and changed by way of jaxlib's MLIR: a part of the adapter ``pjrt``."""

import contextlib
import io
from typing import Any, NamedTuple

import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.mlir.passmanager import PassManager

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.sharding import Shape
from pathways_runtime.wire.callbacks import ATTRIBUTE, Functions, find_functions

_DTYPE_OF_MLIR = {
    "i1": DType.PRED,
    "i8": DType.S8,
    "i16": DType.S16,
    "i32": DType.S32,
    "i64": DType.S64,
    "i2": DType.S2,
    "i4": DType.S4,
    "ui1": DType.U1,
    "ui2": DType.U2,
    "ui4": DType.U4,
    "ui8": DType.U8,
    "ui16": DType.U16,
    "ui32": DType.U32,
    "ui64": DType.U64,
    "f16": DType.F16,
    "f32": DType.F32,
    "f64": DType.F64,
    "bf16": DType.BF16,
    "complex<f32>": DType.C64,
    "complex<f64>": DType.C128,
    "f8E5M2": DType.F8E5M2,
    "f8E4M3FN": DType.F8E4M3FN,
    "f8E4M3B11FNUZ": DType.F8E4M3B11FNUZ,
    "f8E5M2FNUZ": DType.F8E5M2FNUZ,
    "f8E4M3FNUZ": DType.F8E4M3FNUZ,
    "f8E4M3": DType.F8E4M3,
    "f8E3M4": DType.F8E3M4,
    "f8E8M0FNU": DType.F8E8M0FNU,
    "f4E2M1FN": DType.F4E2M1FN,
    "f6E2M3FN": DType.F6E2M3FN,
    "f6E3M2FN": DType.F6E3M2FN,
}


def without_locations(program: bytes) -> bytes:
    """A StableHLO program less what says where in the user's files it comes from: equal for equal programs.

    Raises:
        ValueError: it cannot be parsed.
    """
    module = parse(program)
    with module.context:
        PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
    return bytecode(module)


class CallingProgram(NamedTuple):
    """A program with callbacks.

    Attributes:
        program: MLIR bytecode, the same for all clients.
        functions: what it calls.
    """

    program: bytes
    functions: Functions


#: The custom calls of ``jax.experimental.buffer_callback``.
_BUFFER_CALLBACK = b"xla_buffer_python_"


def calling_program(program: bytes) -> CallingProgram | None:
    """A StableHLO program's callbacks, taken from what the client's plugin has written on it; None: it has none.

    Raises:
        ValueError: it cannot be parsed, or its callbacks want the devices' memory.
    """
    functions = find_functions(program)
    if functions is None:
        return None
    if _BUFFER_CALLBACK in program:
        raise ValueError(
            "buffer_callback hands the memory of a device to the Python function, which runs in another process: "
            "use jax.pure_callback or io_callback"
        )
    module = parse(program)
    with module.context:
        del module.operation.attributes[ATTRIBUTE]
    return CallingProgram(bytecode(module), functions)


def with_one_more_parameter(program: bytes, shape: Shape, dtype: np.dtype[Any]) -> bytes:
    """A StableHLO program whose ``main`` has a parameter more, at the end, which it does not use.

    Raises:
        ValueError: it has no function ``main``, or it cannot be parsed.
    """
    module = parse(program)
    with module.context, ir.Location.unknown():
        main = _main(module)
        kind = ir.RankedTensorType.get(shape, jax_mlir.dtype_to_ir_type(dtype))
        main.regions[0].blocks[0].add_argument(kind, ir.Location.unknown())
        signature = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        main.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get([*signature.inputs, kind], list(signature.results))
        )
        if "arg_attrs" in main.attributes:
            replicated = ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get("{replicated}")})
            main.attributes["arg_attrs"] = ir.ArrayAttr.get([*ir.ArrayAttr(main.attributes["arg_attrs"]), replicated])
    return bytecode(module)


def as_bytecode(text: bytes) -> bytes:
    """A program in MLIR's text form as bytecode.

    Raises:
        ValueError: it cannot be parsed.
    """
    return bytecode(parse(text))


def bytecode(module: Any) -> bytes:
    """A module as bytes."""
    written = io.BytesIO()
    module.operation.write_bytecode(written)
    return written.getvalue()


def parse(program: bytes) -> Any:
    """A module of a StableHLO program: a VHLO artifact, or MLIR's bytecode or text.

    Raises:
        ValueError: it is none of these.
    """
    context = jax_mlir.make_ir_context()
    # jaxlib raises several types for "not a portable artifact": it may be plain MLIR.
    with contextlib.suppress(Exception):
        return stablehlo.deserialize_portable_artifact(context, program)
    try:
        return ir.Module.parse(program, context)
    except Exception as failure:
        raise ValueError(f"not a StableHLO program: {failure}") from failure


def program_name(program: bytes) -> str:
    """What a StableHLO program is called, as its compiled module will be; empty if it has no name.

    Raises:
        ValueError: it cannot be parsed.
    """
    module = parse(program)
    with module.context:
        attributes = module.operation.attributes
        return ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else ""


def global_outputs(program: bytes) -> list[tuple[Shape, DType]]:
    """Global shapes and types of a StableHLO program's outputs.

    Raises:
        ValueError: it has no function ``main``, or it cannot be parsed.
    """
    module = parse(program)
    with module.context:
        function_type = ir.FunctionType(ir.TypeAttr(_main(module).attributes["function_type"]).value)
        return [_mlir_shape(result) for result in function_type.results]


def _main(module: Any) -> Any:
    for operation in module.body.operations:
        if "sym_name" in operation.attributes and ir.StringAttr(operation.attributes["sym_name"]).value == "main":
            return operation
    raise ValueError("the program has no function 'main'")


def _mlir_shape(result: Any) -> tuple[Shape, DType]:
    if not isinstance(result, ir.RankedTensorType):
        return (), DType.TOKEN
    tensor = ir.RankedTensorType(result)
    return tuple(tensor.shape), _DTYPE_OF_MLIR[str(tensor.element_type)]
