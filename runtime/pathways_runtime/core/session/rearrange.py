"""Arrays out of arrays: copies, reshards, remaps, assembling and taking apart.

Nothing moves that need not. A result whose shards all lie where they should already is an Alias; any other is a
Transfer, in which a shard that is in place is a move onto itself without boxes, so that a worker may keep the shard as
it is. Either way the result may share shards with its sources, and ``Storage`` keeps a later donation from destroying
them. Arrays are immutable, so ALWAYS_COPY and REUSE_INPUT mean the same here; DONATE_INPUT deletes the inputs
afterwards.
"""

from collections.abc import Iterable

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, RequestId
from pathways_runtime.core.operations import Alias, Move, Transfer
from pathways_runtime.core.session import requests, responses
from pathways_runtime.core.session.arrays import ArrayRecord, Placement, describe, poisoned_handle
from pathways_runtime.core.session.dataflow import SessionState, sharded_result
from pathways_runtime.core.session.instructions import SubmitOperation
from pathways_runtime.core.session.requests import ArrayCopySemantics, ArraySpec, Interval, RemapPlan
from pathways_runtime.core.session.reshard import PlannedMove, plan_reshard
from pathways_runtime.core.sharding import Shape, Sharding
from pathways_runtime.core.status import Code, Status, error


class _NewArray(msgspec.Struct):
    """An array to be made from shards.

    Attributes:
        sources: what it is made of, in the order in which their failures count.
        moves: from which source each range comes, as ``(index in sources, move)``.
    """

    handle: Handle
    dtype: DType
    shape: Shape
    placement: Placement
    sources: tuple[Handle, ...]
    moves: list[tuple[int, PlannedMove]]


def copy_arrays(state: SessionState, _: RequestId, request: requests.CopyArrays) -> responses.Response:
    """CopyArrays: shard i goes to device i."""
    records = state.arrays.find_all(request.array_handles)
    results = _results(state, request.result_handles, len(records))
    devices = state.placements.device_list(request.device_ids)[0] if request.device_ids else None
    news, failed = [], []
    for handle, source_handle, source in zip(results, request.array_handles, records, strict=True):
        if source.placement is None:
            failed.append((handle, source))
            continue
        old = source.placement.sharding
        if devices is not None and len(devices) != len(old.devices):
            raise error(
                Code.INVALID_ARGUMENT,
                f"{describe(source_handle, source)} has {len(old.devices)} shards and cannot be copied to"
                f" {len(devices)} devices",
            )
        memory_kind = old.memory_kind if request.memory_kind is None else request.memory_kind or None
        placement = state.placements.intern(
            Sharding(devices or old.devices, old.tiles, memory_kind, old.is_single_device)
        )
        moves = [
            (0, PlannedMove(from_device, to_device, None, None))
            for from_device, to_device in zip(old.devices, placement.devices, strict=True)
        ]
        news.append(_NewArray(handle, source.dtype, source.shape, placement, (source_handle,), moves))
    for handle, source in failed:
        assert source.poison is not None
        state.arrays.add(handle, poisoned_handle(source.poison))
    _make(state, news)
    _donate(state, request.copy_semantics, request.array_handles)
    return responses.ArrayHandles(results)


def reshard_arrays(state: SessionState, _: RequestId, request: requests.ReshardArrays) -> responses.Response:
    """ReshardArrays: the same values laid out as the specs say."""
    records = state.arrays.find_all(request.array_handles)
    if len(request.array_specs) != len(records):
        raise error(Code.INVALID_ARGUMENT, f"{len(records)} arrays but {len(request.array_specs)} specs to reshard to")
    results = _results(state, request.result_handles, len(records))
    news = []
    for handle, source_handle, source, spec in zip(
        results, request.array_handles, records, request.array_specs, strict=True
    ):
        placement = _placement(state, spec)
        moves: list[tuple[int, PlannedMove]] = []
        if source.placement is not None:
            if (spec.dtype, spec.shape) != (source.dtype, source.shape):
                raise error(
                    Code.INVALID_ARGUMENT,
                    f"resharding cannot make {spec.dtype.name}{list(spec.shape)} of {describe(source_handle, source)}",
                )
            if source.poison is None and placement.loss is None:
                plan = plan_reshard(source.placement.sharding, placement.sharding, spec.shape, state.topology)
                moves = [(0, move) for move in plan]
        news.append(_NewArray(handle, spec.dtype, spec.shape, placement, (source_handle,), moves))
    _make(state, news)
    _donate(state, request.copy_semantics, request.array_handles)
    return responses.ArrayHandles(results)


def remap_arrays(state: SessionState, _: RequestId, request: requests.RemapArrays) -> responses.Response:
    """RemapArrays: shards change arrays, not devices."""
    plan = request.plan
    records = state.arrays.find_all(request.array_handles)
    if len(plan.input_specs) != len(records):
        raise error(Code.INVALID_ARGUMENT, f"a remap plan for {len(plan.input_specs)} arrays is given {len(records)}")
    for handle, record, spec in zip(request.array_handles, records, plan.input_specs, strict=True):
        if (
            record.placement is not None
            and state.placements.intern(spec.sharding).devices is not record.placement.devices
        ):
            raise error(
                Code.INVALID_ARGUMENT, f"{describe(handle, record)} lies on other devices than the remap plan says"
            )
    results = _results(state, request.result_handles, len(plan.output_specs))
    origins = _shard_origins(plan)
    news = []
    for handle, spec, shards in zip(results, plan.output_specs, origins, strict=True):
        placement = _placement(state, spec)
        inputs = tuple(dict.fromkeys(in_array for in_array, _ in shards))
        places = {in_array: place for place, in_array in enumerate(inputs)}
        moves = [
            (places[in_array], PlannedMove(from_device, to_device, None, None))
            for (in_array, from_device), to_device in zip(shards, placement.devices, strict=True)
        ]
        sources = tuple(request.array_handles[in_array] for in_array in inputs)
        new = _NewArray(handle, spec.dtype, spec.shape, placement, sources, moves)
        _check_shards(state, new)
        news.append(new)
    _make(state, news)
    _donate(state, request.copy_semantics, request.array_handles)
    return responses.ArrayHandles(results)


def assemble(
    state: SessionState, _: RequestId, request: requests.AssembleArrayFromSingleDeviceArrays
) -> responses.Response:
    """AssembleArrayFromSingleDeviceArrays: array i is shard i."""
    handles = request.single_device_array_handles
    records = state.arrays.find_all(handles)
    dtype = request.dtype if request.dtype is not None else records[0].dtype if records else None
    if dtype is None:
        raise error(Code.INVALID_ARGUMENT, "an array that is assembled from no shards needs an element type")
    placement = _placement(state, ArraySpec(dtype, request.shape, request.sharding))
    if len(handles) != len(placement.devices):
        raise error(
            Code.INVALID_ARGUMENT,
            f"an array on {len(placement.devices)} devices cannot be assembled from {len(handles)}",
        )
    moves = []
    for place, (handle, record, device) in enumerate(zip(handles, records, placement.devices, strict=True)):
        if record.placement is not None and record.placement.devices != (device,):
            raise error(
                Code.INVALID_ARGUMENT,
                f"shard {place} belongs on device {device}, but {describe(handle, record)} lies on"
                f" {list(record.placement.devices)}",
            )
        moves.append((place, PlannedMove(device, device, None, None)))
    (result,) = _results(state, (request.result_handle,) if request.result_handle else (), 1)
    new = _NewArray(result, dtype, request.shape, placement, handles, moves)
    _check_shards(state, new)
    _make(state, [new])
    _donate(state, request.copy_semantics, handles)
    return responses.ArrayHandle(result)


def disassemble(
    state: SessionState, _: RequestId, request: requests.DisassembleIntoSingleDeviceArrays
) -> responses.Response:
    """DisassembleIntoSingleDeviceArrays: shard i as array i."""
    source = state.arrays.find(request.array_handle)
    if source.placement is None:
        assert source.poison is not None
        if not request.result_handles:
            raise error(source.poison.code, source.poison.message)
        state.arrays.check_new(request.result_handles)
        for handle in request.result_handles:
            state.arrays.add(handle, poisoned_handle(source.poison))
        return responses.ArrayHandles(request.result_handles)
    sharding = source.placement.sharding
    results = _results(state, request.result_handles, len(sharding.devices))
    shape = sharding.shard_shape(source.shape)
    news = [
        _NewArray(
            handle,
            source.dtype,
            shape,
            state.placements.single(device, sharding.memory_kind),
            (request.array_handle,),
            [(0, PlannedMove(device, device, None, None))],
        )
        for handle, device in zip(results, sharding.devices, strict=True)
    ]
    _make(state, news)
    _donate(state, request.copy_semantics, (request.array_handle,))
    return responses.ArrayHandles(results)


def fully_replicated_shard(
    state: SessionState, _: RequestId, request: requests.FullyReplicatedShard
) -> responses.Response:
    """FullyReplicatedShard: the shard on the first device, as the client takes for granted."""
    source = state.arrays.find(request.array_handle)
    (result,) = _results(state, (request.result_handle,) if request.result_handle else (), 1)
    if source.placement is None:
        assert source.poison is not None
        state.arrays.add(result, poisoned_handle(source.poison))
        return responses.ArrayHandle(result)
    sharding = source.placement.sharding
    if not sharding.is_fully_replicated():
        raise error(Code.INVALID_ARGUMENT, f"{describe(request.array_handle, source)} is not fully replicated")
    device = sharding.devices[0]
    placement = state.placements.single(device, sharding.memory_kind)
    moves = [(0, PlannedMove(device, device, None, None))]
    _make(state, [_NewArray(result, source.dtype, source.shape, placement, (request.array_handle,), moves)])
    _donate(state, request.copy_semantics, (request.array_handle,))
    return responses.ArrayHandle(result)


def bitcast_arrays(_: SessionState, __: RequestId, request: requests.BitcastArrays) -> responses.Response:
    """BitcastArrays: not offered."""
    raise error(Code.UNIMPLEMENTED, f"BitcastArrays (of {len(request.array_handles)} arrays) is not implemented")


def _results(state: SessionState, given: tuple[Handle, ...], count: int) -> tuple[Handle, ...]:
    if given and len(given) != count:
        raise error(Code.INVALID_ARGUMENT, f"{len(given)} result handles for {count} arrays")
    state.arrays.check_new(given)
    return state.mint_unless_given(given, count)


def _placement(state: SessionState, spec: ArraySpec) -> Placement:
    """The placement of an array that is to be made, its tiles checked against its shape."""
    placement = state.placements.intern(spec.sharding)
    try:
        spec.sharding.shard_shape(spec.shape)
    except ValueError as mismatch:
        raise error(Code.INVALID_ARGUMENT, str(mismatch)) from mismatch
    return placement


def _check_shards(state: SessionState, new: _NewArray) -> None:
    """Refuse to make an array of whole shards that do not fit it."""
    shard_shape = new.placement.sharding.shard_shape(new.shape)
    for handle in new.sources:
        source = state.arrays.records[handle]
        if source.placement is None:
            continue
        if source.dtype is not new.dtype or source.placement.sharding.shard_shape(source.shape) != shard_shape:
            raise error(
                Code.INVALID_ARGUMENT,
                f"the shards of {describe(handle, source)} do not fit an array whose shards are"
                f" {new.dtype.name}[{','.join(map(str, shard_shape))}]",
            )


def _donate(state: SessionState, semantics: ArrayCopySemantics, handles: Iterable[Handle]) -> None:
    if semantics is ArrayCopySemantics.DONATE_INPUT:
        handles = tuple(dict.fromkeys(handles))
        for handle in handles:
            state.arrays.records[handle].is_deleted = True
        state.free(handles)


def _shard_origins(plan: RemapPlan) -> list[list[tuple[int, DeviceId]]]:
    """Per output and shard: the input it comes from and the device where it lies there."""
    origins: list[list[tuple[int, DeviceId] | None]] = [[None] * len(s.sharding.devices) for s in plan.output_specs]

    def place(out_array: int, shard: int, in_array: int, device: DeviceId) -> None:
        if not 0 <= shard < len(origins[out_array]):
            raise error(Code.INVALID_ARGUMENT, f"a remap plan speaks of shard {shard} of output {out_array}")
        if origins[out_array][shard] not in (None, (in_array, device)):
            raise error(Code.INVALID_ARGUMENT, f"a remap plan fills shard {shard} of output {out_array} twice")
        origins[out_array][shard] = (in_array, device)

    num_inputs, num_outputs = len(plan.input_specs), len(plan.output_specs)
    for mapping in plan.mappings:
        if not (0 <= mapping.in_array < num_inputs and 0 <= mapping.out_array < num_outputs):
            raise error(Code.INVALID_ARGUMENT, "a remap plan speaks of an array that it does not have")
        in_devices = plan.input_specs[mapping.in_array].sharding.devices
        froms, tos = _shards(mapping.from_), _shards(mapping.to)
        if len(froms) != len(tos):
            raise error(Code.INVALID_ARGUMENT, f"a remap plan maps {len(froms)} shards to {len(tos)}")
        for from_shard, to_shard in zip(froms, tos, strict=True):
            if not 0 <= from_shard < len(in_devices):
                raise error(Code.INVALID_ARGUMENT, f"a remap plan speaks of shard {from_shard} of {len(in_devices)}")
            place(mapping.out_array, to_shard, mapping.in_array, in_devices[from_shard])
    for output in plan.input_devices_for_output:
        if not 0 <= output.out_array < num_outputs:
            raise error(Code.INVALID_ARGUMENT, "a remap plan speaks of an array that it does not have")
        shard_on = {d: i for i, d in enumerate(plan.output_specs[output.out_array].sharding.devices)}
        for devices_of_input in output.input_devices:
            if not 0 <= devices_of_input.in_array < num_inputs:
                raise error(Code.INVALID_ARGUMENT, "a remap plan speaks of an array that it does not have")
            for device in devices_of_input.devices:
                place(output.out_array, shard_on.get(device, -1), devices_of_input.in_array, device)
    complete: list[list[tuple[int, DeviceId]]] = []
    for out_array, shards in enumerate(origins):
        filled = [origin for origin in shards if origin is not None]
        if len(filled) != len(shards):
            raise error(Code.INVALID_ARGUMENT, f"a remap plan leaves shards of output {out_array} empty")
        complete.append(filled)
    return complete


def _shards(intervals: Iterable[Interval]) -> list[int]:
    shards: list[int] = []
    for interval in intervals:
        if interval.step <= 0:
            raise error(Code.INVALID_ARGUMENT, f"a remap interval has step {interval.step}")
        shards.extend(range(interval.start, interval.end, interval.step))
    return shards


def _make(state: SessionState, news: list[_NewArray]) -> None:
    """Record new arrays, and submit one Alias and one Transfer at most for those that are not poisoned."""
    records = state.arrays.records
    for new in news:
        if new.dtype is DType.STRING and any(move.source_box or move.target_box for _, move in new.moves):
            raise error(Code.UNIMPLEMENTED, "arrays of strings can be moved, but not cut in another way, on workers")
    aliases, transfers = [], []
    for new in news:
        cause = _cause(state, new)
        if cause is not None:
            state.new_poisoned(new.handle, new.dtype, new.shape, new.placement, cause)
        elif _is_in_place(records, new):
            aliases.append(new)
        else:
            transfers.append(new)
    if aliases:
        _submit_alias(state, aliases)
    if transfers:
        _submit_transfer(state, transfers)


def _cause(state: SessionState, new: _NewArray) -> Status | None:
    for handle in new.sources:
        poison = state.arrays.records[handle].poison
        if poison is not None:
            return poison
    return new.placement.loss


def _stays(records: dict[Handle, ArrayRecord], new: _NewArray, source: int, move: PlannedMove) -> bool:
    """Whether a move takes a whole shard that is where it should be."""
    if move.source_device != move.target_device or move.source_box is not None:
        return False
    placement = records[new.sources[source]].placement
    return placement is not None and placement.memory_kind == new.placement.memory_kind


def _is_in_place(records: dict[Handle, ArrayRecord], new: _NewArray) -> bool:
    return len(new.moves) == len(new.placement.devices) and all(
        _stays(records, new, source, move) for source, move in new.moves
    )


def _submit_alias(state: SessionState, news: list[_NewArray]) -> None:
    records = state.arrays.records
    op_id = state.next_op()
    results, shard_sources, hosts = [], [], set()
    reads: dict[Handle, None] = {}
    for new in news:
        sources = [records[handle] for handle in new.sources]
        record = state.new_array(new.handle, new.dtype, new.shape, new.placement)
        state.share(record, new.sources)
        record.via_transfers = _via(sources)
        record.is_ready = all(source.is_ready for source in sources)
        results.append(sharded_result(new.handle, record))
        shard_sources.append(tuple(new.sources[source] for source, _ in new.moves))
        reads.update(dict.fromkeys(new.sources))
        hosts.add(new.placement.hosts)
    state.submit(
        Alias(op_id, tuple(results), tuple(shard_sources)),
        _union(hosts),
        reads=state.order_reads(tuple(reads), [records[handle] for handle in reads]),
        writes=tuple(new.handle for new in news),
    )


def _submit_transfer(state: SessionState, news: list[_NewArray]) -> None:
    records, topology = state.arrays.records, state.topology
    op_id = state.next_op()
    results, moves = [], []
    hosts: set[tuple[HostIndex, ...]] = set()
    senders: set[HostIndex] = set()
    reads: dict[Handle, None] = {}
    for result_index, new in enumerate(news):
        sources = [records[handle] for handle in new.sources]
        record = state.new_array(new.handle, new.dtype, new.shape, new.placement)
        local: dict[int, None] = {}
        kept: dict[int, None] = {}
        for source, move in new.moves:
            source_host, target_host = topology.host_of(move.source_device), topology.host_of(move.target_device)
            hosts.add((source_host,))
            if source_host != target_host:
                senders.add(source_host)
            else:
                local[source] = None
            if _stays(records, new, source, move):
                kept[source] = None
            moves.append(
                Move(
                    new.sources[source],
                    move.source_device,
                    result_index,
                    move.target_device,
                    move.source_box,
                    move.target_box,
                )
            )
        if kept:
            state.share(record, [new.sources[source] for source in kept])
        # A sender speaks up when its sources are there, so what they came by is settled; what stays on its host is not.
        record.via_transfers = (*_via(sources[source] for source in local), op_id)
        results.append(sharded_result(new.handle, record))
        reads.update(dict.fromkeys(new.sources))
        hosts.add(new.placement.hosts)
    state.out.append(
        SubmitOperation(
            Transfer(op_id, tuple(results), tuple(moves)),
            _union(hosts),
            is_transfer=True,
            reads=state.order_reads(tuple(reads), [records[handle] for handle in reads]),
            writes=tuple(new.handle for new in news),
            senders=tuple(sorted(senders)),
        )
    )


def _via(records: Iterable[ArrayRecord]) -> tuple[OpId, ...]:
    return tuple(dict.fromkeys(op_id for record in records for op_id in record.via_transfers))


def _union(groups: set[tuple[HostIndex, ...]]) -> tuple[HostIndex, ...]:
    if len(groups) == 1:
        return next(iter(groups))
    return tuple(sorted({host for group in groups for host in group}))
