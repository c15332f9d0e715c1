"""Records: what became of each run, in a file of its own, for ``slurm-pathways report``. docs/report.md has the schema.

They lie in ``SLURM_PATHWAYS_RECORDS``, else in ``$XDG_STATE_HOME/slurm-pathways/records``, else in the same under
``~/.local/state``: a folder that nodes and login nodes share, as homes are, and that stays when the run's own is gone.
"""

import contextlib
import os
import pwd
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from slurm_pathways.config import RECORDS_VARIABLE

SCHEMA_VERSION = 1
#: In a record, of each slice and of the whole: it is written again and again.
MAX_PROGRAMS_KEPT = 256
#: What ``SLURM_PATHWAYS_RECORDS`` says where none are wanted.
OFF = ("", "none")

#: Kinds of records: of one program, and of the life of a runtime that outlives programs.
RUN, RUNTIME = "run", "runtime"


class SlurmPlace(msgspec.Struct, frozen=True):
    """Where in Slurm a run was.

    Attributes:
        array_job_id, array_task_id: of a job array's task.
        step_id: of the step whose tasks the runtime is made of; None where its processes are steps of their own.
    """

    job_id: int
    nodes: tuple[str, ...]
    cluster: str | None = None
    job_name: str | None = None
    array_job_id: int | None = None
    array_task_id: int | None = None
    restart_count: int = 0
    step_id: int | None = None

    @property
    def label(self) -> str:
        """The job as sacct names it."""
        return str(self.job_id) if self.array_task_id is None else f"{self.array_job_id}_{self.array_task_id}"


class Component(msgspec.Struct):
    """A process of the runtime, or the program (``client``).

    Attributes:
        node: None where it is not known.
        step_id: of its step, where it has one.
        job_id: of its step, where that is in another job than the run.
        exit_code: None while it runs, after a signal, and where its end was not seen.
        signal: that has killed it.
        was_asked: whether it ended because the run was over.
        cause: why it ended, if not because it was asked to.
        restarts: how often it was started again; ``cause`` is then that of its last end that nobody asked for.
    """

    name: str
    node: str | None = None
    step_id: int | None = None
    job_id: int | None = None
    ended_at_unix_s: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    was_asked: bool | None = None
    cause: str | None = None
    restarts: int = 0


class Host(msgspec.Struct):
    """A worker and its place.

    Attributes:
        slice_index: None for a spare, and until hosts are bound.
        ready_after_s: from the launch; None if it never was.
        companion: what people call the job that lent it (``job 123``); None of the run's own.
    """

    worker: int
    node: str
    slice_index: int | None = None
    ready_after_s: float | None = None
    companion: str | None = None


class Failure(msgspec.Struct, frozen=True):
    """The loss of a host.

    Attributes:
        at_unix_s: when it was found.
        served_again_after_s: until another stood in its place; None if none ever did.
        served_again_by: that one's node.
        host: the virtual host that it stood behind; None if it stood behind none.
        found_after_s: from its last word until the loss was found; it was lost in between.
    """

    at_unix_s: float
    worker: int
    node: str
    slice_index: int | None
    cause: str
    served_again_after_s: float | None = None
    served_again_by: str | None = None
    host: int | None = None
    found_after_s: float | None = None


class ProgramUsage(msgspec.Struct, frozen=True):
    """What one program used. ``busy_s`` and ``waiting_s`` are device-seconds; ``devices`` are its own (``0-7``)."""

    name: str
    devices: str
    executions: int
    busy_s: float
    waiting_s: float


class SliceUsage(msgspec.Struct, frozen=True):
    """What became of a slice's device-seconds.

    Attributes:
        device_s: from when the runtime was ready to when usage was last heard of: ``busy_s`` and ``idle_s`` together.
        waiting_s: the part of ``idle_s`` in which a launch was there and its inputs were not.
        programs_left_out: those that were too many; the busiest are in ``programs``.
        without_usage: nodes that were lost before they said anything; they are in none of the sums.
    """

    index: int
    nodes: tuple[str, ...]
    num_devices: int
    device_s: float
    busy_s: float
    idle_s: float
    waiting_s: float
    programs: tuple[ProgramUsage, ...]
    programs_left_out: int = 0
    without_usage: tuple[str, ...] = ()


class Usage(msgspec.Struct, frozen=True):
    """What the controller's last answer said, with the last words of those who are lost.

    Attributes:
        as_of_unix_s: of the last answer; None if there was none.
        problem: why there was none at the end.
        did_not_answer: names.
    """

    as_of_unix_s: float | None = None
    problem: str | None = None
    did_not_answer: tuple[str, ...] = ()
    slices: tuple[SliceUsage, ...] = ()
    programs: tuple[ProgramUsage, ...] = ()
    programs_left_out: int = 0
    bytes_moved: dict[str, int] = {}


class Record(msgspec.Struct, frozen=True):
    """One run. Times are seconds since 1970; None while it is not so.

    Attributes:
        id: unique; part of the file's name.
        kind: RUN or RUNTIME.
        runtime_id: the name of the run folder; runs of one warm runtime share it.
        is_warm: the runtime was there before, and has a record of its own.
        launcher_host, launcher_pid: of whoever writes the record.
        argv: the program's command line; empty of a RUNTIME.
        exit_code: of the command; its program's unless ``problem`` says otherwise.
        problem: why the program was not run.
    """

    schema_version: int
    id: str
    kind: str
    runtime_id: str | None
    is_warm: bool
    written_at_unix_s: float
    launcher_host: str
    launcher_pid: int
    slurm: SlurmPlace | None
    settings: dict[str, str | int | float | bool | None]
    argv: tuple[str, ...]
    started_at_unix_s: float
    ready_at_unix_s: float | None
    program_ended_at_unix_s: float | None
    ended_at_unix_s: float | None
    exit_code: int | None
    problem: str | None
    hosts: tuple[Host, ...]
    components: tuple[Component, ...]
    failures: tuple[Failure, ...]
    usage: Usage

    @property
    def file_name(self) -> str:
        """By cluster, job, start and id: so that a job's are found by their names."""
        return f"{_place(self)}.{_started(self)}.{self.id}.json"


def events_file_name(record: Record) -> str:
    """The event log's: one of each job, and of each run that is in none."""
    own = "" if record.slurm is not None else f"{_started(record)}.{record.id}."
    return f"{_place(record)}.{own}events.jsonl"


def _place(record: Record) -> str:
    return "local" if record.slurm is None else f"{_plain(record.slurm.cluster or 'cluster')}.{record.slurm.label}"


def _started(record: Record) -> str:
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime(record.started_at_unix_s))


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


class NoHome(OSError):
    """There is no home to keep records in."""


def records_folder(environ: Mapping[str, str]) -> Path | None:
    """Where records lie; None where they are not wanted.

    Raises:
        NoHome: nothing says where.
    """
    configured = environ.get(RECORDS_VARIABLE)
    if configured is not None:
        return None if configured in OFF else Path(configured).expanduser().absolute()
    state = environ.get("XDG_STATE_HOME", "")
    # As the XDG base directory specification has it, one that is not absolute does not count.
    if state.startswith("/"):
        return Path(state) / "slurm-pathways" / "records"
    home = environ.get("HOME")
    if not home:
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError as failure:
            raise NoHome(f"user id {os.getuid()} has no home; set {RECORDS_VARIABLE} to a folder, or none") from failure
    return Path(home) / ".local" / "state" / "slurm-pathways" / "records"


def make_folder(folder: Path) -> None:
    """Make the folder of records, if it is not there.

    Raises:
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def write(folder: Path, record: Record) -> None:
    """Write a record; who reads meanwhile sees the old one or this one.

    Raises:
        OSError: it cannot be written.
    """
    make_folder(folder)
    fresh = folder / f".{record.file_name}.new"
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(record)))
        fresh.replace(folder / record.file_name)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def of_job(folder: Path, label: str) -> list[Record]:
    """The records of a job (``9``), of a task of a job array (``9_3``), or of all tasks (``9``), oldest first."""
    if not re.fullmatch(r"\d+(_\d+)?", label):
        return []
    patterns = [f"*.{label}.*.*.json", *([f"*.{label}_*.*.*.json"] if "_" not in label else [])]
    found = [record for pattern in patterns for path in folder.glob(pattern) for record in _read(path)]
    return sorted(found, key=lambda record: record.started_at_unix_s)


def by_id(folder: Path, record_id: str) -> Record | None:
    """The record with this id, or of the run folder with this name; the newest, where there are several."""
    found = [record for path in folder.glob(f"*.{_plain(record_id)}.json") for record in _read(path)]
    if not found:
        found = [r for path in folder.glob("*.json") for r in _read(path) if r.runtime_id == record_id]
    return max(found, key=lambda record: record.started_at_unix_s, default=None)


def newest(folder: Path) -> Record | None:
    """The record of the run that was started last."""
    # By when they were written first: names hold the start, before the id.
    paths = sorted(folder.glob("*.json"), key=lambda path: path.name.split(".")[-3:], reverse=True)
    return next((record for path in paths for record in _read(path)), None)


def _read(path: Path) -> Iterator[Record]:
    """The record in a file, if this version understands it; files of others, and of later versions, are passed over."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        record = msgspec.json.decode(path.read_bytes(), type=Record)
        if record.schema_version == SCHEMA_VERSION:
            yield record
