"""StableHLO before it is compiled, read and changed by way of jaxlib's MLIR, and what its compiler asks: a part of the
adapter ``pjrt``.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.mlir.passmanager import PassManager

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.sharding import Shape
from pathways_runtime.wire import partitioning
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


@contextlib.contextmanager
def inspected(
    program: bytes, target: str, xla_target: str, make: Callable[[bytes], Callable[[Any], None]]
) -> Iterator[bytes]:
    """A StableHLO program in which custom calls of ``target`` are inspections of XLA's: for as long as the context is
    entered, XLA's partitioner tells each one's function, made by ``make`` from what the call is configured with, its
    operand's sharding.

    Raises:
        ValueError: it cannot be parsed.
    """
    if target.encode() not in program:
        yield program
        return
    # Kept by this frame.
    functions: list[Callable[[Any], None]] = []

    def replace(operation: Any) -> Any:
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and ir.StringAttr(attributes["call_target_name"]).value == target:
            functions.append(make(ir.StringAttr(attributes["backend_config"]).value_bytes))
            attributes["call_target_name"] = ir.StringAttr.get(xla_target)
            # The addresses of the function.
            attributes["backend_config"] = ir.StringAttr.get(xla_client.encode_inspect_sharding_callback(functions[-1]))
        return ir.WalkResult.ADVANCE

    module = parse(program)
    with module.context:
        module.operation.walk(replace)
    yield bytecode(module)


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


# What the compiler asks


def register_partitioner(
    target: str, of_user: Callable[..., Any], partition: Callable[..., Any], of_operands: Callable[..., Any]
) -> None:
    """Have XLA ask these functions about custom calls of ``target``, on any thread. What they raise fails the program.

    Args:
        of_user: ``(sharding of the result's user, shape, configuration) -> sharding``
        partition: ``(shapes, shardings, result's shape and sharding, configuration) -> (MLIR of a part, operands'
            shardings, result's sharding)``
        of_operands: ``(shapes, shardings, result's shape, configuration) -> result's sharding``
    """
    xla_client.register_custom_call_partitioner(
        target, of_user, partition, of_operands, can_side_effecting_have_replicated_sharding=True
    )


def shape_spec(shape: Any) -> partitioning.Shape:
    """XLA's shape as a value."""
    parts = shape.tuple_shapes() if shape.is_tuple() else [shape]
    dimensions = tuple((part.numpy_dtype().name, tuple(part.dimensions())) for part in parts)
    return partitioning.Shape(dimensions, shape.is_tuple())


def sharding_bytes(sharding: Any) -> bytes:
    """XLA's sharding as a serialized ``OpSharding``."""
    return bytes(sharding.to_proto().SerializeToString())


def sharding_of(serialized: bytes) -> Any:
    """What ``sharding_bytes`` was given."""
    proto = xla_client.OpSharding()
    proto.ParseFromString(serialized)
    return xla_client.HloSharding.from_proto(proto)


def replicated_sharding() -> Any:
    """XLA's sharding of what every device has whole."""
    return xla_client.HloSharding.replicate()
