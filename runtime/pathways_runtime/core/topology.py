"""Virtual devices: what the client sees, fixed for the life of a session whatever stands behind it."""

from collections.abc import Iterable

import msgspec

from pathways_runtime.core.ids import DeviceId, HostIndex

#: The platform whose devices are what functions run on, too.
CPU = "cpu"


class VirtualDevice(msgspec.Struct, frozen=True, array_like=True):
    """One device of the client's view.

    Attributes:
        id: dense from 0 over the whole topology.
        slice_index: the slice it belongs to.
        host: the virtual host it is attached to.
        local_index: its place on that host, 0..devices_per_host-1.
        coords: (x, y, z) of its chip in its slice; (place in the slice, 0, 0) where slices have no torus (CPU, GPU).
        core_on_chip: its place among the devices of its chip.
    """

    id: DeviceId
    slice_index: int
    host: HostIndex
    local_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0


class Topology(msgspec.Struct, frozen=True, array_like=True):
    """``num_slices`` slices of ``hosts_per_slice`` hosts of ``devices_per_host`` devices.

    Device ids grow by slice, then host, then place on the host, so that all maps below are arithmetic. Beside every
    accelerator stands a CPU device of its host, with the accelerator's id plus ``num_devices``; where devices are CPUs
    themselves, there are no others.

    Attributes:
        torus: (x, y, z, core on its chip) of each device of a slice, in order; empty where slices have no torus.
    """

    num_slices: int
    hosts_per_slice: int
    devices_per_host: int
    platform: str
    torus: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def num_hosts(self) -> int:
        """Virtual hosts, spares not counted."""
        return self.num_slices * self.hosts_per_slice

    @property
    def num_devices(self) -> int:
        """Devices that the client sees."""
        return self.num_hosts * self.devices_per_host

    @property
    def num_device_ids(self) -> int:
        """Devices and the CPUs beside them."""
        return self.num_devices if self.platform == CPU else 2 * self.num_devices

    def is_beside(self, device: DeviceId) -> bool:
        """Whether this is a CPU beside an accelerator."""
        return device >= self.num_devices

    def host_of(self, device: DeviceId) -> HostIndex:
        """The virtual host that a device is attached to, or that it is a CPU of."""
        host = device // self.devices_per_host
        return HostIndex(host if host < self.num_hosts else host - self.num_hosts)

    def local_index_of(self, device: DeviceId) -> int:
        """A device's place on its host."""
        return device % self.devices_per_host

    def slice_of_host(self, host: HostIndex) -> int:
        """The slice that a virtual host belongs to."""
        return host // self.hosts_per_slice

    def slice_of(self, device: DeviceId) -> int:
        """The slice that a device belongs to."""
        return self.slice_of_host(self.host_of(device))

    def device_at(self, host: HostIndex, local_index: int) -> DeviceId:
        """The device at a place on a host."""
        return DeviceId(host * self.devices_per_host + local_index)

    def hosts_of_slice(self, slice_index: int) -> tuple[HostIndex, ...]:
        """A slice's virtual hosts in order: this order is the rank order of the slice's world."""
        first = slice_index * self.hosts_per_slice
        return tuple(HostIndex(h) for h in range(first, first + self.hosts_per_slice))

    def hosts_of(self, devices: Iterable[DeviceId]) -> tuple[HostIndex, ...]:
        """The hosts that a list of devices touches, ascending and without repeats."""
        return tuple(sorted({self.host_of(d) for d in devices}))

    def slices_of(self, devices: Iterable[DeviceId]) -> tuple[int, ...]:
        """The slices that a list of devices touches, ascending and without repeats."""
        return tuple(sorted({self.slice_of(d) for d in devices}))

    def device(self, device: DeviceId) -> VirtualDevice:
        """The full description of one device."""
        host = self.host_of(device)
        slice_index = self.slice_of_host(host)
        in_slice = device - slice_index * self.hosts_per_slice * self.devices_per_host
        x, y, z, core = self.torus[in_slice] if self.torus else (in_slice, 0, 0, 0)
        return VirtualDevice(device, slice_index, host, self.local_index_of(device), (x, y, z), core)

    def devices(self) -> tuple[VirtualDevice, ...]:
        """Every device, by id."""
        return tuple(self.device(DeviceId(i)) for i in range(self.num_devices))
