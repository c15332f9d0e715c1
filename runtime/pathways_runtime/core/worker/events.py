"""What happens to an executor's core."""

from typing import Any

import msgspec

from pathways_runtime.core.ids import DeviceId, Handle, OpId, SessionId
from pathways_runtime.core.operations import Operation
from pathways_runtime.core.status import Status
from pathways_runtime.core.worker.arrays import LocalArray, Program
from pathways_runtime.core.worker.launches import PendingLaunch


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""


class SessionOpened(Event, frozen=True):
    """Operations of the session may follow."""

    session: SessionId


class SessionClosed(Event, frozen=True):
    """Everything of the session goes. Launches of it that are waiting still run where other hosts take part in them."""

    session: SessionId


class ArraysRetained(Event, frozen=True):
    """Arrays of the session that an executor before this one had.

    Attributes:
        arrays: handle, devices of the shards here, value.
    """

    session: SessionId
    arrays: tuple[tuple[Handle, tuple[DeviceId, ...], Any], ...]


class ProgramLoaded(Event, frozen=True):
    """An executable may be launched from now on."""

    session: SessionId
    executable: Handle
    program: Program


class OperationReceived(Event, frozen=True):
    """The next operation in the one order. ``now_ns`` is the shell's clock, for reports only."""

    session: SessionId
    operation: Operation
    now_ns: int


class BufferArrived(Event, frozen=True):
    """A host buffer came over the session link; possibly before its MakeArrays."""

    session: SessionId
    op_id: OpId
    index: int
    payload: Any


class PieceArrived(Event, frozen=True):
    """A move of a transfer came from another host: ``payload``, or why it will not come."""

    session: SessionId
    op_id: OpId
    move_index: int
    payload: Any
    failure: Status | None


class LaunchEnqueued(Event, frozen=True):
    """PJRT took a launch; ``values`` are its results' in order.

    ``failure`` is set when an argument failed after the core had looked, so that a stand-in took its place.
    """

    launch: PendingLaunch
    values: tuple[Any, ...]
    failure: Status | None = None


class LaunchFailed(Event, frozen=True):
    """A launch failed, at once or after it was enqueued."""

    launch: PendingLaunch
    failure: Status


class ArrayMade(Event, frozen=True):
    """The array of a MakeArray, ShareShards or AssembleArray is there."""

    session: SessionId
    array: LocalArray
    value: Any


class ArrayCopied(Event, frozen=True):
    """What RetainArray asked for is in memory that outlives this executor.

    Attributes:
        value: the array from now on; None if it stays as it was.
        copy: the shell's, for RecordArray.
    """

    session: SessionId
    array: LocalArray
    value: Any
    copy: Any


class ArrayFailed(Event, frozen=True):
    """It could not be made."""

    session: SessionId
    op_id: OpId
    array: LocalArray
    failure: Status


class CallReturned(Event, frozen=True):
    """A call of MakeCall is over: ``values`` of its results, or why there are none."""

    session: SessionId
    op_id: OpId
    results: tuple[LocalArray, ...]
    values: tuple[Any, ...]
    failure: Status | None


class ReadTaken(Event, frozen=True):
    """Readers that instructions announced (``LocalArray.num_readers``) have their view or gave up; one per entry."""

    arrays: tuple[LocalArray, ...]
