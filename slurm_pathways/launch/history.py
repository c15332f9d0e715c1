"""What happens in a run, collected into its record. Pure: events, answers and times come in, a ``Record`` goes out."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pathways_runtime.core.controller.usage import add_up
from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, RuntimeEvent, describe_end
from slurm_pathways.launch.local import CONTROLLER
from slurm_pathways.launch.news import (
    AGENT_EVENT,
    BOUND_EVENT,
    HOST_BACK_EVENT,
    HOST_READY_EVENT,
    HOST_THERE_EVENT,
    LOST_EVENTS,
)
from slurm_pathways.launch.records import (
    MAX_PROGRAMS_KEPT,
    RUN,
    SCHEMA_VERSION,
    Component,
    Failure,
    Host,
    ProgramUsage,
    Record,
    SliceUsage,
    SlurmPlace,
    Usage,
)
from slurm_pathways.launch.runtime import settings_of

CLIENT = "client"
#: They run beside the controller.
PROXY_PREFIX = "proxy-"
_PLACES_CHANGE = (BOUND_EVENT, *LOST_EVENTS)
#: The controller and the launcher hear of one thing by different ways, and not at the same moment.
_APART_S = 2.0

Values = Mapping[str, Any]
#: A worker and the pid of one of its executors.
_Executor = tuple[int, int | None]


class History:
    """One run as it goes on. Not thread-safe.

    Args:
        record_id: see ``Record``, as for the other arguments.
        spec: of the runtime.
        is_warm: the runtime was there before: what it says until it is ``ready`` to serve the program is not this
            run's usage.
        started_at_unix_s: of the command.
    """

    def __init__(
        self,
        *,
        record_id: str,
        spec: RuntimeSpec,
        argv: Sequence[str],
        launcher_host: str,
        launcher_pid: int,
        slurm: SlurmPlace | None,
        started_at_unix_s: float,
        kind: str = RUN,
        is_warm: bool = False,
    ) -> None:
        self._id = record_id
        self._kind = kind
        self._spec = spec
        self._argv = tuple(argv)
        self._launcher = (launcher_host, launcher_pid)
        self._slurm = slurm
        self.is_warm = is_warm
        self._started_s = started_at_unix_s
        self._ready_s: float | None = None
        self._program_ended_s: float | None = None
        self._ended_s: float | None = None
        self._exit_code: int | None = None
        self._problem: str | None = None
        self._components: dict[str, Component] = {}
        self._hosts: dict[int, Host] = {}
        self._failures: list[Failure] = []
        #: Of each component: when and why it ended unasked, where its exit code says something.
        self._ends: dict[str, list[tuple[float, str]]] = {}
        #: Of each executor (worker and pid): its worker's last entry in a status report, when that was, and since when
        #: it had served; None: from the start.
        self._executors: dict[_Executor, tuple[Values, float, float | None]] = {}
        #: When each worker had last taken a lost one's place.
        self._joined_s: dict[int, float] = {}
        #: Of a warm runtime: what they had used before.
        self._before: dict[_Executor, Values] | None = None
        self._answered_s: float | None = None
        self._no_answer: str | None = None
        self._did_not_answer: tuple[str, ...] = ()
        #: The name of the run folder.
        self.runtime_id: str | None = None

    # What happens

    def note(self, event: RuntimeEvent, now_s: float) -> None:
        """A component said something, or ended."""
        is_over = self._program_ended_s is not None
        match event:
            case ComponentEvent(component, name, fields) if name == AGENT_EVENT:
                entry = self._component(component)
                entry.node = fields["place"]["node"]
                entry.step_id = int(fields["step_id"]) if fields.get("step_id") else None
                entry.job_id = fields.get("job_id")
            case ComponentEvent(component, name, fields) if component == CONTROLLER and name == HOST_READY_EVENT:
                host = self._host(fields["worker"], fields["name"])
                host.ready_after_s = round(now_s - self._started_s, 3)
                host.companion = fields.get("companion")
            # Once the program is over, all are on their way out: some are lost to others, which take their places.
            case ComponentEvent(name=name) if is_over and name in _PLACES_CHANGE:
                pass
            case ComponentEvent(component, name, fields) if component == CONTROLLER and name == BOUND_EVENT:
                host = self._host(fields["worker"], fields["name"])
                host.slice_index = fields["host"] // self._spec.hosts_per_slice
            case ComponentEvent(component, name, fields) if name in LOST_EVENTS:
                host = self._host(fields["worker"], fields["name"])
                cause = str(fields.get("cause", fields.get("reason", name)))
                self._failures.append(
                    Failure(
                        at_unix_s=round(now_s, 3),
                        worker=host.worker,
                        node=host.node,
                        slice_index=host.slice_index,
                        cause=cause,
                        host=fields.get("host"),
                        found_after_s=fields.get("found_after_s"),
                    )
                )
            case ComponentEvent(component, name, fields) if component == CONTROLLER and name == HOST_BACK_EVENT:
                self._serve_again(fields["host"], fields["name"], now_s)
                self._joined_s[fields["worker"]] = now_s
            case ComponentEvent(component, name, fields) if component == CONTROLLER and name == HOST_THERE_EVENT:
                self._joined_s[fields["worker"]] = now_s
            case ComponentEvent(component):
                self._component(component)
            case ComponentEnded(component, returncode, was_asked, will_restart):
                entry = self._component(component)
                self._end(entry, returncode, was_asked or is_over, now_s)
                if entry.cause is not None and returncode != 0:
                    self._ends.setdefault(component, []).append((now_s, entry.cause))
                if will_restart:
                    entry.restarts += 1
                    entry.ended_at_unix_s = entry.was_asked = entry.exit_code = entry.signal = None

    def ready(self, now_s: float) -> None:
        """A program can be served."""
        self._ready_s = now_s

    def program_ended(self, exit_code: int, now_s: float) -> None:
        """Of a run; what follows is the runtime's end."""
        self._end(self._component(CLIENT), exit_code, True, now_s)
        self._exit_code = exit_code
        self._program_ended_s = now_s

    def ended(self, exit_code: int, problem: str | None, now_s: float) -> None:
        """The command is over. ``problem``: why there was no program."""
        self._exit_code = exit_code
        self._problem = problem
        self._ended_s = now_s

    def answered(self, report: Values, now_s: float) -> None:
        """The controller has sent its status report."""
        for worker in report.get("workers", ()):
            if "usage" in worker:
                executor = worker["id"], worker.get("executor_pid")
                _, _, since_s = self._executors.get(executor, (None, 0.0, self._joined_s.get(worker["id"])))
                self._executors[executor] = (worker, now_s, since_s)
        if self.is_warm and self._ready_s is None:
            self._before = {executor: worker for executor, (worker, _, _) in self._executors.items()}
        for worker in report.get("workers", ()):
            host = self._host(worker["id"], worker["name"])
            if worker["slice_index"] is not None:
                host.slice_index = worker["slice_index"]
        self._answered_s = now_s
        self._no_answer = None
        self._did_not_answer = tuple(report.get("did_not_answer", ()))

    def not_answered(self, reason: str) -> None:
        """It has not, though it was asked."""
        self._no_answer = reason

    def _component(self, name: str) -> Component:
        return self._components.setdefault(name, Component(name))

    def _host(self, worker: int, node: str) -> Host:
        component = self._component(f"worker-{worker}")
        component.node = component.node or node
        return self._hosts.setdefault(worker, Host(worker, node))

    def _serve_again(self, host: int, node: str, now_s: float) -> None:
        """Somebody stands in the place of all that were lost behind a virtual host."""
        for index, failure in enumerate(self._failures):
            if failure.host == host and failure.served_again_after_s is None:
                took_s = round(max(0.0, now_s - failure.at_unix_s), 3)
                self._failures[index] = msgspec.structs.replace(
                    failure, served_again_after_s=took_s, served_again_by=node
                )

    def _end_of(self, failure: Failure) -> str | None:
        """How the component of a lost worker ended, if it did so in consequence or as the reason."""
        later = [one.at_unix_s for one in self._failures if one.worker == failure.worker]
        next_s = min((at_s for at_s in later if at_s > failure.at_unix_s), default=None)
        for at_s, cause in self._ends.get(f"worker-{failure.worker}", ()):
            if at_s >= failure.at_unix_s - _APART_S and (next_s is None or at_s < next_s - _APART_S):
                return cause
        return None

    @staticmethod
    def _end(component: Component, returncode: int, was_asked: bool, now_s: float) -> None:
        component.ended_at_unix_s = round(now_s, 3)
        component.was_asked = was_asked
        component.signal = component.exit_code = None
        # Whoever starts a process for us on a node says its end as a shell does.
        if component.step_id is not None and returncode > 128:
            returncode = 128 - returncode
        if returncode < 0:
            component.signal = -returncode
        else:
            component.exit_code = returncode
        if not was_asked:
            component.cause = describe_end(returncode)

    # What is known

    def record(self, now_s: float) -> Record:
        """All of it so far."""
        head = self._component(CONTROLLER).node
        for component in self._components.values():
            if component.name == CLIENT or component.name.startswith(PROXY_PREFIX):
                component.node = component.node or head
        causes = {f"worker-{failure.worker}": failure.cause for failure in reversed(self._failures)}
        for name, cause in causes.items():
            component = self._component(name)
            # srun ends with 0 when Slurm has given up the node; and an executor's end is not its supervisor's.
            if component.cause is None or component.exit_code == 0:
                component.cause = cause
        failures = [
            failure if own is None else msgspec.structs.replace(failure, cause=f"{failure.cause}; its supervisor {own}")
            for failure, own in ((failure, self._end_of(failure)) for failure in self._failures)
        ]
        return Record(
            schema_version=SCHEMA_VERSION,
            id=self._id,
            kind=self._kind,
            runtime_id=self.runtime_id,
            is_warm=self.is_warm,
            written_at_unix_s=round(now_s, 3),
            launcher_host=self._launcher[0],
            launcher_pid=self._launcher[1],
            slurm=self._slurm,
            settings=settings_of(self._spec),
            argv=self._argv,
            started_at_unix_s=round(self._started_s, 3),
            ready_at_unix_s=_rounded(self._ready_s),
            program_ended_at_unix_s=_rounded(self._program_ended_s),
            ended_at_unix_s=_rounded(self._ended_s),
            exit_code=self._exit_code,
            problem=self._problem,
            hosts=tuple(self._hosts[worker] for worker in sorted(self._hosts)),
            components=tuple(self._components.values()),
            failures=tuple(failures),
            usage=self.usage(),
        )

    def usage(self) -> Usage:
        """What devices did, as far as the answers say."""
        if self.is_warm and self._before is None and self._answered_s is not None:
            return Usage(problem="the runtime did not answer before the program, so what it had used before is unknown")
        workers = []
        for executor, (worker, answered_s, since_s) in self._executors.items():
            before = (self._before or {}).get(executor)
            usage = worker["usage"] if before is None else used_since(before["usage"], worker["usage"])
            moved = worker.get("bytes_moved", {})
            if before is not None:
                moved = {way: count - before["bytes_moved"].get(way, 0) for way, count in moved.items()}
            ready_s = self._ready_s if self._ready_s is not None else answered_s
            span_s = max(0.0, answered_s - max(ready_s, since_s or ready_s))
            workers.append({**worker, "usage": usage, "bytes_moved": moved, "span_s": span_s})
        added = add_up(workers)
        slices = [self._slice(part, [w for w in workers if w["host"] in part["hosts"]]) for part in added["slices"]]
        ways = sorted({way for worker in workers for way in worker["bytes_moved"]})
        return Usage(
            as_of_unix_s=_rounded(self._answered_s),
            problem=self._no_answer,
            did_not_answer=self._did_not_answer,
            slices=tuple(slices),
            **_programs(added["programs"]),
            bytes_moved={way: sum(worker["bytes_moved"].get(way, 0) for worker in workers) for way in ways},
        )

    def _slice(self, part: Values, workers: Sequence[Values]) -> SliceUsage:
        device_s = sum(len(worker["usage"]["devices"]) * worker["span_s"] for worker in workers)
        # The span is by the launcher's clock, what devices did in it by theirs.
        device_s = max(device_s, part["busy_s"] + part["waiting_s"])
        known = {worker["id"] for worker in workers}
        members = [host for host in self._hosts.values() if host.slice_index == part["index"]]
        return SliceUsage(
            index=part["index"],
            nodes=tuple(host.node for host in sorted(members, key=lambda host: host.worker)),
            num_devices=self._spec.hosts_per_slice * self._spec.devices_per_host,
            device_s=round(device_s, 3),
            busy_s=part["busy_s"],
            idle_s=round(device_s - part["busy_s"], 3),
            waiting_s=part["waiting_s"],
            **_programs(part["programs"]),
            without_usage=tuple(host.node for host in members if host.worker not in known),
        )


def _programs(rows: Sequence[Values]) -> dict[str, Any]:
    """The fields of ``Usage`` and ``SliceUsage`` that say what programs used; ``rows`` are the busiest first."""
    kept = tuple(ProgramUsage(**row) for row in rows[:MAX_PROGRAMS_KEPT])
    return {"programs": kept, "programs_left_out": len(rows) - len(kept)}


def used_since(before: Values, after: Values) -> dict[str, Any]:
    """The ``usage`` of one host between two answers."""

    def row(entry: Values, old: Values | None) -> dict[str, Any]:
        sums = ("busy_s", "waiting_s", "executions")
        return {
            key: round(value - (old[key] if old is not None else 0), 6) if key in sums else value
            for key, value in entry.items()
        }

    old_devices = {entry["id"]: entry for entry in before["devices"]}
    old_programs = {(entry["name"], entry["devices"]): entry for entry in before["programs"]}
    programs = [row(entry, old_programs.get((entry["name"], entry["devices"]))) for entry in after["programs"]]
    return {
        **row({key: after[key] for key in ("busy_s", "waiting_s")}, before),
        "devices": [row(entry, old_devices.get(entry["id"])) for entry in after["devices"]],
        "programs": [entry for entry in programs if entry["executions"] or entry["busy_s"] > 0],
    }


def _rounded(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s, 3)
