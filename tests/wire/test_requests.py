"""IfrtRequest to core's requests, and core's answers to IfrtResponse."""

import io

import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle
from pathways_runtime.core.session import requests as core
from pathways_runtime.core.session import responses
from pathways_runtime.core.sharding import Sharding, TileAssignment, TileKind
from pathways_runtime.core.status import Code, Status, StatusError
from pathways_runtime.wire.ifrt import programs, schema, shardings
from pathways_runtime.wire.ifrt.requests import decode_request, result_handles, sent_host_buffers
from pathways_runtime.wire.ifrt.responses import encode_error, encode_response, varint
from pathways_runtime.wire.messages import ProgramMetadata

ROWS = Sharding(
    (DeviceId(0), DeviceId(1)),
    TileAssignment(TileKind.TILED, (2, 1), reshape_dims=(2,), transpose_perm=(0,)),
    "device",
)


def body(kind: str):  # type: ignore[no-untyped-def]
    return getattr(schema.IfrtRequest(), kind)


def fill_spec(proto, spec: core.ArraySpec) -> None:  # type: ignore[no-untyped-def]
    proto.dtype.kind = int(spec.dtype)
    proto.shape.dims.extend(spec.shape)
    proto.sharding.CopyFrom(shardings.encode_sharding(spec.sharding))


SPEC = core.ArraySpec(DType.F32, (4, 3), ROWS)


def test_execute() -> None:
    proto = body("loaded_executable_execute_request")
    proto.loaded_executable_handle = 1 << 62
    proto.args_handles.extend((1, 2))
    proto.result_array_handle.extend((3, 4))
    proto.result_status_handle = 5
    proto.device_ids.append(7)
    proto.execute_options.fill_status = True
    proto.execute_options.non_donatable_input_indices.append(1)
    assert decode_request("loaded_executable_execute_request", proto) == core.LoadedExecutableExecute(
        Handle(1 << 62), (Handle(1), Handle(2)), (Handle(3), Handle(4)), Handle(5), True, (1,), (DeviceId(7),)
    )
    assert result_handles("loaded_executable_execute_request", proto) == (3, 4)


def test_make_array_from_host_buffer() -> None:
    kind = "make_array_from_host_buffer_request"
    proto = body(kind)
    fill_spec(proto, SPEC)
    proto.host_buffer_handle = proto.array_handle = 9
    expected = core.MakeArrayFromHostBuffer(DType.F32, (4, 3), ROWS, Handle(9), None, Handle(9))
    assert decode_request(kind, proto) == expected
    proto.byte_strides.strides.extend((4, 16))
    assert decode_request(kind, proto).byte_strides == (4, 16)  # type: ignore[attr-defined]
    assert sent_host_buffers(kind, proto) == (9,)
    assert result_handles(kind, proto) == (9,)


def test_a_scalars_strides_are_not_absent_strides() -> None:
    proto = body("copy_to_host_buffer_request")
    proto.array_handle, proto.host_buffer_handle = 1, 2
    assert decode_request("copy_to_host_buffer_request", proto).byte_strides is None  # type: ignore[attr-defined]
    proto.byte_strides.SetInParent()
    assert decode_request("copy_to_host_buffer_request", proto).byte_strides == ()  # type: ignore[attr-defined]


def test_make_arrays_from_host_buffer_shards() -> None:
    kind = "make_arrays_from_host_buffer_shards_request"
    proto = body(kind)
    spec = proto.specs.add()
    fill_spec(spec.array_spec, SPEC)
    for handle, shards in ((5, (0,)), (6, (1,))):
        buffer = spec.host_buffers.add(host_buffer_handle=handle)
        buffer.dtype.kind = int(DType.F32)
        buffer.shape.dims.extend((2, 3))
        spec.addressable_shard_indices.add(indices=shards)
    proto.array_handles.append(8)
    buffers = (core.HostBuffer(DType.F32, (2, 3), Handle(5)), core.HostBuffer(DType.F32, (2, 3), Handle(6)))
    assert decode_request(kind, proto) == core.MakeArraysFromHostBufferShards(
        (core.HostBufferShards(SPEC, buffers, ((0,), (1,))),), (Handle(8),)
    )
    assert sent_host_buffers(kind, proto) == (5, 6)


def test_remap_plan() -> None:
    proto = body("remap_arrays_request")
    fill_spec(proto.plan.input_specs.add(), SPEC)
    fill_spec(proto.plan.output_specs.add(), SPEC)
    proto.plan.mappings.add(
        in_array=0, out_array=0, from_start=[0], from_end=[2], from_step=[1], to_start=[1], to_end=[-1], to_step=[-1]
    )
    proto.array_handles.append(1)
    proto.copy_semantics = core.ArrayCopySemantics.DONATE_INPUT
    proto.result_handles.append(2)
    mapping = core.RemapMapping(0, 0, (core.Interval(0, 2, 1),), (core.Interval(1, -1, -1),))
    plan = core.RemapPlan((SPEC,), (SPEC,), (mapping,))
    expected = core.RemapArrays(plan, (Handle(1),), core.ArrayCopySemantics.DONATE_INPUT, (Handle(2),))
    assert decode_request("remap_arrays_request", proto) == expected
    proto.plan.mappings[0].from_end.append(3)
    with pytest.raises(StatusError, match="starts, ends and steps differ in number"):
        decode_request("remap_arrays_request", proto)


def test_remap_plan_by_devices() -> None:
    """How it comes from SerDes version 6 on, without mappings."""
    proto = body("remap_arrays_request")
    fill_spec(proto.plan.input_specs.add(), SPEC)
    fill_spec(proto.plan.output_specs.add(), SPEC)
    proto.plan.version_number = 6
    output = proto.plan.input_devices_for_output.add(out_array=0)
    output.input_devices.add(in_array=0).device_list.device_ids.extend((3, 1))
    proto.copy_semantics = core.ArrayCopySemantics.REUSE_INPUT
    found = decode_request("remap_arrays_request", proto)
    assert isinstance(found, core.RemapArrays)
    devices = core.InputDevices(0, (DeviceId(3), DeviceId(1)))
    assert found.plan == core.RemapPlan((SPEC,), (SPEC,), (), (core.InputDevicesForOutput(0, (devices,)),))


def test_copy_arrays_without_and_with_memory_kind() -> None:
    proto = body("copy_arrays_request")
    proto.array_handles.append(1)
    proto.device_ids.extend((4, 5))
    proto.copy_semantics = core.ArrayCopySemantics.ALWAYS_COPY
    request = core.CopyArrays((Handle(1),), (DeviceId(4), DeviceId(5)), None, core.ArrayCopySemantics.ALWAYS_COPY)
    assert decode_request("copy_arrays_request", proto) == request
    proto.memory_kind = "pinned_host"
    assert decode_request("copy_arrays_request", proto).memory_kind == "pinned_host"  # type: ignore[attr-defined]


def test_unknown_copy_semantics_are_refused() -> None:
    with pytest.raises(StatusError, match="INVALID_ARGUMENT: 0 is none of IFRT's ArrayCopySemantics"):
        decode_request("copy_arrays_request", body("copy_arrays_request"))


def test_error_arrays() -> None:
    proto = body("make_error_arrays_request")
    proto.error.code, proto.error.message = int(Code.DATA_LOSS), "gone"
    fill_spec(proto.array_specs.add(), SPEC)
    assert decode_request("make_error_arrays_request", proto) == core.MakeErrorArrays(
        Status(Code.DATA_LOSS, "gone"), (SPEC,), ()
    )


def compile_request(partitions: list[list[int]], replicas: int):  # type: ignore[no-untyped-def]
    options = schema.XlaCompileOptionsProto()
    assignment = options.compile_options.executable_build_options.device_assignment
    assignment.replica_count, assignment.computation_count = replicas, len(partitions)
    for devices in partitions:
        assignment.computation_devices.add(replica_device_ids=devices)
    proto = body("compile_request")
    proto.program.type_name, proto.program.data = programs.XLA_PROGRAM, b"module"
    proto.compile_options.type_name = programs.XLA_COMPILE_OPTIONS
    proto.compile_options.data = options.SerializeToString()
    return proto, options.compile_options.SerializeToString()


def test_compile_takes_devices_replica_by_replica() -> None:
    proto, options = compile_request([[0, 1, 2], [3, 4, 5]], replicas=3)
    assert decode_request("compile_request", proto) == core.Compile(
        b"module", options, tuple(map(DeviceId, (0, 3, 1, 4, 2, 5)))
    )


def test_compile_options_that_we_do_not_know_are_passed_on() -> None:
    proto, options = compile_request([[0]], replicas=1)
    # Field 9 of CompileOptionsProto is none of ours; within field 1 of XlaCompileOptionsProto, merged by protobuf.
    proto.compile_options.data += b"\x0a\x02\x48\x01"
    assert decode_request("compile_request", proto).options == options + b"\x48\x01"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: setattr(p.program, "type_name", "xla::ifrt::PluginProgram"), "INVALID_ARGUMENT: Bad PluginProgram"),
        (lambda p: setattr(p.compile_options, "type_name", "x::Y"), "UNIMPLEMENTED: compile options of type x::Y"),
        (lambda p: p.host_callbacks.append(b""), "UNIMPLEMENTED: host callbacks"),
        (
            lambda p: setattr(p.compile_options, "data", b"\xff"),
            "INVALID_ARGUMENT: the bytes of an xla::ifrt::XlaCompile",
        ),
        (
            lambda p: setattr(
                p.compile_options,
                "data",
                p.compile_options.data
                + schema.XlaCompileOptionsProto(outputs_bundle_slice_sizes=[1]).SerializeToString(),
            ),
            "UNIMPLEMENTED: outputs in bundles",
        ),
        (lambda p: setattr(p.compile_options, "data", b""), "INVALID_ARGUMENT: .* do not assign a device"),
    ],
)
def test_programs_that_are_not_taken(change, message: str) -> None:  # type: ignore[no-untyped-def]
    proto, _ = compile_request([[0]], replicas=1)
    change(proto)
    with pytest.raises(StatusError, match=message):
        decode_request("compile_request", proto)


def bytecode(target: str, name: str) -> bytes:
    """A program with a custom call, of an operation that the program's author has given a name."""
    text = f'''
        func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
            %y = stablehlo.custom_call @{target}(%x) {{backend_config = "\\10\\05"}} : (tensor<8xf32>) -> tensor<8xf32>
                loc("{name}")
            return %y : tensor<8xf32>
        }}
    '''
    written = io.BytesIO()
    with mlir.make_ir_context():
        ir.Module.parse(text).operation.write_bytecode(written)
    return written.getvalue()


def test_programs_that_call_the_client_while_they_are_compiled_are_not_taken() -> None:
    """XLA would jump to an address of another process."""
    proto, _ = compile_request([[0]], replicas=1)
    proto.program.data = bytecode("InspectSharding", "x")
    with pytest.raises(StatusError, match=r"UNIMPLEMENTED: .*jax\.debug\.inspect_array_sharding"):
        decode_request("compile_request", proto)
    proto.program.data = bytecode("CustomSPMDPartitioning", "x")
    with pytest.raises(StatusError, match=r"UNIMPLEMENTED: .*custom_partitioning\. Use shard_map"):
        decode_request("compile_request", proto)
    proto.program.data = bytecode("cu_solver", "jit(f)/InspectSharding/UseInspectSharding")
    decode_request("compile_request", proto)


# Answers


def decoded(kind: str, response: responses.Response, **how):  # type: ignore[no-untyped-def]
    proto = schema.IfrtResponse.FromString(
        encode_response(kind + "_request", 77, response, how.pop("seq_num", 0), **how)
    )
    assert proto.response_metadata.op_id == 77
    assert not proto.response_metadata.HasField("status")
    assert proto.WhichOneof("response") == kind + "_response"
    return proto


def test_the_answer_of_every_kind_is_set_even_when_it_says_nothing() -> None:
    for field in schema.IfrtRequest.DESCRIPTOR.oneofs_by_name["request"].fields:
        decoded(field.name.removesuffix("_request"), responses.EMPTY)


@pytest.mark.parametrize("seq_num", [0, 1, 127, 128, 300_000, 1 << 40])
def test_sequence_numbers_and_user_contexts(seq_num: int) -> None:
    contexts = (1, (1 << 64) - 1)
    proto = decoded("check_future", responses.EMPTY, seq_num=seq_num, destroyed_user_contexts=contexts)
    assert proto.response_metadata.seq_num == seq_num
    assert tuple(proto.response_metadata.destroyed_user_context_ids) == contexts


def test_many_user_contexts() -> None:
    contexts = list(range(1, 40))
    proto = decoded("check_future", responses.EMPTY, destroyed_user_contexts=contexts)
    assert list(proto.response_metadata.destroyed_user_context_ids) == contexts


BIG = Handle((1 << 62) + 5)


@pytest.mark.parametrize(
    "kind", ["make_array_from_host_buffer", "assemble_array_from_single_device_arrays", "fully_replicated_shard"]
)
def test_one_array_handle(kind: str) -> None:
    proto = decoded(kind, responses.ArrayHandle(BIG))
    assert getattr(proto, kind + "_response").array_handle == BIG


@pytest.mark.parametrize(
    "kind",
    [
        "make_arrays_from_host_buffer_shards",
        "make_error_arrays",
        "remap_arrays",
        "bitcast_arrays",
        "reshard_arrays",
        "disassemble_into_single_device_arrays",
        "copy_arrays",
    ],
)
@pytest.mark.parametrize("handles", [(), (BIG,), tuple(range(1, 40))])
def test_array_handles(kind: str, handles: tuple[Handle, ...]) -> None:
    proto = decoded(kind, responses.ArrayHandles(handles))
    assert tuple(getattr(proto, kind + "_response").array_handles) == handles


def test_futures_and_deletion() -> None:
    assert decoded("delete_array", responses.FutureHandle(BIG)).delete_array_response.deletion_future_handle == BIG
    deleted = decoded("loaded_executable_delete", responses.FutureHandle(BIG))
    assert deleted.loaded_executable_delete_response.future_handle == BIG
    for answer in (False, True):
        assert decoded("is_array_deleted", responses.Deleted(answer)).is_array_deleted_response.deleted is answer
        proto = decoded("loaded_executable_is_deleted", responses.Deleted(answer))
        assert proto.loaded_executable_is_deleted_response.is_deleted is answer


def test_executed() -> None:
    kind = "loaded_executable_execute"
    assert decoded(kind, responses.Executed(Handle(0), ())).loaded_executable_execute_response.status_handle == 0
    assert decoded(kind, responses.Executed(BIG, ())).loaded_executable_execute_response.status_handle == BIG
    output = responses.Output(DType.F32, (4, 3), ROWS, BIG)
    proto = decoded(kind, responses.Executed(Handle(3), (output,))).loaded_executable_execute_response
    assert proto.status_handle == 3
    (found,) = proto.outputs
    assert (found.dtype.kind, tuple(found.shape.dims), found.array_handle) == (DType.F32, (4, 3), BIG)
    assert shardings.decode_sharding(found.sharding) == ROWS


def test_compiled() -> None:
    response = responses.Compiled(BIG, "jit_f", (DeviceId(2), DeviceId(0)), b"print", Handle(4))
    proto = decoded("compile", response).compile_response
    assert proto.loaded_executable_handle == BIG
    assert (proto.name, proto.num_devices, proto.fingerprint_value) == ("jit_f", 2, b"print")
    assert list(proto.device_ids) == list(proto.addressable_device_ids) == [2, 0]
    assert proto.HasField("ready_future_handle") and proto.ready_future_handle == 4


REPLICATED_BYTES = schema.OpSharding().SerializeToString()

METADATA = ProgramMetadata(
    name="jit_f",
    fingerprint=b"p",
    parameter_shardings=(REPLICATED_BYTES,),
    output_shardings=(shardings.encode_op_sharding(ROWS.tiles).SerializeToString(),),
    parameter_layouts=((1, 0),),
    output_layouts=((0, 1),),
    output_memory_kinds=("device",),
    output_dtypes=(int(DType.F32),),
    output_shapes=((4, 3),),
    donated_inputs=(0,),
    memory_stats={"temp_size_in_bytes": 12, "a_figure_that_ifrt_has_not": 1},
    generated_code_bytes=99,
    cost_analysis={"flops": 2.0},
    text="HloModule f",
)


def test_metadata() -> None:
    proto = decoded("loaded_executable_metadata", responses.ExecutableMetadata(METADATA))
    found = proto.loaded_executable_metadata_response
    assert list(found.parameter_shardings.shardings) == [schema.OpSharding()]
    assert shardings.decode_op_sharding(found.output_shardings.shardings[0], 2) == ROWS.tiles
    assert [list(layout.minor_to_major) for layout in found.parameter_layouts_list.layouts] == [[1, 0]]
    assert [list(layout.minor_to_major) for layout in found.output_layouts_list.layouts] == [[0, 1]]
    assert [list(each.memory_kinds) for each in found.output_memory_kinds.memory_kind_lists] == [["device"]]
    assert list(found.donated_input_indices.donated_input_indices) == [0]
    assert found.compiled_memory_stats.temp_size_in_bytes == 12
    assert found.size_of_generated_code_in_bytes == 99


def test_what_the_core_needs_of_a_program() -> None:
    program = programs.compiled_program(METADATA, 2)
    (output,) = program.outputs
    assert (output.dtype, output.shape, output.tiles, output.memory_kind) == (DType.F32, (4, 3), ROWS.tiles, "device")
    assert program.donated_inputs == (0,)
    assert program.num_parameters == 1
    assert program.metadata is METADATA


def test_analysis_text_assignment_layout() -> None:
    cost = decoded("loaded_executable_cost_analysis", responses.CostAnalysis({"flops": 2.0}))
    assert cost.loaded_executable_cost_analysis_response.attributes.attributes["flops"].float_value == 2.0
    text = decoded("loaded_executable_human_readable_program_text", responses.HumanReadableProgramText("HloModule f"))
    assert text.loaded_executable_human_readable_program_text_response.human_readable_program_text == "HloModule f"
    devices = ((DeviceId(0), DeviceId(1)), (DeviceId(2), DeviceId(3)), (DeviceId(4), DeviceId(5)))
    proto = decoded("get_default_device_assignment", responses.DeviceAssignment(devices))
    assignment = proto.get_default_device_assignment_response.device_assignment
    assert (assignment.replica_count, assignment.computation_count) == (3, 2)
    assert [list(each.replica_device_ids) for each in assignment.computation_devices] == [[0, 2, 4], [1, 3, 5]]
    layout = decoded("get_default_layout", responses.DefaultLayout((1, 0)))
    assert layout.get_default_layout_response.serialized_pjrt_layout == b"{1,0}"


def test_an_error_has_no_response_and_no_sequence_number() -> None:
    proto = schema.IfrtResponse.FromString(encode_error(5, Status(Code.DATA_LOSS, "host-3 is gone")))
    assert proto.WhichOneof("response") is None
    assert proto.response_metadata == schema.message_class("xla.ifrt.proxy.ResponseMetadata")(
        op_id=5, status=schema.StatusProto(code=int(Code.DATA_LOSS), message="host-3 is gone")
    )


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, (1 << 63) - 1])
def test_varints(value: int) -> None:
    proto = schema.message_class("xla.ifrt.proxy.ResponseMetadata").FromString(b"\x18" + varint(value))
    assert proto.seq_num == value
