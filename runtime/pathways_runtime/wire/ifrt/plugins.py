"""Plugin programs as clients write them: JSON after a fixed word. See ``core.session.plugins``.

Three kinds come from pathwaysutils and orbax (``profileRequest``, ``bulk_persistence_…_request`` and their single
forms, ``reshardRequest``); ``hostTraceRequest`` is our own client's. Folders are taken as they are written; the proxy
says where they lie (``proxy.folders``).
"""

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.session import plugin_programs as core
from pathways_runtime.core.sharding import REPLICATED, Sharding
from pathways_runtime.core.status import Code, StatusError, error
from pathways_runtime.core.stored import StoredArray
from pathways_runtime.wire.ifrt.shardings import decode_op_sharding_bytes

PLUGIN_PROGRAM = "xla::ifrt::PluginProgram"
_PREFIX = b"__serialized_plugin_program "

#: Levels of ``jax.profiler.ProfileOptions`` where the client leaves them out. Python is not traced on hosts: what runs
#: there is the runtime's Python, not the client's.
_HOST_TRACER_LEVEL = 2
_PYTHON_TRACER_LEVEL = 0
#: pathwaysutils' default for ``maxNumHosts``, which nobody has chosen who wants to see what the hosts do.
_UNCHOSEN_NUM_HOSTS = 1


def decode_plugin(content: bytes) -> core.CompilePlugin:
    """The request that a plugin program's bytes state.

    Raises:
        StatusError: INVALID_ARGUMENT if it is not what we take for one; the text begins with ``Bad PluginProgram``, for
            which pathwaysutils has an explanation of its own.
    """
    text = content.removeprefix(_PREFIX)
    try:
        request = json.loads(text)
        (kind,) = request
        plugin, devices = _KINDS[kind](request[kind])
    except StatusError as failure:
        raise error(failure.status.code, f"Bad PluginProgram: {failure.status.message}") from failure
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as failure:
        known = ", ".join(_KINDS)
        raise error(
            Code.INVALID_ARGUMENT,
            f"Bad PluginProgram: {failure!r} in {text[:200]!r}; a request is JSON with one of the keys {known}",
        ) from failure
    return core.CompilePlugin(plugin, kind, devices, text.decode(), None)


Decoded = tuple[core.Plugin, tuple[DeviceId, ...]]


def _profile(request: Mapping[str, Any]) -> Decoded:
    options = request.get("xprofTraceOptions")
    levels = options or {}
    runtime_options = levels.get("pwTraceOptions", {})
    num_hosts = int(request.get("maxNumHosts", _UNCHOSEN_NUM_HOSTS))
    plugin = core.Trace(
        folder=str(request["traceLocation"]),
        run=str(levels.get("traceSessionName", "")),
        max_hosts=0 if num_hosts == _UNCHOSEN_NUM_HOSTS else num_hosts,
        host_tracer_level=int(levels.get("hostTraceLevel", _HOST_TRACER_LEVEL)),
        python_tracer_level=int(bool(runtime_options.get("enablePythonTracer", _PYTHON_TRACER_LEVEL))),
        gives_array=options is not None,
    )
    return plugin, ()


def _host_trace(request: Mapping[str, Any]) -> Decoded:
    plugin = core.HostTrace(
        starts=bool(request["starts"]),
        folder=str(request.get("folder", "")),
        run=str(request.get("run", "")),
        max_hosts=int(request.get("maxNumHosts", 0)),
        host_tracer_level=int(request.get("hostTracerLevel", _HOST_TRACER_LEVEL)),
        python_tracer_level=int(request.get("pythonTracerLevel", _PYTHON_TRACER_LEVEL)),
    )
    return plugin, ()


def _write(requests: Sequence[Mapping[str, Any]]) -> Decoded:
    # What type the arrays have is not said; they tell it themselves.
    targets = tuple(_stored(each, DType.OPAQUE, each["shape"]) for each in requests)
    return core.Write(targets, _timeout_s(requests)), _common_devices(targets)


def _read(requests: Sequence[Mapping[str, Any]]) -> Decoded:
    sources = tuple(
        _stored(each, DType[each["shape"]["xla_primitive_type_str"]], each["shape"].get("dimensions", ()))
        for each in requests
    )
    return core.Read(sources, _timeout_s(requests)), _common_devices(sources)


def _reshard(request: Mapping[str, Any]) -> Decoded:
    sources = tuple(map(_ifrt_sharding, request["inSharding"]))
    targets = tuple(map(_ifrt_sharding, request["outSharding"]))
    if len(sources) != len(targets):
        raise error(Code.INVALID_ARGUMENT, f"{len(sources)} input shardings, but {len(targets)} output shardings")
    devices = dict.fromkeys(device for sharding in sources for device in sharding.devices)
    return core.Reshard(sources, targets, bool(request.get("donateInput"))), tuple(devices)


def _stored(request: Mapping[str, Any], dtype: DType, shape: Sequence[int]) -> StoredArray:
    location, name = (base64.b64decode(request[key]).decode() for key in ("b64_location", "b64_name"))
    sharding = _sharding(request["b64_hlo_sharding_string"], request["devices"], None)
    return StoredArray(f"{location.rstrip('/')}/{name}", dtype, tuple(map(int, shape)), sharding)


def _ifrt_sharding(request: Mapping[str, Any]) -> Sharding:
    return _sharding(request["xla_hlo_sharding"], request["devices"], request.get("memory_kind"))


def _sharding(op_sharding: str, devices: Mapping[str, Any], memory_kind: str | None) -> Sharding:
    ids = tuple(DeviceId(int(device)) for device in devices["device_ids"])
    tiles = decode_op_sharding_bytes(base64.b64decode(op_sharding), len(ids)) if op_sharding else REPLICATED
    return Sharding(ids, tiles, memory_kind)


def _timeout_s(requests: Sequence[Mapping[str, Any]]) -> float:
    timeouts = [each["timeout"] for each in requests if "timeout" in each]
    return max((float(t.get("seconds", 0)) + float(t.get("nanos", 0)) / 1e9 for t in timeouts), default=3600.0)


def _common_devices(arrays: Sequence[StoredArray]) -> tuple[DeviceId, ...]:
    """The client compares the number of devices with that of each argument's shards."""
    lists = {array.sharding.devices for array in arrays}
    if len(lists) > 1:
        raise error(Code.INVALID_ARGUMENT, "the arrays of one request must lie on the same devices, in one order")
    return next(iter(lists), ())


_KINDS: dict[str, Callable[[Any], Decoded]] = {
    "profileRequest": _profile,
    "hostTraceRequest": _host_trace,
    "persistenceWriteRequest": lambda request: _write([request]),
    "persistenceReadRequest": lambda request: _read([request]),
    "bulk_persistence_write_request": lambda request: _write(request["write_requests"]),
    "bulk_persistence_read_request": lambda request: _read(request["read_requests"]),
    "reshardRequest": _reshard,
}
