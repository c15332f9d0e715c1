"""Arrays from host buffers and from arrays: exact operations."""

import numpy as np
import pytest

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import Handle, OpId
from pathways_runtime.core.operations import Alias, Delete, MakeArrays, Move, ShardedResult, Transfer
from pathways_runtime.core.session import requests, responses
from pathways_runtime.core.session.instructions import DropHostBuffer, SendHostBuffer, SubmitOperation
from pathways_runtime.core.session.requests import ArrayCopySemantics, ArraySpec, Interval
from pathways_runtime.core.sharding import REPLICATED, Sharding, TileAssignment, TileKind
from pathways_runtime.core.status import Code, Status
from pathways_runtime.testing.session_client import (
    ON_SLICE_0,
    ON_SLICE_1,
    ROWS_0,
    SHAPE,
    SLICE_0,
    SLICE_1,
    VALUES,
    Client,
)
from pathways_runtime.testing.session_driver import SessionDriver

REUSE, DONATE = ArrayCopySemantics.REUSE_INPUT, ArrayCopySemantics.DONATE_INPUT
#: Three columns over two places: the second is padded.
COLUMNS_0 = Sharding(SLICE_0, TileAssignment(TileKind.TILED, (1, 2, 2), (), (), (0, 1, 2, 3), 1), "device")


def test_a_replicated_buffer_crosses_to_each_host_once(session: SessionDriver, client: Client) -> None:
    array = client.array()
    made, sent, dropped, _ = client.last()
    result = ShardedResult(array, DType.S32, SHAPE, "device", SLICE_0)
    assert made == SubmitOperation(MakeArrays(OpId(1), (result,), ((0, 0, 0, 0),)), (0, 1), writes=(array,))
    assert sent == SendHostBuffer(array, OpId(1), 0, (0, 1), DType.S32, SHAPE, None, None, SHAPE)
    assert dropped == DropHostBuffer(array)


def test_a_sharded_buffer_is_cut_into_boxes_and_padded(session: SessionDriver, client: Client) -> None:
    array = client.array(COLUMNS_0)
    made, left, right, _, _ = client.last()
    assert isinstance(made, SubmitOperation) and isinstance(made.operation, MakeArrays)
    assert made.operation.buffers == ((0, 0, 1, 1),)
    assert made.operation.results[0].shape == (4, 2)
    assert left == SendHostBuffer(array, OpId(1), 0, (0,), DType.S32, SHAPE, None, ((0, 4), (0, 2)), (4, 2))
    assert right == SendHostBuffer(array, OpId(1), 1, (1,), DType.S32, SHAPE, None, ((0, 4), (2, 3)), (4, 2))
    session.run_workers()


def test_shards_share_buffers(session: SessionDriver, client: Client) -> None:
    handle, upper, lower = client.mint(), client.mint(), client.mint()
    halves = Sharding(SLICE_0, TileAssignment(TileKind.TILED, (2, 1, 2), (), (), (0, 3, 1, 2), 1), "device")
    session.stored[upper], session.stored[lower] = VALUES[:2], VALUES[2:]
    spec = requests.HostBufferShards(
        ArraySpec(DType.S32, SHAPE, halves),
        (requests.HostBuffer(DType.S32, (2, 3), upper, (12, 4)), requests.HostBuffer(DType.S32, (2, 3), lower)),
        ((0, 3), (1, 2)),
    )
    session.ask(requests.MakeArraysFromHostBufferShards((spec,), (handle,)))
    made, first, second, *dropped, _ = client.last()
    assert isinstance(made, SubmitOperation) and isinstance(made.operation, MakeArrays)
    assert made.operation.buffers == ((0, 1, 1, 0),)
    assert first == SendHostBuffer(upper, OpId(1), 0, (0, 1), DType.S32, (2, 3), (12, 4), None, (2, 3))
    assert second == SendHostBuffer(lower, OpId(1), 1, (0, 1), DType.S32, (2, 3), None, None, (2, 3))
    assert dropped == [DropHostBuffer(upper), DropHostBuffer(lower)]
    session.run_workers()


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (((0, 1), (2, 2)), "shard 2 of 4 is unknown or filled twice"),
        (((0, 1), (2,)), "host buffers for 3 of 4 shards"),
        (((0, 1, 2, 3),), "1 lists of shards for 2 host buffers"),
    ],
)
def test_shards_that_do_not_add_up(
    session: SessionDriver, client: Client, indices: tuple[tuple[int, ...], ...], message: str
) -> None:
    buffers = tuple(requests.HostBuffer(DType.S32, (1, 3), Handle(90 + i)) for i in range(2))
    session.stored.update({buffer.host_buffer_handle: VALUES[:1] for buffer in buffers})
    spec = requests.HostBufferShards(ArraySpec(DType.S32, SHAPE, ROWS_0), buffers, indices)
    refusal = client.refused(requests.MakeArraysFromHostBufferShards((spec,), (client.mint(),)))
    assert refusal == Status(Code.INVALID_ARGUMENT, message)
    assert not session.stored, "the buffers are dropped all the same"


def test_a_copy_that_stays_is_an_alias(session: SessionDriver, client: Client) -> None:
    array, alias = client.array(ROWS_0), client.mint()
    session.ask(requests.CopyArrays((array,), SLICE_0, "", ArrayCopySemantics.ALWAYS_COPY, (alias,)))
    made = client.last()[0]
    assert isinstance(made, SubmitOperation)
    result = ShardedResult(alias, DType.S32, (1, 3), None, SLICE_0)
    assert made.operation == Alias(OpId(2), (result,), ((array,) * 4,))
    assert made.hosts == (0, 1) and made.writes == (alias,) and made.reads[0] == array


def test_a_copy_that_goes_is_a_transfer_and_names_who_sends(session: SessionDriver, client: Client) -> None:
    array, moved = client.array(ROWS_0), client.mint()
    session.ask(requests.CopyArrays((array,), SLICE_1, "pinned_host", DONATE, (moved,)))
    transfer, delete, _ = client.last()
    result = ShardedResult(moved, DType.S32, (1, 3), "pinned_host", SLICE_1)
    moves = tuple(Move(array, s, 0, t) for s, t in zip(SLICE_0, SLICE_1, strict=True))
    assert transfer == SubmitOperation(
        Transfer(OpId(2), (result,), moves),
        (0, 1, 2, 3),
        is_transfer=True,
        reads=(array,),
        writes=(moved,),
        senders=(0, 1),
    )
    assert isinstance(delete, SubmitOperation) and delete.operation == Delete(OpId(3), (array,))
    assert session.ask(requests.IsArrayDeleted(array)) == responses.Deleted(True)


def test_a_copy_within_hosts_has_no_senders(session: SessionDriver, client: Client) -> None:
    array = client.array(ROWS_0)
    session.ask(requests.CopyArrays((array,), (1, 0, 3, 2), None, REUSE, (client.mint(),)))
    transfer = client.last()[0]
    assert isinstance(transfer, SubmitOperation) and transfer.is_transfer and transfer.senders == ()


def test_arrays_of_one_request_are_one_operation_of_each_kind(session: SessionDriver, client: Client) -> None:
    arrays = [client.array(ROWS_0), client.array(ROWS_0)]
    columns = ArraySpec(DType.S32, SHAPE, COLUMNS_0)
    rows = ArraySpec(DType.S32, SHAPE, ROWS_0)
    results = tuple(client.mint() for _ in range(4))
    session.ask(requests.ReshardArrays((*arrays, *arrays), (columns, rows, rows, columns), REUSE, results))
    alias, transfer, _ = client.last()
    assert isinstance(alias, SubmitOperation) and alias.writes == (results[1], results[2])
    assert isinstance(transfer, SubmitOperation) and transfer.writes == (results[0], results[3])
    session.run_workers()


def test_a_shard_stays_in_a_transfer_by_a_move_onto_itself(session: SessionDriver, client: Client) -> None:
    """And then the two arrays share it."""
    array, result = client.array(ROWS_0), client.mint()
    session.ask(requests.CopyArrays((array,), (0, 1, 4, 5), None, REUSE, (result,)))
    transfer = client.last()[0]
    assert isinstance(transfer, SubmitOperation) and isinstance(transfer.operation, Transfer)
    assert transfer.operation.moves[0] == Move(array, 0, 0, 0)
    assert len(transfer.reads) == 2, "the array and the token of what is shared"


@pytest.mark.parametrize("form", ["devices", "mappings"])
def test_a_remap_exchanges_shards(session: SessionDriver, client: Client, form: str) -> None:
    first = client.array(Sharding((0, 2), TileAssignment(TileKind.TILED, (2, 1), places=(0, 1)), "device"))
    second = client.array(
        Sharding((1, 3), TileAssignment(TileKind.TILED, (2, 1), places=(0, 1)), "device"), VALUES + 100
    )
    rows = ArraySpec(DType.S32, (8, 3), Sharding(SLICE_0, ROWS_0.tiles, "device"))
    inputs = tuple(
        ArraySpec(DType.S32, SHAPE, Sharding(d, TileAssignment(TileKind.TILED, (2, 1), places=(0, 1)), "device"))
        for d in ((0, 2), (1, 3))
    )
    both = Interval(0, 2, 1)
    plan = requests.RemapPlan(
        inputs,
        (rows,),
        mappings=(
            requests.RemapMapping(0, 0, (both,), (Interval(0, 4, 2),)),
            requests.RemapMapping(1, 0, (both,), (Interval(1, 4, 2),)),
        )
        if form == "mappings"
        else (),
        input_devices_for_output=(
            requests.InputDevicesForOutput(0, (requests.InputDevices(0, (0, 2)), requests.InputDevices(1, (1, 3)))),
        )
        if form == "devices"
        else (),
    )
    joined, buffer = client.mint(), client.mint()
    session.ask(requests.RemapArrays(plan, (first, second), DONATE, (joined,)))
    alias, delete, _ = client.last()
    assert isinstance(alias, SubmitOperation) and isinstance(alias.operation, Alias)
    assert alias.operation.sources == ((first, second, first, second),)
    assert isinstance(delete, SubmitOperation) and delete.consumes == (first, second)
    whole = client.mint()
    spec = ArraySpec(DType.S32, (8, 3), ON_SLICE_1)
    session.ask(requests.ReshardArrays((joined,), (spec,), REUSE, (whole,)))
    session.request(requests.CopyToHostBuffer(whole, buffer))
    session.run_workers()
    expected = np.concatenate([VALUES[:2], VALUES[:2] + 100, VALUES[2:], VALUES[2:] + 100])
    np.testing.assert_array_equal(session.stored[buffer], expected)


def test_remap_plans_that_do_not_add_up(session: SessionDriver, client: Client) -> None:
    array = client.array(ROWS_0)
    spec = ArraySpec(DType.S32, SHAPE, ROWS_0)

    def refusal(*mappings: requests.RemapMapping) -> str:
        plan = requests.RemapPlan((spec,), (spec,), mappings)
        status = client.refused(requests.RemapArrays(plan, (array,), REUSE, (client.mint(),)))
        assert status.code is Code.INVALID_ARGUMENT
        return status.message

    every = (Interval(0, 4, 1),)
    some = (Interval(0, 2, 1),)
    assert refusal() == "a remap plan leaves shards of output 0 empty"
    assert refusal(requests.RemapMapping(0, 0, some, every)) == "a remap plan maps 2 shards to 4"
    assert refusal(requests.RemapMapping(1, 0, every, every)) == "a remap plan speaks of an array that it does not have"
    assert refusal(requests.RemapMapping(0, 0, (Interval(0, 4, 0),), every)) == "a remap interval has step 0"
    twice = requests.RemapMapping(0, 0, (Interval(1, 3, 1),), some)
    assert refusal(requests.RemapMapping(0, 0, every, every), twice) == "a remap plan fills shard 0 of output 0 twice"


def test_apart_and_together(session: SessionDriver, client: Client) -> None:
    array = client.array(ROWS_0)
    singles = tuple(client.mint() for _ in SLICE_0)
    session.ask(requests.DisassembleIntoSingleDeviceArrays(array, REUSE, singles))
    alias = client.last()[0]
    assert isinstance(alias, SubmitOperation) and isinstance(alias.operation, Alias)
    assert [result.devices for result in alias.operation.results] == [(0,), (1,), (2,), (3,)]
    again = client.mint()
    made = requests.AssembleArrayFromSingleDeviceArrays(SHAPE, ROWS_0, singles, REUSE, again)
    assert session.ask(made) == responses.ArrayHandle(again)
    turned = requests.AssembleArrayFromSingleDeviceArrays(SHAPE, ROWS_0, singles[::-1], REUSE, client.mint())
    assert (
        client.refused(turned).message == f"shard 0 belongs on device 0, but array {singles[3]} (S32[1,3]) lies on [3]"
    )
    larger = requests.AssembleArrayFromSingleDeviceArrays((8, 3), ROWS_0, singles, REUSE, client.mint())
    assert client.refused(larger).message == (
        f"the shards of array {singles[0]} (S32[1,3]) do not fit an array whose shards are S32[2,3]"
    )
    session.run_workers()


def test_the_shard_of_a_replicated_array_is_the_one_on_its_first_device(session: SessionDriver, client: Client) -> None:
    array = client.array(Sharding((3, 0), REPLICATED, "device"))
    answer = session.ask(requests.FullyReplicatedShard(array, REUSE))
    assert isinstance(answer, responses.ArrayHandle)
    alias = client.last()[0]
    assert isinstance(alias, SubmitOperation) and isinstance(alias.operation, Alias)
    assert alias.operation.results[0].devices == (3,) and alias.hosts == (1,)
    refusal = client.refused(requests.FullyReplicatedShard(client.array(ROWS_0), REUSE))
    assert refusal.code is Code.INVALID_ARGUMENT


def test_deleted_is_not_forgotten(session: SessionDriver, client: Client) -> None:
    arrays = client.array(), client.array(ON_SLICE_1), client.array()
    future = session.ask(requests.DeleteArray((*arrays, Handle(99))))
    assert isinstance(future, responses.FutureHandle)
    slice_0, slice_1, _ = client.last()
    assert isinstance(slice_0, SubmitOperation) and slice_0.consumes == (arrays[0], arrays[2])
    assert isinstance(slice_1, SubmitOperation) and slice_1.hosts == (2, 3)
    assert client.refused(requests.CheckFuture(future.future_handle)) == Status(Code.NOT_FOUND, "there is no array 99")
    assert client.refused(requests.CheckFuture(future.future_handle)).code is Code.NOT_FOUND
    assert session.ask(requests.IsArrayDeleted(arrays[1])) == responses.Deleted(True)
    missing = client.refused(requests.DestructArray((arrays[1], Handle(98))))
    assert missing == Status(Code.NOT_FOUND, "there is no array 98")
    assert client.refused(requests.IsArrayDeleted(arrays[1])).code is Code.NOT_FOUND, "the known ones are forgotten"


def test_error_arrays_stay_in_the_session(session: SessionDriver, client: Client) -> None:
    cause = Status(Code.ABORTED, "made to fail")
    handle, copy = client.mint(), client.mint()
    session.ask(requests.MakeErrorArrays(cause, (ArraySpec(DType.S32, SHAPE, ROWS_0),), (handle,)))
    session.ask(requests.CopyArrays((handle,), SLICE_1, None, REUSE, (copy,)))
    assert client.refused(requests.CheckValueReady((copy,))) == cause
    session.ask(requests.DestructArray((handle, copy)))
    assert all(not isinstance(i, SubmitOperation) for _, told in session.log for i in told)


def test_shardings_that_make_no_sense(session: SessionDriver, client: Client) -> None:
    def refusal(sharding: Sharding) -> str:
        handle = client.mint()
        session.stored[handle] = VALUES
        request = requests.MakeArrayFromHostBuffer(DType.S32, SHAPE, sharding, handle, None, handle)
        status = client.refused(request)
        assert status.code is Code.INVALID_ARGUMENT
        return status.message

    assert refusal(Sharding((0, 8))) == "there is no device 8: devices are numbered 0 to 7"
    assert refusal(Sharding((1, 1))) == "a device is named twice in (1, 1)"
    assert refusal(Sharding(())) == "an array or program needs at least one device"
    assert refusal(Sharding(SLICE_0[:3], ROWS_0.tiles)) == "a sharding of 4 tiles cannot lie on 3 devices"
    flat = Sharding(SLICE_0, TileAssignment(TileKind.TILED, (4,), places=(0, 1, 2, 3)))
    assert refusal(flat) == "a sharding over 1 dimensions cannot cut an array of shape (4, 3)"


def test_bitcasts_are_not_there(session: SessionDriver, client: Client) -> None:
    array, result = client.array(), client.mint()
    spec = ArraySpec(DType.U32, SHAPE, ON_SLICE_0)
    refusal = client.refused(requests.BitcastArrays((array,), (spec,), REUSE, (result,)))
    assert refusal.code is Code.UNIMPLEMENTED and "BitcastArrays" in refusal.message
