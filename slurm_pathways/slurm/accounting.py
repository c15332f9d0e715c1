"""What sacct knows of a job: one record for the job and one for each step, from its parsable output.

sacct is not the truth of single workers: a job that loses a node gets a row per size it had (``RESIZING``), and steps
that were running then keep that state and ``0:0`` for good. ``Record.is_conclusive`` says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_pathways.slurm import hostlist, quantities
from slurm_pathways.slurm.states import ENDED, ExitStatus, split_state

#: sacct's delimiter is "|" by default, and names and comments of users hold it; this byte they do not.
DELIMITER = "\x1f"
#: Texts that users choose stand before others: a line break in the last field would look like the end of its row.
FIELDS = (
    "JobID",
    "JobName",
    "Comment",
    "State",
    "ExitCode",
    "DerivedExitCode",
    "Submit",
    "Start",
    "End",
    "ElapsedRaw",
    "TotalCPU",
    "MaxRSS",
    "NodeList",
    "AllocTRES",
)
#: Arguments of sacct whose output ``parse`` reads. With SLURM_TIME_FORMAT=%s in its environment.
ARGUMENTS = ("--duplicates", "--parsable2", f"--delimiter={DELIMITER}", f"--format={','.join(FIELDS)}")


class AccountingError(ValueError):
    """A text is not what sacct prints for ``ARGUMENTS``; the message quotes the line."""


@dataclass(frozen=True, slots=True)
class Record:
    """A job, or one of its steps.

    Attributes:
        job: as sacct names it: ``9``, ``10_3`` of an array, ``14+1`` of a heterogeneous job.
        step: ``batch``, ``extern``, ``interactive`` or a number; "" for the job itself.
        state: the base word, as in ``states.ENDED``; ``state_detail`` is what follows it (``by 1000``).
        exit_status: of the step; of the job that of its script. sacct takes 128 off codes from 128 up: 130 is 2 here.
        derived_exit_status: the worst of the job's steps; None for steps.
        submitted_at_unix_s, started_at_unix_s, ended_at_unix_s: None while it is not so.
        elapsed_s: whole seconds.
        cpu_s: user and system time of all its processes that have ended.
        max_rss_bytes: of the largest process of any task; None where it was not sampled.
        nodes: in Slurm's order; empty while there are none.
        tres: what was allocated, by name (``cpu``, ``node``, ``gres/tpu:v5p``); ``mem`` in bytes.
    """

    job: str
    step: str
    name: str
    state: str
    state_detail: str
    exit_status: ExitStatus
    derived_exit_status: ExitStatus | None
    submitted_at_unix_s: int | None
    started_at_unix_s: int | None
    ended_at_unix_s: int | None
    elapsed_s: int
    cpu_s: float
    max_rss_bytes: int | None
    nodes: tuple[str, ...]
    tres: Mapping[str, int]
    comment: str

    @property
    def is_ended(self) -> bool:
        """Whether it has ended, as far as sacct knows: it may lag by seconds."""
        return self.state in ENDED

    @property
    def is_conclusive(self) -> bool:
        """Whether state and exit status say how it ended. A row that a change of size has cut off does not."""
        return self.is_ended and self.state != "RESIZING"


def parse(text: str) -> tuple[Record, ...]:
    """The records in sacct's order.

    Raises:
        AccountingError: see the class.
    """
    lines = text.splitlines()
    if not lines or tuple(lines[0].split(DELIMITER)) != FIELDS:
        raise AccountingError(
            f"the first line is {lines[0] if lines else ''!r}, not sacct's header {', '.join(FIELDS)}"
        )
    return tuple(_record(row) for row in _rows(lines[1:]))


def _rows(lines: Sequence[str]) -> list[list[str]]:
    """Lines as fields. A line break in a job's name or comment has cut its row in two."""
    rows: list[list[str]] = []
    for line in lines:
        fields = line.split(DELIMITER)
        if rows and len(rows[-1]) < len(FIELDS):
            rows[-1][-1] += "\n" + fields[0]
            rows[-1].extend(fields[1:])
        else:
            rows.append(fields)
    for row in rows:
        if len(row) != len(FIELDS):
            raise AccountingError(f"{DELIMITER.join(row)!r} has {len(row)} fields, not {len(FIELDS)}")
    return rows


def _record(row: Sequence[str]) -> Record:
    value = dict(zip(FIELDS, row, strict=True))
    job, _, step = value["JobID"].partition(".")
    state, detail = split_state(value["State"])
    try:
        return Record(
            job=job,
            step=step,
            name=value["JobName"],
            state=state,
            state_detail=detail,
            exit_status=_exit_status(value["ExitCode"], state),
            derived_exit_status=ExitStatus.parse(value["DerivedExitCode"]) if value["DerivedExitCode"] else None,
            submitted_at_unix_s=_unix_s(value["Submit"]),
            started_at_unix_s=_unix_s(value["Start"]),
            ended_at_unix_s=_unix_s(value["End"]),
            elapsed_s=int(value["ElapsedRaw"] or 0),
            cpu_s=quantities.duration_s(value["TotalCPU"]) if value["TotalCPU"] else 0.0,
            max_rss_bytes=quantities.size_bytes(value["MaxRSS"]) if value["MaxRSS"] else None,
            # "None assigned" while a job waits.
            nodes=hostlist.expand(value["NodeList"]) if not value["NodeList"].startswith("None") else (),
            tres=quantities.tres(value["AllocTRES"]),
            comment=value["Comment"],
        )
    except ValueError as failure:
        raise AccountingError(f"the record {value['JobID']!r}: {failure}") from failure


def _exit_status(text: str, state: str) -> ExitStatus:
    status = ExitStatus.parse(text)
    # Of 128 sacct leaves nothing, and what has failed must not look as if it had not.
    return ExitStatus(128, 0) if state == "FAILED" and status == ExitStatus(0, 0) else status


def _unix_s(text: str) -> int | None:
    if text in ("", "None", "Unknown"):
        return None
    if not text.isdigit():
        raise ValueError(f"{text!r} is no time in seconds since 1970: sacct needs SLURM_TIME_FORMAT=%s")
    return int(text)
