"""Arrays of a session: small records with interned placements.

So an operation costs the same for one device and for ten thousand.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId
from pathways_runtime.core.sharding import REPLICATED, Shape, Sharding, TileKind, num_elements
from pathways_runtime.core.status import Code, Status, error
from pathways_runtime.core.topology import Topology

#: The memory that ``memory_kind=None`` means.
DEFAULT_MEMORY_KIND = "device"


class Placement:
    """An interned Sharding: two arrays lie alike if and only if they have the same Placement object.

    Attributes:
        devices: interned too: equal device lists are one tuple, so ``is`` compares them.
        hosts: the hosts of ``devices``, ascending; interned too.
        memory_kind: never None.
        loss: why one of ``hosts`` is lost at present, None while all are there.
    """

    __slots__ = ("devices", "hosts", "loss", "memory_kind", "sharding")

    def __init__(self, sharding: Sharding, hosts: tuple[HostIndex, ...], loss: Status | None) -> None:
        self.sharding = sharding
        self.devices = sharding.devices
        self.hosts = hosts
        self.memory_kind = sharding.memory_kind or DEFAULT_MEMORY_KIND
        self.loss = loss


class PlacementTable:
    """Interns shardings and device lists, and knows which hosts are lost."""

    def __init__(self, topology: Topology, losses: Mapping[HostIndex, Status]) -> None:
        self._topology = topology
        self._placements: dict[Sharding, Placement] = {}
        self._of_host: dict[HostIndex, list[Placement]] = {}
        self._device_lists: dict[tuple[DeviceId, ...], tuple[tuple[DeviceId, ...], tuple[HostIndex, ...]]] = {}
        self._host_lists: dict[tuple[HostIndex, ...], tuple[HostIndex, ...]] = {}
        self._single: dict[tuple[DeviceId, str | None], Placement] = {}
        self.losses = dict(losses)

    def device_list(self, devices: tuple[DeviceId, ...]) -> tuple[tuple[DeviceId, ...], tuple[HostIndex, ...]]:
        """The interned device list and its hosts.

        Raises:
            StatusError: INVALID_ARGUMENT for an empty list, an unknown device, or one that is named twice.
        """
        known = self._device_lists.get(devices)
        if known is None:
            if not devices:
                raise error(Code.INVALID_ARGUMENT, "an array or program needs at least one device")
            unknown = [d for d in devices if not 0 <= d < self._topology.num_device_ids]
            if unknown:
                raise error(
                    Code.INVALID_ARGUMENT,
                    f"there is no device {unknown[0]}: devices are numbered 0 to {self._topology.num_device_ids - 1}",
                )
            if len(set(devices)) != len(devices):
                raise error(Code.INVALID_ARGUMENT, f"a device is named twice in {devices}")
            hosts = self._topology.hosts_of(devices)
            known = self._device_lists[devices] = (devices, self._host_lists.setdefault(hosts, hosts))
        return known

    def intern(self, sharding: Sharding) -> Placement:
        """The one Placement of a sharding.

        Raises:
            StatusError: INVALID_ARGUMENT for a device list as in ``device_list``, or tiles that do not fit it.
        """
        placement = self._placements.get(sharding)
        if placement is None:
            devices, hosts = self.device_list(sharding.devices)
            tiles = sharding.tiles
            if tiles.kind is TileKind.TILED:
                places = tiles.tile_of_place().shape[0]
                if places != len(devices):
                    raise error(
                        Code.INVALID_ARGUMENT, f"a sharding of {places} tiles cannot lie on {len(devices)} devices"
                    )
            placement = Placement(msgspec.structs.replace(sharding, devices=devices), hosts, self.first_loss(hosts))
            self._placements[sharding] = placement
            for host in hosts:
                self._of_host.setdefault(host, []).append(placement)
        return placement

    def single(self, device: DeviceId, memory_kind: str | None) -> Placement:
        """The placement of a single-device array."""
        placement = self._single.get((device, memory_kind))
        if placement is None:
            placement = self.intern(Sharding((device,), REPLICATED, memory_kind, is_single_device=True))
            self._single[device, memory_kind] = placement
        return placement

    def first_loss(self, hosts: Iterable[HostIndex]) -> Status | None:
        """Why the first lost one of ``hosts`` is lost, or None."""
        if not self.losses:
            return None
        return next((self.losses[host] for host in hosts if host in self.losses), None)

    def set_loss(self, host: HostIndex, loss: Status | None) -> None:
        """Note that a host is lost, or is there again."""
        if loss is None:
            self.losses.pop(host, None)
        else:
            self.losses[host] = loss
        for placement in self.touching(host):
            placement.loss = self.first_loss(placement.hosts)

    def touching(self, host: HostIndex) -> Sequence[Placement]:
        """The placements with a shard on a host, oldest first."""
        return self._of_host.get(host, ())


class Storage:
    """Shards that more than one array may name, because an Alias was made of them.

    Rule of donation: a Launch may take the buffers of an array only while no other live array of the session names any
    of them. So each array that takes part in aliasing carries its storages, and each storage counts the live arrays
    that carry it. (An array whose shards came from several arrays carries the storages of all; that errs on the safe
    side.)

    Attributes:
        token: a handle of no array, which stands for the shards in ``reads`` and ``consumes``: a launch that takes the
            buffers comes after all readers of every array that ever named them, whatever their handles are.
        founder: the array that had the shards alone, until the first Alias: who read it before then has not named the
            token.
        num_arrays: live arrays that carry it.
    """

    __slots__ = ("founder", "num_arrays", "token")

    def __init__(self, token: Handle, founder: Handle) -> None:
        self.token = token
        self.founder = founder
        self.num_arrays = 0


class ArrayRecord(msgspec.Struct, gc=False):
    """What the session knows of an array.

    Attributes:
        placement: None only for a handle that a refused request would have given a value: ``poison`` says why, and
            ``dtype`` and ``shape`` mean nothing.
        hosts: who holds shards: ``placement.hosts``, or none if it was never made, was deleted, donated, or lost.
        poison: the first cause of failure, never changed once set; but if it is the loss of a host in whose memory the
            array still is, it goes when the host is back (``SessionState.away``).
        is_deleted: deleted or donated; the handle is known until it is destructed.
        is_ready: known to be computed, as a wait for it has succeeded.
        via_transfers: transfers that its shards come from, directly or through aliases; a launch that reads it names
            them.
        storages: see Storage; None while nothing was ever aliased.
    """

    dtype: DType
    shape: Shape
    placement: Placement | None
    hosts: tuple[HostIndex, ...]
    poison: Status | None = None
    is_deleted: bool = False
    is_ready: bool = False
    via_transfers: tuple[OpId, ...] = ()
    storages: tuple[Storage, ...] | None = None

    def is_shared(self) -> bool:
        """Whether another live array names one of its shards."""
        return self.storages is not None and any(storage.num_arrays > 1 for storage in self.storages)

    def leave_workers(self) -> None:
        """Nothing of it is on workers any more, or will not be once what is submitted is done."""
        self.hosts = ()
        if self.storages is not None:
            for storage in self.storages:
                storage.num_arrays -= 1
            self.storages = None

    def sharing(self, storages: tuple[Storage, ...]) -> None:
        """Carry ``storages`` from now on; called once, before the array is used."""
        for storage in storages:
            storage.num_arrays += 1
        self.storages = storages


def poisoned_handle(status: Status) -> ArrayRecord:
    """The record of a handle whose request was refused."""
    return ArrayRecord(DType.OPAQUE, (), None, (), status)


class ArrayTable:
    """The arrays of a session by handle. Handles are never reused; a handle is here until it is destructed."""

    def __init__(self) -> None:
        self.records: dict[Handle, ArrayRecord] = {}

    def find(self, handle: Handle) -> ArrayRecord:
        """A record that may be used; it may be poisoned.

        Raises:
            StatusError: INVALID_ARGUMENT if the array is deleted, NOT_FOUND if the handle is unknown.
        """
        record = self.records.get(handle)
        if record is None:
            raise error(Code.NOT_FOUND, f"there is no array {handle}")
        if record.is_deleted:
            raise error(Code.INVALID_ARGUMENT, f"{describe(handle, record)} has been deleted or donated")
        return record

    def find_all(self, handles: Iterable[Handle]) -> list[ArrayRecord]:
        """``find`` for each."""
        return [self.find(handle) for handle in handles]

    def check_new(self, handles: tuple[Handle, ...]) -> None:
        """Raise StatusError ALREADY_EXISTS if one is taken or named twice."""
        for handle in handles:
            if handle in self.records:
                raise error(Code.ALREADY_EXISTS, f"handle {handle} already names an array")
        if len(set(handles)) != len(handles):
            raise error(Code.INVALID_ARGUMENT, f"a result handle is named twice in {handles}")

    def add(self, handle: Handle, record: ArrayRecord) -> None:
        """Give a new handle its record. The caller has made sure that it is new."""
        self.records[handle] = record


def describe(handle: Handle, record: ArrayRecord) -> str:
    """An array for people: ``array 17 (F32[8,8])``."""
    if record.placement is None:
        return f"array {handle}"
    return f"array {handle} ({record.dtype.name}[{','.join(map(str, record.shape))}])"


def shard_bytes(record: ArrayRecord) -> int:
    """Bytes of one shard, padding included, as a host buffer would hold it; 0 for what has no such form."""
    if record.placement is None or record.dtype in (DType.TOKEN, DType.OPAQUE, DType.STRING):
        return 0
    return num_elements(record.placement.sharding.shard_shape(record.shape)) * record.dtype.itemsize_bytes
