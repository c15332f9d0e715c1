"""The compiler's questions to Python functions of the client (``wire.partitioning``), while it compiles a program."""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pathways_runtime.wire.partitioning import (
    INSPECTED_TARGET,
    PARTITIONED_TARGET,
    Answer,
    Question,
    answer_of,
    functions_asked,
    to_array,
    whom_to_ask,
)
from pathways_runtime.worker import mlir, pjrt
from pathways_runtime.worker.callbacks import Call, CallbackFailed

logger = logging.getLogger(__name__)

#: What XLA itself calls an operation that only tells its operand's sharding.
_XLA_INSPECTION = "InspectSharding"


class _Compilation:
    """A program that is being compiled.

    Attributes:
        failure: of the last question that was not answered.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.failure: str | None = None


_lock = threading.Lock()
#: By (client, number) of the function. XLA's registry of partitioners is one for the process, and its threads do not
#: say which program they compile; but each program has functions of its own.
_asking: dict[tuple[str, int], _Compilation] = {}


@contextlib.contextmanager
def asking(program: bytes, call: Call) -> Iterator[bytes]:
    """While the context is entered, a program can be compiled that asks its client; gives the form to compile.

    Args:
        program: MLIR, in a form that does not change from one compilation to the next.
        call: calls functions of the client.

    Raises:
        ValueError: it cannot be parsed. PjrtError: a function failed.
    """
    functions = functions_asked(program)
    if not functions:
        yield program
        return
    _register()
    compilation = _Compilation(call)
    with _lock:
        _asking.update(dict.fromkeys(functions, compilation))
    try:
        with mlir.inspected(program, INSPECTED_TARGET, _XLA_INSPECTION, _inspector) as prepared:
            yield prepared
    finally:
        with _lock:
            for function in functions:
                if _asking[function] is compilation:
                    del _asking[function]
        if compilation.failure is not None:
            raise pjrt.PjrtError(compilation.failure)


@functools.cache
def _register() -> None:
    mlir.register_partitioner(PARTITIONED_TARGET, _of_user, _partition, _of_operands)


def _ask(whom: bytes, question: Question) -> Answer | None:
    """None if it was not answered; what a function failed with, ``asking`` raises.

    Raises nothing: XLA ends the process where a question about a sharding does.
    """
    try:
        function = whom_to_ask(whom)
        with _lock:
            compilation = _asking[function]
    except (ValueError, KeyError):
        logger.exception("the compiler asks about %s, and nobody knows whom", question.about)
        return None
    try:
        (answer,) = compilation.call(*function, [to_array(question)])
        assert answer is not None, "an answer is an array"
        return answer_of(answer)
    except Exception as failed:
        # Whatever a client's answer brings about in parsers, too.
        reason = str(failed) if isinstance(failed, CallbackFailed) else f"INTERNAL: {failed!r}"
        code, _, text = reason.partition(": ")
        compilation.failure = f"{code}: a Python function that the compiler asked about {question.about} failed: {text}"
        return None


def _of_user(sharding: Any, shape: Any, whom: bytes) -> Any:
    question = Question("user", (), (), mlir.shape_spec(shape), mlir.sharding_bytes(sharding))
    answer = _ask(whom, question)
    return sharding if answer is None else mlir.sharding_of(answer.result_sharding)


def _of_operands(shapes: Sequence[Any], shardings: Sequence[Any], result: Any, whom: bytes) -> Any:
    answer = _ask(whom, Question("operands", _specs(shapes), _bytes(shardings), mlir.shape_spec(result), None))
    return mlir.replicated_sharding() if answer is None else mlir.sharding_of(answer.result_sharding)


def _partition(
    shapes: Sequence[Any], shardings: Sequence[Any], result: Any, result_sharding: Any, whom: bytes
) -> tuple[bytes, list[Any], Any]:
    question = Question(
        "partition",
        _specs(shapes),
        _bytes(shardings),
        mlir.shape_spec(result),
        mlir.sharding_bytes(result_sharding),
    )
    answer = _ask(whom, question)
    if answer is None:
        raise RuntimeError("see the failure of the function")
    operand_shardings = [mlir.sharding_of(each) for each in answer.operand_shardings]
    return answer.program, operand_shardings, mlir.sharding_of(answer.result_sharding)


def _inspector(whom: bytes) -> Callable[[Any], None]:
    def inspect(sharding: Any) -> None:
        _ask(whom, Question("inspect", (), (mlir.sharding_bytes(sharding),), None, None))

    return inspect


def _specs(shapes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(mlir.shape_spec, shapes))


def _bytes(shardings: Sequence[Any]) -> tuple[bytes, ...]:
    return tuple(map(mlir.sharding_bytes, shardings))
