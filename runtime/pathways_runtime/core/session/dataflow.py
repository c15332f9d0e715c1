"""A session's state, and the one way in which operations leave it: with handles, hosts, and what orders them."""

from collections.abc import Iterable, Mapping

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import SERVER_HANDLES_START, Handle, HostIndex, OpId, RequestId, SessionId
from pathways_runtime.core.operations import Delete, Operation, ShardedResult
from pathways_runtime.core.session.arrays import ArrayRecord, ArrayTable, Placement, PlacementTable, Storage
from pathways_runtime.core.session.executables import ExecutableTable
from pathways_runtime.core.session.instructions import Instruction, Respond, RespondError, SubmitOperation
from pathways_runtime.core.session.responses import Response
from pathways_runtime.core.session.waits import Wait, WaitTable
from pathways_runtime.core.sharding import Shape
from pathways_runtime.core.status import Status
from pathways_runtime.core.topology import Topology


class ExecutionOutcome(msgspec.Struct):
    """How an execution went, kept until LoadedExecutableFetchExecuteResult asks.

    Attributes:
        op_id: the launch; 0 if the execution failed before there was one.
        wait: while it is not known.
    """

    op_id: OpId
    wait: Wait | None
    failure: Status | None


class Tracing(msgspec.Struct, frozen=True):
    """A trace that was begun on some hosts, by an executable or, 0, beside the client's own."""

    executable: Handle
    hosts: tuple[HostIndex, ...]


class SessionState:
    """What the handlers of one session share. They read and write it, and append to ``out`` what is to be done."""

    def __init__(self, session: SessionId, topology: Topology, losses: Mapping[HostIndex, Status]) -> None:
        self.session = session
        self.topology = topology
        self.placements = PlacementTable(topology, losses)
        self.arrays = ArrayTable()
        self.executables = ExecutableTable()
        self.waits = WaitTable()
        #: Futures that the client has not asked yet: all are done when they are minted. None is success.
        self.futures: dict[Handle, Status | None] = {}
        #: By status handle.
        self.outcomes: dict[Handle, ExecutionOutcome] = {}
        #: The trace of the hosts that goes on, see ``plugins``.
        self.tracing: Tracing | None = None
        #: Arrays that are poisoned because hosts are lost in whose memory they may still be: which hosts.
        self.away: dict[Handle, set[HostIndex]] = {}
        self.out: list[Instruction] = []
        self._last_op = 0
        self._next_handle: int = SERVER_HANDLES_START

    def mint(self) -> Handle:
        """A handle that no client mints."""
        handle = self._next_handle
        self._next_handle = handle + 1
        return Handle(handle)

    def mint_unless_given(self, given: tuple[Handle, ...], count: int) -> tuple[Handle, ...]:
        """The client's result handles, or new ones if it gives none."""
        return given or tuple(self.mint() for _ in range(count))

    def next_op(self) -> OpId:
        """The id of the operation that is made next. Every one is submitted, in order."""
        self._last_op += 1
        return OpId(self._last_op)

    @property
    def last_op(self) -> OpId:
        """The id of the latest operation; 0 before the first."""
        return OpId(self._last_op)

    def respond(self, request_id: RequestId, response: Response) -> None:
        """Answer a request."""
        self.out.append(Respond(request_id, response))

    def respond_error(self, request_id: RequestId, status: Status) -> None:
        """Answer a request with a failure."""
        self.out.append(RespondError(request_id, status))

    def new_array(self, handle: Handle, dtype: DType, shape: Shape, placement: Placement) -> ArrayRecord:
        """Record an array that an operation about to be submitted makes on all its hosts."""
        record = ArrayRecord(dtype, shape, placement, placement.hosts)
        self.arrays.records[handle] = record
        return record

    def new_poisoned(self, handle: Handle, dtype: DType, shape: Shape, placement: Placement, cause: Status) -> None:
        """Record an array that fails before anything is asked of workers."""
        self.arrays.records[handle] = ArrayRecord(dtype, shape, placement, (), cause)

    def share(self, record: ArrayRecord, sources: Iterable[Handle]) -> None:
        """Note that a new array names shards of live arrays; see Storage."""
        storages: dict[Storage, None] = {}
        for handle in sources:
            source = self.arrays.records[handle]
            if source.storages is None:
                source.sharing((Storage(self.mint(), handle),))
            assert source.storages is not None
            storages.update(dict.fromkeys(source.storages))
        record.sharing(tuple(storages))

    def submit(
        self,
        operation: Operation,
        hosts: tuple[HostIndex, ...],
        *,
        reads: tuple[Handle, ...] = (),
        writes: tuple[Handle, ...] = (),
        consumes: tuple[Handle, ...] = (),
    ) -> None:
        """Submit an operation that is neither a launch nor a transfer."""
        self.out.append(SubmitOperation(operation, hosts, reads=reads, writes=writes, consumes=consumes))

    def order_reads(self, handles: tuple[Handle, ...], records: Iterable[ArrayRecord]) -> tuple[Handle, ...]:
        """The handles to name in ``reads``: the arrays, and the tokens of what they share."""
        tokens: dict[Handle, None] = {}
        for record in records:
            if record.storages is not None:
                tokens.update(dict.fromkeys(storage.token for storage in record.storages))
        return (*handles, *tokens) if tokens else handles

    def free(self, handles: Iterable[Handle]) -> None:
        """Make workers forget arrays, one Delete per set of hosts. The records stay, with nothing on workers."""
        records = self.arrays.records
        # Host tuples are interned: by identity, as hashing one costs as much as it is long.
        groups: dict[int, tuple[tuple[HostIndex, ...], list[Handle]]] = {}
        for handle in handles:
            record = records[handle]
            hosts = record.hosts
            if self.away and handle in self.away:
                self.give_up(handle)
            elif hosts:
                group = groups.get(id(hosts))
                if group is None:
                    groups[id(hosts)] = (hosts, [handle])
                else:
                    group[1].append(handle)
                record.leave_workers()
        for hosts, freed in groups.values():
            self.submit_delete(tuple(freed), hosts)

    def give_up(self, handle: Handle) -> None:
        """An array that was away is of no use any more: free the shards that are on hosts that are there.

        A host that comes back with a shard is told then (see ``core.session.core``).
        """
        del self.away[handle]
        record = self.arrays.records[handle]
        present = tuple(host for host in record.hosts if host not in self.placements.losses)
        record.leave_workers()
        if present:
            self.submit_delete((handle,), present)

    def submit_delete(self, handles: tuple[Handle, ...], hosts: tuple[HostIndex, ...]) -> None:
        """Make ``hosts`` forget arrays."""
        self.out.append(SubmitOperation(Delete(self.next_op(), handles), hosts, consumes=handles))


def sharded_result(handle: Handle, record: ArrayRecord) -> ShardedResult:
    """A new array as operations describe it."""
    placement = record.placement
    assert placement is not None
    return ShardedResult(
        handle,
        record.dtype,
        placement.sharding.shard_shape(record.shape),
        placement.sharding.memory_kind,
        placement.devices,
    )


def first_poison(records: Iterable[ArrayRecord]) -> Status | None:
    """The cause of the first poisoned array, or None."""
    return next((record.poison for record in records if record.poison is not None), None)
