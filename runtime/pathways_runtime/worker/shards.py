"""This host's shards of an array, as the executor's core carries them around (``LocalArray.value``)."""

import contextlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.sharding import Shape
from pathways_runtime.worker import pjrt
from pathways_runtime.worker.buffers import HostArray
from pathways_runtime.worker.worlds import Placement, World

_sharing_lock = threading.Lock()


class Retaining:
    """How far the copy is that outlives this executor.

    Attributes:
        is_settled: set when there is one, or there will be none.
        ranges: where its shards begin in the retained file, and their contents; empty if there is none.
    """

    __slots__ = ("is_settled", "ranges")

    def __init__(self) -> None:
        self.is_settled = threading.Event()
        self.ranges: tuple[tuple[int, HostArray], ...] = ()


class Shards:
    """A PJRT array with its placement. Immutable, but for copies in other worlds that it remembers.

    Safe for use from several threads: what two of them make at the same time is equal, and one of it stays.
    """

    __slots__ = ("__weakref__", "_elsewhere", "_sharers", "array", "origins", "placement", "retaining")

    def __init__(self, array: pjrt.Array, placement: Placement) -> None:
        self.array = array
        self.placement = placement
        #: Of what was made of shards that are retained: each one's array and place in it.
        self.origins: tuple[tuple[Shards, int], ...] = ()
        #: If it is to outlive this executor: how far that is.
        self.retaining: Retaining | None = None
        self._elsewhere: dict[Placement, pjrt.Array] | None = None
        # All that share memory with this, this included; None if nobody ever did.
        self._sharers: weakref.WeakSet[Shards] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether a program that takes over this array's memory would take it from another one too."""
        sharers = self._sharers
        if sharers is None:
            return False
        with _sharing_lock:
            return len(sharers) > 1

    def share_with(self, others: Iterable["Shards"]) -> None:
        """Remember that the memory, or a part of it, is also that of ``others``."""
        with _sharing_lock:
            together: weakref.WeakSet[Shards] = weakref.WeakSet((self,))
            for other in others:
                together.add(other)
                together |= other._sharers or ()
            for member in together:
                member._sharers = together

    def shard(self, position: int) -> pjrt.Array:
        """One of them, as an array of one device.

        Raises:
            PjrtError: the array was donated.
        """
        return pjrt.shards(self.array)[position]

    @property
    def shape(self) -> Shape:
        """Of each shard."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements."""
        dtype: np.dtype[Any] = self.array.dtype
        return dtype

    def nbytes(self) -> int:
        """On this host, copies in other worlds not counted, for most of them share memory."""
        return pjrt.nbytes(self.array)

    def for_program(self, world: World, devices: tuple[DeviceId, ...]) -> pjrt.Array:
        """The array as a program of ``world`` takes it, whose local devices are ``devices``.

        Raises:
            PjrtError: the array was donated. ValueError: it lies on other devices.
        """
        placement = self.placement
        if placement.world is world and placement.devices == devices:
            return self.array
        if placement.devices != devices and set(placement.devices) != set(devices):
            raise ValueError(f"an argument lies on devices {placement.devices}, the program runs on {devices}")
        return self.on(world.placement(devices, placement.memory_kind))

    def on(self, target: Placement) -> pjrt.Array:
        """The same shards in another world, or in another order; remembered. Memory is shared where PJRT can."""
        elsewhere = self._elsewhere
        if elsewhere is None:
            elsewhere = self._elsewhere = {}
        found = elsewhere.get(target)
        if found is not None and not found.is_deleted():
            return found
        pieces = pjrt.shards(self.array)
        order = [self.placement.devices.index(device) for device in target.devices]
        if self.placement.world is target.world:
            made = pjrt.join([pieces[place] for place in order], target.sharding)
        else:
            moved = [migrate(pieces[place], target, position) for position, place in enumerate(order)]
            made = pjrt.join(moved, target.sharding)
        elsewhere[target] = made
        return made


def migrate(shard: pjrt.Array, target: Placement, position: int) -> pjrt.Array:
    """One shard as an array of another world.

    The same memory if it is ready and of a type that can be shared; else a copy that PJRT makes when it is ready, so
    that nobody waits here.
    """
    if target.is_default_memory and pjrt.is_ready(shard):
        # Sub-byte types cannot be shared; a failed array fails again below, with its own text, where it is used.
        with contextlib.suppress(pjrt.PjrtError):
            return pjrt.adopt(shard, target.physical[position])
    return pjrt.copy(shard, target.single_lists[position], target.singles[position])


def joined(pieces: Sequence[pjrt.Array], placement: Placement) -> Shards:
    """Single-device arrays of the placement's world and devices, in order, as one."""
    return Shards(pjrt.join(pieces, placement.sharding), placement)
