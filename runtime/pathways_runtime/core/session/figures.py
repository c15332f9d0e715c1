"""A session in numbers, and what must hold between events."""

from typing import Any

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.session.arrays import Storage, shard_bytes
from pathways_runtime.core.session.dataflow import SessionState

_MAX_HANDLES_SHOWN = 8


def figures(state: SessionState) -> dict[str, Any]:
    """Counts, and what is waited for.

    Returns:
        JSON-able values. ``held_bytes`` is per memory kind the total over all devices and the most on one device,
        counted as a host buffer would be, each array that shares all its shards with an older one left out.
    """
    records = state.arrays.records
    seen: set[Storage] = set()
    per_placement: dict[int, int] = {}
    placements = {}
    for record in records.values():
        if not record.hosts or record.placement is None:
            continue
        if record.storages is not None:
            if all(storage in seen for storage in record.storages):
                continue
            seen.update(record.storages)
        key = id(record.placement)
        placements[key] = record.placement
        per_placement[key] = per_placement.get(key, 0) + shard_bytes(record)
    per_memory: dict[str, dict[DeviceId, int]] = {}
    for key, shard in per_placement.items():
        placement = placements[key]
        per_device = per_memory.setdefault(placement.memory_kind, {})
        for device in placement.devices:
            per_device[device] = per_device.get(device, 0) + shard
    return {
        "arrays": len(records),
        "arrays_on_workers": sum(1 for record in records.values() if record.hosts),
        "arrays_poisoned": sum(1 for record in records.values() if record.poison is not None),
        "executables": len(state.executables.records),
        "executables_unloaded": sum(1 for e in state.executables.records.values() if e.unloaded is not None),
        "operations": int(state.last_op),
        "held_bytes": {
            kind: {"total": sum(per_device.values()), "most_on_one_device": max(per_device.values())}
            for kind, per_device in sorted(per_memory.items())
        },
        "waits": [
            {
                "wait_id": int(wait.wait_id),
                "op_id": int(wait.op_id),
                "request_id": None if wait.request_id is None else int(wait.request_id),
                "for": "value" if wait.target is not None else "readiness",
                "arrays": [int(handle) for handle in wait.handles[:_MAX_HANDLES_SHOWN]],
                "num_arrays": len(wait.handles),
                "missing_hosts": [int(host) for host in wait.missing()],
                "is_answered": wait.has_concluded,
            }
            for wait in state.waits.open.values()
        ],
        "compiling": [
            int(handle) for handle, record in state.executables.records.items() if record.waiting is not None
        ],
        "lost_hosts": {int(host): str(loss) for host, loss in sorted(state.placements.losses.items())},
    }


def check_invariants(state: SessionState) -> None:
    """Raise AssertionError if the state contradicts itself."""
    carriers: dict[Storage, int] = {}
    for handle, record in state.arrays.records.items():
        where = f"array {handle}: {record}"
        assert handle != 0, where
        assert record.placement is not None or (record.poison is not None and not record.hosts), where
        assert not (record.is_ready and record.poison is not None), where
        if record.is_deleted:
            assert not record.hosts, where
        if record.hosts:
            assert record.placement is not None and record.hosts is record.placement.hosts, where
            assert (record.placement.loss is not None) == (handle in state.away), where
        else:
            assert record.storages is None, where
            assert record.is_deleted or record.poison is not None, where
        for storage in record.storages or ():
            carriers[storage] = carriers.get(storage, 0) + 1
    for handle, hosts in state.away.items():
        where = f"array {handle}, away on hosts {hosts}"
        assert hosts and all(host in state.placements.losses for host in hosts), where
        assert state.arrays.records[handle].poison is not None, where
    for storage, count in carriers.items():
        assert storage.num_arrays == count, f"storage {storage.token} counts {storage.num_arrays} arrays of {count}"
        assert storage.token not in state.arrays.records
    for wait_id, wait in state.waits.open.items():
        assert wait.wait_id == wait_id and not wait.is_over(), f"{wait}"
        assert wait.unreported and wait.unreported <= set(wait.hosts), f"{wait}"
        assert len(wait.unreported) < len(wait.hosts) or not wait.has_concluded, f"{wait}"
        assert not any(host in state.placements.losses for host in wait.missing()), f"{wait}"
    for handle, outcome in state.outcomes.items():
        assert outcome.wait is None or not outcome.wait.has_concluded, f"outcome {handle}: {outcome}"
    for handle, executable in state.executables.records.items():
        assert (executable.compiled is None) == (executable.waiting is not None), f"executable {handle}"
        if executable.unloaded is None:
            assert state.placements.first_loss(executable.hosts) is None, f"executable {handle}"
            is_on_workers = executable.plugin is not None or bool(executable.on_workers)
            assert executable.waiting is not None or is_on_workers, f"executable {handle}"
        assert executable.handle == handle
    for stand_in in state.executables.stand_ins.values():
        assert stand_in.executable in state.executables.records, f"{stand_in}"
    for placement in (record.placement for record in state.arrays.records.values()):
        if placement is not None:
            assert placement.loss == state.placements.first_loss(placement.hosts)
