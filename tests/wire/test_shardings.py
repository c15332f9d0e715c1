"""Shardings, with JAX's own reading of an OpSharding as the judge."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.lib import xla_client
from jax._src.op_shardings import op_sharding_to_numpy_indices

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.sharding import REPLICATED, Sharding, TileAssignment, TileKind
from pathways_runtime.core.status import StatusError
from pathways_runtime.wire.ifrt import schema, shardings

Type = schema.OpSharding.Type


def hlo_sharding_proto(op_sharding: bytes, devices: tuple[int, ...], memory_kind: str | None = None):  # type: ignore[no-untyped-def]
    proto = schema.HloShardingProto(memory_kind=memory_kind)
    proto.devices.device_ids.extend(devices)
    proto.xla_op_sharding.MergeFromString(op_sharding)
    return wrap(shardings.HLO_SHARDING, proto)


def wrap(type_name: str, proto):  # type: ignore[no-untyped-def]
    wrapped = schema.ShardingProto()
    wrapped.serialized_sharding.type_name = type_name
    wrapped.serialized_sharding.data = proto.SerializeToString()
    return wrapped


@st.composite
def tiled(draw: st.DrawFn) -> tuple[bytes, tuple[int, ...], int]:
    """A serialized OpSharding, tiles per array dimension, number of devices."""
    tiles = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3))
    copies = draw(st.sampled_from([1, 2]))
    total = math.prod(tiles) * copies
    dims = [*tiles, copies] if copies > 1 else tiles
    op = xla_client.OpSharding()
    op.type = xla_client.OpSharding.Type.OTHER
    op.tile_assignment_dimensions = dims
    op.replicate_on_last_tile_dim = copies > 1
    if draw(st.booleans()):
        op.tile_assignment_devices = draw(st.permutations(range(total)))
    else:
        rows = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
        op.iota_reshape_dims = [rows, total // rows]
        op.iota_transpose_perm = draw(st.permutations(range(2)))
    return op.SerializeToString(), tuple(tiles), total


@given(tiled())
@settings(deadline=None)
def test_boxes_are_those_that_jax_computes(case: tuple[bytes, tuple[int, ...], int]) -> None:
    serialized, tiles, total = case
    shape = tuple(2 * count for count in tiles)
    op = xla_client.OpSharding()
    op.ParseFromString(serialized)
    expected = op_sharding_to_numpy_indices(xla_client.HloSharding.from_proto(op), shape, total)
    sharding = shardings.decode_sharding(hlo_sharding_proto(serialized, tuple(range(10, 10 + total))))
    found = [tuple(slice(*each) for each in box) for box in sharding.boxes(shape)]
    whole = [tuple(slice(*s.indices(dim)[:2]) for s, dim in zip(row, shape, strict=True)) for row in expected]
    assert found == whole


@given(tiled())
@settings(deadline=None)
def test_a_sharding_comes_back_the_same(case: tuple[bytes, tuple[int, ...], int]) -> None:
    serialized, _, total = case
    sharding = shardings.decode_sharding(hlo_sharding_proto(serialized, tuple(range(total)), "pinned_host"))
    assert sharding.memory_kind == "pinned_host"
    assert shardings.decode_sharding(shardings.encode_sharding(sharding)) == sharding


def test_an_empty_op_sharding_is_replicated() -> None:
    sharding = shardings.decode_sharding(hlo_sharding_proto(b"", (3, 1)))
    assert sharding == Sharding((DeviceId(3), DeviceId(1)), REPLICATED)
    assert sharding.is_fully_replicated()


def test_maximal_and_manual() -> None:
    maximal = schema.OpSharding(type=Type.MAXIMAL, tile_assignment_dimensions=[1], tile_assignment_devices=[1])
    assert shardings.decode_op_sharding(maximal, 2) == TileAssignment(TileKind.MAXIMAL, maximal_place=1)
    manual = schema.OpSharding(type=Type.MANUAL)
    assert shardings.decode_op_sharding(manual, 2) == TileAssignment(TileKind.MANUAL)
    for proto in (maximal, manual):
        tiles = shardings.decode_op_sharding(proto, 2)
        assert shardings.encode_op_sharding(tiles) == proto


def test_subgroups_do_not_tile() -> None:
    proto = schema.OpSharding(
        type=Type.OTHER,
        tile_assignment_dimensions=[2, 1, 2],
        iota_reshape_dims=[4],
        iota_transpose_perm=[0],
        last_tile_dims=[Type.MANUAL, Type.REPLICATED],
    )
    sharding = Sharding(tuple(map(DeviceId, range(4))), shardings.decode_op_sharding(proto, 4))
    assert sharding.boxes((4,)) == (((0, 2),), ((0, 2),), ((2, 4),), ((2, 4),))


def test_terms_of_a_sum_are_not_copies() -> None:
    whole = schema.OpSharding(type=Type.UNREDUCED)
    rows = schema.OpSharding(
        type=Type.OTHER,
        tile_assignment_dimensions=[2, 2],
        iota_reshape_dims=[4],
        iota_transpose_perm=[0],
        last_tile_dims=[Type.UNREDUCED],
    )
    devices = tuple(map(DeviceId, range(4)))
    for proto, boxes in ((whole, (((0, 4),),) * 4), (rows, (((0, 2),),) * 2 + (((2, 4),),) * 2)):
        sharding = Sharding(devices, shardings.decode_op_sharding(proto, 4))
        assert sharding.boxes((4,)) == boxes
        assert sharding.tiles.holds_partial_sums()
        assert not sharding.is_fully_replicated()
        assert shardings.encode_op_sharding(sharding.tiles) == proto


def test_single_device_sharding_keeps_its_kind() -> None:
    proto = wrap(shardings.SINGLE_DEVICE_SHARDING, schema.SingleDeviceShardingProto(device_id=0, memory_kind="device"))
    sharding = shardings.decode_sharding(proto)
    assert sharding == Sharding((DeviceId(0),), REPLICATED, "device", is_single_device=True)
    assert shardings.encode_sharding(sharding) == proto


def test_concrete_even_sharding_is_row_major() -> None:
    proto = schema.ConcreteEvenShardingProto()
    proto.devices.device_ids.extend((4, 5, 6, 7))
    proto.shape.dims.extend((4, 6))
    proto.shard_shape.dims.extend((2, 3))
    sharding = shardings.decode_sharding(wrap(shardings.CONCRETE_EVEN_SHARDING, proto))
    assert sharding.boxes((4, 6)) == (
        ((0, 2), (0, 3)),
        ((0, 2), (3, 6)),
        ((2, 4), (0, 3)),
        ((2, 4), (3, 6)),
    )
    proto.is_fully_replicated = True
    assert shardings.decode_sharding(wrap(shardings.CONCRETE_EVEN_SHARDING, proto)).tiles == REPLICATED


def test_equal_bytes_give_the_same_object() -> None:
    first = shardings.decode_sharding(hlo_sharding_proto(b"", (0, 1)))
    assert shardings.decode_sharding(hlo_sharding_proto(b"", (0, 1))) is first


@pytest.mark.parametrize(
    ("proto", "message"),
    [
        (wrap("xla::ifrt::OpaqueSharding", schema.ShardingProto()), "UNIMPLEMENTED: arrays with a xla::ifrt::Opaque"),
        (hlo_sharding_proto(schema.OpSharding(type=Type.UNKNOWN).SerializeToString(), (0,)), "type UNKNOWN"),
        (
            hlo_sharding_proto(
                schema.OpSharding(
                    type=Type.OTHER, tile_assignment_dimensions=[2], tile_assignment_devices=[0, 0]
                ).SerializeToString(),
                (0, 1),
            ),
            "INVALID_ARGUMENT: .* does not put one tile on each of 2 devices",
        ),
        (
            hlo_sharding_proto(
                schema.OpSharding(
                    type=Type.OTHER, tile_assignment_dimensions=[4], iota_reshape_dims=[4], iota_transpose_perm=[0]
                ).SerializeToString(),
                (0, 1),
            ),
            "INVALID_ARGUMENT: .* does not put one tile on each of 2 devices",
        ),
        (
            hlo_sharding_proto(
                schema.OpSharding(type=Type.MAXIMAL, tile_assignment_devices=[2]).SerializeToString(), (0, 1)
            ),
            "INVALID_ARGUMENT: a sharding on place 2 of 2",
        ),
    ],
)
def test_what_is_not_taken_is_refused_with_its_name(proto, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(StatusError, match=message):
        shardings.decode_sharding(proto)


def test_bytes_that_are_no_sharding() -> None:
    proto = schema.ShardingProto()
    proto.serialized_sharding.type_name = shardings.HLO_SHARDING
    proto.serialized_sharding.data = b"\xff"
    with pytest.raises(StatusError, match="INVALID_ARGUMENT: the bytes of a xla::ifrt::HloSharding cannot be parsed"):
        shardings.decode_sharding(proto)


def test_numpy_agrees_with_the_iota_form() -> None:
    # devices=[2,4]<=[4,2]T(1,0), spelled out.
    proto = schema.OpSharding(
        type=Type.OTHER, tile_assignment_dimensions=[2, 4], iota_reshape_dims=[4, 2], iota_transpose_perm=[1, 0]
    )
    order = np.arange(8).reshape(4, 2).T.reshape(2, 4)
    tiles = shardings.decode_op_sharding(proto, 8).tile_of_place()
    assert [order[tuple(tile)] for tile in tiles] == list(range(8))
