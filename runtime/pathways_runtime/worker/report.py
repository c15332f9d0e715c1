"""The executor's part of ``status``."""

import time
from typing import Any

from pathways_runtime.transport.dataplane import DataPlane
from pathways_runtime.worker.collectives import Collectives
from pathways_runtime.worker.dispatch import Dispatcher


def report_of(name: str, dispatcher: Dispatcher, data_plane: DataPlane, collectives: Collectives) -> dict[str, Any]:
    """What this host holds and what waits here, as plain values."""
    now_ns = time.monotonic_ns()
    snapshot = dispatcher.snapshot()
    waiting = [
        {
            "session": session,
            "op_id": op_id,
            "what": what,
            "waits_for": waits_for,
            "since_s": round((now_ns - since_ns) / 1e9, 3),
        }
        for session, op_id, what, waits_for, since_ns in snapshot.waiting
    ]
    links = dispatcher.links()
    moved = data_plane.bytes_moved()
    return {
        "host": name,
        "bytes_moved": {
            "host_buffers": sum(link.bytes_received + link.bytes_sent for link in links) + snapshot.closed_links_bytes,
            "shared_memory": moved["shared_memory"],
            "socket": moved["socket"],
            "collectives": collectives.bytes_out(),
        },
        "arrays": sum(session["arrays"] for session in snapshot.sessions),
        "bytes": sum(session["bytes"] for session in snapshot.sessions),
        "sessions": snapshot.sessions,
        "transfers": [entry for entry in waiting if entry["what"] == "transfer"],
        "waiting": waiting,
        "launches_in_flight": dispatcher.completions.num_in_flight(),
        "usage": dispatcher.completions.report_usage(),
        "python": dispatcher.python_processes(),
        "retained": dispatcher.retained_bytes(),
    }
