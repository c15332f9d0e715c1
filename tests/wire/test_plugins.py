"""Plugin programs as pathwaysutils and our own client write them."""

import base64
import json
from typing import Any

import pytest

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.session import plugin_programs as core
from pathways_runtime.core.sharding import REPLICATED, Sharding, TileKind
from pathways_runtime.core.status import Code, StatusError
from pathways_runtime.core.stored import StoredArray
from pathways_runtime.wire.ifrt import schema
from pathways_runtime.wire.ifrt.plugins import decode_plugin

ROWS = schema.OpSharding(
    type=schema.OpSharding.Type.OTHER, tile_assignment_dimensions=[2, 1], iota_reshape_dims=[2], iota_transpose_perm=[0]
).SerializeToString()


def text_of(value: bytes | str) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def program(request: Any) -> bytes:
    return b"__serialized_plugin_program " + json.dumps(request).encode()


def stored(**fields: Any) -> dict[str, Any]:
    return {
        "b64_location": text_of("gs://bucket/ck/"),
        "b64_name": text_of("params.w"),
        "b64_hlo_sharding_string": text_of(ROWS),
        "devices": {"device_ids": [2, 3]},
        "timeout": {"seconds": 90, "nanos": 500000000},
        **fields,
    }


def test_a_profile() -> None:
    plain = {"traceLocation": "gs://b/t", "maxNumHosts": 1, "includeResourceManagers": True}
    decoded = decode_plugin(program({"profileRequest": plain}))
    assert decoded.plugin == core.Trace("gs://b/t", "", 0, 2, 0, gives_array=False) and decoded.devices == ()
    options = {
        "traceDirectory": "gs://b/t",
        "traceSessionName": "run",
        "hostTraceLevel": 3,
        "pwTraceOptions": {"enablePythonTracer": True},
    }
    decoded = decode_plugin(program({"profileRequest": {**plain, "maxNumHosts": 3, "xprofTraceOptions": options}}))
    assert decoded.plugin == core.Trace("gs://b/t", "run", 3, 3, 1, gives_array=True)


def test_the_clients_own_trace() -> None:
    begin = decode_plugin(program({"hostTraceRequest": {"starts": True, "hostTracerLevel": 1}}))
    assert begin.plugin == core.HostTrace(True, "", "", 0, 1, 0)
    end = decode_plugin(program({"hostTraceRequest": {"starts": False, "folder": "/t", "run": "r"}}))
    assert end.plugin == core.HostTrace(False, "/t", "r", 0, 2, 0)


@pytest.mark.parametrize("is_bulk", [False, True])
def test_arrays_to_files_and_back(is_bulk: bool) -> None:
    def request(kind: str, fields: dict[str, Any]) -> bytes:
        if is_bulk:
            return program({f"bulk_persistence_{kind.lower()}_request": {f"{kind.lower()}_requests": [fields] * 2}})
        return program({f"persistence{kind}Request": fields})

    count = 2 if is_bulk else 1
    write = decode_plugin(request("Write", stored(shape=[4, 6])))
    assert isinstance(write.plugin, core.Write) and len(write.plugin.targets) == count
    (target, *_) = write.plugin.targets
    assert (target.folder, target.shape, target.sharding.devices) == ("gs://bucket/ck/params.w", (4, 6), (2, 3))
    assert target.sharding.tiles.kind is TileKind.TILED and write.plugin.timeout_s == 90.5
    assert write.devices == (2, 3)
    shape = {"xla_primitive_type_str": "BF16", "dimensions": [4, 6]}
    read = decode_plugin(request("Read", stored(shape=shape)))
    assert read.plugin == core.Read(
        (StoredArray("gs://bucket/ck/params.w", DType.BF16, (4, 6), target.sharding),) * count, 90.5
    )


def test_resharding() -> None:
    source = {"devices": {"device_ids": [0, 1]}, "xla_hlo_sharding": text_of(ROWS)}
    target = {"devices": {"device_ids": [5]}, "xla_hlo_sharding": "", "memory_kind": "pinned_host"}
    decoded = decode_plugin(
        program({"reshardRequest": {"donateInput": True, "inSharding": [source], "outSharding": [target]}})
    )
    assert isinstance(decoded.plugin, core.Reshard) and decoded.plugin.donates
    assert decoded.plugin.targets == (Sharding((5,), REPLICATED, "pinned_host"),)
    assert decoded.devices == (0, 1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "JSONDecodeError"),
        (program({"dreamRequest": {}}), "a request is JSON with one of the keys profileRequest, hostTraceRequest"),
        (program({"profileRequest": {}}), "traceLocation"),
        (program([1, 2]), "Bad PluginProgram"),
        (program({"persistenceReadRequest": stored(shape={"xla_primitive_type_str": "F99"})}), "F99"),
        (
            program(
                {
                    "bulk_persistence_write_request": {
                        "write_requests": [stored(shape=[2, 2]), stored(shape=[2, 2], devices={"device_ids": [0, 1]})]
                    }
                }
            ),
            "must lie on the same devices",
        ),
    ],
)
def test_what_is_none(content: bytes, says: str) -> None:
    with pytest.raises(StatusError) as refused:
        decode_plugin(content)
    assert refused.value.status.code is Code.INVALID_ARGUMENT
    assert refused.value.status.message.startswith("Bad PluginProgram: ") and says in refused.value.status.message
