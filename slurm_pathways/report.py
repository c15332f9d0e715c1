"""``slurm-pathways report``: what a job used and what became of it, from sacct and from the runs' own records.

Each knows what the other does not: Slurm the steps, their CPU time and memory, and runs that were never ours; records
what devices did, and how a worker ended whose node Slurm has given up.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from slurm_pathways.launch import records
from slurm_pathways.launch.records import RUN, Component, Record
from slurm_pathways.slurm import accounting
from slurm_pathways.slurm.commands import CommandError, CommandFailed, Slurm

SCHEMA_VERSION = 1
#: A launcher writes every 30 s while its run goes on.
SILENT_AFTER_S = 120.0
#: Slurm's times are whole seconds, and those of another daemon's clock.
_CLOCKS_APART_S = 5.0
_CLIENT_STEP = "pathways-client"

Values = dict[str, Any]


class UnknownJob(Exception):
    """Nothing is known of what was asked for; the message says where was looked."""


def is_job(text: str) -> bool:
    """Whether a text is the id of a job or of a job array's task, as sacct names them."""
    return re.fullmatch(r"\d+(_\d+)?", text) is not None


def gather(job: str | None, run_id: str | None, environ: Mapping[str, str]) -> Values:
    """The report of a job; of the run with an id; without both, of the run that was started last.

    Args:
        job: see ``is_job``.

    Raises:
        UnknownJob: see the class.
    """
    notes: list[str] = []
    try:
        folder = records.records_folder(environ)
    except OSError as failure:
        notes.append(str(failure))
        folder = None
    where = f"in {folder}" if folder is not None else "no folder of records is set"
    chosen: Record | None = None
    if job is None:
        if folder is not None:
            chosen = records.newest(folder) if run_id is None else records.by_id(folder, run_id)
        if chosen is None:
            raise UnknownJob(f"there is no record of {'any run' if run_id is None else f'a run {run_id}'} ({where})")
        job = chosen.slurm.label if chosen.slurm is not None else None
    rows: tuple[accounting.Record, ...] = ()
    if job is not None:
        try:
            rows = Slurm(environ).records(job)
        except (CommandError, accounting.AccountingError) as failure:
            notes.append(f"Slurm's accounting was not read: {_briefly(failure)}")
    labels = list(dict.fromkeys(row.job for row in rows)) or ([job] if job is not None else [])

    def runs_of(label: str) -> list[Record]:
        return records.of_job(folder, label) if folder is not None else []

    runs = {label: [chosen] if run_id is not None and chosen is not None else runs_of(label) for label in labels}
    if job is not None and not rows and not any(runs.values()):
        reasons = "".join(f"; {note}" for note in notes) or "; sacct knows no such job either"
        raise UnknownJob(f"there is no record of a run in job {job} ({where}){reasons}")
    if job is None:
        assert chosen is not None
        jobs = [job_report(None, (), [chosen], time.time(), _is_alive)]
    else:
        # Without accounting, tasks of an array are told apart by their records.
        if not rows:
            by_label: dict[str, list[Record]] = {}
            for record in (record for found in runs.values() for record in found):
                assert record.slurm is not None
                by_label.setdefault(record.slurm.label, []).append(record)
            runs, labels = by_label, list(by_label)
        jobs = [
            job_report(label, [row for row in rows if row.job == label], runs[label], time.time(), _is_alive)
            for label in labels
        ]
        if not any(entry["runs"] for entry in jobs):
            notes.append(f"there is no record of a run in this job ({where})")
    return {"schema_version": SCHEMA_VERSION, "jobs": jobs, "notes": notes}


def _briefly(failure: Exception) -> str:
    """What went wrong, without the command line and all that led to it."""
    if isinstance(failure, CommandFailed):
        return (failure.stderr.strip().splitlines() or [f"sacct ended with exit code {failure.returncode}"])[-1]
    return str(failure)


def _is_alive(record: Record) -> bool | None:
    """Whether the process that writes a record lives; None where that cannot be seen from here."""
    if record.launcher_host != socket.gethostname():
        return None
    try:
        os.kill(record.launcher_pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def job_report(
    job: str | None,
    rows: Sequence[accounting.Record],
    runs: Iterable[Record],
    now_s: float,
    is_alive: Callable[[Record], bool | None],
) -> Values:
    """What is known of one job. Pure; docs/report.md has the schema.

    Args:
        job: as sacct names it; None: a run outside of Slurm.
        rows: sacct's, of this job and its steps.
        runs: records that may be this job's: ids are given anew when a cluster is set up again.
        is_alive: whether a record's launcher lives.
    """
    of_job = [row for row in rows if not row.step]
    # Of a step that lost a node, sacct has several rows: the last one is the step.
    steps = {row.step: row for row in rows if row.step}
    begin_s = min((row.started_at_unix_s for row in of_job if row.started_at_unix_s is not None), default=None)
    if begin_s is not None:
        runs = [run for run in runs if run.started_at_unix_s >= begin_s - _CLOCKS_APART_S]
    runs = sorted(runs, key=lambda run: run.started_at_unix_s)
    has_ended = bool(of_job) and of_job[-1].is_conclusive
    owners = _owners(runs, steps)
    reports = [
        _run(run, {name: steps[step] for (name, step) in owners[run.id]}, now_s, has_ended, is_alive(run))
        for run in runs
    ]
    # A step whose tasks are the runtime is of no one component.
    components: dict[str, tuple[str | None, str | None]] = {
        str(run.slurm.step_id): (run.id, None) for run in runs if run.slurm is not None
    }
    components |= {step: (run.id, name) for run in runs for name, step in owners[run.id]}
    return {
        "job": job,
        **(_job(of_job) if of_job else {}),
        "steps": [_step(row, *components.get(row.step, (None, None))) for row in steps.values()],
        "runs": reports,
        "totals": _totals(of_job, reports),
    }


def _owners(runs: Sequence[Record], steps: Mapping[str, accounting.Record]) -> dict[str, list[tuple[str, str]]]:
    """Of each run: its components and their steps.

    Records name the steps of the runtime's components. The program's starts after them, and before those of the next
    run.
    """
    clients = sorted(int(step) for step, row in steps.items() if row.name == _CLIENT_STEP and step.isdigit())
    owners: dict[str, list[tuple[str, str]]] = {}
    for run in runs:
        mine = [(part.name, str(part.step_id)) for part in _of_job(run) if str(part.step_id) in steps]
        owners[run.id] = mine
        last = max((int(step) for _, step in mine), default=None)
        after = [client for client in clients if last is None or client > last]
        within = [
            client
            for client in after
            if run.started_at_unix_s - _CLOCKS_APART_S <= (steps[str(client)].started_at_unix_s or 0.0)
        ]
        has_client = run.kind == RUN and run.slurm is not None and run.slurm.step_id is None
        if within and has_client:
            mine.append(("client", str(within[0])))
            clients.remove(within[0])
    return owners


def _of_job(run: Record) -> list[Component]:
    """The components that are in the run's job: what another job lends has steps there."""
    return [part for part in run.components if part.job_id is None]


def _job(rows: Sequence[accounting.Record]) -> Values:
    last = rows[-1]
    return {
        "name": last.name,
        "state": last.state,
        "state_detail": last.state_detail,
        "exit_status": _exit_status(last),
        "submitted_at_unix_s": last.submitted_at_unix_s,
        "started_at_unix_s": next((row.started_at_unix_s for row in rows if row.started_at_unix_s is not None), None),
        "ended_at_unix_s": last.ended_at_unix_s,
        "elapsed_s": sum(row.elapsed_s for row in rows),
        "nodes": list(dict.fromkeys(node for row in rows for node in row.nodes)),
        "comment": last.comment,
    }


def _exit_status(row: accounting.Record) -> Values | None:
    """None where sacct does not know: while it runs, and of what was cut off by the loss of a node."""
    if not row.is_conclusive:
        return None
    return {"code": row.exit_status.code, "signal": row.exit_status.signal}


def _accounted(row: accounting.Record) -> Values:
    return {
        "state": row.state,
        "exit_status": _exit_status(row),
        "elapsed_s": row.elapsed_s,
        "cpu_s": row.cpu_s,
        "max_rss_bytes": row.max_rss_bytes,
    }


def _step(row: accounting.Record, run_id: str | None, component: str | None) -> Values:
    return {
        "step": row.step,
        "name": row.name,
        "nodes": list(row.nodes),
        **_accounted(row),
        "tres": dict(row.tres),
        "run": run_id,
        "component": component,
    }


def _run(
    record: Record,
    steps: Mapping[str, accounting.Record],
    now_s: float,
    has_job_ended: bool,
    is_alive: bool | None,
) -> Values:
    state = _state(record, now_s, has_job_ended, is_alive)
    values: Values = msgspec.to_builtins(record)
    for component in values["components"]:
        row = steps.get(component["name"])
        component["accounting"] = None if row is None else _accounted(row)
    return {
        **values,
        "state": state,
        "startup_s": _between(record.started_at_unix_s, record.ready_at_unix_s),
        "device_seconds": device_seconds(record),
    }


def _state(record: Record, now_s: float, has_job_ended: bool, is_alive: bool | None) -> str:
    """``ended``, ``running``, or ``lost``: nobody will write how it ended."""
    if record.ended_at_unix_s is not None:
        return "ended"
    is_silent = is_alive is None and now_s - record.written_at_unix_s > SILENT_AFTER_S
    return "lost" if has_job_ended or is_alive is False or is_silent else "running"


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else round(end_s - begin_s, 3)


def device_seconds(record: Record) -> dict[str, float]:
    """Where the device-seconds of a run went: ``allocated`` is what the others add up to, but for ``waiting``, a part
    of ``idle``. ``other``: spares, hosts that were lost, and the run's end."""
    settings = record.settings
    served = int(settings["num_slices"] or 0) * int(settings["hosts_per_slice"] or 0)
    per_host = int(settings["devices_per_host"] or 0)
    num_hosts = served + int(settings["num_spares"] or 0)
    until_s = record.ended_at_unix_s or record.written_at_unix_s
    allocated = num_hosts * per_host * (until_s - record.started_at_unix_s)
    startup = served * per_host * ((record.ready_at_unix_s or until_s) - record.started_at_unix_s)
    sums = {
        name: sum(getattr(part, f"{name}_s") for part in record.usage.slices) for name in ("busy", "idle", "waiting")
    }
    found = {"allocated": allocated, "startup": startup, **sums}
    found["other"] = max(0.0, allocated - startup - sums["busy"] - sums["idle"])
    return {name: round(float(value), 3) for name, value in found.items()}


def _totals(rows: Sequence[accounting.Record], runs: Sequence[Values]) -> Values:
    """Over all runs of a job. What runs on a warm runtime used is in the runtime's own record."""
    owned = [run for run in runs if not run["is_warm"]]
    ways = sorted({way for run in owned for way in run["usage"]["bytes_moved"]})
    failures = [failure for run in owned for failure in run["failures"]]
    return {
        "allocated_by_slurm": {
            name: sum(row.tres.get(name, 0) * row.elapsed_s for row in rows)
            for name in dict.fromkeys(name for row in rows for name in row.tres)
            if name == "cpu" or name.startswith("gres/")
        },
        "device_seconds": {
            name: round(sum(run["device_seconds"][name] for run in owned), 3)
            for name in ("allocated", "startup", "busy", "idle", "waiting", "other")
        },
        "bytes_moved": {way: sum(run["usage"]["bytes_moved"].get(way, 0) for run in owned) for way in ways},
        "failures": len(failures),
        "recovery_s": round(sum(failure["served_again_after_s"] or 0.0 for failure in failures), 3),
    }
