"""What slices and programs used, added up from what hosts say (``core.worker.usage``). Plain values in and out."""

from collections.abc import Iterable, Mapping
from typing import Any

Values = Mapping[str, Any]


def add_up(workers: Iterable[Values]) -> dict[str, Any]:
    """The sections ``slices`` and ``programs`` of a status report; docs/status.md has their schema.

    Args:
        workers: those of the report. Spares, and those without ``usage``, add nothing.
    """
    by_slice: dict[int, list[Values]] = {}
    for worker in workers:
        if worker["slice_index"] is not None:
            by_slice.setdefault(worker["slice_index"], []).append(worker)
    usages = {index: [w["usage"] for w in members if "usage" in w] for index, members in by_slice.items()}
    return {
        "slices": [
            {
                "index": index,
                "hosts": sorted(worker["host"] for worker in by_slice[index]),
                "num_devices": sum(len(usage["devices"]) for usage in usages[index]),
                "busy_s": _sum(usages[index], "busy_s"),
                "waiting_s": _sum(usages[index], "waiting_s"),
                "programs": add_programs(usage["programs"] for usage in usages[index]),
            }
            for index in sorted(by_slice)
        ],
        "programs": add_programs(usage["programs"] for members in usages.values() for usage in members),
    }


def add_programs(tables: Iterable[Iterable[Values]]) -> list[dict[str, Any]]:
    """The tables of several hosts as one, the busiest program first.

    Each host of a program counts each of its executions, so it was executed as often as the host says that has
    counted most.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for table in tables:
        for row in table:
            key = (row["name"], row["devices"])
            have = rows.setdefault(key, {**row, "executions": 0, "busy_s": 0.0, "waiting_s": 0.0})
            have["executions"] = max(have["executions"], row["executions"])
            have["busy_s"] = round(have["busy_s"] + row["busy_s"], 6)
            have["waiting_s"] = round(have["waiting_s"] + row["waiting_s"], 6)
    return sorted(rows.values(), key=lambda row: (-row["busy_s"], row["name"], row["devices"]))


def _sum(usages: Iterable[Values], key: str) -> float:
    return float(round(sum(usage[key] for usage in usages), 6))
