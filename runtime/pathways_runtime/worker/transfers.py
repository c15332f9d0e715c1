"""Transfers: ranges of shards copied within this host, sent to others, and put together from what arrives."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable

import numpy as np

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.sharding import box_shape
from pathways_runtime.core.status import Code, Status, StatusError
from pathways_runtime.core.worker.arrays import LocalArray, ShardRef, first_failure
from pathways_runtime.core.worker.events import ArrayFailed, ArrayMade, Event, PieceArrived, ReadTaken
from pathways_runtime.core.worker.instructions import (
    AssembleArray,
    ExpectPiece,
    Instruction,
    OutgoingPiece,
    Part,
    SendPieces,
)
from pathways_runtime.transport.dataplane import DataPlane, Payload
from pathways_runtime.worker import failures, pjrt
from pathways_runtime.worker.acknowledgements import Acknowledgements
from pathways_runtime.worker.buffers import HostArray, from_bytes, section, zeros
from pathways_runtime.worker.endings import Endings
from pathways_runtime.worker.shards import Shards, joined, migrate
from pathways_runtime.worker.strings import Strings, strings_of
from pathways_runtime.worker.threads import Pool, tell
from pathways_runtime.worker.worlds import Placement, World

logger = logging.getLogger(__name__)

#: Threads that wait for sources and copy ranges. They are made as needed.
_MAX_THREADS = 32

Instructions = list[Instruction]


class _NotAtOnce(Exception):
    """Why something failed is to be waited for, which the thread that performs instructions must not do."""


def newest_world_s(arrays: Iterable[LocalArray]) -> float:
    """When the newest world was formed in which one of these lies, on ``time.monotonic``; 0 if they lie in none."""
    values = [array.value for array in arrays]
    return max((value.placement.world.end.formed_s for value in values if isinstance(value, Shards)), default=0.0)


def value_of(array: LocalArray) -> Shards:
    """An array's shards.

    Raises:
        StatusError: it has failed.
    """
    value = array.value
    if value is None:
        raise StatusError(array.failure or Status(Code.INTERNAL, f"array {array.handle} is not there yet"))
    assert isinstance(value, Shards)
    return value


class Transfers:
    """Performs the core's instructions about transfers.

    Args:
        post: takes an event of another thread and performs what follows.
        take: takes an event and returns what follows, to the one who performs instructions now.
        home: the world in which arrays are made.
        endings: explain failures.
    """

    def __init__(
        self,
        data_plane: DataPlane,
        acknowledgements: Acknowledgements,
        post: Callable[[Event], None],
        take: Callable[[Event], Instructions],
        home: Callable[[], World],
        endings: Endings,
    ) -> None:
        self._data_plane = data_plane
        self._acknowledgements = acknowledgements
        self._post = post
        self._take = take
        self._home = home
        self._endings = endings
        self._threads = Pool("transfers", _MAX_THREADS)

    def close(self) -> None:
        """End threads; nothing more is performed."""
        self._threads.close()

    # Receiving

    def expect(self, instruction: ExpectPiece) -> None:
        """Perform ExpectPiece."""
        key = (instruction.session, instruction.op_id, instruction.move_index)
        arrived = functools.partial(tell, self._arrived, instruction)
        self._data_plane.expect(key, arrived, source=instruction.sender)

    def _arrived(self, instruction: ExpectPiece, payload: Payload) -> None:
        contents: HostArray | None = None
        failure: Status | None
        if payload.failure is not None:
            # The only thing that ends a data plane's payload is the loss of its sender.
            failure = Status(Code.DATA_LOSS, str(payload.failure))
        else:
            # Adopted at once: it may wait here for other pieces, and the sender must not wait with it.
            contents = payload.adopt(np.uint8, (-1,))
            try:
                failure = failures.decode(contents, instruction.num_bytes)
            except ValueError as mismatch:
                failure = Status(Code.INTERNAL, str(mismatch))
        move = (instruction.session, instruction.op_id, instruction.move_index)
        self._post(PieceArrived(*move, None if failure is not None else contents, failure))

    # Sending

    def send(self, instruction: SendPieces) -> Instructions | None:
        """Perform SendPieces: at once if all sources are ready, else on a thread."""
        sources = [piece.source.array.value for piece in instruction.pieces if piece.source is not None]
        if all(value is None or type(value) is Strings or pjrt.is_ready(value.array) for value in sources):
            with contextlib.suppress(_NotAtOnce):
                return self._take(self._send_now(instruction, may_wait=False))
        self._threads.submit(self._send_when_ready, instruction)
        return None

    def _send_when_ready(self, instruction: SendPieces) -> None:
        self._post(self._send_now(instruction, may_wait=True))

    def _send_now(self, instruction: SendPieces, *, may_wait: bool) -> Event:
        read = []
        outgoing = [self._outgoing(piece, may_wait) for piece in instruction.pieces]
        for piece, contents in zip(instruction.pieces, outgoing, strict=True):
            if piece.source is not None:
                read.append(piece.source.array)
            key = (instruction.session, instruction.op_id, piece.move_index)
            self._data_plane.send(piece.target, key, contents, functools.partial(_sent, key, contents))
        self._acknowledgements.transfer_started(instruction.session, instruction.op_id)
        self._acknowledgements.flush()
        return ReadTaken(tuple(read))

    def _outgoing(self, piece: OutgoingPiece, may_wait: bool) -> HostArray:
        """What is sent for a piece; blocks until its source is ready."""
        if piece.source is None:
            assert piece.failure is not None
            return failures.encode(piece.failure, piece.num_bytes)
        array = piece.source.array
        if isinstance(array.value, Strings):
            return array.value.shards[piece.source.position]
        try:
            contents = section(pjrt.view(value_of(array).shard(piece.source.position)), piece.source_box)
            return np.ascontiguousarray(contents)
        except StatusError as raised:
            return failures.encode(raised.status, piece.num_bytes)
        except pjrt.PjrtError as raised:
            return failures.encode(array.failure or self._why(raised, (array,), may_wait), piece.num_bytes)

    def _why(self, failure: Exception, arrays: Iterable[LocalArray], may_wait: bool) -> Status:
        """Why a value is not there that comes from these.

        Raises:
            _NotAtOnce: that is not known yet, and ``may_wait`` is False.
        """
        if isinstance(failure, StatusError):
            return failure.status
        status = pjrt.status_of(failure)
        if not may_wait and self._endings.may_explain(status):
            raise _NotAtOnce
        return self._endings.explain(status, newest_world_s(arrays))

    # Putting together

    def assemble(self, instruction: AssembleArray) -> Instructions | None:
        """Perform AssembleArray: at once if whole shards are moved, which PJRT does by itself; else on a thread."""
        if all(len(parts) == 1 and _is_whole(parts[0]) for parts in instruction.parts):
            with contextlib.suppress(_NotAtOnce):
                return self._take_all(self._assemble_now(instruction, may_wait=False))
        self._threads.submit(self._assemble_when_ready, instruction)
        return None

    def _assemble_when_ready(self, instruction: AssembleArray) -> None:
        for event in self._assemble_now(instruction, may_wait=True):
            self._post(event)

    def _take_all(self, events: list[Event]) -> Instructions:
        return [instruction for event in events for instruction in self._take(event)]

    def _assemble_now(self, instruction: AssembleArray, *, may_wait: bool) -> list[Event]:
        array, result = instruction.array, instruction.result
        sources = [part.source.array for parts in instruction.parts for part in parts if part.source is not None]
        made: Event
        if result.dtype is DType.STRING:
            return [ReadTaken(tuple(sources)), self._assemble_strings(instruction)]
        try:
            placement = self._home().placement(array.devices, result.memory_kind)
            pieces: list[pjrt.Array] = []
            shared: list[Shards] = []
            for position, parts in enumerate(instruction.parts):
                pieces.append(self._piece(instruction, parts, placement, position, shared))
            value = joined(pieces, placement)
            value.share_with(shared)
            made = ArrayMade(instruction.session, array, value)
        except (pjrt.PjrtError, ValueError, StatusError) as failure:
            status = first_failure(sources) or self._why(failure, sources, may_wait)
            made = ArrayFailed(instruction.session, instruction.op_id, array, status)
        return [ReadTaken(tuple(sources)), made]

    @staticmethod
    def _assemble_strings(instruction: AssembleArray) -> Event:
        array = instruction.array
        # Strings are moved by whole shards only.
        parts = [part for (part,) in instruction.parts]
        try:
            shards = [
                part.payload if part.source is None else strings_of(part.source.array).shards[part.source.position]
                for part in parts
            ]
        except StatusError as failure:
            return ArrayFailed(instruction.session, instruction.op_id, array, failure.status)
        return ArrayMade(instruction.session, array, Strings(array.devices, shards))

    def _piece(
        self,
        instruction: AssembleArray,
        parts: tuple[Part, ...],
        placement: Placement,
        position: int,
        shared: list[Shards],
    ) -> pjrt.Array:
        """One shard of the result; appends to ``shared`` whose memory it shares."""
        result = instruction.result
        if len(parts) == 1 and _is_whole(parts[0]):
            source = parts[0].source
            if source is None:
                return _put(from_bytes(parts[0].payload, result.dtype, result.shape), placement, position)
            value = value_of(source.array)
            return self._moved(value, source, placement, position, shared)
        memory = zeros(pjrt.dtype_of(result.dtype), result.shape)
        for part in parts:
            target = section(memory, part.target_box)
            if part.source is None:
                shape = result.shape if part.target_box is None else box_shape(part.target_box)
                target[...] = from_bytes(part.payload, result.dtype, shape)
            else:
                shard = value_of(part.source.array).shard(part.source.position)
                target[...] = section(pjrt.view(shard), part.source_box)
        return _put(memory, placement, position)

    @staticmethod
    def _moved(value: Shards, source: ShardRef, target: Placement, position: int, shared: list[Shards]) -> pjrt.Array:
        """A whole shard of this host on another device, in another memory, or shared where it lies."""
        shard = value.shard(source.position)
        is_there = value.placement.devices[source.position] == target.devices[position]
        if is_there and value.placement.memory_kind == target.memory_kind:
            shared.append(value)
            return shard if value.placement.world is target.world else migrate(shard, target, position)
        return pjrt.copy(shard, target.single_lists[position], target.singles[position])


def _is_whole(part: Part) -> bool:
    return part.source_box is None and part.target_box is None


def _put(contents: HostArray, placement: Placement, position: int) -> pjrt.Array:
    return pjrt.put([contents], placement.singles[position], [placement.physical[position]])


def _sent(key: tuple[int, int, int], contents: HostArray, failure: Exception | None) -> None:
    """``contents`` is kept alive by being bound to this call until it comes."""
    if failure is not None:
        # The other end sees the loss of the connection itself.
        logger.info("move %s of %d bytes was not sent: %s", key, contents.nbytes, failure)
