"""Loaded executables of a session."""

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, RequestId
from pathways_runtime.core.session.arrays import Placement
from pathways_runtime.core.session.events import CompiledProgram
from pathways_runtime.core.session.plugin_programs import Plugin
from pathways_runtime.core.sharding import Shape
from pathways_runtime.core.status import Code, Status, error
from pathways_runtime.core.topology import Topology


class OutputSpec(msgspec.Struct, frozen=True, gc=False):
    """What every execution of an executable returns, or takes, at one position."""

    dtype: DType
    shape: Shape
    placement: Placement


class Function(msgspec.Struct, frozen=True, gc=False):
    """What is known of a function of colocated Python: see ``core.session.functions``."""

    name: str
    inputs: tuple[OutputSpec, ...]


class ExecutableRecord(msgspec.Struct):
    """What the session knows of an executable.

    The program and its options are kept so that it can be loaded again when a lost host of it has been replaced.

    Attributes:
        devices, hosts: interned, see ``PlacementTable.device_list``.
        needed_hosts: ``hosts``, or those of its world if it runs on several: when one of them is lost, the world is
            over, and it must be loaded again in the next one.
        compiled: None until the first ProgramCompiled; the client knows the handle only after that.
        on_workers: its name on workers, that of the latest CompileProgram; 0 while there was none. While it is being
            loaded, the controller holds what names it.
        unloaded: why it cannot run at present although the client has it; executions poison their outputs with this.
        waiting: the Compile request to answer, until it is.
        plugin: what it does, if it is no program of XLA's; nothing else of it is on workers then.
        function: of colocated Python, if that is what it is.
    """

    handle: Handle
    program: bytes
    options: bytes
    devices: tuple[DeviceId, ...]
    hosts: tuple[HostIndex, ...]
    needed_hosts: tuple[HostIndex, ...]
    compiled: CompiledProgram | None = None
    outputs: tuple[OutputSpec, ...] = ()
    donated: tuple[int, ...] = ()
    on_workers: Handle = Handle(0)
    unloaded: Status | None = None
    is_deleted: bool = False
    waiting: RequestId | None = None
    plugin: Plugin | None = None
    function: Function | None = None


class StandIn(msgspec.Struct, frozen=True):
    """A compilation on ``hosts`` that tells what ``executable`` is like."""

    executable: Handle
    hosts: tuple[HostIndex, ...]


class ExecutableTable:
    """The executables of a session by handle; a handle is here until it is destructed."""

    def __init__(self) -> None:
        self.records: dict[Handle, ExecutableRecord] = {}
        #: What is being loaded, by the name that it will have on workers; it may be deleted meanwhile.
        self.loads: dict[Handle, ExecutableRecord] = {}
        #: Programs compiled on other devices only to learn what they are like, by the handle used there.
        self.stand_ins: dict[Handle, StandIn] = {}

    def find(self, handle: Handle) -> ExecutableRecord:
        """An executable that the client may name, deleted or not.

        Raises:
            StatusError: NOT_FOUND if there is none.
        """
        record = self.records.get(handle)
        if record is None or record.compiled is None:
            raise error(Code.NOT_FOUND, f"there is no loaded executable {handle}")
        return record

    def find_live(self, handle: Handle) -> tuple[ExecutableRecord, CompiledProgram]:
        """An executable that may be used, with what it is like.

        Raises:
            StatusError: NOT_FOUND if there is none, INVALID_ARGUMENT if it is deleted.
        """
        record = self.find(handle)
        compiled = record.compiled
        assert compiled is not None
        if record.is_deleted:
            raise error(Code.INVALID_ARGUMENT, f"loaded executable {handle} ({compiled.name}) has been deleted")
        return record, compiled


def stand_in_devices(
    devices: tuple[DeviceId, ...], topology: Topology, lost_hosts: frozenset[HostIndex]
) -> tuple[DeviceId, ...] | None:
    """Where else a program can be compiled to learn what it is like: whole slices instead of those with a lost host.

    Returns:
        Devices with the same places in other slices, in the order of ``devices``; None if whole slices are too few.
    """
    lost_slices = {topology.slice_of_host(host) for host in lost_hosts}
    used = topology.slices_of(devices)
    free = [s for s in range(topology.num_slices) if s not in lost_slices and s not in used]
    replacement = {s: s for s in used}
    for slice_index in used:
        if slice_index in lost_slices:
            if not free:
                return None
            replacement[slice_index] = free.pop(0)
    per_slice = topology.hosts_per_slice * topology.devices_per_host

    def stand_in(device: DeviceId) -> DeviceId:
        first = topology.num_devices if topology.is_beside(device) else 0
        return DeviceId(first + replacement[topology.slice_of(device)] * per_slice + device % per_slice)

    return tuple(map(stand_in, devices))
