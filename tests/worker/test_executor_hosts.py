"""Several executors: programs that span hosts and slices, shards that move between them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pathways_runtime.core import operations as ops
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle
from pathways_runtime.core.status import Code, Status
from pathways_runtime.wire import links as wire_links
from pathways_runtime.wire import messages as wire

F32 = np.dtype(np.float32)


def numbers(*shape: int, start: float = 0) -> np.ndarray:
    return (np.arange(np.prod(shape)) + start).astype(F32).reshape(shape)


def result(handle: Handle, shape: tuple[int, ...], devices: list[int]) -> ops.ShardedResult:
    return ops.ShardedResult(handle, DType.F32, shape, None, tuple(DeviceId(d) for d in devices))


def move(source: Handle, source_device: int, target_device: int, source_box: Any = None, target_box: Any = None) -> Any:
    return ops.Move(source, DeviceId(source_device), 0, DeviceId(target_device), source_box, target_box)


def psum(lab: Any, sharded: Callable[..., Any], devices: list[int], factor: int = 1) -> Any:
    """A program whose result on every device is ``factor`` times the sum of all shards."""
    argument = sharded((len(devices),), F32, len(devices), "x")
    mesh = argument.sharding.mesh

    def function(x: Any) -> Any:
        total = jax.shard_map(
            lambda shard: jax.lax.psum(factor * shard, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
        )
        return total(x)

    return lab.jit(function, argument, devices=devices)


def test_a_program_spans_the_hosts_of_a_slice(slice_lab: Any, sharded: Callable[..., Any]) -> None:
    lab = slice_lab
    program = psum(lab, sharded, [0, 1, 2, 3])
    # The second host loads what the first one compiled.
    assert [answer.from_cache for answer in program.answers] == [False, True]
    assert [answer.metadata is None for answer in program.answers] == [False, True]
    x = lab.make_array([numbers(1, start=10**d) for d in range(4)], [0, 1, 2, 3])
    total = program(x)
    assert lab.wait_ready([total]) == [None, None]
    assert [lab.fetch(total, d, F32, (1,))[0] for d in range(4)] == [1111] * 4


def test_a_program_spans_some_devices_in_any_order(slice_lab: Any, sharded: Callable[..., Any]) -> None:
    lab = slice_lab
    argument = sharded((2,), F32, 2, "x")
    program = lab.jit(lambda x: x.cumsum(), argument, devices=[3, 0], out_shardings=argument.sharding)
    x = lab.make_array([numbers(1, start=5), numbers(1, start=7)], [3, 0])
    y = program(x)
    assert (lab.fetch(y, 3, F32, (1,))[0], lab.fetch(y, 0, F32, (1,))[0]) == (5, 12)


def test_chains_of_collectives_keep_their_order(slice_lab: Any, sharded: Callable[..., Any]) -> None:
    lab = slice_lab
    programs = [psum(lab, sharded, [0, 1, 2, 3], factor) for factor in (1, 3)]
    x = lab.make_array([numbers(1, start=d) for d in range(4)], [0, 1, 2, 3])
    results = [programs[place % 2](x) for place in range(20)]
    for place, handle in enumerate(results):
        for device in (0, 3):
            assert lab.fetch(handle, device, F32, (1,))[0] == (6 if place % 2 == 0 else 18)


def test_a_program_spans_slices_and_its_arrays_come_and_go(slices_lab: Any, sharded: Callable[..., Any]) -> None:
    lab = slices_lab
    add = [lab.jit(lambda x: x + 1, sharded((2,), F32, 2, "x"), devices=devices) for devices in ([0, 1], [2, 3])]
    total = psum(lab, sharded, [0, 1, 2, 3])
    parts = [lab.make_array([numbers(1, start=10 * d) for d in devices], devices) for devices in ([0, 1], [2, 3])]
    value, expected = parts, np.array([0, 10, 20, 30.0])
    for _ in range(3):
        value = [add[0](value[0]), add[1](value[1])]
        expected = expected + 1
        whole = lab.handle()
        sources = (value[0], value[0], value[1], value[1])
        lab.submit(ops.Alias(lab.op_id(), (result(whole, (1,), [0, 1, 2, 3]),), (sources,)))
        summed = total(whole)
        expected = np.full(4, expected.sum())
        assert [lab.fetch(summed, d, F32, (1,))[0] for d in range(4)] == list(expected)
        # What comes out of the large world goes into programs of the small ones.
        value = [lab.handle(), lab.handle()]
        lab.submit(
            ops.Alias(lab.op_id(), (result(value[0], (1,), [0, 1]),), ((summed,) * 2,)),
            ops.Alias(lab.op_id(), (result(value[1], (1,), [2, 3]),), ((summed,) * 2,)),
        )


@pytest.mark.parametrize("forced", [False, True], ids=["shared memory", "sockets"])
def test_shards_move_between_hosts(make_lab: Callable[..., Any], sharded: Callable[..., Any], forced: bool) -> None:
    lab = make_lab(2, 1, 2, *(["--force-sockets"] if forced else []))
    size = 1 << 18
    x = lab.make_array([numbers(size), numbers(size, start=7)], [0, 1])
    y, op_id = lab.handle(), lab.op_id()
    lab.submit(ops.Transfer(op_id, (result(y, (size,), [2, 3]),), (move(x, 0, 3), move(x, 1, 2))))
    lab.hosts[0].wait_transfer(op_id)
    np.testing.assert_array_equal(lab.fetch(y, 3, F32, (size,)), numbers(size))
    np.testing.assert_array_equal(lab.fetch(y, 2, F32, (size,)), numbers(size, start=7))
    moved = lab.status(0)["bytes_moved"]
    way, other = ("socket", "shared_memory") if forced else ("shared_memory", "socket")
    assert (moved[way], moved[other]) == (2 * 4 * size, 0)


def test_ranges_move_between_hosts(slices_lab: Any) -> None:
    lab = slices_lab
    # Rows on two devices of slice 0 become columns on two devices of slice 1 and one of slice 0.
    x = lab.make_array([numbers(2, 4), numbers(2, 4, start=8)], [0, 1])
    y = lab.handle()
    moves = [
        move(x, source, target, ((0, 2), (column, column + 2)), ((2 * source, 2 * source + 2), (0, 2)))
        for target, column in ((2, 0), (0, 2))
        for source in (0, 1)
    ]
    lab.submit(ops.Transfer(lab.op_id(), (result(y, (4, 2), [2, 0]),), tuple(moves)), ops.Delete(lab.op_id(), (x,)))
    whole = numbers(4, 4)
    np.testing.assert_array_equal(lab.fetch(y, 2, F32, (4, 2)), whole[:, :2])
    np.testing.assert_array_equal(lab.fetch(y, 0, F32, (4, 2)), whole[:, 2:])


def test_a_transfer_is_arranged_before_its_source_is_there(slices_lab: Any, sharded: Callable[..., Any]) -> None:
    lab = slices_lab
    add = lab.jit(lambda x: x + 1, sharded((2,), F32, 1), devices=[2])
    x, y, made, moved = lab.handle(), lab.handle(), lab.op_id(), lab.op_id()
    launch = add.launch(y)
    lab.submit(
        ops.MakeArrays(made, (result(x, (2,), [0]),), ((0,),)),
        ops.Transfer(moved, (result(y, (2,), [2]),), (move(x, 0, 2),)),
    )
    lab.submit(launch, hosts=[1])
    lab.status(0)
    acknowledged = lab.hosts[0].inbox.all(wire.Acknowledge)
    assert moved not in [op_id for message in acknowledged for _, op_id in message.transfers_started]
    assert {entry["what"] for entry in lab.status(1)["waiting"]} == {"launch", "transfer"}
    lab.hosts[0].link.channel.send(wire_links.HostBuffer(made, 0), numbers(2).tobytes())
    lab.hosts[0].wait_transfer(moved)
    np.testing.assert_array_equal(lab.fetch(launch.results[0], 2, F32, (2,)), [1, 2])


def test_a_failed_source_fails_what_was_to_come(slices_lab: Any) -> None:
    lab = slices_lab
    x, y, z = lab.handle(), lab.handle(), lab.handle()
    status = Status(Code.RESOURCE_EXHAUSTED, "no memory on host-0")
    lab.submit(ops.Poison(lab.op_id(), (x,), status), hosts=[0])
    first, second = lab.op_id(), lab.op_id()
    lab.submit(ops.Transfer(first, (result(y, (2,), [2]),), (move(x, 0, 2),)))
    # The size that the mark and the status happen to have changes nothing.
    lab.submit(ops.Transfer(second, (result(z, (0,), [2]),), (move(x, 0, 2),)))
    lab.hosts[0].wait_transfer(first)
    for handle in (y, z):
        assert lab.fetch_failure(handle, 2) == status
    failed = lab.hosts[1].inbox.take(wire.OperationFailed).message
    assert (failed.op_id, failed.failure) == (first, status)


def test_a_lost_sender_fails_what_was_to_come(make_lab: Callable[..., Any]) -> None:
    lab = make_lab(2, 1, 1)
    x, y = lab.handle(), lab.handle()
    lab.submit(
        ops.MakeArrays(lab.op_id(), (result(x, (2,), [0]),), ((0,),)),
        ops.Transfer(lab.op_id(), (result(y, (2,), [1]),), (move(x, 0, 1),)),
    )
    assert [entry["waits_for"] for entry in lab.status(1)["waiting"]] == ["bytes from hosts 0"]
    # Something has come from there before, so that its end is noticed on the connection.
    z, moved = lab.handle(), lab.op_id()
    w = lab.make_array([numbers(2)], [0])
    lab.submit(ops.Transfer(moved, (result(z, (2,), [1]),), (move(w, 0, 1),)))
    np.testing.assert_array_equal(lab.fetch(z, 1, F32, (2,)), [0, 1])
    lab.hosts[0].process.kill()
    failure = lab.fetch_failure(y, 1)
    assert failure.code == Code.DATA_LOSS
    assert "host 0" in failure.message


def test_a_host_takes_part_in_a_launch_although_its_argument_failed(
    slice_lab: Any, sharded: Callable[..., Any]
) -> None:
    lab = slice_lab
    program = psum(lab, sharded, [0, 1, 2, 3])
    x = lab.make_array([numbers(1, start=d) for d in range(4)], [0, 1, 2, 3])
    lab.wait_ready([x])
    status = Status(Code.DATA_LOSS, "half of it never came")
    lab.submit(ops.Poison(lab.op_id(), (x,), status), hosts=[1])
    y = program(x)
    # Host 0 would hang if host 1 had left the launch out.
    assert lab.wait_ready([y]) == [None, status]
    assert lab.hosts[1].inbox.take(wire.OperationFailed).message.handles == (y,)
    z = lab.make_array([numbers(1, start=d) for d in range(4)], [0, 1, 2, 3])
    assert lab.fetch(program(z), 3, F32, (1,))[0] == 6


def test_a_closed_session_does_not_leave_others_hanging(slice_lab: Any, sharded: Callable[..., Any]) -> None:
    lab = slice_lab
    program = psum(lab, sharded, [0, 1, 2, 3])
    x, op_id = lab.handle(), lab.op_id()
    lab.submit(ops.MakeArrays(op_id, (result(x, (1,), [0, 1, 2, 3]),), ((0, 0, 0, 0),)))
    # The bytes reach host 0 only: it is inside the collective when the session is closed.
    lab.hosts[0].link.channel.send(wire_links.HostBuffer(op_id, 0), numbers(1).tobytes())
    program(x)
    lab.close_session()
    lab.open_session()
    again = psum(lab, sharded, [0, 1, 2, 3])
    y = lab.make_array([numbers(1, start=1)] * 4, [0, 1, 2, 3])
    assert lab.fetch(again(y), 0, F32, (1,))[0] == 4


def test_launches_are_delayed_when_the_test_switch_says_so(
    make_lab: Callable[..., Any], sharded: Callable[..., Any]
) -> None:
    lab = make_lab(1, 2, 1, env={"SLURM_PATHWAYS_TEST_LAUNCH_DELAY_S": "3:0.01"})
    programs = [psum(lab, sharded, [0, 1], factor) for factor in (1, 3)]
    x = lab.make_array([numbers(1, start=d) for d in range(2)], [0, 1])
    results = [programs[place % 2](x) for place in range(10)]
    assert [lab.fetch(handle, 1, F32, (1,))[0] for handle in results] == [1, 3] * 5


def test_dtypes_move_between_hosts(slices_lab: Any) -> None:
    lab = slices_lab
    for kind in (DType.S4, DType.BF16, DType.C64, DType.F8E4M3FN, DType.PRED):
        values = (np.arange(6) % 2).reshape(2, 3).astype(np.dtype(kind.numpy_name))
        x, y = lab.make_array([values], [1], kind=kind), lab.handle()
        moved = ops.ShardedResult(y, kind, (2, 2), None, (DeviceId(2),))
        moves = (move(x, 1, 2, ((0, 2), (1, 3)), ((0, 2), (0, 2))),)
        lab.submit(ops.Transfer(lab.op_id(), (moved,), moves))
        back = lab.fetch(y, 2, values.dtype, (2, 2))
        assert back.view(np.uint8).tolist() == np.ascontiguousarray(values[:, 1:]).view(np.uint8).tolist()


def test_different_programs_run_on_different_slices(slices_lab: Any, sharded: Callable[..., Any]) -> None:
    lab = slices_lab
    double = lab.jit(lambda x: x * 2, sharded((2,), F32, 2, "x"), devices=[0, 1])
    root = lab.jit(lambda x: jnp.sqrt(x), sharded((2,), F32, 2, "x"), devices=[2, 3])
    x = lab.make_array([numbers(1, start=4)] * 2, [0, 1])
    y = lab.make_array([numbers(1, start=4)] * 2, [2, 3])
    assert lab.fetch(double(x), 1, F32, (1,))[0] == 8
    assert lab.fetch(root(y), 3, F32, (1,))[0] == 2
