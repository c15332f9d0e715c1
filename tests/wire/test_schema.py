"""Our IFRT schema against its source text and against what the installed jaxlib embeds."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from pathways_runtime.core.status import StatusError
from pathways_runtime.wire.gen import ifrt_descriptors
from pathways_runtime.wire.ifrt import embedded, requests, schema

ROOT = Path(__file__).resolve().parents[2]
Files = dict[str, descriptor_pb2.FileDescriptorProto]

#: What of ours some supported jaxlibs lack, and which.
LACKED_BY_SOME = {
    "xla.MeshProto.iota_transform": "0.10.1",
    "xla.MeshProto.IotaTransform": "0.10.1",
    "xla.ifrt.DTypeProto.Kind.KIND_F6E2M3FN": "0.10",
    "xla.ifrt.DTypeProto.Kind.KIND_F6E3M2FN": "0.10",
    "xla.ifrt.XlaCompileOptionsProto.version_number": "0.10",
    "xla.ifrt.XlaCompileOptionsProto.outputs_bundle_slice_sizes": "0.10",
}


@pytest.fixture(scope="module")
def jaxlib_files() -> Files:
    """The files of the installed jaxlib."""
    return embedded.embedded_files(embedded.jaxlib_library())


def test_generated_descriptors_are_those_of_the_protos(tmp_path: Path) -> None:
    fresh = tmp_path / "ifrt_descriptors.py"
    subprocess.run([sys.executable, ROOT / "tools" / "generate_schema.py", "--output", fresh], check=True, timeout=60)
    generated = Path(ifrt_descriptors.__file__).read_text()
    assert fresh.read_text() == generated, "run tools/generate_schema.py and commit what it writes"


def test_jaxlib_embeds_what_we_look_for(jaxlib_files: Files) -> None:
    assert "xla/python/ifrt_proxy/common/ifrt_service.proto" in jaxlib_files
    assert "xla/xla_data.proto" in jaxlib_files
    service = jaxlib_files["xla/python/ifrt_proxy/common/grpc_ifrt_service.proto"].service[0]
    assert f"xla.ifrt.proxy.{service.name}" == schema.SERVICE


def test_no_field_of_ours_means_something_else_to_jaxlib(jaxlib_files: Files) -> None:
    assert embedded.differences(schema.files(), list(jaxlib_files.values())).conflicts == []


def test_jaxlib_lacks_only_what_versions_of_it_are_known_to_lack(jaxlib_files: Files) -> None:
    missing = embedded.differences(schema.files(), list(jaxlib_files.values())).missing
    assert set(missing) <= LACKED_BY_SOME.keys()


@pytest.mark.parametrize("ours", [schema.IfrtRequest, schema.IfrtResponse], ids=["requests", "responses"])
def test_every_kind_that_jaxlib_may_send_is_known(jaxlib_files: Files, ours: Any) -> None:
    theirs = dict(embedded.messages(list(jaxlib_files.values())))[ours.DESCRIPTOR.full_name]
    unknown = {field.name for field in theirs.field} - set(ours.DESCRIPTOR.fields_by_name)
    assert unknown == set(), f"kinds of this jaxlib that would be refused without their names: {sorted(unknown)}"


def test_requests_without_a_value_are_the_ones_we_mean_to_refuse() -> None:
    kinds = {field.name for field in schema.IfrtRequest.DESCRIPTOR.oneofs_by_name["request"].fields}
    refused = set()
    for kind in kinds:
        body = getattr(schema.IfrtRequest(), kind)
        try:
            requests.decode_request(kind, body)
        except StatusError as failure:
            if f"IFRT request {kind} is not supported" in failure.status.message:
                refused.add(kind)
    assert refused == {
        "init_request",  # the proxy's own, no matter of the core
        "loaded_executable_mpmd_metadata_request",
        "loaded_executable_mpmd_cost_analysis_request",
        "loaded_host_callback_poll_request",
        "loaded_host_callback_return_request",
    }


def _serialized(files: list[descriptor_pb2.FileDescriptorProto]) -> descriptor_pb2.FieldDescriptorProto:
    """``xla.ifrt.Serialized.data``; its neighbour ``type_name`` has number 1."""
    field = dict(embedded.messages(files))["xla.ifrt.Serialized"].field[1]
    assert (field.name, field.number) == ("data", 2)
    return field


@pytest.mark.parametrize(
    ("name", "value", "conflict"),
    [
        ("number", 99, "xla.ifrt.Serialized.data is (99,"),
        ("name", "content", "xla.ifrt.Serialized.content is 2, in theirs data"),
        (
            "type",
            descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
            "xla.ifrt.Serialized.data is (2, 'TYPE_STRING'",
        ),
        (
            "label",
            descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
            "xla.ifrt.Serialized.data is (2, 'TYPE_BYTES', 'LABEL_REPEATED'",
        ),
    ],
)
def test_a_conflict_is_found(name: str, value: object, conflict: str) -> None:
    changed = schema.files()
    setattr(_serialized(changed), name, value)
    found = embedded.differences(changed, schema.files())
    (only,) = found.conflicts
    assert only.startswith(conflict)
    assert found.missing == []


def test_what_they_lack_is_no_conflict() -> None:
    less = schema.files()
    messages = dict(embedded.messages(less))
    del messages["xla.ifrt.Serialized"].field[1]
    kinds = messages["xla.ifrt.DTypeProto"].enum_type[0]
    del kinds.value[next(i for i, value in enumerate(kinds.value) if value.name == "KIND_F32")]
    for file in less:
        for i in reversed(range(len(file.message_type))):
            if file.message_type[i].name == "RemapPlanProto":
                del file.message_type[i]
    found = embedded.differences(schema.files(), less)
    assert found.conflicts == []
    remap_plan = "xla.ifrt.RemapPlanProto"
    assert {name for name in found.missing if not name.startswith(remap_plan)} == {
        "xla.ifrt.Serialized.data",
        "xla.ifrt.DTypeProto.Kind.KIND_F32",
    }
    assert remap_plan in found.missing
    assert embedded.differences(less, schema.files()) == ([], [])


@pytest.mark.parametrize(
    ("name", "number", "conflict"),
    [
        ("KIND_F32", 98, "xla.ifrt.DTypeProto.Kind.KIND_F32 is 98, in theirs 11"),
        ("KIND_OTHER", 11, "xla.ifrt.DTypeProto.Kind.KIND_OTHER is 11, in theirs KIND_F32"),
    ],
)
def test_a_changed_enum_value_is_found(name: str, number: int, conflict: str) -> None:
    changed = schema.files()
    kinds = dict(embedded.messages(changed))["xla.ifrt.DTypeProto"].enum_type[0]
    value = next(value for value in kinds.value if value.name == "KIND_F32")
    value.name, value.number = name, number
    assert embedded.differences(changed, schema.files()) == ([conflict], [])


def test_fields_that_we_leave_out_survive() -> None:
    # CompileOptionsProto.profile_version (field 5) is not in our schema.
    unknown = b"\x28\x07"
    options = schema.CompileOptionsProto.FromString(unknown)
    options.compile_portable_executable = True
    assert options.SerializeToString() == b"\x20\x01" + unknown
