"""Programs: from a client's StableHLO and options to something that this host can launch."""

import functools
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.sharding import Shape
from pathways_runtime.core.worker.arrays import Program
from pathways_runtime.core.worker.usage import ProgramUsage, device_ranges
from pathways_runtime.wire.messages import ProgramMetadata
from pathways_runtime.worker import callbacks, gates, mlir, partitioning, pjrt, protobuf, threads
from pathways_runtime.worker.compile_cache import CompileCache, CompiledProgram, cache_key, cpu_features
from pathways_runtime.worker.shards import Shards
from pathways_runtime.worker.worlds import Placement, World

# Field numbers of XLA's protobufs: xla.CompileOptionsProto, xla.ExecutableBuildOptionsProto.
_OPTIONS_BUILD = 3
_BUILD_DEBUG = 3
# xla.DeviceAssignmentProto, its ComputationDevice.
_ASSIGNMENT_COMPUTATIONS = 3
_COMPUTATION_REPLICA_DEVICES = 1
# xla.HloModuleProto, xla.HloInputOutputAliasProto, its AliasEntryProto.
_MODULE_ALIAS = 8
_ALIAS_ENTRIES = 1
_ENTRY_PARAMETER = 2


#: The outputs, what tells of the end, and when PJRT was given it, on ``time.monotonic``.
Launched = tuple[tuple[Shards, ...], pjrt.Token, float]


class LoadedProgram:
    """An executable that is loaded here, with all that a launch needs. It changes in ``usage`` and ``last_launch_s``.

    Attributes:
        executable: PJRT's.
        world: where it runs.
        devices: this host's, in PJRT's order.
        is_whole_program: no other host has a part of it.
        handlers, placements: per output.
        parameters: (shape, kind) of one device's shard, per parameter.
        last_launch_s: how long PJRT took to take in the last execution. Programs of one device per host run inside that
            call unless XLA thinks them expensive.
        name, scope: what its use is accounted under; see ``ProgramUsage``.
        usage: its row, once it has been launched.
    """

    __slots__ = (
        "__weakref__",
        "devices",
        "executable",
        "handlers",
        "is_whole_program",
        "last_launch_s",
        "name",
        "parameters",
        "placements",
        "scope",
        "usage",
        "world",
    )

    def __init__(
        self, executable: pjrt.Executable, world: World, devices: Sequence[DeviceId], compiled: CompiledProgram
    ):
        self.executable = executable
        self.world = world
        self.name = compiled.metadata.name
        self.scope = device_ranges(devices)
        self.usage: ProgramUsage | None = None
        self.last_launch_s = 0.0
        by_physical = {world.device(device).id: device for device in devices}
        self.is_whole_program = len(executable.local_devices()) == len(set(devices))
        self.devices = tuple(by_physical[device.id] for device in executable.local_devices())
        self.parameters = compiled.parameters
        kinds = compiled.metadata.output_memory_kinds
        self.placements: list[Placement] = [world.placement(self.devices, kind) for kind in kinds]
        self.handlers = [
            pjrt.result_handler(shape, pjrt.dtype_of(DType(kind)), placement.sharding)
            for (shape, kind), placement in zip(compiled.outputs, self.placements, strict=True)
        ]

    def stand_in(self, position: int) -> pjrt.Array:
        """An argument of the right form and no meaning, for a launch whose results are failures anyway."""
        shape, kind = self.parameters[position]
        zeros = np.zeros(shape, pjrt.dtype_of(DType(kind)))
        placement = self.world.placement(self.devices, None)
        return pjrt.put([zeros] * len(self.devices), placement.sharding, placement.physical)

    def copied(self, array: pjrt.Array, original: Placement) -> pjrt.Array:
        """A copy of an argument that the program may take over."""
        placement = self.world.placement(self.devices, original.memory_kind)
        # What a program that spans hosts gave is an array over the devices of all of them to PJRT.
        local = pjrt.join(pjrt.shards(array), placement.sharding)
        return pjrt.copy(local, placement.device_list, placement.sharding)

    def launch(self, arguments: Sequence[pjrt.Array], launch_id: int) -> Launched:
        """Enqueue one execution; see ``pjrt.execute``."""
        started_s = time.monotonic()
        outputs, token = pjrt.execute(self.executable, arguments, self.handlers, launch_id)
        self.last_launch_s = time.monotonic() - started_s
        return tuple(map(Shards, outputs, self.placements)), token, started_s

    def as_program(self, donated: tuple[int, ...]) -> Program:
        """As the core sees it."""
        return Program(self.devices, donated, not self.is_whole_program, self)


class GatedProgram(LoadedProgram):
    """A program with callbacks that must not run inside its launch; its last parameter is a gate (``gates``).

    What a thread launches on one CPU device, other than what runs within the launch, PJRT runs one after another. So
    that what a callback waits for is not behind its program, each launch has a thread of its own. Programs that span
    hosts are left in line: out of order, their collectives would meet others.
    """

    __slots__ = ()

    def launch(self, arguments: Sequence[pjrt.Array], launch_id: int) -> Launched:
        """See ``LoadedProgram``."""
        if len(self.devices) > 1:
            # Other hosts have one device each.
            return super().launch([*arguments, self.stand_in(len(arguments))], launch_id)
        if self.is_whole_program:
            return threads.apart(self._launch_behind_gate, arguments, launch_id)
        return self._launch_behind_gate(arguments, launch_id)

    def _launch_behind_gate(self, arguments: Sequence[pjrt.Array], launch_id: int) -> Launched:
        held, open_gate = self.world.gate(self.devices[0]).shut()
        try:
            return super().launch([*arguments, held], launch_id)
        finally:
            open_gate()


class Loaded:
    """The outcome of ``load``."""

    __slots__ = ("compiled", "is_from_cache", "program")

    def __init__(self, program: Program, compiled: CompiledProgram, is_from_cache: bool) -> None:
        self.program = program
        self.compiled = compiled
        self.is_from_cache = is_from_cache


class Prepared(NamedTuple):
    """What is compiled, and the name of the result in the compile cache.

    Attributes:
        program: StableHLO, without what says whose callbacks it has.
        settings: compile options with the world's devices.
        physical: these devices.
        is_gated: ``program`` has a parameter more than the client's; see ``gates``.
    """

    program: bytes
    settings: pjrt.CompileOptions
    physical: pjrt.DeviceList
    forwarders: Sequence[callbacks.Forwarder]
    is_gated: bool
    key: str


def prepare(
    world: World,
    devices: tuple[DeviceId, ...],
    program: bytes,
    options: bytes,
    call: callbacks.Call = callbacks.nobody,
) -> Prepared:
    """Everything before the compiler; arguments as of ``load``.

    Raises:
        ValueError: the program or the options are not what they should be.
    """
    settings = worker_options(options, world, devices)
    calling = mlir.calling_program(program)
    forwarders: Sequence[callbacks.Forwarder] = ()
    if calling is not None:
        program = calling.program
        forwarders = callbacks.forwarders(call, *calling.functions)
    is_gated = calling is not None and world.needs_gate(devices)
    if is_gated:
        program = mlir.with_one_more_parameter(program, gates.SHAPE, gates.DTYPE)
        pjrt.allow_one_more_parameter(settings)
    rows = assignment(options, devices)
    flat = [device for row in rows for device in row]
    physical = pjrt.device_list(world.devices(flat))
    # PJRT's ids depend on how many processes share the devices. An executable does not, nor should its name.
    pjrt.set_assignment(settings, [[world.number(device) for device in row] for row in rows])
    key = cache_key(
        mlir.without_locations(program),
        settings.SerializeAsString(),
        _environment(pjrt.compiler_version(world.client), world.client.platform == "cpu"),
        world.hardware(flat),
    )
    pjrt.set_assignment(settings, _ids(world, rows))
    return Prepared(program, settings, physical, forwarders, is_gated, key)


def load(
    world: World,
    devices: tuple[DeviceId, ...],
    program: bytes,
    options: bytes,
    cache: CompileCache,
    call: callbacks.Call = callbacks.nobody,
) -> Loaded:
    """Load a program on ``devices`` from the cache, or compile it and fill the cache.

    Args:
        devices: virtual, every device of the program.
        options: the client's ``CompileOptionsProto``; device ids in it are virtual.
        call: makes the calls of the program's callbacks and of its compiler, should it have some.

    Raises:
        PjrtError: it does not compile. ValueError: the program or the options are not what they should be.
    """
    program, settings, physical, forwarders, is_gated, key = prepare(world, devices, program, options, call)
    compiled = cache.load(key)
    if compiled is not None:
        try:
            executable = pjrt.load_program(world.client, compiled.executable, physical, settings, forwarders)
        except pjrt.PjrtError:
            # What another build of jaxlib wrote, or a damaged entry with a good checksum: compile again.
            compiled = None
    is_from_cache = compiled is not None
    if compiled is None:
        with partitioning.asking(program, call) as asking_program:
            executable = pjrt.compile_program(world.client, asking_program, physical, settings, forwarders)
        compiled = describe(executable, program, world.client, world.device(devices[0]), int(is_gated))
        cache.store(key, compiled)
    make = GatedProgram if is_gated else LoadedProgram
    loaded = make(executable, world, devices, compiled)
    return Loaded(loaded.as_program(compiled.donated), compiled, is_from_cache)


@functools.cache
def _environment(compiler_version: str, is_for_this_processor: bool) -> str:
    """What compiled code depends on besides program, options and devices."""
    features = cpu_features() if is_for_this_processor else ""
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    return "\n".join([pjrt.jaxlib_version(), compiler_version, features, *flags])


def _ids(world: World, rows: list[list[DeviceId]]) -> list[list[int]]:
    return [[world.device(device).id for device in row] for row in rows]


def assignment(options: bytes, devices: tuple[DeviceId, ...]) -> list[list[DeviceId]]:
    """``[replica][partition]`` virtual devices, as the options say; else one replica over ``devices``.

    Where the options name other devices, ``devices`` stand in for them, one by one: a program of a slice that is down
    is compiled elsewhere, to learn what it gives.
    """
    serialized = pjrt.serialized_assignment(pjrt.parse_compile_options(options))
    if serialized is None:
        return [list(devices)]
    columns = []
    for computation in protobuf.fields(serialized):
        if computation.number == _ASSIGNMENT_COMPUTATIONS:
            assert isinstance(computation.value, bytes)
            replicas: list[DeviceId] = []
            for field in protobuf.fields(computation.value):
                if field.number == _COMPUTATION_REPLICA_DEVICES:
                    replicas += map(DeviceId, protobuf.ints(field.value))
            columns.append(replicas)
    rows = [list(row) for row in zip(*columns, strict=True)]
    named = [device for row in rows for device in row]
    if set(named) != set(devices):
        stand_ins = dict(zip(named, devices, strict=True))
        rows = [[stand_ins[device] for device in row] for row in rows]
    return rows


def worker_options(options: bytes, world: World, devices: tuple[DeviceId, ...]) -> pjrt.CompileOptions:
    """The client's compile options as they fit this world: its devices, and none of the client's debug options."""
    settings = pjrt.replace_debug_options(
        pjrt.parse_compile_options(options),
        pjrt.parse_compile_options(protobuf.without(options, _OPTIONS_BUILD, _BUILD_DEBUG)),
    )
    pjrt.set_assignment(settings, _ids(world, assignment(options, devices)))
    return settings


def describe(
    executable: pjrt.Executable,
    program: bytes,
    client: pjrt.Client,
    device: pjrt.Device,
    num_hidden_parameters: int = 0,
) -> CompiledProgram:
    """All that is to be known of a compiled program.

    Args:
        client, device: its client, and one of its devices.
        num_hidden_parameters: the last ones, of which the user's program does not know.
    """
    module = pjrt.optimized_module(executable)
    serialized = pjrt.module_bytes(module)
    signature = pjrt.signature(serialized)
    outputs = mlir.global_outputs(program)
    donated = donated_parameters(serialized)
    kinds = pjrt.output_memory_kinds(executable, len(outputs))
    shardings = executable.get_parameter_shardings()
    num_parameters = len(signature.parameters) - num_hidden_parameters
    metadata = ProgramMetadata(
        name=module.name,
        fingerprint=pjrt.fingerprint(executable),
        parameter_shardings=pjrt.sharding_protos(None if shardings is None else shardings[:num_parameters]),
        output_shardings=pjrt.sharding_protos(executable.get_output_shardings()),
        parameter_layouts=pjrt.minor_to_major(
            executable.get_parameter_layouts()[:num_parameters], signature.parameters[:num_parameters], client, device
        ),
        output_layouts=pjrt.minor_to_major(executable.get_output_layouts(), signature.outputs, client, device),
        output_memory_kinds=kinds,
        output_dtypes=tuple(int(kind) for _, kind in outputs),
        output_shapes=tuple(shape for shape, _ in outputs),
        donated_inputs=donated,
        memory_stats=pjrt.memory_stats(executable),
        generated_code_bytes=pjrt.generated_code_bytes(executable),
        cost_analysis=pjrt.cost_analysis(executable),
        text=module.to_string(),
    )
    return CompiledProgram(
        executable=pjrt.serialize(executable),
        metadata=metadata,
        parameters=_encoded(signature.parameters),
        outputs=_encoded(signature.outputs),
        donated=donated,
    )


def _encoded(shapes: Sequence[tuple[Shape, DType]]) -> tuple[tuple[Shape, int], ...]:
    return tuple((shape, int(kind)) for shape, kind in shapes)


def donated_parameters(module: bytes) -> tuple[int, ...]:
    """Parameters whose memory an output takes over, from a serialized ``HloModuleProto``."""
    found: set[int] = set()
    for alias in protobuf.fields(module):
        if alias.number == _MODULE_ALIAS:
            assert isinstance(alias.value, bytes)
            for entry in protobuf.fields(alias.value):
                if entry.number == _ALIAS_ENTRIES:
                    assert isinstance(entry.value, bytes)
                    numbers = {field.number: field.value for field in protobuf.fields(entry.value)}
                    parameter = numbers.get(_ENTRY_PARAMETER, 0)
                    assert isinstance(parameter, int)
                    found.add(parameter)
    return tuple(sorted(found))
