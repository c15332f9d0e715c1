"""Devices, and the CPUs beside them, by arithmetic."""

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.topology import Topology


def test_cpus_beside_accelerators_are_of_their_hosts() -> None:
    topology = Topology(num_slices=2, hosts_per_slice=2, devices_per_host=3, platform="tpu")
    assert (topology.num_devices, topology.num_device_ids) == (12, 24)
    for device in range(12):
        beside = DeviceId(12 + device)
        assert topology.is_beside(beside) and not topology.is_beside(DeviceId(device))
        assert topology.host_of(beside) == topology.host_of(DeviceId(device)) == device // 3
        assert topology.slice_of(beside) == device // 6
        assert topology.local_index_of(beside) == device % 3
    assert topology.hosts_of((DeviceId(23), DeviceId(0))) == (0, 3)
    assert topology.slices_of((DeviceId(12), DeviceId(1))) == (0,)


def test_cpu_devices_have_nothing_beside_them() -> None:
    topology = Topology(num_slices=1, hosts_per_slice=2, devices_per_host=2, platform="cpu")
    assert topology.num_device_ids == topology.num_devices == 4
