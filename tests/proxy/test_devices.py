"""What InitResponse says of devices and memories."""

from pathways_runtime.core.ids import SessionId
from pathways_runtime.core.topology import Topology
from pathways_runtime.proxy.devices import init_response
from pathways_runtime.wire.ifrt.values import decode_attributes
from pathways_runtime.wire.messages import Attached


def response(platform: str):  # type: ignore[no-untyped-def]
    return init_response(Attached(SessionId(7), Topology(2, 2, 2, platform), (), "jaxlib x", "kind x", 10))


def test_cpu_devices() -> None:
    init = response("cpu")
    assert (init.session_id, init.platform_name, init.platform_version) == (7, "cpu", "jaxlib x")
    assert (init.runtime_type, init.process_index) == ("pathways", 0)
    assert decode_attributes(init.client_attributes) == {"serialize_with_sdy": True}
    ids = list(range(8))
    assert [device.id for device in init.all_devices] == ids
    assert list(init.primary_device_ids) == list(init.addressable_device_ids) == ids
    device = init.all_devices[5]
    assert device.to_string == "device(5,CPU_DEVICE,coords=[1,0,0,0],vtask=2,slice=1,default_mem=device,mem_spaces=3)"
    assert device.debug_string == device.to_string
    assert (device.device_kind, device.platform_name) == ("kind x", "cpu")
    assert decode_attributes(device.attributes) == {
        "slice_index": 1,
        "coords": (1, 0, 0),
        "core_on_chip": 0,
        "task_id": 2,
        "virtual_task_index": 2,
        "colocation_id": 5,
    }


def test_devices_of_a_torus_have_their_places_in_it() -> None:
    """Each slice is a torus of its own: here of two chips with two devices each."""
    torus = ((0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0), (0, 1, 0, 1))
    topology = Topology(2, 1, 4, "tpu", torus)
    init = init_response(Attached(SessionId(7), topology, (), "libtpu x", "TPU7x", 10))
    places = [decode_attributes(device.attributes) for device in init.all_devices[:8]]
    assert [(place["slice_index"], *place["coords"], place["core_on_chip"]) for place in places] == [
        (slice_index, *place) for slice_index in (0, 1) for place in torus
    ]
    text = "device(7,TPU_DEVICE,coords=[0,1,0,1],vtask=1,slice=1,default_mem=device,mem_spaces=3)"
    assert init.all_devices[7].to_string == text


def test_every_device_has_three_memories_of_its_own_and_defaults_to_its_own() -> None:
    init = response("cpu")
    memories = {memory.id: memory for memory in init.memories}
    assert sorted(memories) == list(range(24))
    for device in init.all_devices:
        kinds = [memories[each].memory_space_kind for each in device.memory_ids]
        assert kinds == ["device", "pinned_host", "unpinned_host"]
        assert device.default_memory_id == device.memory_ids[0]
        assert all(list(memories[each].device_ids) == [device.id] for each in device.memory_ids)


def test_accelerators_have_a_cpu_device_beside_them() -> None:
    init = response("tpu")
    assert list(init.primary_device_ids) == list(range(8))
    assert list(init.addressable_device_ids) == list(range(16))
    accelerators, hosts = init.all_devices[:8], init.all_devices[8:]
    assert {device.platform_name for device in accelerators} == {"tpu"}
    assert {(device.platform_name, device.device_kind) for device in hosts} == {("cpu", "cpu")}
    colocation = [decode_attributes(device.attributes)["colocation_id"] for device in init.all_devices]
    assert colocation[:8] == colocation[8:]
    assert len({memory.id for memory in init.memories}) == len(init.memories)
