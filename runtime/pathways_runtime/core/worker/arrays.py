"""What one host holds of arrays and programs."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pathways_runtime.core.ids import DeviceId, Handle
from pathways_runtime.core.status import Status


class LocalArray:
    """This host's shards of one array.

    It is *pending* until its producer says what it is; then it is *present* (``value`` is set: the computation is on
    its way in PJRT, not necessarily done) or *failed* (``failure`` is set). Present may become failed, when a
    computation fails after it was enqueued. Who needs the array refers to this object, not to its handle, so deleting
    the handle takes nothing from those who came before.

    Attributes:
        devices: of the shards that are here, in shard order.
        value: the shell's; the core never looks inside.
        num_readers: transfers and aliases that were received, and instructions under way, that still have to take
            their view of ``value``. A program that would overwrite the array gets a copy as long as there are any.
        is_on_host: whether it is in a host's memory, and is to be retained.
        is_retained: whether the next executor will have it.
        waiters: who waits while it is pending (launches, assemblies, operations: each counts what it misses); empty
            otherwise.
    """

    __slots__ = ("devices", "failure", "handle", "is_on_host", "is_retained", "num_readers", "value", "waiters")

    def __init__(self, handle: Handle, devices: tuple[DeviceId, ...]) -> None:
        self.handle = handle
        self.devices = devices
        self.value: Any = None
        self.failure: Status | None = None
        self.num_readers = 0
        self.is_on_host = False
        self.is_retained = False
        self.waiters: list[Any] = []

    @property
    def is_pending(self) -> bool:
        """Whether nobody knows yet what it is."""
        return self.value is None and self.failure is None

    def __repr__(self) -> str:
        state = "pending" if self.is_pending else f"failed with {self.failure}" if self.failure else "present"
        return f"<array {self.handle} on devices {self.devices}: {state}, {len(self.waiters)} waiting>"


class Program(msgspec.Struct, frozen=True):
    """A loaded executable as this host sees it.

    Attributes:
        devices: this host's, in the order in which the executable wants the shards of its arguments.
        donated: argument positions whose memory the program takes over.
        spans_hosts: other hosts take part: every launch must be enqueued here, come what may, or they would hang.
        value: the shell's.
        is_function: of colocated Python: it is called, not launched.
    """

    devices: tuple[DeviceId, ...]
    donated: tuple[int, ...]
    spans_hosts: bool
    value: Any
    is_function: bool = False


class ShardRef(msgspec.Struct, frozen=True):
    """One shard of an array here: ``array.devices[position]``'s."""

    array: LocalArray
    position: int


def first_failure(arrays: Sequence[LocalArray]) -> Status | None:
    """The failure of the first failed array, if any."""
    for array in arrays:
        if array.failure is not None:
            return array.failure
    return None


def hold(arrays: Iterable[LocalArray]) -> None:
    """Count one who will read each of these. From its receipt on: while it waits for one, another must not be lost."""
    for array in arrays:
        array.num_readers += 1


def release(arrays: Iterable[LocalArray]) -> None:
    """One who was counted has taken what it reads of each of these, or will not read them after all."""
    for array in arrays:
        array.num_readers -= 1
