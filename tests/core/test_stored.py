"""Which shards are written for an array, and which tiles a part of it lies in."""

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.sharding import REPLICATED, Sharding, TileAssignment, TileKind
from pathways_runtime.core.stored import covering_tiles, writers

DEVICES = tuple(map(DeviceId, (4, 5, 6, 7)))
COLUMNS_TWICE = TileAssignment(TileKind.TILED, (1, 2, 2), places=(0, 2, 1, 3), num_subgroup_dims=1)


def test_every_tile_is_written_once_by_turns() -> None:
    sharding = Sharding(DEVICES, COLUMNS_TWICE)
    assert writers(sharding, (6, 4), 0) == ((4, (0, 0)), (7, (0, 1)))
    assert writers(sharding, (6, 4), 1) == ((6, (0, 0)), (5, (0, 1)))


def test_copies_take_turns_over_arrays() -> None:
    sharding = Sharding(DEVICES, REPLICATED)
    assert [writers(sharding, (3,), turn) for turn in (0, 1, 5)] == [((4, (0,)),), ((5, (0,)),), ((5, (0,)),)]
    assert writers(sharding, (), 2) == ((6, ()),)


def test_tiles_without_an_element_are_left_out() -> None:
    rows = Sharding(DEVICES, TileAssignment(TileKind.TILED, (4,), places=(0, 1, 2, 3)))
    assert writers(rows, (5,), 0) == ((4, (0,)), (5, (1,)), (6, (2,)))
    assert writers(rows, (0,), 0) == writers(Sharding(DEVICES, REPLICATED), (0, 4), 0) == ()


def test_tiles_that_cover_a_part() -> None:
    assert covering_tiles(((2, 5), (0, 4)), (2, 4)) == ((1, 0), (2, 0))
    assert covering_tiles((), ()) == ((),)
    assert covering_tiles(((3, 3),), (2,)) == ()
