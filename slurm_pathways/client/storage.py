"""Arrays to and from files by the hosts themselves: each writes and reads the shards that it holds.

Asked for by plugin programs, the same that pathwaysutils' persistence makes. An array is a Zarr array (format 2), a
folder of its own; copies of a shard are written once.
"""

import base64
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from pathways_runtime.core.dtype import DTYPE_OF_NUMPY
from slurm_pathways.client.jax_plugin_programs import client_of, devices_of, encode_sharding, start_plugin_program


def start_writing(folder: Path, arrays: Mapping[str, jax.Array], timeout_s: float) -> Callable[[], None]:
    """Have the hosts write arrays, each to ``folder / name``; the arrays may be given up before it is done.

    Args:
        folder: absolute, and the same for all hosts.
        timeout_s: after which a host begins no further file.

    Returns:
        What waits for all, and raises JaxRuntimeError if a host could not.

    Raises:
        jax.errors.JaxRuntimeError: the runtime refuses. ValueError: the arrays are in no run of ours.
    """
    waits = []
    for names in _by_devices({name: array.sharding for name, array in arrays.items()}):
        chosen = [arrays[name] for name in names]
        requests = [
            {**_request(folder, name, array, timeout_s), "shape": array.shape}
            for name, array in zip(names, chosen, strict=True)
        ]
        text = json.dumps({"bulk_persistence_write_request": {"write_requests": requests}})
        waits.append(start_plugin_program(_client(chosen[0].sharding), text, chosen)[1])

    def wait() -> None:
        for each in waits:
            each()

    return wait


def start_reading(
    folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], timeout_s: float
) -> tuple[dict[str, jax.Array], Callable[[], None]]:
    """Have the hosts read arrays, each from ``folder / name``, in whatever partition they were written.

    Args:
        wanted: shapes, types and shardings, in the memory of devices.

    Returns:
        The arrays, and what waits until they are there and raises JaxRuntimeError if a host could not read.

    Raises:
        jax.errors.JaxRuntimeError: the runtime refuses. ValueError: the devices belong to no run of ours.
    """
    made: dict[str, jax.Array] = {}
    waits = []
    for names in _by_devices({name: each.sharding for name, each in wanted.items()}):
        chosen = [wanted[name] for name in names]
        requests = [
            {**_request(folder, name, each, timeout_s), "shape": _described(each)}
            for name, each in zip(names, chosen, strict=True)
        ]
        text = json.dumps({"bulk_persistence_read_request": {"read_requests": requests}})
        arrays, wait = start_plugin_program(_client(chosen[0].sharding), text, (), chosen)
        made.update(zip(names, arrays, strict=True))
        waits.append(wait)

    def wait_for_all() -> None:
        for each in waits:
            each()

    return made, wait_for_all


def missing_part(folder: Path) -> str | None:
    """What of an array that hosts have written is not to be seen from here; None if it is whole.

    Folders are listed, as network file systems remember for a while that a single file was not there.
    """
    try:
        names = set(os.listdir(folder))  # noqa: PTH208 (names alone)
        layout = json.loads((folder / ".zarray").read_text(encoding="ascii"))
    except FileNotFoundError:
        return ".zarray"
    counts = [math.ceil(size / chunk) for size, chunk in zip(layout["shape"], layout["chunks"], strict=True)]
    for index in itertools.product(*map(range, counts)):
        if (chunk := ".".join(map(str, index)) or "0") not in names:
            return chunk
    return None


def _by_devices(shardings: Mapping[str, Any]) -> list[list[str]]:
    """Names, grouped: one program's arrays lie on the same devices, in one order."""
    groups: dict[Any, list[str]] = {}
    for name, sharding in shardings.items():
        groups.setdefault(devices_of(sharding), []).append(name)
    return list(groups.values())


def _client(sharding: Any) -> Any:
    return client_of(devices_of(sharding)[0])


def _request(folder: Path, name: str, array: Any, timeout_s: float) -> dict[str, Any]:
    return {
        "b64_location": base64.b64encode(os.fsencode(folder)).decode(),
        "b64_name": base64.b64encode(name.encode()).decode(),
        "b64_hlo_sharding_string": encode_sharding(array.sharding, len(array.shape)),
        "devices": {"device_ids": [device.id for device in devices_of(array.sharding)]},
        "timeout": {"seconds": math.ceil(timeout_s)},
    }


def _described(array: jax.ShapeDtypeStruct) -> dict[str, Any]:
    return {"xla_primitive_type_str": DTYPE_OF_NUMPY[array.dtype.name].name, "dimensions": array.shape}
