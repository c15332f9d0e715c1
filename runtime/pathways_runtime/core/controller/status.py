"""What ``status`` shows of the controller, as plain JSON-able values. docs/status.md documents the schema."""

from typing import Any

from pathways_runtime.core.controller.gang import Order
from pathways_runtime.core.controller.membership import Membership
from pathways_runtime.core.controller.programs import Programs
from pathways_runtime.core.controller.sessions import Sessions
from pathways_runtime.core.controller.workers import Loss, Worker
from pathways_runtime.core.controller.worlds import Worlds, WorldState
from pathways_runtime.core.ids import HostIndex
from pathways_runtime.core.topology import Topology

#: Grows when a field changes its meaning or goes away; new fields do not count.
SCHEMA_VERSION = 1


def report(
    topology: Topology,
    membership: Membership,
    worlds: Worlds,
    programs: Programs,
    sessions: Sessions,
    order: Order,
    now_ns: int,
) -> dict[str, Any]:
    """The controller's part of the report; the shell adds what proxies and executors say."""
    in_flight = order.in_flight()
    waiting = [
        {"what": held.what, "waits_for": held.waits_for, "since_s": _since_s(held.since_ns, now_ns)}
        for held in order.waiting()
    ]
    for compilation in programs.all():
        request = compilation.request
        hosts = ", ".join(map(str, sorted(compilation.unanswered)))
        waiting.append(
            {
                "what": f"compilation of program {request.executable} of session {request.session}",
                "waits_for": compilation.stage.value + (f": hosts {hosts}" if hosts else ""),
                "since_s": _since_s(request.now_ns, now_ns),
            }
        )
    for attach in sessions.waiting():
        waiting.append(
            {
                "what": f"client {attach.client_name} (pid {attach.client_pid})",
                "waits_for": "the runtime to be ready",
                "since_s": _since_s(attach.now_ns, now_ns),
            }
        )
    return {
        "schema_version": SCHEMA_VERSION,
        "is_ready": worlds.is_ready,
        "started_at_unix_s": _unix_s(membership, membership.started_ns),
        "elapsed_s": _since_s(membership.started_ns, now_ns),
        "devices": [
            {
                "id": device.id,
                "slice_index": device.slice_index,
                "host": device.host,
                "state": _device_state(membership, in_flight, device.host),
            }
            for device in topology.devices()
        ],
        "workers": [_worker(worker, topology, membership) for worker in membership.workers()],
        "failures": [_failure(loss, topology, membership) for loss in membership.losses],
        "sessions": [
            {
                "id": session.session,
                "client_name": session.request.client_name,
                "client_pid": session.request.client_pid,
                "arrays": 0,
                "bytes": 0,
                "operations": order.counts(session.session),
            }
            for session in sessions.all()
        ],
        "worlds": [
            {
                "id": world.world,
                "slices": list(world.slices),
                "state": world.state.value,
                "waits_for_hosts": sorted(world.unformed) if world.state is WorldState.FORMING else [],
                "failure": str(world.failure) if world.failure else None,
            }
            for world in worlds.all()
        ],
        "queues": [{"host": host, "launches_in_flight": count} for host, count in enumerate(in_flight)],
        "transfers": [],
        "bytes_moved": {"host_buffers": 0, "shared_memory": 0, "socket": 0},
        "waiting": waiting,
        "did_not_answer": [],
    }


def _since_s(since_ns: int, now_ns: int) -> float:
    return round((now_ns - since_ns) / 1e9, 3)


def _device_state(membership: Membership, in_flight: list[int], host: HostIndex) -> str:
    if not membership.is_bound:
        return "starting"
    if membership.is_joining(host):
        return "joining"
    if membership.is_absent(host):
        return "absent"
    if membership.executor_peer(host) is None:
        return "lost"
    return "running" if in_flight[host] else "idle"


def _unix_s(membership: Membership, now_ns: int) -> float:
    return round(membership.unix_s(now_ns), 3)


def _place(name: str, host: HostIndex | None, topology: Topology) -> dict[str, Any]:
    return {"name": name, "host": host, "slice_index": topology.slice_of_host(host) if host is not None else None}


def _failure(loss: Loss, topology: Topology, membership: Membership) -> dict[str, Any]:
    return {
        "at_unix_s": _unix_s(membership, loss.at_ns),
        "worker": loss.worker,
        **_place(loss.name, loss.host, topology),
        "companion": loss.companion or None,
        "cause": loss.cause,
        "found_after_s": loss.found_after_s,
        "served_again_after_s": _since_s(loss.at_ns, loss.served_again_ns) if loss.served_again_ns else None,
        "served_again_by": loss.served_again_by or None,
    }


def _worker(worker: Worker, topology: Topology, membership: Membership) -> dict[str, Any]:
    executor = worker.executor
    return {
        "id": worker.worker,
        **_place(worker.name, worker.host, topology),
        "companion": worker.companion or None,
        "state": "left" if worker.is_leaving else worker.state.value,
        "supervisor_pid": worker.supervisor_pid,
        "executor_pid": executor.pid if executor is not None else None,
        "ready_after_s": _since_s(membership.started_ns, executor.now_ns) if executor is not None else None,
        "failure": str(worker.failure) if worker.failure else None,
        "relay": membership.relay_of(worker),
    }
