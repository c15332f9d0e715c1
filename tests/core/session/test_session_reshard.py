"""Reshard plans against a simulation with numpy, over random shardings."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.session.reshard import PlannedMove, plan_reshard
from pathways_runtime.core.sharding import Shape, Sharding, TileAssignment, TileKind
from pathways_runtime.core.status import StatusError
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.session_workers import MISSING, gather, scatter

TOPOLOGY = Topology(num_slices=2, hosts_per_slice=2, devices_per_host=4, platform="cpu")
ALL_DEVICES = tuple(DeviceId(i) for i in range(TOPOLOGY.num_devices))


@st.composite
def shardings(draw: st.DrawFn, rank: int) -> Sharding:
    """Replicated, tiled, partly replicated, iota or explicit, on any devices in any order."""
    kind = draw(st.sampled_from(["replicated", "iota", "places"]))
    if kind == "replicated":
        devices = draw(st.permutations(ALL_DEVICES))[: draw(st.integers(1, 8))]
        return Sharding(tuple(devices))
    tile_dims = tuple(draw(st.sampled_from([1, 2, 3])) for _ in range(rank))
    copies = draw(st.sampled_from([1, 2]))
    if math.prod(tile_dims) * copies > len(ALL_DEVICES):
        tile_dims = (1,) * rank
    dims = (*tile_dims, copies)
    count = math.prod(dims)
    devices = tuple(draw(st.permutations(ALL_DEVICES))[:count])
    if kind == "iota":
        perm = tuple(draw(st.permutations(range(len(dims)))))
        reshape = tuple(dims[perm.index(axis)] for axis in range(len(dims)))
        tiles = TileAssignment(TileKind.TILED, dims, reshape_dims=reshape, transpose_perm=perm, num_subgroup_dims=1)
    else:
        places = tuple(draw(st.permutations(range(count))))
        tiles = TileAssignment(TileKind.TILED, dims, places=places, num_subgroup_dims=1)
    return Sharding(devices, tiles)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Sharding, Sharding]:
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(0, 7)) for _ in range(rank))
    return shape, draw(shardings(rank)), draw(shardings(rank))


def perform(moves: tuple[PlannedMove, ...], values: np.ndarray, source: Sharding, target: Sharding) -> list[np.ndarray]:
    """The target's shards after all moves; an element that is written twice is an error."""
    held = dict(zip(source.devices, scatter(values, source), strict=True))
    made = {d: np.full(target.shard_shape(values.shape), MISSING, values.dtype) for d in target.devices}
    for move in moves:
        if move.source_box is None or move.target_box is None:
            assert move.source_box is None and move.target_box is None
            assert np.all(made[move.target_device] == MISSING)
            made[move.target_device] = held[move.source_device].copy()
        else:
            into = made[move.target_device][tuple(slice(*r) for r in move.target_box)]
            assert np.all(into == MISSING)
            into[...] = held[move.source_device][tuple(slice(*r) for r in move.source_box)]
    return [made[d] for d in target.devices]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_plan_makes_every_shard(case: tuple[Shape, Sharding, Sharding]) -> None:
    shape, source, target = case
    values = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    moves = plan_reshard(source, target, shape, TOPOLOGY)
    shards = perform(moves, values, source, target)
    for shard, expected in zip(shards, scatter(values, target), strict=True):
        np.testing.assert_array_equal(shard, expected)
    np.testing.assert_array_equal(gather(shards, target, shape), values)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_nothing_crosses_that_is_there(case: tuple[Shape, Sharding, Sharding]) -> None:
    shape, source, target = case
    boxes = dict(zip(source.devices, source.boxes(shape), strict=True))
    wanted = dict(zip(target.devices, target.boxes(shape), strict=True))
    for move in plan_reshard(source, target, shape, TOPOLOGY):
        box = boxes[move.source_device]
        holders = [d for d, b in boxes.items() if b == box]
        if move.target_device in holders:
            assert move.source_device == move.target_device
        elif any(TOPOLOGY.host_of(d) == TOPOLOGY.host_of(move.target_device) for d in holders):
            assert TOPOLOGY.host_of(move.source_device) == TOPOLOGY.host_of(move.target_device)
        elif any(TOPOLOGY.slice_of(d) == TOPOLOGY.slice_of(move.target_device) for d in holders):
            assert TOPOLOGY.slice_of(move.source_device) == TOPOLOGY.slice_of(move.target_device)
        same_shape = source.shard_shape(shape) == target.shard_shape(shape)
        assert (move.source_box is None) == (same_shape and box == wanted[move.target_device])


def test_replicas_share_the_sending() -> None:
    slice_0, slice_1 = ALL_DEVICES[:8], ALL_DEVICES[8:]
    tiled = Sharding(slice_1, TileAssignment(TileKind.TILED, (8,), places=tuple(range(8))))
    moves = plan_reshard(Sharding(slice_0), tiled, (64,), TOPOLOGY)
    senders = [move.source_device for move in moves]
    assert sorted(senders) == list(slice_0), "each device of both hosts sends one eighth"


def test_the_same_layout_is_moves_onto_themselves() -> None:
    tiled = Sharding(ALL_DEVICES[:4], TileAssignment(TileKind.TILED, (2, 2), places=(3, 1, 0, 2)))
    moves = plan_reshard(tiled, tiled, (6, 4), TOPOLOGY)
    assert moves == tuple(PlannedMove(d, d, None, None) for d in ALL_DEVICES[:4])


def test_planning_is_not_quadratic_in_devices() -> None:
    """2,048 devices to 2,048 with shifted tiles: two sources per target, found without looking at all."""
    topology = Topology(num_slices=2, hosts_per_slice=256, devices_per_host=4, platform="cpu")
    devices = tuple(DeviceId(i) for i in range(2048))
    rows = Sharding(devices, TileAssignment(TileKind.TILED, (2048, 1), places=tuple(range(2048))))
    grid = Sharding(devices, TileAssignment(TileKind.TILED, (1024, 2), places=tuple(range(2048))))
    moves = plan_reshard(rows, grid, (2048, 2), topology)
    assert len(moves) == 4096


@pytest.mark.parametrize(
    "tiles",
    [
        TileAssignment(TileKind.UNREDUCED),
        TileAssignment(TileKind.TILED, (2, 2), places=(0, 1, 2, 3), num_subgroup_dims=1, unreduced_subgroups=(0,)),
    ],
)
def test_terms_of_a_sum_go_each_to_its_place_or_nowhere(tiles: TileAssignment) -> None:
    source, target = Sharding(ALL_DEVICES[:4], tiles), Sharding(ALL_DEVICES[4:8], tiles)
    assert plan_reshard(source, target, (8,), TOPOLOGY) == tuple(
        PlannedMove(DeviceId(i), DeviceId(i + 4), None, None) for i in range(4)
    )
    for before, after in ((source, Sharding(ALL_DEVICES[:4])), (Sharding(ALL_DEVICES[:4]), target)):
        with pytest.raises(StatusError, match="terms of a sum"):
            plan_reshard(before, after, (8,), TOPOLOGY)
