"""What an executor's core wants done. A shell performs the instructions of one list in order."""

from typing import Any

import msgspec

from pathways_runtime.core.ids import Handle, HostIndex, OpId, SessionId, WaitId
from pathways_runtime.core.operations import ShardedResult
from pathways_runtime.core.sharding import Box
from pathways_runtime.core.status import Status
from pathways_runtime.core.stored import StoredArray, TileIndex
from pathways_runtime.core.worker.arrays import LocalArray, Program, ShardRef
from pathways_runtime.core.worker.launches import PendingLaunch

#: Of a piece of which only the sender knows how many bytes it has.
ANY_SIZE = -1


class Instruction(msgspec.Struct, frozen=True):
    """Base of all instructions."""


class EnqueueLaunch(Instruction, frozen=True):
    """Give a launch to PJRT; answer with LaunchEnqueued or LaunchFailed. At most one is outstanding, so launches are
    enqueued one after the other, in order, whichever thread performs them. The shell counts it as completed when it is.

    Attributes:
        copied: argument positions of which the program gets a copy (it would overwrite them).
        absent: argument positions that have failed. Other hosts take part in the launch, so it must be enqueued all the
            same; these arguments are stand-ins of any content, and the results will be failures.
    """

    launch: PendingLaunch
    copied: tuple[int, ...]
    absent: tuple[int, ...]


class CountLaunch(Instruction, frozen=True):
    """A launch is over without having been enqueued: acknowledge it as completed."""


class MakeArray(Instruction, frozen=True):
    """Make an array of host buffers, one per device of ``array``; answer with ArrayMade or ArrayFailed."""

    session: SessionId
    op_id: OpId
    array: LocalArray
    result: ShardedResult
    payloads: tuple[Any, ...]


class ShareShards(Instruction, frozen=True):
    """Make an array of shards that are here, without a copy; one source per device.

    Answer as for MakeArray, and with ReadTaken for every source.
    """

    session: SessionId
    op_id: OpId
    array: LocalArray
    result: ShardedResult
    sources: tuple[ShardRef, ...]


class RetainArray(Instruction, frozen=True):
    """Copy an array to memory that outlives this executor, once it is computed; answer with ArrayCopied, if it is."""

    session: SessionId
    array: LocalArray


class RecordArray(Instruction, frozen=True):
    """The next executor is to have the array. ``copy`` is that of ArrayCopied."""

    session: SessionId
    array: LocalArray
    copy: Any


class DropArray(Instruction, frozen=True):
    """The next executor is not to have the array that a RecordArray was about. Either may be performed first."""

    session: SessionId
    handle: Handle


class MakeCall(Instruction, frozen=True):
    """Call a function in the session's Python process; answer with CallReturned, and ReadTaken for every argument that
    has shards here. Calls of one stream are made one after another, in the order of these instructions.

    Attributes:
        arguments: None for one without shards here.
        handles: of all results of the function, in order.
        results: those with shards here, with what they are like.
    """

    session: SessionId
    op_id: OpId
    program: Program
    stream: int
    arguments: tuple[LocalArray | None, ...]
    handles: tuple[Handle, ...]
    results: tuple[tuple[LocalArray, ShardedResult], ...]


class CountCall(Instruction, frozen=True):
    """Tell the controller that a call is over here."""

    session: SessionId
    op_id: OpId


class ForgetFunction(Instruction, frozen=True):
    """The session's Python process needs a function no more. It lets go of it when calls that it was asked for before
    have ended; if all have, later calls begin after that."""

    session: SessionId
    program: Program


class Part(msgspec.Struct, frozen=True):
    """A range of a shard and where it comes from: ``source`` here, or ``payload`` from another host.

    Boxes are None for the whole shard. A payload holds exactly the source box.
    """

    source: ShardRef | None
    payload: Any
    source_box: Box | None
    target_box: Box | None


class AssembleArray(Instruction, frozen=True):
    """Make an array of copied ranges; ``parts`` per device of ``array``.

    Answer as for MakeArray, and with ReadTaken for every part that has a source.
    """

    session: SessionId
    op_id: OpId
    array: LocalArray
    result: ShardedResult
    parts: tuple[tuple[Part, ...], ...]


class ExpectPiece(Instruction, frozen=True):
    """Take a move of a transfer from the data plane; PieceArrived tells.

    Attributes:
        sender: the host that sends it.
        num_bytes: its size, or ``ANY_SIZE``.
    """

    session: SessionId
    op_id: OpId
    move_index: int
    sender: HostIndex
    num_bytes: int


class OutgoingPiece(msgspec.Struct, frozen=True):
    """A range for another host, or why it cannot have it; ``num_bytes`` is the size that the other host expects."""

    move_index: int
    target: HostIndex
    num_bytes: int
    source: ShardRef | None
    source_box: Box | None
    failure: Status | None


class SendPieces(Instruction, frozen=True):
    """Wait until the sources are ready, say ``transfers_started``, send. ReadTaken for every piece with a source."""

    session: SessionId
    op_id: OpId
    pieces: tuple[OutgoingPiece, ...]


class AwaitReady(Instruction, frozen=True):
    """Tell the proxy when all of these are ready, or the first failure. One that was donated since is no failure."""

    session: SessionId
    wait_id: WaitId
    arrays: tuple[LocalArray, ...]


class AnswerAwait(Instruction, frozen=True):
    """Tell the proxy at once."""

    session: SessionId
    wait_id: WaitId
    failure: Status | None


class SendValue(Instruction, frozen=True):
    """Send a shard to the proxy once it is ready, or its failure. ReadTaken for the array."""

    session: SessionId
    wait_id: WaitId
    source: ShardRef


class AnswerFetch(Instruction, frozen=True):
    """Tell the proxy at once that there is nothing to fetch."""

    session: SessionId
    wait_id: WaitId
    failure: Status


class Report(Instruction, frozen=True):
    """Tell the controller that an operation failed and what carries its failure."""

    session: SessionId
    op_id: OpId
    handles: tuple[Handle, ...]
    failure: Status


class BeginTrace(Instruction, frozen=True):
    """Begin a trace of this process, and tell the proxy as of an Await."""

    session: SessionId
    wait_id: WaitId
    host_tracer_level: int
    python_tracer_level: int


class EndTrace(Instruction, frozen=True):
    """End the session's trace, write it, and tell the proxy as of an Await."""

    session: SessionId
    wait_id: WaitId
    folder: str
    run: str


class Tile(msgspec.Struct, frozen=True):
    """A part of an array to be written.

    Attributes:
        is_first: of its array; who writes this one says how the array lies, too.
        source: the shard that holds it; None if the array has no element, so that there is no part.
    """

    target: StoredArray
    index: TileIndex
    is_first: bool
    source: ShardRef | None


class StoreTiles(Instruction, frozen=True):
    """Write tiles to files, and tell the proxy as of an Await when they are on the disk. ReadTaken for ``arrays``.

    Attributes:
        arrays: of ``tiles``, one entry for each that has a source.
        timeout_s: no further tile is begun after that.
    """

    session: SessionId
    wait_id: WaitId
    tiles: tuple[Tile, ...]
    arrays: tuple[LocalArray, ...]
    timeout_s: float


class LoadArray(Instruction, frozen=True):
    """Make an array of what is in files; answer as for MakeArray.

    Attributes:
        boxes: per device of ``array``, the part of the whole array that its shard holds.
        timeout_s: no further part is begun after that.
    """

    session: SessionId
    op_id: OpId
    array: LocalArray
    result: ShardedResult
    source: StoredArray
    boxes: tuple[Box, ...]
    timeout_s: float


class ForgetTransfers(Instruction, frozen=True):
    """Drop what the data plane holds or expects for a session that is closed, and its trace."""

    session: SessionId
