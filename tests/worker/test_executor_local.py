"""One executor process: programs, values, failures."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 - names of types for numpy
import numpy as np
import pytest

from pathways_runtime.core import operations as ops
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle
from pathways_runtime.core.status import Code, Status
from pathways_runtime.wire import links as wire_links
from pathways_runtime.wire import messages as wire

F32 = np.dtype(np.float32)


def numbers(*shape: int, start: float = 0) -> np.ndarray:
    return (np.arange(np.prod(shape)) + start).astype(F32).reshape(shape)


def result(handle: Handle, shape: tuple[int, ...], devices: list[int], memory_kind: str | None = None) -> Any:
    return ops.ShardedResult(handle, DType.F32, shape, memory_kind, tuple(DeviceId(d) for d in devices))


# Programs


def test_a_program_runs_on_one_device(lab: Any, sharded: Callable[..., Any]) -> None:
    add = lab.jit(lambda x: x + 1, sharded((3,), F32, 1), devices=[1])
    x = lab.make_array([numbers(3)], [1])
    y = add(add(x))
    assert lab.wait_ready([y]) == [None]
    np.testing.assert_array_equal(lab.fetch(y, 1, F32, (3,)), [2, 3, 4])
    lab.hosts[0].wait_completed(2)


def test_a_program_runs_on_devices_in_another_order(lab: Any, sharded: Callable[..., Any]) -> None:
    def function(x: Any) -> Any:
        return x + jnp.arange(4, dtype=F32), x.sum()

    program = lab.jit(function, sharded((4,), F32, 2, "x"), devices=[1, 0])
    x = lab.make_array([numbers(2), numbers(2, start=10)], [1, 0])
    y, total = program(x, num_results=2)
    np.testing.assert_array_equal(lab.fetch(y, 1, F32, (2,)), [0, 2])
    np.testing.assert_array_equal(lab.fetch(y, 0, F32, (2,)), [12, 14])
    for device in (0, 1):
        assert lab.fetch(total, device, F32, ()) == 22


def test_an_argument_whose_shards_are_in_another_order_is_reordered(lab: Any, sharded: Callable[..., Any]) -> None:
    program = lab.jit(lambda x: x + jnp.arange(2, dtype=F32), sharded((2,), F32, 2, "x"), devices=[0, 1])
    x = lab.make_array([numbers(1, start=5), numbers(1, start=7)], [1, 0])
    y = program(x)
    assert lab.fetch(y, 0, F32, (1,)) == 7
    assert lab.fetch(y, 1, F32, (1,)) == 6


def test_metadata(lab: Any, sharded: Callable[..., Any]) -> None:
    def function(a: Any, b: Any, c: Any) -> Any:
        return a + 1, b.astype(jnp.int4), (c > 0, c.sum(), c[:0])

    program = lab.jit(
        function,
        sharded((8, 4), F32, 2, "x"),
        sharded((64,), jnp.bfloat16, 2),
        sharded((4, 2), np.float64, 2, None, "x"),
        devices=[0, 1],
        donate_argnums=(0, 1),
    )
    metadata = program.metadata
    assert metadata.name == "jit_function"
    assert metadata.output_shapes == ((8, 4), (64,), (4, 2), (), (0, 2))
    assert metadata.output_dtypes == (DType.F32, DType.S4, DType.PRED, DType.F64, DType.F64)
    assert metadata.output_layouts == ((1, 0), (0,), (1, 0), (), (1, 0))
    assert metadata.parameter_layouts == ((1, 0), (0,), (1, 0))
    assert metadata.output_memory_kinds == ("device",) * 5
    # The second one is donated too, but no output can use its memory.
    assert metadata.donated_inputs == (0,)
    assert len(metadata.parameter_shardings) == 3
    assert len(metadata.output_shardings) == 5
    assert metadata.memory_stats["argument_size_in_bytes"] == 64 + 128 + 32
    assert metadata.cost_analysis["flops"] > 0
    assert "ENTRY" in metadata.text


def test_linear_algebra_runs(lab: Any, sharded: Callable[..., Any]) -> None:
    program = lab.jit(lambda x: jnp.linalg.cholesky(x), sharded((2, 2), F32, 1), devices=[0])
    x = lab.make_array([np.array([[4, 0], [0, 9]], F32)], [0])
    np.testing.assert_allclose(lab.fetch(program(x), 0, F32, (2, 2)), [[2, 0], [0, 3]])


def test_a_program_that_does_not_compile_says_why(lab: Any, sharded: Callable[..., Any]) -> None:
    _, (answer,) = lab.compile(b"not a program", b"", [0])
    assert answer.failure.code == Code.INVALID_ARGUMENT
    assert "not a StableHLO program" in answer.failure.message
    assert answer.metadata is None
    # The executor still works.
    assert lab.fetch(lab.make_array([numbers(1)], [0]), 0, F32, (1,)) == 0


def test_flags_of_the_client_do_not_reach_the_compiler(
    lab: Any, sharded: Callable[..., Any], tmp_path: Path, lower: Callable[..., Any]
) -> None:
    program, options = lower(lambda x: x * 3, sharded((1,), F32, 1), devices=[0])
    from jaxlib import xla_client

    settings = xla_client.CompileOptions.ParseFromString(options)
    settings.executable_build_options.debug_options.xla_dump_to = str(tmp_path)
    settings.executable_build_options.debug_options.xla_dump_hlo_as_text = True
    _, (answer,) = lab.compile(program, settings.SerializeAsString(), [0])
    assert answer.failure is None
    assert list(tmp_path.iterdir()) == []


# Usage


def test_executions_and_what_they_took_are_counted(own_lab: Any, sharded: Callable[..., Any]) -> None:
    def double(x: Any) -> Any:
        return x * 2

    def slow(x: Any) -> Any:
        return jax.lax.fori_loop(0, 300, lambda _, y: y @ x / 300, x)

    both = own_lab.jit(double, sharded((2,), F32, 2, "x"), devices=[0, 1])
    one = own_lab.jit(slow, sharded((300, 300), F32, 1), devices=[1])
    before = own_lab.status(0)["usage"]
    assert ([device["id"] for device in before["devices"]], before["programs"]) == ([0, 1], [])
    x = own_lab.make_array([numbers(1), numbers(1)], [0, 1])
    results = [both(x) for _ in range(3)]
    results.append(one(own_lab.make_array([np.ones((300, 300), F32)], [1])))
    assert own_lab.wait_ready(results) == [None]
    # Readiness may be told before the end is counted.
    own_lab.hosts[0].wait_completed(4)
    usage = own_lab.status(0)["usage"]
    rows = {row["name"]: row for row in usage["programs"]}
    assert {name: (row["devices"], row["executions"]) for name, row in rows.items()} == {
        "jit_double": ("0-1", 3),
        "jit_slow": ("1", 1),
    }
    assert usage["busy_s"] == pytest.approx(rows["jit_double"]["busy_s"] + rows["jit_slow"]["busy_s"], abs=1e-5)
    # 300 products of matrices of 300 x 300: more than a hundred times what a processor does in a millisecond.
    assert rows["jit_slow"]["busy_s"] > 0.001
    for device in usage["devices"]:
        assert 0 < device["busy_s"] <= usage["elapsed_s"]
        assert device["busy_s"] + device["waiting_s"] <= usage["elapsed_s"] + 1e-5


# The compile cache


def test_the_compile_cache_is_used_and_damage_is_repaired(own_lab: Any, sharded: Callable[..., Any]) -> None:
    def compiled() -> Any:
        return own_lab.jit(lambda x: x * 2, sharded((2,), F32, 1), devices=[0], donate_argnums=0)

    first, second = compiled(), compiled()
    assert (first.answers[0].from_cache, second.answers[0].from_cache) == (False, True)
    assert second.metadata == first.metadata
    (entry,) = own_lab.cache.glob("*.program")
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 0xFF
    entry.write_bytes(content)
    third, fourth = compiled(), compiled()
    assert (third.answers[0].from_cache, fourth.answers[0].from_cache) == (False, True)
    assert third.metadata.donated_inputs == (0,)
    assert [path.suffix for path in own_lab.cache.iterdir()] == [".program"]
    y = fourth(own_lab.make_array([numbers(2, start=1)], [0]))
    np.testing.assert_array_equal(own_lab.fetch(y, 0, F32, (2,)), [2, 4])


def test_a_program_on_another_device_is_another_entry(own_lab: Any, sharded: Callable[..., Any]) -> None:
    for device in (0, 1):
        program = own_lab.jit(lambda x: x - 1, sharded((1,), F32, 1), devices=[device])
        assert not program.answers[0].from_cache
        assert own_lab.fetch(program(own_lab.make_array([numbers(1)], [device])), device, F32, (1,)) == -1
    assert len(list(own_lab.cache.iterdir())) == 2


# Host buffers


@pytest.mark.parametrize("kind", [k for k in DType if k not in (DType.TOKEN, DType.OPAQUE, DType.STRING)], ids=str)
def test_every_type_goes_there_and_back(lab: Any, kind: DType) -> None:
    dtype = np.dtype(kind.numpy_name)
    values = (np.arange(6) % 2).reshape(2, 3).astype(dtype)
    handle = lab.make_array([values], [0], kind=kind)
    (failure,) = lab.wait_ready([handle])
    if failure is not None and "Unknown NumPy dtype" in failure.message:
        pytest.skip(f"this jaxlib has no {kind.name}")
    back = lab.fetch(handle, 0, dtype, (2, 3))
    assert back.view(np.uint8).tobytes() == values.view(np.uint8).tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
def test_every_shape_goes_there_and_back(lab: Any, shape: tuple[int, ...]) -> None:
    values = np.full(shape, 3.5, F32)
    back = lab.fetch(lab.make_array([values], [0]), 0, F32, shape)
    np.testing.assert_array_equal(back, values)


def test_a_large_buffer_goes_there_and_back(lab: Any) -> None:
    values = numbers(1 << 20)
    before = lab.status(0)["bytes_moved"]["host_buffers"]
    np.testing.assert_array_equal(lab.fetch(lab.make_array([values], [1]), 1, F32, values.shape), values)
    assert lab.status(0)["bytes_moved"]["host_buffers"] - before == 2 * values.nbytes


@pytest.mark.parametrize("memory_kind", ["device", "pinned_host", "unpinned_host"])
def test_arrays_lie_in_every_memory(lab: Any, memory_kind: str) -> None:
    handle = lab.make_array([numbers(2), numbers(2, start=4)], [0, 1], memory_kind)
    np.testing.assert_array_equal(lab.fetch(handle, 1, F32, (2,)), [4, 5])


def test_an_array_waits_for_its_bytes_and_what_reads_it_waits_too(lab: Any, sharded: Callable[..., Any]) -> None:
    add = lab.jit(lambda x, y: x + y, sharded((2,), F32, 1), sharded((2,), F32, 1), devices=[0])
    op_id, late, wait_id = lab.op_id(), lab.handle(), lab.wait_id()
    x = lab.make_array([numbers(2)], [0])
    launch = add.launch(x, late)
    lab.wait_ready([x])
    lab.submit(
        ops.MakeArrays(op_id, (result(late, (2,), [0]),), ((0,),)),
        ops.Await(lab.op_id(), wait_id, (late,)),
        launch,
        # Taken in while the launch waits: the launch still reads what it named.
        ops.Delete(lab.op_id(), (x, late)),
    )
    waiting = sorted(lab.status(0)["waiting"], key=lambda entry: entry["what"])
    assert [entry["what"] for entry in waiting] == ["await", "launch", "makearrays"]
    assert waiting[1]["waits_for"] == f"arrays {late}"
    lab.hosts[0].link.channel.send(wire_links.HostBuffer(op_id, 0), numbers(2, start=1).tobytes())
    answer = lab.hosts[0].link.take(wire_links.ArraysReady, lambda m: m.wait_id == wait_id).message
    assert answer.failure is None
    np.testing.assert_array_equal(lab.fetch(launch.results[0], 0, F32, (2,)), [1, 3])
    lab.hosts[0].wait_completed(1)
    assert lab.status(0)["waiting"] == []


def test_shards_may_share_a_buffer(lab: Any) -> None:
    op_id, handle = lab.op_id(), lab.handle()
    lab.submit(ops.MakeArrays(op_id, (result(handle, (2,), [0, 1]),), ((0, 0),)))
    lab.hosts[0].link.channel.send(wire_links.HostBuffer(op_id, 0), numbers(2).tobytes())
    for device in (0, 1):
        np.testing.assert_array_equal(lab.fetch(handle, device, F32, (2,)), [0, 1])


def test_a_buffer_of_the_wrong_size_is_a_failure(lab: Any) -> None:
    op_id, handle = lab.op_id(), lab.handle()
    lab.submit(ops.MakeArrays(op_id, (result(handle, (3,), [0]),), ((0,),)))
    lab.hosts[0].link.channel.send(wire_links.HostBuffer(op_id, 0), b"12345678")
    failed = lab.hosts[0].inbox.take(wire.OperationFailed).message
    assert (failed.op_id, failed.handles) == (op_id, (handle,))
    assert str(failed.failure) == "INVALID_ARGUMENT: a host buffer has 8 bytes, F32[3] needs 12"
    assert lab.wait_ready([handle]) == [failed.failure]


# Donation


def test_a_donated_argument_is_gone_and_its_memory_reused(lab: Any, sharded: Callable[..., Any]) -> None:
    program = lab.jit(lambda x: x + 1, sharded((4,), F32, 1), devices=[0], donate_argnums=0)
    x = lab.make_array([numbers(4)], [0])
    y = program(x)
    np.testing.assert_array_equal(lab.fetch(y, 0, F32, (4,)), [1, 2, 3, 4])
    failure = lab.fetch_failure(x, 0)
    assert failure.code == Code.INVALID_ARGUMENT
    assert "deleted or donated" in failure.message


def test_a_non_donatable_argument_survives(lab: Any, sharded: Callable[..., Any]) -> None:
    program = lab.jit(lambda x: x + 1, sharded((8,), F32, 2, "x"), devices=[0, 1], donate_argnums=0)
    x = lab.make_array([numbers(4), numbers(4)], [0, 1])
    y = program(x, non_donatable=(0,))
    for device in (0, 1):
        np.testing.assert_array_equal(lab.fetch(y, device, F32, (4,)), [1, 2, 3, 4])
        np.testing.assert_array_equal(lab.fetch(x, device, F32, (4,)), [0, 1, 2, 3])


def test_a_chain_of_donations(lab: Any, sharded: Callable[..., Any]) -> None:
    program = lab.jit(lambda x: x + 1, sharded((2,), F32, 2, "x"), devices=[0, 1], donate_argnums=0)
    x = lab.make_array([numbers(1), numbers(1)], [0, 1])
    for _ in range(100):
        x = program(x)
    assert lab.fetch(x, 1, F32, (1,)) == 100
    lab.hosts[0].wait_completed(100)
    assert lab.hosts[0].inbox.all(wire.OperationFailed) == []


def test_what_was_asked_for_before_a_donation_is_still_answered(lab: Any, sharded: Callable[..., Any]) -> None:
    slow = lab.jit(lambda x: x @ x @ x, sharded((500, 500), F32, 1), devices=[0])
    donate = lab.jit(lambda x: x * 0, sharded((500, 500), F32, 1), devices=[0], donate_argnums=0)
    x = lab.make_array([np.eye(500, dtype=F32)], [0])
    first = slow.launch(x)
    second = donate.launch(first.results[0])
    fetched, awaited = lab.wait_id(), lab.wait_id()
    lab.submit(
        first,
        ops.Fetch(lab.op_id(), fetched, first.results[0], DeviceId(0)),
        ops.Await(lab.op_id(), awaited, (first.results[0],)),
        second,
        ops.Delete(lab.op_id(), (first.results[0],)),
    )
    frame = lab.hosts[0].link.take(wire_links.Fetched, lambda m: m.wait_id == fetched)
    assert frame.message.failure is None
    np.testing.assert_array_equal(np.frombuffer(frame.payload, F32).reshape(500, 500), np.eye(500))
    assert lab.hosts[0].link.take(wire_links.ArraysReady).message.failure is None
    assert lab.fetch(second.results[0], 0, F32, (500, 500)).sum() == 0


def test_arrays_that_share_memory_survive_each_others_donation(lab: Any, sharded: Callable[..., Any]) -> None:
    program = lab.jit(lambda x: x + 1, sharded((4,), F32, 1), devices=[0], donate_argnums=0)
    x, alias = lab.make_array([numbers(4)], [0]), lab.handle()
    lab.submit(ops.Alias(lab.op_id(), (result(alias, (4,), [0]),), ((x,),)))
    y = program(alias)
    np.testing.assert_array_equal(lab.fetch(y, 0, F32, (4,)), [1, 2, 3, 4])
    np.testing.assert_array_equal(lab.fetch(x, 0, F32, (4,)), [0, 1, 2, 3])


# Alias and transfers on one host


def test_alias_takes_apart_and_puts_together(lab: Any) -> None:
    x = lab.make_array([numbers(2), numbers(2, start=10)], [0, 1])
    first, second, swapped = lab.handle(), lab.handle(), lab.handle()
    lab.submit(
        ops.Alias(lab.op_id(), (result(first, (2,), [0]), result(second, (2,), [1])), ((x,), (x,))),
        ops.Alias(lab.op_id(), (result(swapped, (2,), [1, 0]),), ((second, first),)),
        ops.Delete(lab.op_id(), (x, first, second)),
    )
    np.testing.assert_array_equal(lab.fetch(swapped, 1, F32, (2,)), [10, 11])
    np.testing.assert_array_equal(lab.fetch(swapped, 0, F32, (2,)), [0, 1])


def move(source: Handle, source_device: int, target_device: int, source_box: Any = None, target_box: Any = None) -> Any:
    return ops.Move(source, DeviceId(source_device), 0, DeviceId(target_device), source_box, target_box)


def test_transfer_between_devices_and_memories(lab: Any) -> None:
    x = lab.make_array([numbers(2), numbers(2, start=10)], [0, 1])
    crossed, pinned = lab.handle(), lab.handle()
    lab.submit(
        ops.Transfer(lab.op_id(), (result(crossed, (2,), [0, 1]),), (move(x, 1, 0), move(x, 1, 1))),
        ops.Transfer(lab.op_id(), (result(pinned, (2,), [0], "pinned_host"),), (move(x, 0, 0),)),
    )
    for device in (0, 1):
        np.testing.assert_array_equal(lab.fetch(crossed, device, F32, (2,)), [10, 11])
    np.testing.assert_array_equal(lab.fetch(pinned, 0, F32, (2,)), [0, 1])


def test_transfer_of_ranges(lab: Any) -> None:
    x = lab.make_array([numbers(2, 2), numbers(2, 2, start=10)], [0, 1])
    y = lab.handle()
    lab.submit(
        ops.Transfer(
            lab.op_id(),
            (result(y, (4, 1), [1]),),
            (
                move(x, 0, 1, ((0, 2), (1, 2)), ((0, 2), (0, 1))),
                move(x, 1, 1, ((1, 2), (0, 1)), ((3, 4), (0, 1))),
            ),
        )
    )
    back = lab.fetch(y, 1, F32, (4, 1))[:, 0]
    assert (back[0], back[1], back[3]) == (1, 3, 12)


# Failures


def test_a_failed_launch_poisons_what_depends_on_it(lab: Any, sharded: Callable[..., Any]) -> None:
    huge = lab.jit(
        lambda x: jnp.zeros((1 << 20, 1 << 20, 1 << 8), F32) + x,
        sharded((), F32, 1),
        devices=[0],
    )
    total = lab.jit(lambda x: x.sum(), sharded((1 << 20, 1 << 20, 1 << 8), F32, 1), devices=[0])
    bad = huge(lab.make_array([numbers()], [0]))
    worse = total(bad)
    (failure,) = lab.wait_ready([worse])
    assert failure.code == Code.RESOURCE_EXHAUSTED
    assert "Out of memory" in failure.message
    assert "host-0" in failure.message
    first, second = (lab.hosts[0].inbox.take(wire.OperationFailed).message for _ in range(2))
    assert (first.handles, second.handles) == ((bad,), (worse,))
    assert first.failure == second.failure == failure
    assert lab.fetch_failure(bad, 0) == failure
    lab.hosts[0].wait_completed(2)


def test_poison_is_inherited(lab: Any, sharded: Callable[..., Any]) -> None:
    add = lab.jit(lambda x, y: x + y, sharded((1,), F32, 1), sharded((1,), F32, 1), devices=[0])
    lost, x = lab.handle(), lab.make_array([numbers(1)], [0])
    status = Status(Code.DATA_LOSS, "host-3 was lost")
    lab.submit(ops.Poison(lab.op_id(), (lost,), status))
    y = add(x, lost)
    alias = lab.handle()
    lab.submit(ops.Alias(lab.op_id(), (result(alias, (1,), [0]),), ((y,),)))
    assert lab.wait_ready([x, alias]) == [status]
    assert lab.fetch_failure(y, 0) == status
    lab.hosts[0].wait_completed(1)
    # What does not depend on it goes on.
    assert lab.fetch(add(x, x), 0, F32, (1,)) == 0


def test_poison_ends_the_waiting_for_an_array_that_never_comes(lab: Any, sharded: Callable[..., Any]) -> None:
    add = lab.jit(lambda x: x + 1, sharded((1,), F32, 1), devices=[0])
    never = lab.handle()
    lab.submit(ops.MakeArrays(lab.op_id(), (result(never, (1,), [0]),), ((0,),)))
    y = add(never)
    status = Status(Code.CANCELLED, "the client took it back")
    lab.submit(ops.Poison(lab.op_id(), (never,), status))
    assert lab.wait_ready([y]) == [status]


# Ends


def test_deleted_arrays_free_their_memory(lab: Any, sharded: Callable[..., Any]) -> None:
    double = lab.jit(lambda x: x * 2, sharded((1 << 20,), F32, 1), devices=[0])
    x = lab.make_array([numbers(1 << 20)], [0])
    y = double(x)
    lab.wait_ready([x, y])
    assert lab.status(0)["bytes"] == 2 * (4 << 20)
    lab.submit(ops.Delete(lab.op_id(), (x,)))
    assert lab.status(0)["bytes"] == 4 << 20
    lab.submit(ops.Delete(lab.op_id(), (y,)))
    report = lab.status(0)
    assert (report["arrays"], report["bytes"]) == (0, 0)


def test_a_closed_session_leaves_nothing(lab: Any, sharded: Callable[..., Any]) -> None:
    add = lab.jit(lambda x: x + 1, sharded((1,), F32, 1), devices=[0])
    never = lab.handle()
    lab.make_array([numbers(100)], [0])
    lab.submit(ops.MakeArrays(lab.op_id(), (result(never, (1,), [0]),), ((0,),)))
    add(never)
    # Counts the launch that was waiting, and checks that nothing is left.
    lab.close_session()
    lab.open_session()
    assert lab.fetch(lab.make_array([numbers(1)], [0]), 0, F32, (1,)) == 0


@pytest.mark.parametrize("how", ["shutdown", "connection", "lifeline"])
def test_the_process_ends_when_its_controller_or_parent_does(own_lab: Any, how: str) -> None:
    import os

    host = own_lab.hosts[0]
    started_s = time.monotonic()
    if how == "shutdown":
        host.send(wire.Shutdown("the test is over"))
    elif how == "connection":
        host.inbox.channel.close()
    else:
        os.close(host.lifeline)
    assert host.process.wait(10) == 0
    assert time.monotonic() - started_s < 5
    assert [path.name for path in own_lab.folder.glob("data*")] in ([], ["data-0-1.sock"])


def test_heartbeats_come(lab: Any) -> None:
    first, second = (lab.hosts[0].inbox.take(wire.Heartbeat).message.sent_ns for _ in range(2))
    assert 0.5e9 < second - first < 5e9
