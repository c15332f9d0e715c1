"""Arrays in files: where one lies, and which host writes which part of it. Pure; ``worker.storage`` does the I/O."""

import functools
import itertools

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.sharding import Box, Shape, Sharding, TileKind

#: Coordinates of a part in the grid of equal parts that an array is cut into.
TileIndex = tuple[int, ...]


class StoredArray(msgspec.Struct, frozen=True, array_like=True):
    """A Zarr array (format 2) that is written from, or read into, an array that lies as ``sharding`` says.

    Attributes:
        folder: the array's own; absolute, and the same folder on all hosts.
        dtype, shape: of the whole array.
    """

    folder: str
    dtype: DType
    shape: Shape
    sharding: Sharding


@functools.lru_cache(maxsize=1024)
def writers(sharding: Sharding, shape: Shape, turn: int) -> tuple[tuple[DeviceId, TileIndex], ...]:
    """Which device's shard is written for each tile; tiles without an element are left out.

    Copies of a tile are equally good, so they take turns, over tiles and over arrays.

    Args:
        sharding: of copies, not of terms of sums.
        turn: how many arrays come before this one.
    """
    if 0 in shape:
        return ()
    if sharding.tiles.kind is not TileKind.TILED:
        return ((sharding.devices[turn % len(sharding.devices)], (0,) * len(shape)),)
    holders: dict[TileIndex, list[DeviceId]] = {}
    for device, row in zip(sharding.devices, sharding.tiles.tile_of_place().tolist(), strict=True):
        holders.setdefault(tuple(row), []).append(device)
    sizes = sharding.shard_shape(shape)
    chosen = []
    for place, (tile, devices) in enumerate(holders.items()):
        if all(index * size < dim for index, size, dim in zip(tile, sizes, shape, strict=True)):
            chosen.append((devices[(turn + place) % len(devices)], tile))
    return tuple(chosen)


def covering_tiles(box: Box, tile_shape: Shape) -> tuple[TileIndex, ...]:
    """The tiles of a grid that have an element of ``box``, row-major. A box of rank 0 is in its one tile."""
    ranges = [
        range(start // size, -(-stop // size)) if start < stop else range(0)
        for (start, stop), size in zip(box, tile_shape, strict=True)
    ]
    return tuple(itertools.product(*ranges))
