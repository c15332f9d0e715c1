"""The event log of a job: what happened to its runtimes, one JSON object on each line. docs/report.md has the fields.

It lies beside the records. Runs of one Slurm job append to one file, requeued ones too; each run outside of Slurm has a
file of its own.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, RuntimeEvent, describe_end
from slurm_pathways.launch.local import CONTROLLER
from slurm_pathways.launch.records import Record, events_file_name
from slurm_pathways.launch.restarts import describe_restart

#: What the controller says that is written down, and which field says how long it took.
_OF_CONTROLLER = {
    "ready": None,
    "host_ready": None,
    "bound": None,
    "host_lost": "found_after_s",
    "worker_lost": "found_after_s",
    "worker_left": None,
    "host_back": "took_s",
    "host_there": None,
    "worker_given_up": None,
    "worker_refused": None,
    "supervisor_stuck": None,
    "world": None,
    "coordination_lost": None,
    "failed": None,
}
_WHERE = ("host", "worker", "companion", "slices", "world", "state")


def entry(event: RuntimeEvent, run_id: str, now_unix_s: float, elapsed_s: float) -> dict[str, Any] | None:
    """The line of an event; None for what is not written down. Pure.

    Args:
        run_id: of the run's record.
        elapsed_s: since the start of the command.
    """
    line: dict[str, Any] = {"at_unix_s": round(now_unix_s, 3), "run": run_id}
    match event:
        case ComponentEvent(component, name, fields) if component == CONTROLLER and name in _OF_CONTROLLER:
            line |= {"what": name, "who": fields.get("name", component)}
            line |= {key: fields[key] for key in _WHERE if fields.get(key) is not None}
            if (cause := fields.get("cause", fields.get("reason"))) is not None:
                line["cause"] = cause
            took = _OF_CONTROLLER[name]
            took_s = fields.get(took) if took is not None else elapsed_s if name in ("ready", "host_ready") else None
            if took_s is not None:
                line["took_s"] = round(took_s, 3)
            return line
        case ComponentEnded(component, returncode, was_asked, will_restart) if not was_asked:
            cause = describe_end(returncode) + describe_restart(will_restart)
            return {**line, "what": "process_ended", "who": component, "cause": cause}
        case _:
            return None


def of_run(record: Record, what: str, now_unix_s: float) -> dict[str, Any]:
    """A line of the run itself: ``run_started``, ``program_ended``, ``run_ended``."""
    line: dict[str, Any] = {"at_unix_s": round(now_unix_s, 3), "run": record.id, "what": what, "who": "run"}
    if what == "run_started":
        return {**line, "argv": list(record.argv)}
    line["exit_code"] = record.exit_code
    if record.problem is not None:
        line["cause"] = record.problem
    return {**line, "took_s": round(now_unix_s - record.started_at_unix_s, 3)}


def append(folder: Path, record: Record, lines: Iterable[dict[str, Any]]) -> None:
    """Append lines to a job's log. Writers of several processes do not get in between of each other's lines.

    Raises:
        OSError: it cannot be written.
    """
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    fd = os.open(folder / events_file_name(record), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def read(folder: Path, record: Record) -> list[dict[str, Any]]:
    """The lines of a job's log, oldest first; without the last one if it is only half there.

    Raises:
        OSError: it cannot be read.
    """
    path = folder / events_file_name(record)
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
