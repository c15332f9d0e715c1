"""How an array is laid over devices: IFRT's HloSharding and SingleDeviceSharding as values.

A *box* is a half-open index range per dimension: ``((start, stop), ...)``, in elements. The boxes of a sharding say
which part of the global array each device holds. XLA pads: every shard has the same shape, ``ceil(dim / tiles)`` per
dimension, so the box of a shard at the edge may be smaller than its shape.
"""

import enum
import functools
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from pathways_runtime.core.ids import DeviceId

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


class TileKind(enum.IntEnum):
    """What an HloSharding says."""

    REPLICATED = 0
    #: One device (given by ``TileAssignment.maximal_place``) has it all.
    MAXIMAL = 1
    TILED = 2
    #: Inside a manual region: each device holds the whole shape as far as this sharding says.
    MANUAL = 3
    #: Each device holds a term of a sum, of the whole shape; no device knows the value.
    UNREDUCED = 4


class TileAssignment(msgspec.Struct, frozen=True):
    """The tiling half of an HloSharding; device *places* are indices into the sharding's device list.

    Attributes:
        kind: see TileKind; only TILED uses the fields below.
        tile_dims: tiles per array dimension, then the sizes of ``num_subgroup_dims`` dimensions along which copies lie.
        reshape_dims, transpose_perm: the iota form:
            ``arange(n).reshape(reshape_dims).transpose(perm).reshape(tile_dims)``.
        places: the explicit form, used when ``reshape_dims`` is empty: place per tile, row-major over ``tile_dims``.
        num_subgroup_dims: trailing dimensions of ``tile_dims`` that do not tile the array.
        unreduced_subgroups: those of them, counted from 0, along which terms of a sum lie instead of copies.
        maximal_place: see TileKind.MAXIMAL.
    """

    kind: TileKind = TileKind.REPLICATED
    tile_dims: tuple[int, ...] = ()
    reshape_dims: tuple[int, ...] = ()
    transpose_perm: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    num_subgroup_dims: int = 0
    unreduced_subgroups: tuple[int, ...] = ()
    maximal_place: int = 0

    def holds_partial_sums(self) -> bool:
        """Whether devices with the same part of the array hold terms of a sum, not copies."""
        return self.kind is TileKind.UNREDUCED or bool(self.unreduced_subgroups)

    def array_tile_dims(self) -> tuple[int, ...]:
        """Tiles per array dimension."""
        return self.tile_dims[: len(self.tile_dims) - self.num_subgroup_dims]

    def tile_of_place(self) -> np.ndarray:
        """Which tile each place holds.

        Returns:
            ``(num_places, num_array_dims) int64`` tile coordinates.
        """
        if self.reshape_dims:
            order = np.arange(math.prod(self.reshape_dims)).reshape(self.reshape_dims)
            order = order.transpose(self.transpose_perm).reshape(self.tile_dims)
        else:
            order = np.asarray(self.places, dtype=np.int64).reshape(self.tile_dims)
        num_array_dims = len(self.tile_dims) - self.num_subgroup_dims
        coordinates = np.empty((order.size, num_array_dims), dtype=np.int64)
        grid = np.indices(order.shape).reshape(order.ndim, -1)
        coordinates[order.ravel()] = grid[:num_array_dims].T
        return coordinates


REPLICATED = TileAssignment()


class Sharding(msgspec.Struct, frozen=True):
    """A device list with what each of its devices holds. Hashable; a session interns it.

    Attributes:
        devices: in IFRT order; shard *i* of an array lies on ``devices[i]``.
        tiles: how the array is cut.
        memory_kind: ``device``, ``pinned_host``, ``unpinned_host``, or None for the device's default.
        is_single_device: came as IFRT's SingleDeviceSharding, and goes back to the client as one.
    """

    devices: tuple[DeviceId, ...]
    tiles: TileAssignment = REPLICATED
    memory_kind: str | None = None
    is_single_device: bool = False

    def is_fully_replicated(self) -> bool:
        """Whether every device holds the whole array."""
        if self.tiles.holds_partial_sums():
            return False
        return self.tiles.kind is not TileKind.TILED or math.prod(self.tiles.array_tile_dims()) == 1

    def shard_shape(self, shape: Shape) -> Shape:
        """The shape of every shard, padding included.

        Raises:
            ValueError: the sharding tiles another number of dimensions than ``shape`` has.
        """
        if self.tiles.kind is not TileKind.TILED:
            return shape
        tile_dims = self.tiles.array_tile_dims()
        if len(tile_dims) != len(shape):
            raise ValueError(f"a sharding over {len(tile_dims)} dimensions cannot cut an array of shape {shape}")
        return tuple(-(-dim // tiles) for dim, tiles in zip(shape, tile_dims, strict=True))

    def boxes(self, shape: Shape) -> tuple[Box, ...]:
        """What each device holds of an array, in the order of ``devices``. Computed once per (sharding, shape)."""
        return _boxes(self, shape)


@functools.lru_cache(maxsize=4096)
def _boxes(sharding: Sharding, shape: Shape) -> tuple[Box, ...]:
    whole: Box = tuple((0, dim) for dim in shape)
    if sharding.tiles.kind is not TileKind.TILED:
        return (whole,) * len(sharding.devices)
    shard_shape = sharding.shard_shape(shape)
    return tuple(
        tuple(
            (min(int(tile) * size, dim), min((int(tile) + 1) * size, dim))
            for tile, size, dim in zip(row, shard_shape, shape, strict=True)
        )
        for row in sharding.tiles.tile_of_place()
    )


def box_shape(box: Box) -> Shape:
    """Elements per dimension."""
    return tuple(stop - start for start, stop in box)


def intersect(first: Box, second: Box) -> Box | None:
    """The common part of two boxes, or None when it has no element. Rank 0 boxes meet in their one element."""
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(first, second, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def relative(box: Box, origin: Box) -> Box:
    """A box in the coordinates of the shard whose own box is ``origin``."""
    return tuple((start - o[0], stop - o[0]) for (start, stop), o in zip(box, origin, strict=True))


def num_elements(dims: Sequence[int]) -> int:
    """Product of dimensions; 1 for a scalar."""
    return math.prod(dims)
