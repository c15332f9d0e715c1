"""What an executor's core remembers of one session."""

from collections import deque
from typing import Any

from pathways_runtime.core.ids import Handle, OpId, SessionId
from pathways_runtime.core.operations import (
    Alias,
    Await,
    CallFunction,
    Fetch,
    Move,
    ShardedResult,
    Transfer,
    WriteArrays,
)
from pathways_runtime.core.worker.arrays import LocalArray, Program, ShardRef


class WaitingOperation:
    """What goes on when arrays here are settled: an Await, a Fetch, a result of an Alias, what a Transfer sends, what a
    WriteArrays writes, a call.

    Attributes:
        arrays: what it needs, resolved when it was received.
        subject: what is made, sent or written.
    """

    __slots__ = ("arrays", "missing", "operation", "received_ns", "session", "subject")

    def __init__(
        self,
        session: "Session",
        operation: Alias | Await | Fetch | Transfer | WriteArrays | CallFunction,
        arrays: tuple[LocalArray, ...],
        received_ns: int,
        subject: Any = None,
    ) -> None:
        self.session = session
        self.operation = operation
        self.arrays = arrays
        self.received_ns = received_ns
        self.subject = subject
        self.missing = 0


class AliasSubject:
    """The result of an Alias and the shards that it takes."""

    __slots__ = ("array", "result", "sources")

    def __init__(self, array: LocalArray, result: ShardedResult, sources: tuple[ShardRef, ...]) -> None:
        self.array = array
        self.result = result
        self.sources = sources


class BufferAssembly:
    """A result of MakeArrays whose host buffers are arriving; ``indices`` per device of ``array``."""

    __slots__ = ("array", "indices", "missing", "op_id", "payloads", "received_ns", "result")

    def __init__(
        self, op_id: OpId, array: LocalArray, result: ShardedResult, indices: tuple[int, ...], received_ns: int
    ) -> None:
        self.op_id = op_id
        self.array = array
        self.result = result
        self.indices = indices
        self.received_ns = received_ns
        self.payloads: dict[int, Any] = {}
        self.missing = len(set(indices))


class MovedPart:
    """A move into an assembly: from a shard here (``source``) or from another host (``payload`` once it is there)."""

    __slots__ = ("move", "move_index", "payload", "source")

    def __init__(self, move_index: int, move: Move, source: ShardRef | None) -> None:
        self.move_index = move_index
        self.move = move
        self.source = source
        self.payload: Any = None


class TransferAssembly:
    """A result of a Transfer whose ranges are arriving; ``parts`` per device of ``array``."""

    __slots__ = ("array", "missing", "op_id", "parts", "received_ns", "result", "session")

    def __init__(
        self,
        session: "Session",
        op_id: OpId,
        array: LocalArray,
        result: ShardedResult,
        parts: tuple[list[MovedPart], ...],
        received_ns: int,
    ) -> None:
        self.session = session
        self.op_id = op_id
        self.array = array
        self.result = result
        self.parts = parts
        self.received_ns = received_ns
        self.missing = 0

    def sources(self) -> list[LocalArray]:
        """The arrays here that it reads, one entry for each part."""
        return [part.source.array for parts in self.parts for part in parts if part.source is not None]


class Session:
    """One session's stores.

    Attributes:
        arrays, programs: by handle; what later operations may name.
        early_buffers: host buffers that came before their MakeArrays, by (op id, index).
        wanted_buffers: who waits for a host buffer; never a key of ``early_buffers``.
        wanted_pieces: which part of what waits for a move from another host, by (op id, move index).
        is_closed: what waits goes on no more.
        waiting: operations that wait for arrays.
        calls: of functions, that have not begun, by stream; see ``core.worker.calls``.
        forgotten: functions that nobody names any more, each with the calls that must begin before it goes.
    """

    __slots__ = (
        "arrays",
        "calls",
        "early_buffers",
        "forgotten",
        "id",
        "is_closed",
        "programs",
        "waiting",
        "wanted_buffers",
        "wanted_pieces",
    )

    def __init__(self, session: SessionId) -> None:
        self.id = session
        self.is_closed = False
        self.arrays: dict[Handle, LocalArray] = {}
        self.programs: dict[Handle, Program] = {}
        self.early_buffers: dict[tuple[OpId, int], Any] = {}
        self.wanted_buffers: dict[tuple[OpId, int], list[BufferAssembly]] = {}
        self.wanted_pieces: dict[tuple[OpId, int], tuple[TransferAssembly, MovedPart]] = {}
        self.waiting: set[WaitingOperation] = set()
        self.calls: dict[int, deque[WaitingOperation]] = {}
        self.forgotten: list[tuple[Program, set[WaitingOperation]]] = []
