"""``slurm-pathways status``: find a running runtime, ask its controller, and show the report."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_pathways.config import RUN_DIR_VARIABLE
from slurm_pathways.launch import controller_status
from slurm_pathways.launch.client_environment import JAX_BACKEND_TARGET, backend_target
from slurm_pathways.launch.controller_status import NoAnswer, Report, ask
from slurm_pathways.launch.local import CONTROLLER
from slurm_pathways.launch.run_folder import RunRecord, is_live, live_runs, read_record, runs_roots
from slurm_pathways.launch.steps import enter_environment
from slurm_pathways.slurm.commands import CommandError, Slurm
from slurm_pathways.slurm.environment import job_id_of
from slurm_pathways.tables import table

#: A controller answers from memory; proxies and executors that it asks first have the rest of the time.
REPLY_TIMEOUT_S = 10.0
#: For Slurm to start a step on the node of the controller.
_STEP_TIMEOUT_S = 30.0


class StatusUnavailable(Exception):
    """There is no run to ask, or it does not answer; the message says what to do."""


def find_run(run_dir: Path | None, environ: Mapping[str, str], job_id: int | None = None) -> tuple[Path, RunRecord]:
    """The run that the user means: the folder given, else the run we are in, else the only one that runs.

    Args:
        job_id: only one in this Slurm job.

    Raises:
        StatusUnavailable: there is none, or there are several.
    """
    if run_dir is None and job_id is None and environ.get(RUN_DIR_VARIABLE):
        run_dir = Path(environ[RUN_DIR_VARIABLE])
    if run_dir is not None:
        record = read_record(run_dir)
        if record is None or not is_live(run_dir):
            raise StatusUnavailable(f"{run_dir} is not the folder of a run that runs now")
        return run_dir, record
    roots = runs_roots(environ)
    all_runs = live_runs(*roots)
    wanted = job_id_of(environ) if job_id is None else job_id
    runs = [run for run in all_runs if run[1].job_id == wanted]
    if job_id is None:
        # One that we are not in is meant where there is no other.
        runs = runs or all_runs
    if not runs:
        whose = "no run of yours" if job_id is None else f"no run of yours in job {job_id}"
        raise StatusUnavailable(
            f"{whose} runs on this machine (looked in {' and '.join(map(str, roots))}); where it was started with "
            "--run-dir, give that folder with --run"
        )
    if len(runs) > 1:
        listed = "\n".join(f"  {path}  {' '.join(record.program_argv)}" for path, record in runs)
        raise StatusUnavailable(f"several runs run on this machine; choose one with --run:\n{listed}")
    return runs[0]


def is_here(job_id: int, environ: Mapping[str, str]) -> bool:
    """Whether a run of this job is to be found on this machine, or we are in the job and it is nowhere else."""
    runs = live_runs(*runs_roots(environ))
    return job_id_of(environ) == job_id or any(record.job_id == job_id for _, record in runs)


def fetch(run_dir: Path | None, environ: Mapping[str, str], job_id: int | None = None) -> Report:
    """The report of the run that the user means (see ``find_run``); docs/status.md has its schema.

    Raises:
        StatusUnavailable: no run, or no answer in ``REPLY_TIMEOUT_S``.
    """
    beside = _controller_beside_our_proxy(environ) if run_dir is None and job_id is None else None
    if beside is not None:
        path = Path(environ[RUN_DIR_VARIABLE])
    else:
        path, record = find_run(run_dir, environ, job_id)
    try:
        report = _ask_where_it_is(record, environ) if beside is None else ask(beside, REPLY_TIMEOUT_S)
    except NoAnswer as failure:
        raise StatusUnavailable(
            f"the controller of {path} {failure}; its log is {path / 'logs' / 'controller.log'}"
        ) from failure
    return {**report, "run_dir": str(path)}


def _controller_beside_our_proxy(environ: Mapping[str, str]) -> str | None:
    """For the program of a run whose launcher is on another machine: the controller's address on this one."""
    proxy = environ.get(JAX_BACKEND_TARGET, "").removeprefix(backend_target("unix:"))
    if RUN_DIR_VARIABLE not in environ or not proxy.startswith("/"):
        return None
    socket = Path(proxy).with_name(f"{CONTROLLER}.sock")
    return f"unix:{socket}" if socket.exists() else None


def _ask_where_it_is(record: RunRecord, environ: Mapping[str, str]) -> Report:
    address = record.controller_address
    if not record.reach or Path(address.removeprefix("unix:")).exists():
        return ask(address, REPLY_TIMEOUT_S)
    argv = [*record.reach, sys.executable, "-m", controller_status.__name__, address, str(REPLY_TIMEOUT_S)]
    try:
        return json.loads(Slurm(enter_environment(environ), REPLY_TIMEOUT_S + _STEP_TIMEOUT_S).run(argv))  # type: ignore[no-any-return]
    except CommandError as failure:
        raise NoAnswer(f"is on another node, and was asked in vain: {failure}") from failure


_WORKER_COLUMNS = (
    "host",
    "name",
    "companion",
    "slice_index",
    "state",
    "supervisor_pid",
    "executor_pid",
    "arrays",
    "bytes",
    "failure",
)
_SESSION_COLUMNS = ("id", "client_name", "client_pid", "age_s", "arrays", "bytes", "open_requests", "is_held_back")

_PROGRAM_COLUMNS = ("name", "devices", "executions", "busy_s", "waiting_s")
_PROGRAMS_SHOWN = 10


def as_json(report: Report) -> str:
    """The report, to be read by programs."""
    return json.dumps(report, indent=2)


def as_text(report: Report) -> str:
    """The report, to be read by people: what fits a line; ``as_json`` has the rest. Sections it lacks are left out."""
    parts = [f"run {report['run_dir']}"]
    workers = report.get("workers", [])
    if workers:
        columns = [column for column in _WORKER_COLUMNS if column != "companion" or any(map(_is_lent, workers))]
        parts.append(table("workers", workers, columns))
    devices = report.get("devices", [])
    if devices:
        parts.append(table("devices", devices, ("id", "slice_index", "host", "state")))
    joining = sorted({device["host"] for device in devices if device["state"] == "joining"})
    if joining:
        parts.append(f"joining: hosts {', '.join(map(str, joining))}")
    failures = report.get("failures", [])
    if failures:
        parts.append(table("losses", [_failure_row(failure) for failure in failures], _FAILURE_COLUMNS))
    sessions = report.get("sessions", [])
    parts.append(table("sessions", sessions, _SESSION_COLUMNS) if sessions else "no session is open")
    slices = report.get("slices", [])
    if slices:
        parts.append(table("slices", slices, ("index", "num_devices", "busy_s", "waiting_s")))
    programs = report.get("programs", [])
    if programs:
        parts.append(table("programs, the busiest first", programs[:_PROGRAMS_SHOWN], _PROGRAM_COLUMNS))
    moved = report.get("bytes_moved", {})
    if moved:
        parts.append("bytes moved\n" + "\n".join(f"  {name:<14} {number}" for name, number in moved.items()))
    waiting = report.get("waiting", [])
    parts.append("waiting\n" + "\n".join("  " + _fields(entry) for entry in waiting) if waiting else "nothing waits")
    return "\n\n".join(parts)


def _is_lent(worker: dict[str, Any]) -> bool:
    return worker.get("companion") is not None


_FAILURE_COLUMNS = ("host", "name", "at", "found after s", "cause", "served again")


def _failure_row(failure: dict[str, Any]) -> dict[str, Any]:
    served = None
    if failure["served_again_after_s"] is not None:
        served = f"after {failure['served_again_after_s']} s by {failure['served_again_by']}"
    return {
        **failure,
        "at": time.strftime("%H:%M:%S UTC", time.gmtime(failure["at_unix_s"])),
        "found after s": failure["found_after_s"],
        "served again": served,
    }


def _fields(entry: object) -> str:
    if isinstance(entry, dict):
        return "  ".join(f"{key}: {value}" for key, value in entry.items())
    return str(entry)
