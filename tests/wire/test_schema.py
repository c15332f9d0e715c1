"""Our IFRT schema against its source text and against what the installed jaxlib embeds."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from pathways_runtime.core.status import StatusError
from pathways_runtime.wire.gen import ifrt_descriptors
from pathways_runtime.wire.ifrt import embedded, requests, schema

ROOT = Path(__file__).resolve().parents[2]
Files = dict[str, descriptor_pb2.FileDescriptorProto]


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


def test_every_field_of_ours_is_jaxlibs(jaxlib_files: Files) -> None:
    assert embedded.differences(schema.files(), list(jaxlib_files.values())) == []


def test_every_kind_of_request_and_response_of_jaxlib_is_known(jaxlib_files: Files) -> None:
    theirs = dict(embedded.messages(list(jaxlib_files.values())))
    for ours in (schema.IfrtRequest, schema.IfrtResponse):
        known = {field.name: field.number for field in ours.DESCRIPTOR.fields}
        assert known == {field.name: field.number for field in theirs[ours.DESCRIPTOR.full_name].field}


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


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda field: setattr(field, "number", 99), "xla.ifrt.Serialized.data is (99,"),
        (lambda field: setattr(field, "name", "content"), "xla.ifrt.Serialized.content is not in theirs"),
        (
            lambda field: setattr(field, "type", descriptor_pb2.FieldDescriptorProto.TYPE_STRING),
            "xla.ifrt.Serialized.data is (2, 'TYPE_STRING'",
        ),
        (
            lambda field: setattr(field, "label", descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED),
            "xla.ifrt.Serialized.data is (2, 'TYPE_BYTES', 'LABEL_REPEATED'",
        ),
    ],
)
def test_a_difference_is_found(jaxlib_files: Files, change, expected: str) -> None:  # type: ignore[no-untyped-def]
    changed = schema.files()
    serialized = dict(embedded.messages(changed))["xla.ifrt.Serialized"]
    change(serialized.field[1])
    (difference,) = embedded.differences(changed, list(jaxlib_files.values()))
    assert difference.startswith(expected)


def test_a_changed_enum_value_is_found(jaxlib_files: Files) -> None:
    changed = schema.files()
    kinds = dict(embedded.messages(changed))["xla.ifrt.DTypeProto"].enum_type[0]
    next(value for value in kinds.value if value.name == "KIND_F32").number = 98
    assert embedded.differences(changed, list(jaxlib_files.values())) == [
        "enum xla.ifrt.DTypeProto.Kind: KIND_F32 is 98, in theirs 11"
    ]


def test_fields_that_we_leave_out_survive() -> None:
    # CompileOptionsProto.profile_version (field 5) is not in our schema.
    unknown = b"\x28\x07"
    options = schema.CompileOptionsProto.FromString(unknown)
    options.compile_portable_executable = True
    assert options.SerializeToString() == b"\x20\x01" + unknown
