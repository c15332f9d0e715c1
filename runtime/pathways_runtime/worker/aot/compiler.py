"""The compiler of a target, without the target's devices. Loads jaxlib: ``worker.environment`` comes before."""

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pathways_runtime.core.ids import DeviceId, WorldId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.worker import gpu, mlir, pjrt, programs
from pathways_runtime.worker.aot import gpus
from pathways_runtime.worker.aot.targets import Target
from pathways_runtime.worker.compile_cache import CompileCache, CompiledProgram
from pathways_runtime.worker.worlds import World

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """Of one compilation.

    Attributes:
        name: the module's; empty where the program could not even be read.
        key: of the entry in the compile cache; empty like the name.
        compiled: None if it failed, for ``failure``.
        took_s: what the compiler and the cache took.
    """

    name: str
    key: str
    compiled: CompiledProgram | None
    failure: Status | None
    is_from_cache: bool
    took_s: float


class Compiler:
    """Compiles as the workers of ``num_slices`` slices of a target would, and fills their cache. Thread-safe.

    A program gets what it would get there: the world of the slices that its devices are in. On CPU that is a client
    with that many devices in this process; for TPU and GPU, the compiler with a description of the slices.

    Args:
        cache: a folder, see ``compile_cache``.

    Raises:
        PjrtError: the compiler does not know the target, or is not there. ModuleNotFoundError: there is no libtpu.
    """

    def __init__(self, target: Target, num_slices: int, cache: Path) -> None:
        self._target = target
        self._cache = CompileCache(cache)
        self._lock = threading.Lock()
        self._clients: dict[int, tuple[pjrt.Client, Mapping[int, list[pjrt.Device]]]] = {}
        self._worlds: dict[tuple[int, ...], World] = {}
        client, by_rank = self._client(1)
        first = by_rank[0][0]
        self.platform_version = str(client.platform_version)
        self.device_kind = str(first.device_kind)
        devices = [device for rank in sorted(by_rank) for device in by_rank[rank]]
        torus = tuple((*device.coords, device.core_on_chip) for device in devices) if target.platform == "tpu" else ()
        self.topology = Topology(num_slices, target.hosts_per_slice, target.devices_per_host, target.platform, torus)

    def compile(self, devices: tuple[DeviceId, ...], program: bytes, options: bytes) -> Outcome:
        """Compile a program for ``devices``, or find it in the cache. Arguments as of ``programs.load``."""
        started_s = time.monotonic()
        name, key, compiled, failure, is_from_cache = "", "", None, None, False
        try:
            name = mlir.program_name(program)
            world = self._world(self.topology.slices_of(devices))
            prepared = programs.prepare(world, devices, program, options)
            key = prepared.key
            compiled = self._cache.load(key)
            is_from_cache = compiled is not None
            if compiled is None:
                compiled = self._compile(world, world.device(devices[0]), prepared)
                self._cache.store(key, compiled)
            failure = self._shortage(compiled)
        except pjrt.PjrtError as raised:
            failure = pjrt.status_of(raised)
        except Exception as raised:
            # Whatever a client's bytes bring about in parsers must end in an answer.
            logger.exception("program %r", name)
            failure = Status(Code.INVALID_ARGUMENT, f"{type(raised).__name__}: {raised}")
        if failure is not None:
            compiled = None
        return Outcome(name, key, compiled, failure, is_from_cache, time.monotonic() - started_s)

    def _compile(self, world: World, device: pjrt.Device, prepared: programs.Prepared) -> CompiledProgram:
        program, settings, physical = prepared.program, prepared.settings, prepared.physical
        if self._target.platform == "cpu":
            executable = pjrt.compile_program(world.client, program, physical, settings, prepared.forwarders)
        else:
            executable = pjrt.compile_only(world.client, program, physical, settings)
        return programs.describe(executable, program, world.client, device, int(prepared.is_gated))

    def _shortage(self, compiled: CompiledProgram) -> Status | None:
        """Why a program does not fit. libtpu refuses such programs itself; XLA's compiler for GPUs does not."""
        if self._target.platform != gpu.PLATFORM:
            return None
        needed_bytes, has_bytes = needed_memory(compiled.metadata.memory_stats), self._target.gpu.memory_bytes
        if needed_bytes <= has_bytes:
            return None
        return Status(
            Code.RESOURCE_EXHAUSTED,
            f"it needs {needed_bytes / (1 << 30):.1f} GiB, and {self.device_kind} has {has_bytes / (1 << 30):.1f} GiB",
        )

    def _world(self, slices: tuple[int, ...]) -> World:
        with self._lock:
            world = self._worlds.get(slices)
            if world is None:
                client, by_rank = self._client(len(slices))
                hosts = tuple(host for each in slices for host in self.topology.hosts_of_slice(each))
                world = self._worlds[slices] = World(WorldId(0), self.topology, hosts, 0, client, None, by_rank=by_rank)
            return world

    def _client(self, num_slices: int) -> tuple[pjrt.Client, Mapping[int, list[pjrt.Device]]]:
        """A client for so many slices, and its devices by host."""
        found = self._clients.get(num_slices)
        if found is None:
            target = self._target
            num_hosts = num_slices * target.hosts_per_slice
            if target.platform == "cpu":
                found = _cpu_client(num_hosts, target.devices_per_host)
            else:
                client = _described(target, num_slices)
                found = client, pjrt.devices_by_process(client)
            have = [len(devices) for devices in found[1].values()]
            if have != [target.devices_per_host] * num_hosts:
                raise pjrt.PjrtError(
                    f"INTERNAL: {target.name} was taken for {target.hosts_per_slice} hosts with "
                    f"{target.devices_per_host} devices; the compiler has {num_slices} slices with {have}"
                )
            self._clients[num_slices] = found
        return found


def needed_memory(stats: Mapping[str, int]) -> int:
    """Bytes of one device's memory while a program runs; ``stats`` as in ``ProgramMetadata``."""
    parts = [stats[f"{part}_size_in_bytes"] for part in ("argument", "output", "temp", "generated_code")]
    return sum(parts) - stats["alias_size_in_bytes"]


def _described(target: Target, num_slices: int) -> pjrt.Client:
    if target.platform == "tpu":
        return pjrt.describe_tpu(target.name, num_slices)
    return pjrt.describe_gpus(gpus.description(target.gpu), num_slices, target.hosts_per_slice, target.devices_per_host)


def _cpu_client(num_hosts: int, devices_per_host: int) -> tuple[pjrt.Client, Mapping[int, list[pjrt.Device]]]:
    client, _ = pjrt.make_cpu_client(num_hosts * devices_per_host, None)
    (devices,) = pjrt.devices_by_process(client).values()
    return client, {rank: devices[rank * devices_per_host : (rank + 1) * devices_per_host] for rank in range(num_hosts)}
