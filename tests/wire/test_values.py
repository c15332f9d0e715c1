"""Element types, statuses, attributes, layouts."""

import pytest

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.status import Code, Status, StatusError
from pathways_runtime.wire.ifrt import schema, values


def test_element_types_are_ifrts_by_name_and_number() -> None:
    kinds = {f"KIND_{kind.name}": int(kind) for kind in DType}
    assert kinds == {name: number for name, number in schema.DTypeProto.Kind.items() if number}


def test_an_unknown_element_type_is_refused_by_number() -> None:
    with pytest.raises(StatusError, match="UNIMPLEMENTED: element type 77"):
        values.decode_dtype(schema.DTypeProto(kind=77))


@pytest.mark.parametrize("code", [code for code in Code if code])
def test_failures_keep_code_and_message(code: Code) -> None:
    proto = schema.StatusProto()
    values.encode_status(Status(code, "why"), proto)
    assert values.decode_status(schema.StatusProto.FromString(proto.SerializeToString())) == Status(code, "why")


def test_success_is_no_failure_and_a_foreign_code_is_unknown() -> None:
    assert values.decode_status(schema.StatusProto()) is None
    assert values.decode_status(schema.StatusProto(code=20, message="m")) == Status(Code.UNKNOWN, "m")


def test_attributes_keep_their_types() -> None:
    proto = schema.AttributeMapProto()
    values.encode_attributes({"i": 3, "b": True, "s": "x", "f": 0.5, "l": (1, -2), "none": ()}, proto)
    decoded = values.decode_attributes(schema.AttributeMapProto.FromString(proto.SerializeToString()))
    assert decoded == {"i": 3, "b": True, "s": b"x", "f": 0.5, "l": (1, -2), "none": ()}
    assert type(decoded["b"]) is bool
    assert type(decoded["i"]) is int


def test_an_attribute_of_another_type_is_an_error() -> None:
    with pytest.raises(TypeError, match="attribute x: IFRT has no attribute of type dict"):
        values.encode_attributes({"x": {}}, schema.AttributeMapProto())  # type: ignore[dict-item]


@pytest.mark.parametrize(("minor_to_major", "text"), [((), "{}"), ((0,), "{0}"), ((1, 0), "{1,0}")])
def test_layouts_are_written_as_xla_does(minor_to_major: tuple[int, ...], text: str) -> None:
    assert values.layout_text(minor_to_major) == text
