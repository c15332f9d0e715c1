"""The rules of an IFRT proxy session, over real sockets, with every front end."""

import asyncio
import contextlib
import json
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
import pytest

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, SessionId, WorkerId
from pathways_runtime.core.sharding import Sharding, TileAssignment, TileKind
from pathways_runtime.core.status import Code, Status
from pathways_runtime.proxy import session_server
from pathways_runtime.proxy.host_buffer_messages import CHUNK_BYTES
from pathways_runtime.wire import messages
from pathways_runtime.wire.ifrt import programs, schema, shardings
from pathways_runtime.wire.messages import HostState, ProgramMetadata

from .conftest import RunWithRig
from .fake_cluster import FakeProgram
from .ifrt_client import IfrtClient, answer, request, status_of, version_metadata
from .rig import Rig

ALWAYS_COPY = 1
ROWS = TileAssignment(TileKind.TILED, (4, 1), reshape_dims=(4,), transpose_perm=(0,))
ALL = Sharding(tuple(map(DeviceId, range(4))), ROWS, "device")


def on(device: int) -> Sharding:
    return Sharding((DeviceId(device),), is_single_device=True)


def array_fields(array: np.ndarray, sharding: Sharding, handle: int) -> dict[str, Any]:
    return {
        "dtype": schema.DTypeProto(kind=int(DType[{"f": "F", "i": "S"}[array.dtype.kind] + str(8 * array.itemsize)])),
        "shape": schema.ShapeProto(dims=array.shape),
        "sharding": shardings.encode_sharding(sharding),
        "host_buffer_handle": handle,
        "array_handle": handle,
    }


async def put(client: IfrtClient, array: np.ndarray, sharding: Sharding, handle: int) -> None:
    await client.store(handle, array.tobytes())
    response = await client.ask("make_array_from_host_buffer_request", **array_fields(array, sharding, handle))
    assert response.make_array_from_host_buffer_response.array_handle == handle, response


async def get(client: IfrtClient, array_handle: int, buffer_handle: int, like: np.ndarray) -> np.ndarray:
    response = await client.ask(
        "copy_to_host_buffer_request", array_handle=array_handle, host_buffer_handle=buffer_handle
    )
    assert response.HasField("copy_to_host_buffer_response"), response
    content = b"".join(await client.lookup(buffer_handle))
    await client.delete(buffer_handle)
    return np.frombuffer(content, like.dtype).reshape(like.shape)


def doubling(num_devices: int, shape: tuple[int, ...], donated: tuple[int, ...] = ()) -> FakeProgram:
    """``x -> 2x`` over as many devices, in rows."""
    rows = TileAssignment(TileKind.TILED, (num_devices, 1), reshape_dims=(num_devices,), transpose_perm=(0,))
    sharding = shardings.encode_op_sharding(rows).SerializeToString()
    metadata = ProgramMetadata(
        name="jit_double",
        fingerprint=b"fingerprint",
        parameter_shardings=(sharding,),
        output_shardings=(sharding,),
        parameter_layouts=((1, 0),),
        output_layouts=((1, 0),),
        output_memory_kinds=("device",),
        output_dtypes=(int(DType.F32),),
        output_shapes=(shape,),
        donated_inputs=donated,
        memory_stats={},
        generated_code_bytes=1,
        cost_analysis={},
        text="",
    )
    return FakeProgram(metadata, lambda x: (2 * x,))


def compile_fields(program: bytes, devices: tuple[int, ...]) -> dict[str, Any]:
    options = schema.XlaCompileOptionsProto()
    assignment = options.compile_options.executable_build_options.device_assignment
    assignment.replica_count, assignment.computation_count = 1, len(devices)
    for device in devices:
        assignment.computation_devices.add(replica_device_ids=[device])
    serialized = schema.message_class("xla.ifrt.Serialized")
    return {
        "program": serialized(type_name=programs.XLA_PROGRAM, data=program),
        "compile_options": serialized(type_name=programs.XLA_COMPILE_OPTIONS, data=options.SerializeToString()),
    }


def test_values_go_to_the_devices_and_come_back(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            init = await client.init()
            assert [device.id for device in init.all_devices] == [0, 1, 2, 3]
            array = np.arange(12, dtype=np.float32).reshape(4, 3)
            await put(client, array, ALL, 1)
            await client.ask("check_value_ready_request", value_handles=[1])
            shards = rig.cluster.sessions[client.session_id].arrays[1]
            assert {device: shard.tolist() for device, shard in shards.items()} == {
                device: [array[device].tolist()] for device in range(4)
            }
            disassembled = await client.ask(
                "disassemble_into_single_device_arrays_request",
                array_handle=1,
                copy_semantics=ALWAYS_COPY,
                result_handles=[2, 3, 4, 5],
            )
            handles = list(disassembled.disassemble_into_single_device_arrays_response.array_handles)
            assert handles == [2, 3, 4, 5]
            assert (await get(client, 4, 9, array[2:3])).tolist() == [array[2].tolist()]
            report = (await status(rig))["sessions"][0]
            assert (report["host_buffers"], report["host_buffer_bytes"], report["open_requests"]) == (0, 0, 0)

    run(body)


async def status(rig: Rig) -> dict[str, Any]:
    rig.cluster.send(messages.StatusRequest(len(rig.cluster.status_replies) + 41))
    replies = len(rig.cluster.status_replies)
    await rig.cluster.until(lambda: len(rig.cluster.status_replies) > replies, "the proxy reports")
    assert rig.cluster.status_replies[-1].request == replies + 41
    return rig.cluster.status_replies[-1].report


async def queued(rig: Rig, at_least: int) -> dict[str, Any]:
    """The report once so many requests have come and queue; the client's stream is not ordered against the report."""
    report: dict[str, Any] = {}
    async with asyncio.timeout(20):
        while not report or report["sessions"][0]["queued_requests"] < at_least:
            report = await status(rig)
    return report


def test_a_program_is_compiled_and_run(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        rig.cluster.programs[b"double"] = doubling(4, (4, 3))
        async with rig.client() as client:
            await client.init()
            array = np.arange(12, dtype=np.float32).reshape(4, 3)
            await put(client, array, ALL, 1)
            compiled = (await client.ask("compile_request", **compile_fields(b"double", (0, 1, 2, 3)))).compile_response
            assert (compiled.name, list(compiled.device_ids)) == ("jit_double", [0, 1, 2, 3])
            executable = compiled.loaded_executable_handle
            ready = await client.ask("check_future_request", future_handle=compiled.ready_future_handle)
            assert ready.WhichOneof("response") == "check_future_response"
            first = await client.ask(
                "loaded_executable_execute_request", loaded_executable_handle=executable, args_handles=[1]
            )
            (output,) = first.loaded_executable_execute_response.outputs
            assert (output.dtype.kind, list(output.shape.dims)) == (DType.F32, [4, 3])
            assert shardings.decode_sharding(output.sharding).boxes((4, 3)) == ALL.boxes((4, 3))
            later = await client.ask(
                "loaded_executable_execute_request",
                loaded_executable_handle=executable,
                args_handles=[output.array_handle],
                result_array_handle=[7],
            )
            assert later.WhichOneof("response") == "loaded_executable_execute_response"
            assert not later.loaded_executable_execute_response.outputs
            value_ready = await client.ask("check_value_ready_request", value_handles=[7])
            assert value_ready.WhichOneof("response") == "check_value_ready_response"
            assert rig.cluster.sessions[client.session_id].arrays[7][2].tolist() == (4 * array[2:3]).tolist()

    run(body)


def test_a_program_that_does_not_compile_is_an_error_of_its_request_only(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            response = await client.ask("compile_request", **compile_fields(b"unknown", (0,)))
            assert status_of(response) == (Code.NOT_FOUND, "no program b'unknown'")
            assert response.WhichOneof("response") is None
            await put(client, np.zeros((1, 1), np.float32), on(0), 1)

    run(body)


def test_a_request_waits_for_its_bytes_and_those_behind_it_wait_too(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            array = np.arange(3, dtype=np.float32)
            made = await client.send(request("make_array_from_host_buffer_request", **array_fields(array, on(1), 1)))
            ready = await client.send(request("check_value_ready_request", value_handles=[1]))
            deleted = await client.send(request("is_array_deleted_request", array_handle=1))
            report = await queued(rig, 3)
            assert [(each["what"], each["waits_for"]) for each in report["waiting"]] == [
                (
                    "make_array_from_host_buffer (request 2 of session 1)",
                    "the client to send host buffers 1",
                ),
                ("check_value_ready (request 3 of session 1)", "the requests before it"),
                ("is_array_deleted (request 4 of session 1)", "the requests before it"),
            ]
            assert all(0 <= each["since_s"] < 60 for each in report["waiting"])
            assert not client._answers.keys() - {2, 3, 4} and not made.done()
            await client.store(1, array.tobytes())
            assert (await answer(made)).make_array_from_host_buffer_response.array_handle == 1
            assert (await answer(ready)).WhichOneof("response") == "check_value_ready_response"
            assert (await answer(deleted)).is_array_deleted_response.deleted is False

    run(body)


def test_sequence_numbers_are_dense_where_the_client_counts_and_contexts_are_reported_once(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            await put(client, np.zeros(1, np.float32), on(0), 1)
            contexts = iter(range(1 << 63, (1 << 63) + 100))
            used = []
            for _ in range(3):
                for kind, fields in (
                    ("is_array_deleted_request", {"array_handle": 1}),
                    ("is_array_deleted_request", {"array_handle": 77}),  # fails
                    ("delete_array_request", {"array_handle": []}),
                    ("check_value_ready_request", {"value_handles": [1]}),
                    ("check_future_request", {"future_handle": 77}),  # fails
                    ("destruct_array_request", {"array_handle": []}),
                ):
                    used.append(next(contexts))
                    await client.ask(kind, used[-1], **fields)
            await client.ask("is_array_deleted_request", array_handle=1)

            uncounted = {"init_response", "check_future_response", "delete_array_response", "destruct_array_response"}
            counted = [each for each in client.responses if each.WhichOneof("response") not in {None, *uncounted}]
            assert [each.response_metadata.seq_num for each in counted] == list(range(8))
            reported = [each for it in counted for each in it.response_metadata.destroyed_user_context_ids]
            assert reported == used
            failed = [each for each in client.responses if each.response_metadata.HasField("status")]
            assert [each.WhichOneof("response") for each in failed] == [None] * 6
            for each in client.responses:
                if each.WhichOneof("response") in uncounted:
                    assert each.response_metadata.seq_num == 1 << 62
                    assert not each.response_metadata.destroyed_user_context_ids

    run(body)


def test_kinds_that_are_not_supported_say_so_by_name(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            response = await client.ask("loaded_host_callback_poll_request")
            assert status_of(response) == (
                Code.UNIMPLEMENTED,
                "IFRT request loaded_host_callback_poll_request is not supported",
            )
            from_the_future = schema.IfrtRequest()
            from_the_future.request_metadata.op_id = 99
            client._answers[99] = asyncio.get_running_loop().create_future()
            future = client._answers[99]
            # Field 90, an empty message: a kind that no schema of today has.
            await client.send_bytes(from_the_future.SerializeToString() + b"\xd2\x05\x00")
            assert status_of(await answer(future)) == (
                Code.UNIMPLEMENTED,
                "an IFRT request of unknown kind (field 90) is not supported",
            )

    run(body)


def test_what_a_refused_request_was_to_make_carries_its_error(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            fields = array_fields(np.zeros(3, np.float32), on(0), 1)
            fields["dtype"] = schema.DTypeProto(kind=77)
            refused = await client.ask("make_array_from_host_buffer_request", **fields)
            assert status_of(refused)[0] == Code.UNIMPLEMENTED
            later = await client.ask("check_value_ready_request", value_handles=[1])
            assert status_of(later) == status_of(refused)
            # Its bytes come after all; nobody wants them.
            await client.store(1, b"abc")
            assert (await status(rig))["sessions"][0]["host_buffers"] == 0

    run(body)


def test_bytes_that_do_not_hold_the_array_are_refused(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            await client.store(1, b"abc")
            fields = array_fields(np.zeros(3, np.float32), on(0), 1)
            refused = await client.ask("make_array_from_host_buffer_request", **fields)
            assert status_of(refused) == (
                Code.INVALID_ARGUMENT,
                "a host buffer of 3 bytes cannot hold F32[3], which takes 12",
            )
            assert (await status(rig))["sessions"][0]["host_buffers"] == 0

    run(body)


@pytest.mark.parametrize("message", [b"\xff\xff\xff", b"\x0a\x05"])
def test_bytes_that_are_no_request_end_that_session_only(run: RunWithRig, message: bytes) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as bystander, rig.client() as client:
            await bystander.init()
            await client.init()
            waiting = await client.send(
                request("make_array_from_host_buffer_request", **array_fields(np.zeros(1, np.float32), on(0), 1))
            )
            await client.send_bytes(message)
            code, text = status_of(await answer(waiting))
            assert code == Code.INVALID_ARGUMENT and "no IfrtRequest" in text
            await asyncio.wait_for(client.ended, 20)
            await rig.cluster.until(lambda: rig.cluster.detached == [client.session_id], "the session is detached")
            await put(bystander, np.zeros(1, np.float32), on(0), 1)

    run(body)


def test_an_op_id_that_comes_twice_ends_the_session(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            waiting = await client.send(
                request("make_array_from_host_buffer_request", **array_fields(np.zeros(1, np.float32), on(0), 1)), 50
            )
            twice = request("delete_array_request")
            twice.request_metadata.op_id = 50
            await client.send_bytes(twice.SerializeToString())
            assert status_of(await answer(waiting)) == (Code.INVALID_ARGUMENT, "op id 50 came twice")

    run(body)


def test_a_client_that_runs_far_ahead_is_held_back(run: RunWithRig) -> None:
    limit = 8

    async def body(rig: Rig) -> None:
        rig.cluster.programs[b"double"] = doubling(1, (1, 1))
        async with rig.client() as client:
            await client.init()
            await put(client, np.ones((1, 1), np.float32), on(0), 1)
            compiled = (await client.ask("compile_request", **compile_fields(b"double", (0,)))).compile_response
            executable = compiled.loaded_executable_handle
            rig.cluster.dispatches_at_once = False
            num_calls = 5 * limit
            futures = [
                await client.send(
                    request(
                        "loaded_executable_execute_request",
                        loaded_executable_handle=executable,
                        args_handles=[handle],
                        result_array_handle=[handle + 1],
                    )
                )
                for handle in range(1, num_calls + 1)
            ]
            await answer(futures[limit])
            report = (await status(rig))["sessions"][0]
            assert report["is_held_back"]
            assert report["undispatched_operations"] == limit + 1
            assert [future.done() for future in futures] == [True] * (limit + 1) + [False] * (num_calls - limit - 1)
            session = rig.cluster.sessions[client.session_id]
            most = 0
            for _ in range(num_calls):
                most = max(most, len(rig.cluster.held))
                rig.cluster.dispatch(1)
                done = sum(submit.is_launch for submit in session.submits) - len(rig.cluster.held)
                if done < num_calls:
                    await rig.cluster.until(lambda: bool(rig.cluster.held), "more operations are submitted")
            await asyncio.gather(*map(answer, futures))
            assert most <= limit + 1
            rig.cluster.dispatches_at_once = True
            last = await get(client, num_calls + 1, 900, np.ones((1, 1), np.float32))
            assert last[0, 0] == 2.0**num_calls

    run(body, max_undispatched=limit)


def test_submits_of_one_turn_travel_together(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            arrays = [np.full(3, number, np.float32) for number in range(1, 21)]
            # All wait for the first one's bytes, so all are fed in one turn.
            for handle, array in enumerate(arrays, 1):
                if handle > 1:
                    await client.store(handle, array.tobytes())
                await client.send(request("make_array_from_host_buffer_request", **array_fields(array, on(0), handle)))
            await rig.cluster.until(lambda: rig.cluster.control is not None, "the proxy has connected")
            await queued(rig, 20)
            await client.store(1, arrays[0].tobytes())
            await client.ask("check_value_ready_request", value_handles=[20])
            batches = [each for each in rig.cluster.received if isinstance(each, messages.SubmitBatch)]
            assert [len(batch.submits) for batch in batches] == [20, 1]
            op_ids = [submit.op_id for batch in batches for submit in batch.submits]
            assert op_ids == list(range(1, 22))

    run(body)


def test_a_lost_host_poisons_what_it_held_and_the_session_goes_on(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            ones = np.ones(3, np.float32)
            await put(client, ones, on(0), 1)
            await put(client, ones, on(3), 2)
            lost = Status(Code.DATA_LOSS, "host-1 is gone")
            rig.cluster.send(messages.HostChanged(HostState(HostIndex(1), None, "host-1", lost), 1))
            response = await client.ask("check_value_ready_request", value_handles=[2])
            assert status_of(response) == (Code.DATA_LOSS, "host-1 is gone")
            assert (await get(client, 1, 9, ones)).tolist() == [1, 1, 1]

    run(body)


def test_the_loss_of_the_controller_is_told_and_ends_the_proxy(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            waiting = await client.send(
                request("make_array_from_host_buffer_request", **array_fields(np.zeros(1, np.float32), on(0), 1))
            )
            await status(rig)
            rig.cluster.close_control()
            code, text = status_of(await answer(waiting))
            assert code == Code.UNAVAILABLE
            assert text.startswith(f"the controller at {rig.cluster.address} is lost: ")
            ending = await asyncio.wait_for(asyncio.shield(rig.running), 20)
            assert ending.is_failure and ending.reason == text
            assert rig.events.events[-1]["event"] == "ended"

    run(body)


def test_a_client_that_goes_is_detached_and_the_next_one_is_served(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        for number in (1, 2, 3):
            async with rig.client() as client:
                await client.init()
                assert client.session_id == number
                await put(client, np.zeros(1, np.float32), on(0), 1)
            await rig.cluster.until(lambda n=number: len(rig.cluster.detached) == n, "the session is detached")
        report = await status(rig)
        assert report["sessions"] == []
        assert [(each.get("id"), each.get("state")) for each in rig.events.events if each["event"] == "session"] == [
            (number, state) for number in (1, 2, 3) for state in ("attached", "over")
        ]

    run(body)


def test_sessions_do_not_see_each_others_handles(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as first, rig.client() as second:
            await first.init()
            await second.init()
            await put(first, np.full(2, 1, np.float32), on(0), 1)
            await put(second, np.full(2, 2, np.float32), on(0), 1)
            values = [(await get(each, 1, 9, np.zeros(2, np.float32))).tolist() for each in (first, second)]
            assert values == [[1, 1], [2, 2]]
            await second.disconnect()
            assert (await get(first, 1, 9, np.zeros(2, np.float32))).tolist() == [1, 1]

    run(body)


@pytest.mark.parametrize("num_elements", [0, 1, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1])
def test_lookups_come_in_chunks_and_an_empty_buffer_in_one_empty_message(run: RunWithRig, num_elements: int) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            array = np.arange(num_elements, dtype=np.int32)
            await put(client, array, on(0), 1)
            await client.ask("copy_to_host_buffer_request", array_handle=1, host_buffer_handle=9)
            chunks = await client.lookup(9)
            assert b"".join(chunks) == array.tobytes()
            whole, rest = divmod(array.nbytes, CHUNK_BYTES)
            assert [len(chunk) for chunk in chunks] == ([CHUNK_BYTES] * whole + [rest] * bool(rest) or [0])
            await client.delete(9)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await client.lookup(9)
            assert failure.value.code() == grpc.StatusCode.NOT_FOUND

    run(body)


def test_values_come_back_in_the_strides_that_the_client_wants(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            array = np.arange(6, dtype=np.float32).reshape(2, 3)
            await put(client, array, on(0), 1)
            strides = schema.ByteStrides(strides=(4, 8))
            await client.ask("copy_to_host_buffer_request", array_handle=1, host_buffer_handle=9, byte_strides=strides)
            assert b"".join(await client.lookup(9)) == array.T.tobytes()

    run(body)


def test_the_report_says_what_is_held_and_who_is_waited_for(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            await put(client, np.zeros((4, 2), np.float32), ALL, 1)
            await client.ask("check_value_ready_request", value_handles=[1])
            # A host that says nothing.
            rig.cluster.dispatches_at_once = False
            await client.store(2, bytes(4))
            await client.ask("make_array_from_host_buffer_request", **array_fields(np.zeros(1, np.float32), on(3), 2))
            await client.send(request("check_value_ready_request", value_handles=[2]))
            await rig.cluster.until(lambda: len(rig.cluster.held) == 2, "the wait is submitted")
            report = await status(rig)
            (session,) = report["sessions"]
            assert (session["id"], session["arrays"], session["bytes"]) == (1, 2, 4 * 8 + 4)
            assert "operations" not in session
            (waiting,) = report["waiting"]
            assert waiting["what"] == "check_value_ready (request 5 of session 1)"
            assert waiting["waits_for"] == "hosts 1, for the readiness of arrays 2"
            json.dumps(report)

    run(body)


def test_values_that_cannot_be_stored_are_an_error_of_their_request(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            await put(client, np.arange(6, dtype=np.float32).reshape(2, 3), on(0), 1)
            fields = {"array_handle": 1, "host_buffer_handle": 9}
            strides = schema.ByteStrides(strides=(-4, 8))
            refused = await client.ask("copy_to_host_buffer_request", byte_strides=strides, **fields)
            assert status_of(refused) == (Code.INVALID_ARGUMENT, "byte strides [-4, 8] do not suit the shape [2, 3]")
            first, second = [await client.send(request("copy_to_host_buffer_request", **fields)) for _ in range(2)]
            assert (await answer(first)).WhichOneof("response") == "copy_to_host_buffer_response"
            assert status_of(await answer(second)) == (Code.ALREADY_EXISTS, "host buffer 9 is stored already")

    run(body)


@pytest.mark.parametrize(("announced", "sent"), [(4, 3), (4, 5), (0, 1), (-1, 0)])
def test_uploads_that_are_not_what_was_announced(run: RunWithRig, announced: int, sent: int) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await client.store(1, bytes(sent), announced_bytes=announced)
            expected = grpc.StatusCode.DATA_LOSS if announced >= 0 else grpc.StatusCode.INVALID_ARGUMENT
            assert failure.value.code() == expected
            assert "host buffer 1" in str(failure.value.details())
            await client.store(1, b"fine")

    run(body)


def test_host_buffers_of_a_session_that_is_not_there(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            client.session_id = 77
            for rpc in (client.store(1, b"x"), client.lookup(1), client.delete(1)):
                with pytest.raises(grpc.aio.AioRpcError) as failure:
                    await rpc
                assert (failure.value.code(), failure.value.details()) == (
                    grpc.StatusCode.NOT_FOUND,
                    "there is no session 77",
                )

    run(body)


def test_versions_are_negotiated_and_a_session_of_another_version_is_refused(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            assert await client.get_version((16, 0), (25, 3)) == (25, 3)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await client.get_version((16, 0), (20, 3))
            assert failure.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert "this proxy 24 to 25" in str(failure.value.details())
        async with rig.client(version_metadata(99, 3)) as client:
            assert "FAILED_PRECONDITION" in await asyncio.wait_for(client.ended, 20)

    run(body)


def test_a_client_that_goes_before_it_is_attached(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        for _ in range(5):
            async with rig.client():
                await asyncio.sleep(0)
        async with rig.client() as client:
            await client.init()
            await put(client, np.zeros(1, np.float32), on(0), 1)
        attaches = sum(isinstance(each, messages.Attach) for each in rig.cluster.received)
        await rig.cluster.until(lambda: len(rig.cluster.detached) == attaches, "every attached session is detached")

    run(body)


def test_the_socket_is_its_owners_only(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        path = Path(rig.listen.removeprefix("unix:"))
        assert path.stat().st_mode & 0o777 == 0o600

    run(body)


def test_a_long_queue_is_not_read_on_until_its_head_has_its_bytes(
    run: RunWithRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_server, "_MAX_QUEUED", 8)

    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            zero = np.zeros(1, np.float32)
            await client.send(request("make_array_from_host_buffer_request", **array_fields(zero, on(0), 1)))
            asked = [await client.send(request("is_array_deleted_request", array_handle=1)) for _ in range(100)]
            await queued(rig, 8)
            await client.store(1, zero.tobytes())
            answers = await asyncio.gather(*map(answer, asked))
            assert {each.WhichOneof("response") for each in answers} == {"is_array_deleted_response"}

    run(body)


def test_a_link_of_a_host_that_is_lost_swallows_nothing(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            zero = np.zeros(1, np.float32)
            await put(client, zero, on(2), 1)
            await client.ask("check_value_ready_request", value_handles=[1])
            session = rig.cluster.sessions[client.session_id]
            # The old executor's link stays open on its side; a new executor connects before the proxy hears of it.
            lost = Status(Code.DATA_LOSS, "host-1 is gone")
            rig.cluster.send(messages.HostChanged(HostState(HostIndex(1), None, "host-1", lost), 1))
            await client.ask("is_array_deleted_request", array_handle=1)
            links_address = next(m.links_address for m in rig.cluster.received if isinstance(m, messages.Attach))
            rig.cluster.send(messages.HostChanged(HostState(HostIndex(1), WorkerId(7), "host-7"), 2))
            await status(rig)
            assert rig.cluster.seen_change == 2
            await put(client, zero, on(2), 2)
            # A link of the old one that comes up late is not taken for the new one's.
            await rig.cluster._open_link(SessionId(client.session_id), HostIndex(1), links_address, change=0)
            await rig.cluster._open_link(SessionId(client.session_id), HostIndex(1), links_address, change=1)
            ready = await client.ask("check_value_ready_request", value_handles=[2])
            assert ready.WhichOneof("response") == "check_value_ready_response"
            assert session.arrays[Handle(2)][DeviceId(2)].tolist() == [0.0]

    run(body)


def test_a_link_of_who_serves_next_may_be_there_before_the_loss_is_heard_of(run: RunWithRig) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as client:
            await client.init()
            zero = np.zeros(1, np.float32)
            await put(client, zero, on(2), 1)
            await client.ask("check_value_ready_request", value_handles=[1])
            links_address = next(m.links_address for m in rig.cluster.received if isinstance(m, messages.Attach))
            await rig.cluster._open_link(SessionId(client.session_id), HostIndex(1), links_address, change=1)
            lost = Status(Code.DATA_LOSS, "host-1 is gone")
            rig.cluster.send(messages.HostChanged(HostState(HostIndex(1), None, "host-1", lost), 1))
            rig.cluster.send(messages.HostChanged(HostState(HostIndex(1), WorkerId(7), "host-7"), 2))
            await status(rig)
            assert rig.cluster.seen_change == 2
            await put(client, zero, on(2), 2)
            ready = await client.ask("check_value_ready_request", value_handles=[2])
            assert ready.WhichOneof("response") == "check_value_ready_response"

    run(body)


def mangled(seed: int) -> bytes:
    """A request that decodes, with any kind and any values."""
    random = Random(seed)
    message = schema.IfrtRequest()
    message.request_metadata.op_id = 1000 + seed
    kinds = [field.name for field in schema.IfrtRequest.DESCRIPTOR.oneofs_by_name["request"].fields]
    scramble(getattr(message, kinds[seed % len(kinds)]), random, depth=0)
    return bytes(message.SerializeToString())


def scramble(message: Any, random: Random, depth: int) -> None:
    """Fill any of the fields of a message with values that a client might send by mistake."""
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        if random.random() < 0.25 or (field.message_type and field.message_type.GetOptions().map_entry):
            continue
        many = field.is_repeated
        for _ in range(random.randrange(3) if many else 1):
            if field.cpp_type == field.CPPTYPE_MESSAGE:
                if depth < 6:
                    child = getattr(message, field.name)
                    scramble(child.add() if many else child, random, depth + 1)
                continue
            value = any_value(field, random)
            if many:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)


def any_value(field: Any, random: Random) -> Any:
    if field.cpp_type == field.CPPTYPE_STRING:
        texts = [shardings.HLO_SHARDING, shardings.SINGLE_DEVICE_SHARDING, programs.XLA_PROGRAM, "device", "x", ""]
        text = random.choice(texts)
        sharding = shardings.encode_sharding(random.choice([ALL, on(0), on(3)])).serialized_sharding.data
        return random.choice([text.encode(), sharding]) if field.type == field.TYPE_BYTES else text
    if field.cpp_type == field.CPPTYPE_BOOL:
        return random.random() < 0.5
    if field.cpp_type == field.CPPTYPE_ENUM:
        return random.choice([0, 1, 2, 3, 11])
    if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64):
        return random.choice([-1, 0, 1, 2, 3, 4, 5, 1 << 30])
    if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
        return random.choice([0, 1, 2, 3, 77])
    return 0.5


@pytest.mark.parametrize("first_seed", range(0, 640, 64))
def test_requests_that_make_no_sense_do_no_harm(run: RunWithRig, first_seed: int) -> None:
    async def body(rig: Rig) -> None:
        async with rig.client() as bystander, rig.client() as client:
            await bystander.init()
            await client.init()
            for handle in (1, 2, 3):
                await put(client, np.zeros((4, 1), np.float32), ALL if handle == 1 else on(handle), handle)
            for seed in range(first_seed, first_seed + 64):
                for handle in (0, 2, 77):
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await client.store(handle, b"abcd")
                await client.send_bytes(mangled(seed))
                report = await status(rig)
                assert len(report["sessions"]) == 2, f"seed {seed} ended a session: {client.responses[-1]}"
            await put(bystander, np.zeros(1, np.float32), on(0), 1)

    run(body)
