"""What the compiler asks a client's functions, here by a call that is a function of the test."""

from typing import Any

import numpy as np
import pytest
from jax._src.lib import xla_client

from pathways_runtime.core.status import Code, Status
from pathways_runtime.wire.partitioning import (
    Answer,
    Question,
    Shape,
    asked_attribute,
    functions_asked,
    question_of,
    to_array,
    whom_to_ask,
)
from pathways_runtime.worker import mlir, partitioning, pjrt
from pathways_runtime.worker.callbacks import CallbackFailed, nobody

SPLIT = mlir.sharding_bytes(xla_client.HloSharding.iota_tile((2,)))

PROGRAM = b"""
module @asking attributes {mhlo.num_partitions = 2 : i32} {
  func.func public @main(%x: tensor<4xf32> {mhlo.sharding = "{devices=[2]<=[2]}"})
      -> (tensor<4xf32> {mhlo.sharding = "{devices=[2]<=[2]}"}) {
    %y = stablehlo.custom_call @slurm_pathways.partitioned(%x) {
      api_version = 2 : i32, backend_config = "slurm_pathways.asked=c0de:7"
    } : (tensor<4xf32>) -> tensor<4xf32>
    %z = stablehlo.custom_call @slurm_pathways.inspected(%y) {
      api_version = 1 : i32, backend_config = "slurm_pathways.asked=c0de:8", has_side_effect = true
    } : (tensor<4xf32>) -> tensor<4xf32>
    return %y : tensor<4xf32>
  }
}
"""
PART = mlir.as_bytecode(b"""
module {
  func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> {
    %y = stablehlo.add %x, %x : tensor<2xf32>
    return %y : tensor<2xf32>
  }
}
""")


@pytest.fixture(scope="module")
def client() -> Any:
    client, _ = pjrt.make_cpu_client(2, None)
    return client


def compile_asking(client: Any, call: Any) -> Any:
    (devices,) = pjrt.devices_by_process(client).values()
    options = xla_client.CompileOptions()
    options.num_partitions = 2
    options.executable_build_options.num_partitions = 2
    options.executable_build_options.use_spmd_partitioning = True
    pjrt.set_assignment(options, [[device.id for device in devices]])
    with partitioning.asking(mlir.as_bytecode(PROGRAM), call) as program:
        return pjrt.compile_program(client, program, pjrt.device_list(devices), options)


def test_functions_are_asked_with_shapes_and_shardings(client: Any) -> None:
    asked: list[tuple[str, int, Question]] = []

    def call(name: str, number: int, operands: Any) -> Any:
        question = question_of(operands[0])
        asked.append((name, number, question))
        is_partition = question.about == "partition"
        return [to_array(Answer(SPLIT, PART, (SPLIT,)) if is_partition else Answer(SPLIT))]

    executable = compile_asking(client, call)
    shape = Shape((("float32", (4,)),))
    assert ("c0de", 7, Question("partition", (shape,), (SPLIT,), shape, SPLIT)) in asked
    assert ("c0de", 8, Question("inspect", (), (SPLIT,), None, None)) in asked
    assert {question.about for _, number, question in asked if number == 8} == {"inspect"}
    (devices,) = pjrt.devices_by_process(client).values()
    place = pjrt.replicated(devices, None)
    handler = pjrt.result_handler((2,), np.dtype(np.float32), place)
    parts = pjrt.put([np.array([1, 2], np.float32), np.array([3, 4], np.float32)], place, devices)
    (output,), token = pjrt.execute(executable, [parts], [handler], 1)
    pjrt.wait_token(token)
    assert [pjrt.view(shard).tolist() for shard in pjrt.shards(output)] == [[2, 4], [6, 8]]


def test_what_a_function_raises_fails_the_compilation(client: Any) -> None:
    """Whatever it is asked: XLA itself ends the process when a question about a sharding is not answered."""

    def failing_at(about: str | None) -> Any:
        def call(name: str, number: int, operands: Any) -> Any:
            question = question_of(operands[0])
            if about == question.about:
                raise CallbackFailed(Status(Code.INTERNAL, "Traceback:\nValueError: boom"))
            return [to_array(Answer(SPLIT, PART, (SPLIT,)))] if about else [np.zeros(3, np.uint8)]

        return call

    for about in ("user", "operands", "partition", "inspect"):
        with pytest.raises(pjrt.PjrtError) as raised:
            compile_asking(client, failing_at(about))
        want = f"a Python function that the compiler asked about {about} failed: Traceback:\nValueError: boom"
        assert pjrt.status_of(raised.value) == Status(Code.INTERNAL, want)
    with pytest.raises(pjrt.PjrtError, match=r"INTERNAL: a Python function that the compiler asked about.*Error"):
        compile_asking(client, failing_at(None))
    with pytest.raises(pjrt.PjrtError, match=r"CANCELLED: .*the session whose Python function this calls is over"):
        compile_asking(client, nobody)


def test_programs_say_whom_to_ask() -> None:
    assert functions_asked(mlir.as_bytecode(PROGRAM)) == {("c0de", 7), ("c0de", 8)}
    assert functions_asked(PART) == frozenset()
    assert whom_to_ask(asked_attribute("c0de", 12).encode()) == ("c0de", 12)
    with pytest.raises(ValueError, match="does not say whose function is to be asked"):
        whom_to_ask(b"140294350931216")


def test_a_program_that_asks_nobody_is_compiled_as_it_is() -> None:
    with partitioning.asking(PART, nobody) as program:
        assert program is PART
