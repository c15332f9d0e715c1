"""Operations: what a session asks of workers, in the one order that the controller decides.

An operation is one value for all the hosts that take part in it: it is encoded once by the proxy, passed on by the
controller without being decoded, and each worker finds its own part in it. Handles are of the operation's session.

Contract of the order. Every worker receives operations with increasing ``Seq`` and *starts* them in that order; of two
operations that share a worker, the same one comes first on each worker that they share. An operation is given a ``Seq``
only when every producer of its inputs has one, so waiting for an input always waits for something earlier: no cycle.
"""

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, OpId, WaitId
from pathways_runtime.core.sharding import Box, Shape
from pathways_runtime.core.status import Status
from pathways_runtime.core.stored import StoredArray

#: Memories of hosts: what operations copy there outlives executors. ``None`` and all others are a device's.
HOST_MEMORY_KINDS = frozenset({"pinned_host", "unpinned_host"})


class Launch(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Run a loaded executable on its devices: one execution of a gang.

    Attributes:
        executable: a handle that every host of it has reported as loaded.
        arguments: arrays whose devices are the executable's, in its parameter order.
        results: handles of its outputs, in order.
        non_donatable: argument positions that must survive although the program would donate them.
    """

    op_id: OpId
    executable: Handle
    arguments: tuple[Handle, ...]
    results: tuple[Handle, ...]
    non_donatable: tuple[int, ...] = ()


class ShardedResult(msgspec.Struct, frozen=True, array_like=True):
    """An array that an operation other than Launch brings about.

    Attributes:
        handle: its name from now on.
        shape: of one shard (all shards of an array have the same, padding included), in elements.
        memory_kind: where its shards lie; None for the device's default memory.
        devices: in shard order.
    """

    handle: Handle
    dtype: DType
    shape: Shape
    memory_kind: str | None
    devices: tuple[DeviceId, ...]


class MakeArrays(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Make arrays from host buffers that the session's proxy sends straight to the workers.

    Attributes:
        results: the arrays.
        buffers: per result and shard, the index of the buffer (see ``HostBuffer`` in wire.links) that holds its
            bytes, row-major and dense. A buffer that several shards share crosses to each host once.
    """

    op_id: OpId
    results: tuple[ShardedResult, ...]
    buffers: tuple[tuple[int, ...], ...]


class Alias(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Make arrays out of shards that are where they should be: no bytes move.

    Serves DisassembleIntoSingleDeviceArrays, AssembleArrayFromSingleDeviceArrays, RemapArrays, FullyReplicatedShard,
    and copies that may reuse their input.

    Attributes:
        results: the arrays.
        sources: per result and shard, the array whose shard on the same device is taken.
    """

    op_id: OpId
    results: tuple[ShardedResult, ...]
    sources: tuple[tuple[Handle, ...], ...]


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One range copied from shard to shard.

    Attributes:
        source, source_device: the shard that is read.
        result_index, target_device: the shard that is written, of ``Transfer.results[result_index]``.
        source_box, target_box: the range in the coordinates of either shard, of equal extent; None for all of the
            shard.
    """

    source: Handle
    source_device: DeviceId
    result_index: int
    target_device: DeviceId
    source_box: Box | None = None
    target_box: Box | None = None


class Transfer(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Make arrays by copying ranges between devices, hosts and memories: CopyArrays, ReshardArrays.

    A move between hosts is known to both ends as ``(session, op_id, index in moves)``. Elements of a result that no
    move covers are padding and have no defined value.
    """

    op_id: OpId
    results: tuple[ShardedResult, ...]
    moves: tuple[Move, ...]


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Forget arrays. Operations before this one still read them."""

    op_id: OpId
    handles: tuple[Handle, ...]


class Await(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Tell the proxy (``wire.links.ArraysReady``) when this host's shards of all these arrays are ready, or why not."""

    op_id: OpId
    wait_id: WaitId
    handles: tuple[Handle, ...]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Send one shard to the proxy (``wire.links.Fetched``), row-major and dense, once it is ready."""

    op_id: OpId
    wait_id: WaitId
    handle: Handle
    device: DeviceId


class DeleteExecutable(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Forget a loaded executable. Launches before this one still run it; a host that has not loaded it does nothing."""

    op_id: OpId
    executable: Handle


class Poison(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Make arrays that only carry an error, so that what depends on them on a worker inherits it."""

    op_id: OpId
    handles: tuple[Handle, ...]
    status: Status


#: What a function of colocated Python has in the place of compile options.
FUNCTION_OPTIONS = b"slurm_pathways.colocated_python"


class CallFunction(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Call a function of colocated Python, on each host of it, in the Python process there.

    Counts as a transfer that every host of it sends: a host says that it has started when the call has ended there.

    Attributes:
        executable: a handle that every host of it has reported as loaded.
        arguments: arrays in the function's order; a host may have no shards of one.
        results: what it gives.
        stream: calls of one stream are made one after another on each host; those of several may overlap.
    """

    op_id: OpId
    executable: Handle
    arguments: tuple[Handle, ...]
    results: tuple[ShardedResult, ...]
    stream: int


class StartTrace(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Begin to record what the host's executor does; told like an Await. A trace that the session has begun before is
    dropped.

    Attributes:
        host_tracer_level, python_tracer_level: as of ``jax.profiler.ProfileOptions``.
    """

    op_id: OpId
    wait_id: WaitId
    host_tracer_level: int
    python_tracer_level: int


class StopTrace(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """End the trace, and write it to ``<folder>/plugins/profile/<run>/``; told like an Await.

    An empty ``folder`` ends it only: it is kept for a StopTrace that writes it, until another one begins.
    """

    op_id: OpId
    wait_id: WaitId
    folder: str
    run: str


class WriteArrays(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """Write arrays to files, each host a part of what it holds; told like an Await once they are on the disk.

    Attributes:
        handles: the arrays. targets: where each goes, and how it lies now.
        timeout_s: no further file is begun after that.
    """

    op_id: OpId
    wait_id: WaitId
    handles: tuple[Handle, ...]
    targets: tuple[StoredArray, ...]
    timeout_s: float


class ReadArrays(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """Make arrays from files, each host the shards that it holds.

    Attributes:
        results: the arrays. sources: where each comes from, and how it is to lie.
        timeout_s: no further file is begun after that.
    """

    op_id: OpId
    results: tuple[ShardedResult, ...]
    sources: tuple[StoredArray, ...]
    timeout_s: float


Operation = (
    Launch
    | MakeArrays
    | Alias
    | Transfer
    | Delete
    | Await
    | Fetch
    | DeleteExecutable
    | Poison
    | CallFunction
    | StartTrace
    | StopTrace
    | WriteArrays
    | ReadArrays
)
