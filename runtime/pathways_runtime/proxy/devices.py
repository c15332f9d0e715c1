"""What the client sees of devices and memories: the tables of InitResponse."""

import zlib
from collections.abc import Mapping
from typing import Any

from pathways_runtime.core.topology import CPU, VirtualDevice
from pathways_runtime.wire.ifrt import schema
from pathways_runtime.wire.ifrt.values import Attribute, encode_attributes
from pathways_runtime.wire.messages import Attached

#: The first is every device's default, also of CPUs beside accelerators: so it is in JAX, which runs functions there.
MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")

#: With "proxy/" before it, what orbax looks for.
RUNTIME_TYPE = "pathways"

#: What JAX asks a client: jax.export writes Shardy's dialect where it may, and fails where it is not told.
CLIENT_ATTRIBUTES: Mapping[str, Attribute] = {"serialize_with_sdy": True}


def init_response(attached: Attached) -> Any:
    """The InitResponse of a session.

    Devices are ``0..N-1`` in the order of the topology. Beside accelerators stands one CPU device for each,
    ``N..2N-1``, addressable but not primary: ``jax.devices()`` does not list it, colocated Python finds it by its
    ``colocation_id``.
    """
    topology = attached.topology
    response = schema.InitResponse(
        session_id=attached.session,
        platform_name=topology.platform,
        platform_version=attached.platform_version,
        # An arbitrary number that is the same for the same platform.
        platform_id=zlib.crc32(topology.platform.encode()),
        process_index=0,
        runtime_type=RUNTIME_TYPE,
    )
    encode_attributes(CLIENT_ATTRIBUTES, response.client_attributes)
    for device in topology.devices():
        _add_device(response, device.id, device, topology.platform, attached.device_kind, MEMORY_KINDS)
        response.primary_device_ids.append(device.id)
    if topology.platform != CPU:
        for device in topology.devices():
            _add_device(response, topology.num_devices + device.id, device, CPU, CPU, MEMORY_KINDS)
    response.addressable_device_ids.extend(device.id for device in response.all_devices)
    return response


def _add_device(
    response: Any, device_id: int, place: VirtualDevice, platform: str, device_kind: str, memory_kinds: tuple[str, ...]
) -> None:
    device = response.all_devices.add(
        id=device_id,
        local_device_id=device_id,
        local_hardware_id=place.local_index,
        platform_name=platform,
        device_kind=device_kind,
    )
    text = device_text(device_id, place, platform, memory_kinds)
    device.debug_string = text
    device.to_string = text
    encode_attributes(device_attributes(place), device.attributes)
    for kind in memory_kinds:
        memory = response.memories.add(
            id=len(response.memories),
            memory_space_kind=kind,
            kind_id=MEMORY_KINDS.index(kind),
            device_ids=[device_id],
        )
        memory.to_string = memory.debug_string = f"memory({memory.id},{kind},device={device_id})"
        device.memory_ids.append(memory.id)
    device.default_memory_id = device.memory_ids[0]


def device_attributes(place: VirtualDevice) -> Mapping[str, Attribute]:
    """What programs and libraries read as ``device.<name>``."""
    return {
        "slice_index": place.slice_index,
        "coords": place.coords,
        "core_on_chip": place.core_on_chip,
        "task_id": int(place.host),
        "virtual_task_index": int(place.host),
        "colocation_id": int(place.id),
    }


def device_text(device_id: int, place: VirtualDevice, platform: str, memory_kinds: tuple[str, ...]) -> str:
    """A device's repr; orbax and others take ``vtask`` and ``slice`` out of it."""
    coords = ",".join(map(str, (*place.coords, place.core_on_chip)))
    return (
        f"device({device_id},{platform.upper()}_DEVICE,coords=[{coords}],vtask={place.host},slice={place.slice_index},"
        f"default_mem={memory_kinds[0]},mem_spaces={len(memory_kinds)})"
    )
