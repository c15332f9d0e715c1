"""What an executor's core wants done. A shell performs the instructions of one list in order."""

from typing import Any

import msgspec

from pathways_runtime.core.ids import Handle, HostIndex, OpId, SessionId, WaitId
from pathways_runtime.core.operations import ShardedResult
from pathways_runtime.core.sharding import Box
from pathways_runtime.core.status import Status
from pathways_runtime.core.worker.arrays import LocalArray, ShardRef
from pathways_runtime.core.worker.launches import PendingLaunch


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
        num_bytes: its size.
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


class ForgetTransfers(Instruction, frozen=True):
    """Drop what the data plane holds or expects for a session that is closed."""

    session: SessionId
