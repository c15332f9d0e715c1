"""The adapter to jaxlib, function by function, in this process: where another jaxlib differs, it shows here."""

import gc
import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.status import Code, Status
from pathways_runtime.wire.callbacks import Functions
from pathways_runtime.worker import buffers, callbacks, mlir, pjrt

F32 = np.dtype(np.float32)
#: They need other processes, libtpu or an accelerator; test_executor_hosts.py has the first, tests/tpu_compile others.
ELSEWHERE = {"leave", "make_plugin_client", "describe_tpu", "describe_gpus", "compile_only"}


@pytest.fixture(scope="module")
def client() -> Any:
    """A CPU client with two devices."""
    client, runtime = pjrt.make_cpu_client(2, None)
    assert runtime is None
    return client


@pytest.fixture(scope="module")
def devices(client: Any) -> list[Any]:
    (found,) = pjrt.devices_by_process(client).values()
    assert len(found) == 2
    return found


def row(*values: float) -> np.ndarray:
    """Values in memory that XLA uses in place."""
    memory = np.frombuffer(buffers.aligned_memory(4 * len(values)), F32)
    memory[:] = values
    return memory


def halves(devices: list[Any]) -> Any:
    """An array with a shard of two on each device."""
    return pjrt.put([row(1, 2), row(3, 4)], pjrt.replicated(devices, None), devices)


def values(array: Any) -> list[list[float]]:
    return [pjrt.view(shard).tolist() for shard in pjrt.shards(array)]


def test_every_function_is_called_here() -> None:
    public = {
        name
        for name, function in vars(pjrt).items()
        if inspect.isfunction(function) and function.__module__ == pjrt.__name__ and not name.startswith("_")
    }
    called = set(re.findall(r"\bpjrt\.(\w+)\(", Path(__file__).read_text()))
    assert public - called == ELSEWHERE


def test_what_it_says_of_itself(devices: list[Any]) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", pjrt.jaxlib_version())
    version, kind = pjrt.describe_platform("cpu")
    assert version
    assert kind == devices[0].device_kind
    assert pjrt.describe_platform("tpu") == ("tpu", "tpu")
    assert pjrt.default_memory_kind(devices[0]) == "device"


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_client_that_nobody_needs_goes_with_its_threads() -> None:
    def use_a_client() -> None:
        client, _ = pjrt.make_cpu_client(2, None)
        array = halves(client.local_devices())
        pjrt.wait([array])

    use_a_client()
    pjrt.let_go_of_clients()
    before = num_threads()
    use_a_client()
    assert num_threads() > before
    pjrt.let_go_of_clients()
    assert num_threads() == before


class FakeDevice:
    """What a cache key takes of a device, or of a client; CPU devices of jaxlib have no coordinates."""

    def __init__(self, platform: str, version: str = "", **attributes: object) -> None:
        self.platform = platform
        self.platform_version = version
        self.__dict__.update(attributes)


def test_what_code_depends_on_besides_the_program(client: Any, devices: list[Any]) -> None:
    """On TPU the same whoever describes the devices: libtpu on a host without any, or a worker's client."""
    assert pjrt.describe_hardware(devices) == ""
    assert pjrt.compiler_version(client) == client.platform_version
    place = {"device_kind": "TPU v5 lite", "core_on_chip": 0}
    described = [FakeDevice("tpu", coords=[x, 0, 0], slice_index=x, **place) for x in (0, 1)]
    expected = "TPU v5 lite\n0:[0, 0, 0]/0\n1:[1, 0, 0]/0"
    assert pjrt.describe_hardware(described) == expected
    assert pjrt.describe_hardware(described[1:]) == "TPU v5 lite\n0:[1, 0, 0]/0"
    alone = [FakeDevice("tpu", coords=[1, 0, 0], slice_index=None, **place)]
    assert pjrt.describe_hardware(alone) == pjrt.describe_hardware(described[1:])
    assert pjrt.describe_hardware([FakeDevice("cuda", device_kind="NVIDIA H200")]) == "NVIDIA H200"
    version = "PJRT C API\nmegascale+TFRT TPU v5 lite\nBuilt on Nov 5 2026 cl/1"
    assert pjrt.compiler_version(FakeDevice("tpu", version)) == "Built on Nov 5 2026 cl/1"
    assert pjrt.compiler_version(FakeDevice("cuda", "cuda 12090")) == "cuda 12090"


# Arrays


def test_each_device_keeps_a_buffer_of_its_own(devices: list[Any]) -> None:
    array = halves(devices)
    assert values(array) == [[1, 2], [3, 4]]
    assert array.shape == (2,)
    assert pjrt.nbytes(array) == 16


def test_one_buffer_for_all_devices(devices: list[Any]) -> None:
    buffer = row(5, 6)
    assert values(pjrt.put([buffer, buffer], pjrt.replicated(devices, None), devices)) == [[5, 6], [5, 6]]


def test_aligned_memory_is_used_in_place(devices: list[Any]) -> None:
    buffer = row(*range(1024))
    array = pjrt.put([buffer], pjrt.replicated(devices[:1], None), devices[:1])
    assert np.shares_memory(pjrt.view(pjrt.shards(array)[0]), buffer)


@pytest.mark.parametrize("kind", [DType.S64, DType.F64, DType.C128, DType.U64])
def test_wide_types_stay_wide(devices: list[Any], kind: DType) -> None:
    dtype = pjrt.dtype_of(kind)
    buffer = np.array([2**53 - 1, 3]).astype(dtype)
    shard = pjrt.shards(pjrt.put([buffer], pjrt.replicated(devices[:1], None), devices[:1]))[0]
    assert pjrt.view(shard).dtype == dtype
    assert pjrt.view(shard).tolist() == buffer.tolist()


def test_shards_are_joined_in_order_without_a_copy(devices: list[Any]) -> None:
    array = halves(devices)
    joined = pjrt.join(pjrt.shards(array), pjrt.replicated(devices, None))
    assert values(joined) == [[1, 2], [3, 4]]
    assert np.shares_memory(pjrt.view(pjrt.shards(joined)[1]), pjrt.view(pjrt.shards(array)[1]))


def test_several_threads_ask_for_shards_at_once(devices: list[Any]) -> None:
    """Each sees all of them, also while another is the first to ask."""
    elsewhere = pjrt.device_list(devices), pjrt.replicated(devices, None)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(2000):
                # Of an array that PJRT has made nobody has asked for the shards yet.
                arrays = [pjrt.copy(halves(devices), *elsewhere)] * 4
                start = threading.Barrier(len(arrays))

                def count(array: Any, start: threading.Barrier = start) -> int:
                    start.wait()
                    return len(pjrt.shards(array))

                assert list(threads.map(count, arrays)) == [2, 2, 2, 2]
    finally:
        sys.setswitchinterval(interval_s)


def test_copies_lie_elsewhere(devices: list[Any]) -> None:
    array = halves(devices)
    turned = devices[::-1]
    copied = pjrt.copy(array, pjrt.device_list(turned), pjrt.replicated(turned, None))
    assert values(copied) == [[1, 2], [3, 4]]
    assert [list(shard.devices()) for shard in pjrt.shards(copied)] == [[device] for device in turned]
    pinned = pjrt.copy(array, pjrt.device_list(devices), pjrt.replicated(devices, "pinned_host"))
    assert values(pinned) == [[1, 2], [3, 4]]
    assert pjrt.shards(pinned)[0].sharding.memory_kind == "pinned_host"


def test_a_copy_to_another_client(devices: list[Any]) -> None:
    other, _ = pjrt.make_cpu_client(2, None)
    theirs = pjrt.devices_by_process(other)[0]
    copied = pjrt.copy(halves(devices), pjrt.device_list(theirs), pjrt.replicated(theirs, None))
    assert values(copied) == [[1, 2], [3, 4]]


def test_another_client_adopts_the_memory(devices: list[Any]) -> None:
    other, _ = pjrt.make_cpu_client(1, None)
    shard = pjrt.shards(halves(devices))[1]
    adopted = pjrt.adopt(shard, pjrt.devices_by_process(other)[0][0])
    assert pjrt.view(adopted).tolist() == [3, 4]
    assert np.shares_memory(pjrt.view(adopted), pjrt.view(shard))
    assert pjrt.is_ready(adopted)


def test_deleted_arrays(devices: list[Any]) -> None:
    array = halves(devices)
    pjrt.wait([array])
    pjrt.delete(array)
    assert pjrt.is_ready(array)
    assert pjrt.nbytes(array) == 0
    pjrt.wait([array])
    with pytest.raises(pjrt.PjrtError, match="deleted or donated") as failure:
        pjrt.shards(array)
    assert pjrt.status_of(failure.value) == Status(Code.INVALID_ARGUMENT, "Array has been deleted or donated.")


def test_scalars_and_single_shardings(devices: list[Any]) -> None:
    array = pjrt.put([np.array(7, F32)], pjrt.single(devices[1], None), devices[1:])
    assert pjrt.view(pjrt.shards(array)[0]).shape == ()
    assert pjrt.view(array) == 7


# Programs


class Program:
    """A function as a client sends it, compiled for two devices."""

    def __init__(self, client: Any, devices: list[Any], artifact: bytes, options: bytes) -> None:
        self.artifact = artifact
        self.devices = pjrt.device_list(devices)
        self.options = pjrt.replace_debug_options(
            pjrt.parse_compile_options(options), pjrt.parse_compile_options(options)
        )
        pjrt.set_assignment(self.options, [[device.id for device in devices]])
        self.executable = pjrt.compile_program(client, artifact, self.devices, self.options)


@pytest.fixture(scope="module")
def program(client: Any, devices: list[Any], lower: Callable[..., Any], sharded: Callable[..., Any]) -> Program:
    """``x + [0 1 2 3]``, and the sum of its own shape; the argument is given up."""

    def function(x: Any, y: Any) -> Any:
        return x + jnp.arange(4, dtype=F32), (y * 2).astype(jnp.bfloat16)

    arguments = sharded((4,), F32, 2, "x"), sharded((3,), np.int32, 2)
    return Program(client, devices, *lower(function, *arguments, devices=[0, 1], donate_argnums=0))


def launch(executable: Any, devices: list[Any], argument: Any, launch_id: int) -> Any:
    sharding = pjrt.replicated(devices, None)
    handlers = [
        pjrt.result_handler((2,), F32, sharding),
        pjrt.result_handler((3,), pjrt.dtype_of(DType.BF16), sharding),
    ]
    ints = np.array([1, 2, 3], np.int32)
    return pjrt.execute(executable, [argument, pjrt.put([ints, ints], sharding, devices)], handlers, launch_id)


def test_a_program_runs(program: Program, devices: list[Any]) -> None:
    argument = halves(devices)
    (first, second), token = launch(program.executable, devices, argument, 1)
    pjrt.wait_token(token)
    assert values(first) == [[1, 3], [5, 7]]
    assert values(second) == [[2, 4, 6], [2, 4, 6]]
    assert second.dtype == pjrt.dtype_of(DType.BF16)
    assert argument.is_deleted(), "its memory was to be taken over"
    # What a program made is an argument of the next.
    (again, _), token = launch(program.executable, devices, first, 2)
    pjrt.wait_token(token)
    assert values(again) == [[1, 4], [7, 10]]


def test_a_program_as_bytes(client: Any, program: Program, devices: list[Any]) -> None:
    loaded = pjrt.load_program(client, pjrt.serialize(program.executable), program.devices, program.options)
    (first, _), token = launch(loaded, devices, halves(devices), 3)
    pjrt.wait_token(token)
    assert values(first) == [[1, 3], [5, 7]]
    with pytest.raises(pjrt.PjrtError):
        pjrt.load_program(client, b"not a program", program.devices, program.options)


def test_what_a_program_says_of_itself(program: Program) -> None:
    executable = program.executable
    module = pjrt.optimized_module(executable)
    assert module.name.startswith("jit_")
    assert "ENTRY" in module.to_string()
    assert pjrt.signature(pjrt.module_bytes(module)) == (
        [((2,), DType.F32), ((3,), DType.S32)],
        [((2,), DType.F32), ((3,), DType.BF16)],
    )
    assert mlir.global_outputs(program.artifact) == [((4,), DType.F32), ((3,), DType.BF16)]
    assert len(pjrt.sharding_protos(executable.get_parameter_shardings()) or ()) == 2
    assert len(pjrt.sharding_protos(executable.get_output_shardings()) or ()) == 2
    assert pjrt.sharding_protos(None) is None
    signature = pjrt.signature(pjrt.module_bytes(module))
    place = executable.client, executable.local_devices()[0]
    assert pjrt.minor_to_major(executable.get_parameter_layouts(), signature.parameters, *place) == ((0,), (0,))
    assert pjrt.minor_to_major(executable.get_output_layouts(), signature.outputs, *place) == ((0,), (0,))
    assert pjrt.output_memory_kinds(executable, 2) == ("device", "device")
    assert isinstance(pjrt.fingerprint(executable), bytes)
    assert pjrt.memory_stats(executable)["argument_size_in_bytes"] == 2 * 4 + 3 * 4
    assert pjrt.cost_analysis(executable)["flops"] > 0
    assert pjrt.generated_code_bytes(executable) == executable.size_of_generated_code_in_bytes()
    assert mlir.program_name(program.artifact) == module.name


class FakeLayout:
    """As of PJRT, with nothing but the order."""

    def __init__(self, *order: int) -> None:
        self.order = order

    def _xla_layout(self) -> "FakeLayout":
        return self

    def minor_to_major(self) -> tuple[int, ...]:
        return self.order


class FakeClient:
    """Whose default puts a narrow last dimension first, as libtpu's does."""

    def __init__(self, platform: str) -> None:
        self.platform = platform

    def get_default_layout(self, dtype: Any, shape: tuple[int, ...], device: Any) -> FakeLayout:
        return FakeLayout(0, 1) if shape[-1] == 10 else FakeLayout(1, 0)


def test_what_lies_as_its_default_does_is_row_major_to_clients() -> None:
    layouts = [FakeLayout(0, 1), FakeLayout(0, 1), FakeLayout(1, 0), FakeLayout(0), FakeLayout()]
    shards = [
        ((128, 10), DType.F32),
        ((10, 128), DType.BF16),
        ((10, 128), DType.S4),
        ((3,), DType.F32),
        ((), DType.TOKEN),
    ]
    told = pjrt.minor_to_major(layouts, shards, FakeClient("tpu"), None)
    assert told == ((1, 0), (0, 1), (1, 0), (0,), ())
    told = pjrt.minor_to_major(layouts, shards, FakeClient("cpu"), None)
    assert told == ((0, 1), (0, 1), (1, 0), (0,), ())


def test_the_assignment_of_devices(program: Program, devices: list[Any]) -> None:
    written = pjrt.serialized_assignment(program.options)
    # DeviceAssignmentProto: 1 replica, 2 computations, each with the device of its replica.
    ids = [device.id for device in devices]
    assert written == bytes([8, 1, 16, 2, 26, 3, 10, 1, ids[0], 26, 3, 10, 1, ids[1]])
    assert pjrt.serialized_assignment(pjrt.parse_compile_options(b"")) is None


def test_programs_that_differ_in_locations_only(lower: Callable[..., Any], sharded: Callable[..., Any]) -> None:
    argument = sharded((4,), F32, 2, "x")
    one, _ = lower(lambda x: x * 2, argument, devices=[0, 1])
    other, _ = lower(lambda x: x * 2, argument, devices=[0, 1])
    third, _ = lower(lambda x: x * 3, argument, devices=[0, 1])
    assert one != other
    assert mlir.without_locations(one) == mlir.without_locations(other)
    assert mlir.without_locations(one) != mlir.without_locations(third)
    with pytest.raises(ValueError, match="not a StableHLO program"):
        mlir.without_locations(b"nothing")


def test_every_type_of_programs_is_known(lower: Callable[..., Any], sharded: Callable[..., Any]) -> None:
    for kind in (DType.PRED, DType.S8, DType.U4, DType.F8E5M2, DType.C64, DType.F64, DType.U64, DType.F4E2M1FN):
        dtype = pjrt.dtype_of(kind)
        artifact, _ = lower(lambda x: x[::-1], sharded((4,), dtype, 2, "x"), devices=[0, 1])
        assert mlir.global_outputs(artifact) == [((4,), kind)]


def test_a_program_that_is_none(client: Any, program: Program) -> None:
    with pytest.raises(pjrt.PjrtError):
        pjrt.compile_program(client, b"nothing", program.devices, program.options)


# Failures


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (pjrt.PjrtError("NOT_FOUND: no such thing"), Status(Code.NOT_FOUND, "no such thing")),
        (
            pjrt.PjrtError("INTERNAL: Error dispatching computation: RESOURCE_EXHAUSTED: full"),
            Status(Code.RESOURCE_EXHAUSTED, "full"),
        ),
        (pjrt.PjrtError("something"), Status(Code.INTERNAL, "something")),
        (KeyError("x"), Status(Code.UNKNOWN, "KeyError: 'x'")),
    ],
)
def test_first_causes(failure: Exception, status: Status) -> None:
    assert pjrt.status_of(failure) == status


def test_memory_is_given_back(devices: list[Any]) -> None:
    """Neither the array nor jaxlib keeps a buffer that was used in place."""
    buffer = row(*range(64))
    kept = weakref.ref(buffer)
    array = pjrt.put([buffer], pjrt.replicated(devices[:1], None), devices[:1])
    del buffer
    assert kept() is not None
    pjrt.wait([array])
    pjrt.delete(array)
    del array
    gc.collect()
    assert kept() is None


# Callbacks


CALLING = b"""
module @calling attributes {slurm_pathways.callbacks = "slurm_pathways.callbacks=c0de:7+2"} {
  func.func public @main(%x: tensor<2xf32> {mhlo.sharding = "{replicated}"}) -> tensor<2xf32> {
    %y = stablehlo.custom_call @xla_ffi_python_cpu_callback(%x) {
      api_version = 4 : i32, backend_config = {index = 0 : ui64}, has_side_effect = true
    } : (tensor<2xf32>) -> tensor<2xf32>
    stablehlo.custom_call @xla_ffi_python_cpu_callback(%y) {
      api_version = 4 : i32, backend_config = {index = 1 : ui64}, has_side_effect = true
    } : (tensor<2xf32>) -> ()
    return %y : tensor<2xf32>
  }
}
"""


def run_on_first(devices: list[Any], executable: Any, *arguments: np.ndarray) -> list[float]:
    place = pjrt.single(devices[0], None)
    handler = pjrt.result_handler((2,), F32, place)
    (output,), token = pjrt.execute(
        executable, [pjrt.put([argument], place, devices[:1]) for argument in arguments], [handler], 1
    )
    pjrt.wait_token(token)
    return pjrt.view(output).tolist()


def test_callbacks_are_known_by_what_the_client_says() -> None:
    calling = mlir.calling_program(CALLING)
    assert calling is not None
    assert calling.functions == Functions("c0de", (7, 8))
    assert mlir.calling_program(mlir.as_bytecode(CALLING)) == calling
    assert mlir.calling_program(calling.program) is None
    with pytest.raises(ValueError, match=r"use jax\.pure_callback"):
        mlir.calling_program(CALLING.replace(b"xla_ffi_python_cpu", b"xla_buffer_python_cpu"))
    another = mlir.calling_program(CALLING.replace(b"c0de:7", b"b0a:11"))
    assert another is not None
    assert mlir.without_locations(another.program) == mlir.without_locations(calling.program)


@pytest.mark.parametrize("is_reloaded", [False, True], ids=["compiled", "loaded"])
def test_callbacks_are_called_in_order_of_their_index(client: Any, devices: list[Any], is_reloaded: bool) -> None:
    calling = mlir.calling_program(CALLING)
    assert calling is not None
    told: list[Any] = []
    functions = [lambda x: (x * 2,), lambda y: told.append(y.tolist()) or ()]
    where, options = pjrt.device_list(devices[:1]), pjrt.single_device_options(devices[0])
    executable = pjrt.compile_program(client, calling.program, where, options, functions)
    if is_reloaded:
        executable = pjrt.load_program(client, pjrt.serialize(executable), where, options, functions)
    assert run_on_first(devices, executable, row(1, 3)) == [2, 6]
    assert told == [[2, 6]]


def test_a_parameter_more_is_not_used(client: Any, devices: list[Any]) -> None:
    calling = mlir.calling_program(CALLING)
    assert calling is not None
    program = mlir.with_one_more_parameter(calling.program, (2,), F32)
    options = pjrt.single_device_options(devices[0])
    pjrt.allow_one_more_parameter(options)
    functions = [lambda x: (x + 1,), lambda y: ()]
    executable = pjrt.compile_program(client, program, pjrt.device_list(devices[:1]), options, functions)
    assert run_on_first(devices, executable, row(1, 3), row(8, 9)) == [2, 4]
    serialized = pjrt.module_bytes(pjrt.optimized_module(executable))
    assert pjrt.signature(serialized).parameters == [((2,), DType.F32)] * 2


def test_a_failed_callback_has_the_text_of_the_client(client: Any, devices: list[Any]) -> None:
    calling = mlir.calling_program(mlir.as_bytecode(CALLING))
    assert calling is not None
    options = pjrt.single_device_options(devices[0])
    for told, want in (
        (Status(Code.INTERNAL, "Traceback:\nValueError: boom"), "CpuCallback error calling callback: Traceback:\n"),
        (Status(Code.CANCELLED, "the client is gone"), "the client is gone"),
    ):

        def fail(x: Any, told: Status = told) -> Any:
            raise callbacks.CallbackFailed(told)

        executable = pjrt.compile_program(
            client, calling.program, pjrt.device_list(devices[:1]), options, [fail, lambda y: ()]
        )
        with pytest.raises(pjrt.PjrtError) as raised:
            run_on_first(devices, executable, row(1, 3))
        status = pjrt.status_of(raised.value)
        assert status.code == told.code
        assert status.message.startswith(want)
        assert "test_pjrt.py" not in status.message
