"""The adapter to jaxlib: of an executor, nothing but this module, ``mlir`` (programs before they are compiled) and
``profiler`` (traces) uses its private API.

XLA reads the size of its thread pool from the environment when it is loaded, so ``worker.environment`` must have
prepared the process before this module is imported. Everything here was measured with jax 0.10.2. Where supported
jaxlibs differ, the code asks what there is, not which version it is, and says which jaxlib has it;
``tests/worker/test_pjrt.py`` calls each function, so another jaxlib's differences show there.

How a host's part of an array is represented: one ``Array`` whose aval has the shape of a *shard* and whose sharding is
"replicated over the local devices of the array". The contents differ per device, which nobody checks. PJRT takes such
an array as an argument of a program that spans hosts, in the order of the executable's local devices, and it costs the
same however many hosts there are.
"""

import contextlib
import gc
import importlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes  # noqa: F401 - registers the names of its types with numpy
import numpy as np
from jax._src import core as jax_core
from jaxlib import _jax, lapack, xla_client

from pathways_runtime.core.dtype import DTYPE_OF_NUMPY, DType
from pathways_runtime.core.sharding import Shape
from pathways_runtime.core.status import Code, Status, StatusError
from pathways_runtime.worker import gpu, mlir

try:
    # From jaxlib 0.10.2 on, XLA's own values are in a library of their own.
    from jaxlib._hlo import XlaComputation
except ModuleNotFoundError:
    from jaxlib._jax import XlaComputation

# jaxlib has no types for these; the names say what they are.
Client = Any
Device = Any
Array = Any
Executable = Any
Token = Any
Sharding = Any
DeviceList = Any
CompileOptions = Any
ResultHandler = Any

PjrtError = jax.errors.JaxRuntimeError

_ZERO_COPY = xla_client.HostBufferSemantics.ZERO_COPY
_ALWAYS_COPY = _jax.ArrayCopySemantics.ALWAYS_COPY
#: jaxlib 0.10 compares outputs with their sharding unless it is told not to; 0.12 never does. The signature is the
#: docstring's first line.
_UNCHECKED = {"_skip_checks": True} if "_skip_checks" in str(_jax.array_result_handler.__doc__) else {}

#: Host memory that XLA can use in place must be aligned to this.
ALIGNMENT_BYTES = 64

_shards_lock = threading.Lock()


def jaxlib_version() -> str:
    """For cache keys."""
    return str(jax.lib.__version__)


# Clients


class Membership(NamedTuple):
    """A client's place in a world of several hosts. The coordination service listens at ``coordinator_address``."""

    coordinator_address: str
    rank: int
    num_members: int


def _join(membership: Membership) -> Any:
    """Connect to the world's coordination service.

    Raises:
        PjrtError: it did not answer in time.
    """
    # No missed_heartbeat_callback: jaxlib aborts the process when it calls one. The timeouts equal the service's.
    runtime = _jax.get_distributed_runtime_client(
        membership.coordinator_address,
        membership.rank,
        init_timeout=60,
        shutdown_timeout=5,
        heartbeat_timeout=100,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    runtime.connect()
    return runtime


def make_cpu_client(
    num_devices: int,
    membership: Membership | None,
    collectives_host: str = "127.0.0.1",
    while_listening: contextlib.AbstractContextManager[object] = contextlib.nullcontext(),  # noqa: B008 - it has no state
) -> tuple[Client, Any]:
    """A CPU client; blocks until all members are there.

    Args:
        collectives_host: name or address at which gloo listens for the other members; see ``worker.collectives``.
        while_listening: entered while the collectives begin to listen there.

    Returns:
        The client, and what must be kept alive and shut down (``leave``) with it; None for a world of one.

    Raises:
        PjrtError: the others did not come in time.
    """
    # LAPACK's functions are looked up in SciPy at first use; without this a decomposition is a segmentation fault.
    lapack._lapack.initialize()
    if membership is None:
        return xla_client.make_cpu_client(asynchronous=True, num_devices=num_devices), None
    runtime = _join(membership)
    try:
        with while_listening:
            collectives = _jax.make_gloo_tcp_collectives(distributed_client=runtime, hostname=collectives_host)
        client = xla_client.make_cpu_client(
            asynchronous=True,
            distributed_client=runtime,
            node_id=membership.rank,
            num_nodes=membership.num_members,
            collectives=collectives,
            num_devices=num_devices,
            get_local_topology_timeout_minutes=1,
            get_global_topology_timeout_minutes=1,
        )
    except PjrtError:
        # The end of its service would else end this process.
        leave(runtime)
        raise
    return client, runtime


#: JAX's plugins for CUDA, newest first; of an installation, one.
_CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def make_plugin_client(platform: str, membership: Membership | None, num_slices: int) -> tuple[Client, Any]:
    """A client of JAX's plugin for CUDA. docs/hardware.md says on what it was run.

    Args:
        num_slices: of the whole topology: how many clients there may be on a device, see ``gpu.client_options``.

    Raises:
        PjrtError: there is no such plugin, or it finds no device; or other members did not come in time.
    """
    if platform != gpu.PLATFORM:
        raise PjrtError(f"UNIMPLEMENTED: there are no workers for {platform}")
    _load_cuda_plugin()
    options = gpu.client_options(xla_client.generate_pjrt_gpu_plugin_options(), os.environ, num_slices)
    runtime = None
    if membership is not None:
        runtime = _join(membership)
        options |= {"node_id": membership.rank, "num_nodes": membership.num_members}
    return xla_client.make_c_api_client(platform, options, runtime), runtime


def _load_cuda_plugin() -> None:
    if not xla_client.pjrt_plugin_loaded(gpu.PLATFORM):
        for name in _CUDA_PLUGINS:
            try:
                plugin = importlib.import_module(name)
            except ModuleNotFoundError as failure:
                if failure.name not in (name, name.partition(".")[0]):
                    raise
            else:
                # Also registers what JAX's own programs call on GPUs: solvers, kernels, callbacks.
                plugin.initialize()
                break
        else:
            raise PjrtError("FAILED_PRECONDITION: JAX's plugin for CUDA is not installed: pip install 'jax[cuda12]'")
    if not xla_client.pjrt_plugin_initialized(gpu.PLATFORM):
        xla_client.initialize_pjrt_plugin(gpu.PLATFORM)


def describe_tpu(topology: str, num_slices: int) -> Client:
    """libtpu's compiler for slices of a topology (``v5e:4x4``): a client that can do nothing but ``compile_only``.

    Raises:
        PjrtError: libtpu does not know the topology. ModuleNotFoundError: there is no libtpu.
    """
    from jax.experimental import topologies

    description = topologies.get_topology_desc(topology, "tpu", num_slices=num_slices)
    return description.devices[0].client


def describe_gpus(description: str, num_slices: int, num_hosts: int, devices_per_host: int) -> Client:
    """The same of XLA's compiler for GPUs.

    Args:
        description: ``GpuTargetConfigProto`` as text.
        num_hosts: of each slice.

    Raises:
        PjrtError: there is no such compiler here, or it does not take the description.
    """
    from jax.experimental import topologies

    shape = f"{num_slices}x{num_hosts}x{devices_per_host}"
    described = topologies.get_topology_desc("", gpu.PLATFORM, topology=shape, target_config=description)
    return described.devices[0].client


def describe_platform(platform: str) -> tuple[str, str]:
    """(platform version, device kind). Makes a client of its own for a moment where that is cheap."""
    if platform != "cpu":
        # A client takes memory on its devices, so the first is made for a world. The driver knows their names.
        names = gpu.device_names() if platform == gpu.PLATFORM else []
        return platform, next(iter(names), platform)
    client = xla_client.make_cpu_client(asynchronous=True, num_devices=1)
    return str(client.platform_version), str(client.local_devices()[0].device_kind)


def compiler_version(client: Client) -> str:
    """The build of a client's compiler. For TPU, what else its version says is of the devices."""
    version = str(client.platform_version)
    builds = [line for line in version.splitlines() if line.startswith("Built on ")]
    return "\n".join(builds) if client.platform == "tpu" and builds else version


def describe_hardware(devices: Sequence[Device]) -> str:
    """Kind and places of devices, where code depends on them: in order, the coordinates of each in its torus.

    Processors of kind cpu are described by their features (``compile_cache.cpu_features``).
    """
    if devices[0].platform == "cpu":
        return ""
    kinds = sorted({str(device.device_kind) for device in devices})
    # A client of one slice may call it anything; what counts is which of them are the same.
    numbers = {index: place for place, index in enumerate(dict.fromkeys(map(_slice_index, devices)))}
    places = [
        f"{numbers[_slice_index(device)]}:{list(device.coords)}/{device.core_on_chip}"
        for device in devices
        # GPUs have coordinates at some jaxlibs, which say nothing that code depends on.
        if device.platform == "tpu"
    ]
    return "\n".join([*kinds, *places])


def _slice_index(device: Device) -> int:
    index = getattr(device, "slice_index", None)
    return 0 if index is None else int(index)


def leave(runtime: Any) -> None:
    """Leave a world's coordination service in good order."""
    runtime.shutdown()


def let_go_of_clients() -> None:
    """Free clients that nothing of ours refers to. JAX's caches do, and clients and their devices refer to each other.

    Takes some hundredths of a second.
    """
    jax.clear_caches()
    gc.collect()


def devices_by_process(client: Client) -> dict[int, list[Device]]:
    """All devices of a world by rank, each rank's in local order."""
    found: dict[int, list[Device]] = {}
    for device in sorted(client.devices(), key=lambda device: device.id):
        found.setdefault(device.process_index, []).append(device)
    return found


# Placements: local devices in shard order


def device_list(devices: Sequence[Device]) -> DeviceList:
    """What calls that take an executable's or a copy's devices want."""
    return _jax.DeviceList(tuple(devices))


def replicated(devices: Sequence[Device], memory_kind: str | None) -> Sharding:
    """The sharding of our arrays over these devices; see the module's docstring."""
    mesh = jax.sharding.Mesh(np.array(devices, dtype=object), ("shard",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind=memory_kind)


def single(device: Device, memory_kind: str | None) -> Sharding:
    """The sharding of one shard."""
    return jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)


def default_memory_kind(device: Device) -> str:
    """Where arrays lie unless somebody says otherwise."""
    return str(device.default_memory().kind)


# Arrays


def dtype_of(kind: DType) -> np.dtype[Any]:
    """The type of host buffers of this kind.

    Raises:
        ValueError: there is none (tokens, strings).
    """
    return np.dtype(kind.numpy_name)


def put(buffers: Sequence[np.ndarray], sharding: Sharding, devices: Sequence[Device]) -> Array:
    """An array of dense host buffers, one per device.

    A buffer that is aligned to ``ALIGNMENT_BYTES`` is used in place and must not change any more; others are copied.
    64-bit types stay 64 bits wide whatever JAX's configuration says.
    """
    aval = jax_core.ShapedArray(buffers[0].shape, buffers[0].dtype)
    if all(buffer is buffers[0] for buffer in buffers):
        return _jax.batched_device_put(aval, sharding, list(buffers), list(devices), True, False, _ZERO_COPY, True)
    # jaxlib looks at the sharding, which says that all shards are equal, and would put the first buffer everywhere.
    pieces = [
        _jax.batched_device_put(
            aval, single(device, sharding.memory_kind), [buffer], [device], True, False, _ZERO_COPY, True
        )
        for buffer, device in zip(buffers, devices, strict=True)
    ]
    return join(pieces, sharding)


def shards(array: Array) -> list[Array]:
    """An array's shards as arrays of one device each, in order. They share its memory.

    Raises:
        PjrtError: it was donated.
    """
    if array.is_deleted():
        raise PjrtError("INVALID_ARGUMENT: Array has been deleted or donated.")
    # Who is the first to ask makes them, one after another, and meanwhile others would see the list as it grows.
    with _shards_lock:
        return list(array._arrays)


def join(pieces: Sequence[Array], sharding: Sharding) -> Array:
    """An array of single-device arrays, in order, sharing their memory."""
    aval = jax_core.ShapedArray(pieces[0].shape, pieces[0].dtype)
    return _jax.ArrayImpl(aval, sharding, list(pieces), True, True)


def copy(array: Array, devices: DeviceList, sharding: Sharding) -> Array:
    """A copy, shard by shard, to other devices, memories or clients.

    Does not wait for ``array``'s computation; a program that is enqueued later may take over ``array``'s memory.
    """
    return _jax.batched_copy_array_to_devices_with_sharding([array], [devices], [sharding], [_ALWAYS_COPY])[0]


def adopt(shard: Array, device: Device) -> Array:
    """The same memory as an array of another client, in its default memory. Blocks until the shard is ready.

    Raises:
        PjrtError: this type of array cannot be shared between clients; ``copy`` can copy it.
    """
    # A client of GPUs puts what it does with the memory behind what is in this stream.
    stream = None if device.platform == "cpu" else device.get_stream_for_external_ready_events()
    return _jax.dlpack_managed_tensor_to_buffer(_jax.buffer_to_dlpack_managed_tensor(shard), device, stream)


def view(shard: Array) -> np.ndarray:
    """A shard's contents, row-major and dense. Blocks until it is ready.

    On CPU this is its memory itself; a program that would overwrite it copies as long as the view lives.

    Raises:
        PjrtError: what the computation failed with.
    """
    return np.ascontiguousarray(np.asarray(shard)).reshape(shard.shape)


def is_ready(array: Array) -> bool:
    """Whether all shards are computed (also when with a failure, or donated since): ``wait`` would not block."""
    return bool(array.is_deleted() or array.is_ready())


def wait(arrays: Sequence[Array]) -> None:
    """Block until all are computed. One that is donated, before or meanwhile, is nobody's concern any more.

    Raises:
        PjrtError: the first failure.
    """
    while True:
        kept = [array for array in arrays if not array.is_deleted()]
        try:
            _jax.batched_block_until_ready(kept)
            return
        except PjrtError:
            if not any(array.is_deleted() for array in kept):
                raise


def nbytes(array: Array) -> int:
    """Bytes on this host."""
    return 0 if array.is_deleted() else int(array.on_device_size_in_bytes())


def delete(array: Array) -> None:
    """Free its memory now, whoever still refers to it."""
    array.delete()


# Programs


def result_handler(shape: Shape, dtype: np.dtype[Any], sharding: Sharding) -> ResultHandler:
    """How ``execute`` wraps one output."""
    return _jax.array_result_handler(jax_core.ShapedArray(shape, dtype), sharding, committed=True, **_UNCHECKED)


def execute(
    executable: Executable, arguments: Sequence[Array], handlers: Sequence[ResultHandler], launch_id: int
) -> tuple[list[Array], Token]:
    """Enqueue one execution. Returns before it is done, except that a small program of one device runs in the call.

    Returns:
        Its outputs, and a token to wait for (``wait_token``), which works even when the outputs have been donated.

    Raises:
        PjrtError: it could not be enqueued.
    """
    results = executable.execute_sharded(arguments, with_tokens=True, launch_id=launch_id)
    token = results.consume_token()
    return results.consume_with_handlers(handlers), token


def wait_token(token: Token) -> None:
    """Block until an execution is over.

    Raises:
        PjrtError: it failed.
    """
    token.block_until_ready()


def compile_program(
    client: Client,
    program: bytes,
    devices: DeviceList,
    options: CompileOptions,
    callbacks: Sequence[Callable[..., Any]] = (),
) -> Executable:
    """Compile and load StableHLO (a VHLO artifact or MLIR bytecode).

    Args:
        callbacks: called by the program's callbacks, by their index, on threads of XLA. What they raise fails the
            execution, with its text.

    Raises:
        PjrtError: the program or an option is wrong, or does not fit. ValueError: it cannot be parsed.
    """
    if callbacks:
        # With callbacks jaxlib takes a module only.
        return client.compile_and_load(mlir.parse(program), devices, options, list(callbacks))
    return client.compile_and_load(program, devices, options)


def compile_only(client: Client, program: bytes, devices: DeviceList, options: CompileOptions) -> Executable:
    """Compile StableHLO for devices that are only described (``describe_tpu``); the result cannot be launched.

    Raises:
        PjrtError: the program or an option is wrong, or does not fit. ValueError: it cannot be parsed.
    """
    return client.compile(mlir.parse(program), devices, options)


def load_program(
    client: Client,
    serialized: bytes,
    devices: DeviceList,
    options: CompileOptions,
    callbacks: Sequence[Callable[..., Any]] = (),
) -> Executable:
    """Load what ``serialize`` gave on any member of a world like this one. ``callbacks``: see ``compile_program``.

    Raises:
        PjrtError: it is not such a thing, or of another version.
    """
    if callbacks:
        return client.deserialize_executable(serialized, devices, options, list(callbacks))
    return client.deserialize_executable(serialized, devices, options)


def serialize(executable: Executable) -> bytes:
    """A compiled program as bytes."""
    return bytes(executable.serialize())


#: What a client's XLA_FLAGS may say that means the same here.
_KEPT_DEBUG_OPTIONS = ("xla_backend_optimization_level", "xla_llvm_disable_expensive_passes")


def parse_compile_options(serialized: bytes) -> CompileOptions:
    """A ``CompileOptionsProto``. jaxlib reads as much of damaged bytes as it can, and says nothing; others parsed them.

    Raises:
        ValueError: jaxlib refuses them.
    """
    try:
        return xla_client.CompileOptions.ParseFromString(serialized)
    except PjrtError as failure:
        raise ValueError(f"not compile options: {failure}") from failure


def replace_debug_options(options: CompileOptions, without: CompileOptions) -> CompileOptions:
    """``without`` (the same options less the debug options) with those of our own XLA_FLAGS and the harmless ones of
    ``options``. A client's flags name files and passes of its own machine and would break a worker."""
    theirs = options.executable_build_options.debug_options
    ours = without.executable_build_options.debug_options
    for name in _KEPT_DEBUG_OPTIONS:
        setattr(ours, name, getattr(theirs, name))
    return without


def single_device_options(device: Device) -> CompileOptions:
    """Of a program on one device."""
    options = xla_client.CompileOptions()
    set_assignment(options, [[device.id]])
    return options


def allow_one_more_parameter(options: CompileOptions) -> None:
    """A program gets a parameter more, at the end; its sharding is not to be chosen by XLA."""
    build = options.executable_build_options
    allowed = list(build.allow_spmd_sharding_propagation_to_parameters)
    # One is for all parameters.
    if len(allowed) > 1:
        build.allow_spmd_sharding_propagation_to_parameters = [*allowed, False]


def serialized_assignment(options: CompileOptions) -> bytes | None:
    """The device assignment as a ``DeviceAssignmentProto``."""
    assignment = options.executable_build_options.device_assignment
    return None if assignment is None else bytes(assignment.serialize())


def set_assignment(options: CompileOptions, device_ids: Sequence[Sequence[int]]) -> None:
    """``device_ids[replica][partition]``."""
    assignment = xla_client.DeviceAssignment.create(np.array(device_ids, dtype=np.int64))
    options.executable_build_options.device_assignment = assignment


# What a compiled program says of itself


class Signature(NamedTuple):
    """Shapes and types of one device's shards, in order."""

    parameters: list[tuple[Shape, DType]]
    outputs: list[tuple[Shape, DType]]


def optimized_module(executable: Executable) -> Any:
    """The HLO module that XLA made."""
    return executable.hlo_modules()[0]


def module_bytes(module: Any) -> bytes:
    """A serialized ``HloModuleProto``."""
    return bytes(module.as_serialized_hlo_module_proto())


def signature(serialized_module: bytes) -> Signature:
    """What the program takes and gives per device."""
    shape = XlaComputation(serialized_module).program_shape()
    result = shape.result_shape()
    outputs = result.tuple_shapes() if result.is_tuple() else [result]
    return Signature([_shape(s) for s in shape.parameter_shapes()], [_shape(s) for s in outputs])


def _shape(shape: Any) -> tuple[Shape, DType]:
    if shape.is_token():
        return (), DType.TOKEN
    return tuple(shape.dimensions()), DTYPE_OF_NUMPY[shape.numpy_dtype().name]


def sharding_protos(shardings: Sequence[Any] | None) -> tuple[bytes, ...] | None:
    """Serialized ``OpSharding`` values."""
    return None if shardings is None else tuple(bytes(sharding.SerializeToString()) for sharding in shardings)


def minor_to_major(
    layouts: Sequence[Any], shards: Sequence[tuple[Shape, DType]], client: Client, device: Device
) -> tuple[tuple[int, ...], ...]:
    """Of PJRT's layouts of one device's shards, as clients of ours are told.

    They are told that every array lies row-major unless a program says otherwise. On TPU an array's default depends on
    its shape: what lies as its default does is row-major to them.
    """
    return tuple(
        _row_major(shape) if _is_default(layout, shape, kind, client, device) else _order(layout)
        for layout, (shape, kind) in zip(layouts, shards, strict=True)
    )


def _is_default(layout: Any, shape: Shape, kind: DType, client: Client, device: Device) -> bool:
    if client.platform != "tpu" or len(shape) < 2:
        return False
    return _order(layout) == _order(client.get_default_layout(dtype_of(kind), shape, device))


def _order(layout: Any) -> tuple[int, ...]:
    return tuple(int(dimension) for dimension in layout._xla_layout().minor_to_major())


def _row_major(shape: Shape) -> tuple[int, ...]:
    return tuple(reversed(range(len(shape))))


def output_memory_kinds(executable: Executable, num_outputs: int) -> tuple[str, ...]:
    """One name per output."""
    kinds = executable.get_output_memory_kinds()
    return tuple(kinds[0]) if kinds else ("device",) * num_outputs


def fingerprint(executable: Executable) -> bytes:
    """Equal for equal programs; empty if PJRT has none, as for what is not loaded."""
    return bytes(getattr(executable, "fingerprint", None) or b"")


def generated_code_bytes(executable: Executable) -> int:
    """The size of its machine code."""
    size = getattr(executable, "size_of_generated_code_in_bytes", None)
    # What is not loaded says it among the rest.
    return memory_stats(executable)["generated_code_size_in_bytes"] if size is None else int(size())


def memory_stats(executable: Executable) -> dict[str, int]:
    """By field name of ``CompiledMemoryStatsProto``."""
    stats = executable.get_compiled_memory_stats()
    names = [name for name in dir(stats) if name.endswith("_in_bytes")]
    return {name: int(getattr(stats, name)) for name in names}


def cost_analysis(executable: Executable) -> dict[str, float]:
    """What XLA thinks an execution costs; numbers only. Empty where the plugin does not say."""
    try:
        costs = executable.cost_analysis()
    except PjrtError as failure:
        if status_of(failure).code is not Code.UNIMPLEMENTED:
            raise
        return {}
    return {name: float(value) for name, value in costs.items() if isinstance(value, int | float)}


# Failures

_CODE = re.compile(r"^([A-Z_]+): ", re.ASCII)
#: What PJRT puts before the text of a failure that it passes on.
_WRAPPERS = re.compile(r"^(?:INTERNAL: )?(?:Error dispatching computation|Error preparing computation): ")

#: What jaxlib says when a forwarder raises (``worker.callbacks``): its own traceback, then the text with the client's.
_CALLBACK_FAILED = re.compile(
    r"(CpuCallback error calling callback): Traceback \(most recent call last\):\n"
    r".*?\n[\w.]*CallbackFailed: (?:INTERNAL: )?(.*)",
    re.ASCII | re.DOTALL,
)


def status_of(failure: BaseException) -> Status:
    """The first cause in what jaxlib raised: ``<CODE>: message``, without what PJRT wrapped around it.

    A ``StatusError`` says its own.
    """
    if isinstance(failure, StatusError):
        return failure.status
    text = str(failure)
    callback = _CALLBACK_FAILED.search(text)
    if callback is not None:
        text = callback[2] if callback[2].startswith("CANCELLED: ") else f"INTERNAL: {callback[1]}: {callback[2]}"
    while (unwrapped := _WRAPPERS.sub("", text, count=1)) != text:
        text = unwrapped
    match = _CODE.match(text)
    if match is not None and match[1] in Code.__members__ and match[1] != "OK":
        return Status(Code[match[1]], text[match.end() :])
    if not isinstance(failure, PjrtError):
        text = f"{type(failure).__name__}: {text}"
    return Status(Code.INTERNAL if isinstance(failure, PjrtError) else Code.UNKNOWN, text)
