"""Python functions that the compiler asks how to partition (``wire.partitioning``); a part of ``jax_adapter``.

JAX names such functions in the program by a number or an address that means something in this process only. Here they
are named as callbacks are, and a worker's compiler asks them over the callbacks' connection.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways_runtime.wire.partitioning import (
    INSPECTED_TARGET,
    PARTITIONED_TARGET,
    Answer,
    Question,
    Shape,
    asked_attribute,
    question_of,
    to_array,
)
from slurm_pathways.client.jax_adapter import is_replaced, private_names, replacing

_PARTITIONED, _INSPECTED = "CustomSPMDPartitioning", "InspectSharding"

#: What asks a callback for an operation's sharding, by the name that JAX gives it; JAX keeps it as long as its program.
_inspectors: "weakref.WeakValueDictionary[bytes, Callable[[Any], None]]" = weakref.WeakValueDictionary()

#: ``(function) -> (client, number, forget)``: takes a function in.
TakeFunction = Callable[[Callable[..., Sequence[Any]]], tuple[str, int, Callable[[], None]]]


def remember_inspectors() -> None:
    """Note the functions of ``inspect_array_sharding``, of which programs have the address only. Again does nothing.

    Raises:
        PrivateNamesChangedError: this version of JAX does it in another way.
    """
    with private_names():
        from jax._src import custom_partitioning
        from jax._src.lib import xla_client

        original = xla_client.encode_inspect_sharding_callback
        for name in ("propagate_user_sharding", "partition", "infer_sharding_from_operands"):
            getattr(custom_partitioning, f"_custom_partitioning_{name}")
        len(custom_partitioning._sharding_callbacks)
    if is_replaced(original):
        return

    @replacing(original)
    def encode_inspect_sharding_callback(inspector: Callable[[Any], None]) -> bytes:
        address = bytes(original(inspector))
        _inspectors[address] = inspector
        return address

    xla_client.encode_inspect_sharding_callback = encode_inspect_sharding_callback


def asks(module: Any) -> bool:
    """Whether the compiler of a module will ask functions that are known here."""
    from jax._src import custom_partitioning
    from jax._src.lib.mlir import ir

    # Most processes have none, and walking through a module takes time.
    if not (_inspectors or custom_partitioning._sharding_callbacks):
        return False
    found: list[Any] = []

    def look(operation: Any) -> Any:
        if _asked_by(operation) is None:
            return ir.WalkResult.ADVANCE
        found.append(operation)
        return ir.WalkResult.INTERRUPT

    module.operation.walk(look)
    return bool(found)


def name_functions(module: Any, take: TakeFunction) -> None:
    """Let the operations of a module, which is changed, say whom to ask."""
    from jax._src.lib.mlir import ir

    def name(operation: Any) -> Any:
        key = _asked_by(operation)
        if key is not None:
            kind, owner = key[0], _owners(key[0])[key[1]]
            client, number, forget = take(functools.partial(_answer, key))
            # JAX keeps it as long as the executable.
            weakref.finalize(owner, forget).atexit = False
            target = PARTITIONED_TARGET if kind == _PARTITIONED else INSPECTED_TARGET
            operation.attributes["call_target_name"] = ir.StringAttr.get(target)
            operation.attributes["backend_config"] = ir.StringAttr.get(asked_attribute(client, number))
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(name)


def _owners(kind: str) -> Any:
    from jax._src import custom_partitioning

    return custom_partitioning._sharding_callbacks if kind == _PARTITIONED else _inspectors


def _asked_by(operation: Any) -> tuple[str, bytes] | None:
    """(target, key) of an operation that the compiler asks about."""
    from jax._src.lib.mlir import ir

    if operation.name != "stablehlo.custom_call":
        return None
    kind = ir.StringAttr(operation.attributes["call_target_name"]).value
    if kind not in (_PARTITIONED, _INSPECTED) or "backend_config" not in operation.attributes:
        return None
    key = ir.StringAttr(operation.attributes["backend_config"]).value_bytes
    return (kind, key) if key in _owners(kind) else None


def _answer(asked: tuple[str, bytes], encoded: Any) -> tuple[np.ndarray[Any, Any]]:
    """What JAX's own functions answer. They find by the key what belongs to the operation."""
    from jax._src import custom_partitioning

    question, (kind, key) = question_of(encoded), asked
    match question.about:
        case "inspect":
            _owners(kind)[key](_sharding(question.operand_shardings[0]))
            answer = Answer()
        case "user":
            sharding = custom_partitioning._custom_partitioning_propagate_user_sharding(
                _sharding(question.result_sharding), _shape(question.result), key
            )
            answer = Answer(_serialized(sharding))
        case "operands":
            sharding = custom_partitioning._custom_partitioning_infer_sharding_from_operands(
                *_operands(question), _shape(question.result), key
            )
            answer = Answer(_serialized(sharding))
        case "partition":
            program, operands, result = custom_partitioning._custom_partitioning_partition(
                *_operands(question), _shape(question.result), _sharding(question.result_sharding), key
            )
            answer = Answer(_serialized(result), bytes(program), tuple(map(_serialized, operands)))
    return (to_array(answer),)


def _operands(question: Question) -> tuple[list[Any], list[Any]]:
    return [_shape(each) for each in question.operands], [_sharding(each) for each in question.operand_shardings]


def _shape(spec: Shape | None) -> Any:
    from jax._src.lib import xla_client

    assert spec is not None, "a question about a result has its shape"
    parts = [xla_client.Shape.array_shape(np.dtype(kind), dimensions) for kind, dimensions in spec.parts]
    return xla_client.Shape.tuple_shape(parts) if spec.is_tuple else parts[0]


def _sharding(serialized: bytes | None) -> Any:
    from jax._src.lib import xla_client

    assert serialized is not None, "a question about a sharding has it"
    proto = xla_client.OpSharding()
    proto.ParseFromString(serialized)
    return xla_client.HloSharding.from_proto(proto)


def _serialized(sharding: Any) -> bytes:
    return bytes(sharding.to_proto().SerializeToString())
