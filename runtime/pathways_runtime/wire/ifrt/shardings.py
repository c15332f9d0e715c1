"""Shardings: IFRT's serialized ones and XLA's OpSharding, to and from ``core.sharding``.

Decoding is cached by the serialized bytes, encoding by the value: a program's arrays use few shardings, many times.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.sharding import REPLICATED, Sharding, TileAssignment, TileKind
from pathways_runtime.core.status import Code, error
from pathways_runtime.wire.ifrt import schema

HLO_SHARDING = "xla::ifrt::HloSharding"
SINGLE_DEVICE_SHARDING = "xla::ifrt::SingleDeviceSharding"
CONCRETE_EVEN_SHARDING = "xla::ifrt::ConcreteEvenSharding"

_Type = schema.OpSharding.Type
_CACHE_ENTRIES = 4096


def decode_sharding(proto: Any) -> Sharding:
    """The value of a ShardingProto. Equal protos give the same object.

    Raises:
        StatusError: UNIMPLEMENTED with its name for a kind of sharding that we do not take; INVALID_ARGUMENT for one
            that contradicts itself.
    """
    serialized = proto.serialized_sharding
    return _decode(serialized.type_name, serialized.data)


@functools.lru_cache(maxsize=_CACHE_ENTRIES)
def _decode(type_name: str, content: bytes) -> Sharding:
    try:
        if type_name == HLO_SHARDING:
            proto = schema.HloShardingProto.FromString(content)
            tiles = decode_op_sharding(proto.xla_op_sharding, len(proto.devices.device_ids))
            return Sharding(_devices(proto.devices.device_ids), tiles, _memory_kind(proto))
        if type_name == SINGLE_DEVICE_SHARDING:
            proto = schema.SingleDeviceShardingProto.FromString(content)
            return Sharding((DeviceId(proto.device_id),), REPLICATED, _memory_kind(proto), is_single_device=True)
        if type_name == CONCRETE_EVEN_SHARDING:
            proto = schema.ConcreteEvenShardingProto.FromString(content)
            devices = _devices(proto.devices.device_ids)
            return Sharding(devices, _even_tiles(proto, len(devices)), _memory_kind(proto))
    except schema.DecodeError as failure:
        raise error(Code.INVALID_ARGUMENT, f"the bytes of a {type_name} cannot be parsed") from failure
    raise error(Code.UNIMPLEMENTED, f"arrays with a {type_name} are not supported")


def encode_sharding(sharding: Sharding) -> Any:
    """A ShardingProto. It is cached: copy it (``CopyFrom``), do not change it."""
    return _encode(sharding)


@functools.lru_cache(maxsize=_CACHE_ENTRIES)
def _encode(sharding: Sharding) -> Any:
    proto: Any
    if sharding.is_single_device:
        type_name, proto = SINGLE_DEVICE_SHARDING, schema.SingleDeviceShardingProto(device_id=sharding.devices[0])
    else:
        type_name, proto = HLO_SHARDING, schema.HloShardingProto()
        proto.devices.device_ids.extend(sharding.devices)
        proto.xla_op_sharding.CopyFrom(encode_op_sharding(sharding.tiles))
    if sharding.memory_kind is not None:
        proto.memory_kind = sharding.memory_kind
    wrapped = schema.ShardingProto()
    wrapped.serialized_sharding.type_name = type_name
    wrapped.serialized_sharding.data = proto.SerializeToString()
    return wrapped


@functools.lru_cache(maxsize=_CACHE_ENTRIES)
def decode_op_sharding_bytes(content: bytes, num_devices: int) -> TileAssignment:
    """Like ``decode_op_sharding``, of a serialized OpSharding."""
    try:
        return decode_op_sharding(schema.OpSharding.FromString(content), num_devices)
    except schema.DecodeError as failure:
        raise error(Code.INVALID_ARGUMENT, "the bytes of an xla.OpSharding cannot be parsed") from failure


def decode_op_sharding(proto: Any, num_devices: int) -> TileAssignment:
    """What an OpSharding over ``num_devices`` devices says.

    Raises:
        StatusError: UNIMPLEMENTED for tuples and the named form; INVALID_ARGUMENT if it does not fit the
            devices.
    """
    if proto.HasField("named_sharding"):
        raise error(Code.UNIMPLEMENTED, "xla.OpSharding in its named form is not supported")
    if proto.type == _Type.REPLICATED:
        return REPLICATED
    if proto.type == _Type.MANUAL:
        return TileAssignment(TileKind.MANUAL)
    if proto.type == _Type.UNREDUCED:
        return TileAssignment(TileKind.UNREDUCED)
    if proto.type == _Type.MAXIMAL:
        place = proto.tile_assignment_devices[0] if proto.tile_assignment_devices else 0
        if not 0 <= place < num_devices:
            raise error(Code.INVALID_ARGUMENT, f"a sharding on place {place} of {num_devices} devices")
        return TileAssignment(TileKind.MAXIMAL, maximal_place=place)
    if proto.type != _Type.OTHER:
        raise error(Code.UNIMPLEMENTED, f"an xla.OpSharding of type {_Type.Name(proto.type)} is not supported")
    for kind in proto.last_tile_dims:
        if kind not in (_Type.REPLICATED, _Type.MANUAL, _Type.UNREDUCED):
            raise error(
                Code.UNIMPLEMENTED, f"an xla.OpSharding with a subgroup of type {_Type.Name(kind)} is not supported"
            )
    tiles = TileAssignment(
        TileKind.TILED,
        tile_dims=tuple(proto.tile_assignment_dimensions),
        reshape_dims=tuple(proto.iota_reshape_dims),
        transpose_perm=tuple(proto.iota_transpose_perm),
        places=tuple(proto.tile_assignment_devices),
        num_subgroup_dims=len(proto.last_tile_dims) + int(proto.replicate_on_last_tile_dim),
        unreduced_subgroups=tuple(i for i, kind in enumerate(proto.last_tile_dims) if kind == _Type.UNREDUCED),
    )
    _check_tiles(tiles, num_devices)
    return tiles


def encode_op_sharding(tiles: TileAssignment) -> Any:
    """An OpSharding. Copies along subgroup dimensions are written as replicas."""
    proto = schema.OpSharding()
    match tiles.kind:
        case TileKind.REPLICATED:
            proto.type = _Type.REPLICATED
        case TileKind.MANUAL:
            proto.type = _Type.MANUAL
        case TileKind.UNREDUCED:
            proto.type = _Type.UNREDUCED
        case TileKind.MAXIMAL:
            proto.type = _Type.MAXIMAL
            proto.tile_assignment_dimensions.append(1)
            proto.tile_assignment_devices.append(tiles.maximal_place)
        case TileKind.TILED:
            proto.type = _Type.OTHER
            proto.tile_assignment_dimensions.extend(tiles.tile_dims)
            proto.iota_reshape_dims.extend(tiles.reshape_dims)
            proto.iota_transpose_perm.extend(tiles.transpose_perm)
            proto.tile_assignment_devices.extend(tiles.places)
            if tiles.num_subgroup_dims == 1 and not tiles.unreduced_subgroups:
                proto.replicate_on_last_tile_dim = True
            else:
                proto.last_tile_dims.extend(
                    _Type.UNREDUCED if i in tiles.unreduced_subgroups else _Type.REPLICATED
                    for i in range(tiles.num_subgroup_dims)
                )
    return proto


def _check_tiles(tiles: TileAssignment, num_devices: int) -> None:
    """Raise unless every device holds exactly one tile."""
    if tiles.num_subgroup_dims > len(tiles.tile_dims) or any(dim < 1 for dim in tiles.tile_dims):
        raise error(Code.INVALID_ARGUMENT, f"a sharding cannot have the tile dimensions {list(tiles.tile_dims)}")
    if tiles.reshape_dims:
        fits = math.prod(tiles.reshape_dims) == num_devices and sorted(tiles.transpose_perm) == list(
            range(len(tiles.reshape_dims))
        )
    else:
        fits = sorted(tiles.places) == list(range(num_devices))
    if not fits or math.prod(tiles.tile_dims) != num_devices:
        raise error(
            Code.INVALID_ARGUMENT,
            f"a sharding with tile dimensions {list(tiles.tile_dims)} does not put one tile on each of "
            f"{num_devices} devices",
        )


def _even_tiles(proto: Any, num_devices: int) -> TileAssignment:
    """Row-major tiles, one per device: the only reading of equal shards that does not say which part is where."""
    if proto.is_fully_replicated:
        return REPLICATED
    shape, shard_shape = tuple(proto.shape.dims), tuple(proto.shard_shape.dims)
    if len(shape) == len(shard_shape) and all(
        shard and not dim % shard for dim, shard in zip(shape, shard_shape, strict=True)
    ):
        tile_dims = tuple(dim // shard for dim, shard in zip(shape, shard_shape, strict=True))
        if math.prod(tile_dims) == num_devices:
            return TileAssignment(TileKind.TILED, tile_dims, reshape_dims=(num_devices,), transpose_perm=(0,))
    raise error(
        Code.UNIMPLEMENTED,
        f"a {CONCRETE_EVEN_SHARDING} of shape {list(shape)} into {num_devices} shards of shape {list(shard_shape)} "
        "does not say which shard is which part",
    )


def _devices(ids: Sequence[int]) -> tuple[DeviceId, ...]:
    return tuple(map(DeviceId, ids))


def _memory_kind(proto: Any) -> str | None:
    return proto.memory_kind if proto.HasField("memory_kind") else None
