"""What a plugin program asks for, as values; see ``plugins``. Decoded by ``wire.ifrt.plugins``."""

from typing import Any

import msgspec

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.session.requests import Request
from pathways_runtime.core.sharding import Sharding
from pathways_runtime.core.stored import StoredArray


class Trace(msgspec.Struct, frozen=True):
    """Record what the hosts do: the first execution begins, the second ends and writes.

    Attributes:
        folder: the trace is written to ``<folder>/plugins/profile/<run>/``.
        max_hosts: record no more than so many; 0 for all.
        host_tracer_level, python_tracer_level: as of ``jax.profiler.ProfileOptions``.
        gives_array: each execution is answered with an array of one element, which nobody looks at.
    """

    folder: str
    run: str
    max_hosts: int
    host_tracer_level: int
    python_tracer_level: int
    gives_array: bool


class HostTrace(msgspec.Struct, frozen=True):
    """Begin or end such a record beside one of the client's process; does nothing while one of ``Trace`` goes on.

    Attributes:
        starts: whether it begins; levels and ``max_hosts`` matter then, else ``folder`` and ``run``.
        folder: empty to end it only; it may be written later.
    """

    starts: bool
    folder: str
    run: str
    max_hosts: int
    host_tracer_level: int
    python_tracer_level: int


class Write(msgspec.Struct, frozen=True):
    """Write the arguments to files."""

    targets: tuple[StoredArray, ...]
    timeout_s: float


class Read(msgspec.Struct, frozen=True):
    """Arrays from files."""

    sources: tuple[StoredArray, ...]
    timeout_s: float


class Reshard(msgspec.Struct, frozen=True):
    """The arguments, which lie as ``sources`` say, laid out as ``targets`` say."""

    sources: tuple[Sharding, ...]
    targets: tuple[Sharding, ...]
    donates: bool


Plugin = Trace | HostTrace | Write | Read | Reshard


class CompilePlugin(Request, frozen=True):
    """Compile a plugin program. Answer: Compiled.

    Attributes:
        devices: whose arrays it takes and gives; empty for all.
        text: the program as the client wrote it.
        metadata: what LoadedExecutableMetadata is answered with.
    """

    plugin: Plugin
    name: str
    devices: tuple[DeviceId, ...]
    text: str
    metadata: Any
