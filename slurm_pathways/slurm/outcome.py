"""How batch jobs end, as exit codes and in words. Pure: what scontrol or sacct print in, values out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_pathways.slurm.accounting import Record
from slurm_pathways.slurm.queue import parse_scontrol
from slurm_pathways.slurm.states import ENDED, ExitStatus

#: What ``timeout`` gives for what took too long.
OUT_OF_TIME = 124
#: How a job ended says nothing about its program: it lost a node, or never started.
NOT_THE_PROGRAMS = 125
#: As if by the SIGTERM with which Slurm ends it.
CANCELLED = 128 + 15
#: As if by the SIGKILL of the kernel.
OUT_OF_MEMORY = 128 + 9

#: Part of a list of tasks: ``3``, ``3-7``, ``3-7:2``.
_TASKS = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?", re.ASCII)

#: Of states whose exit status is not the script's: the exit code, and what to say.
_CODES = {
    "CANCELLED": (CANCELLED, "was cancelled"),
    "PREEMPTED": (CANCELLED, "had to make room for another job"),
    "TIMEOUT": (OUT_OF_TIME, "reached its time limit"),
    "DEADLINE": (OUT_OF_TIME, "reached its deadline"),
    "OUT_OF_MEMORY": (OUT_OF_MEMORY, "ran out of memory"),
    "BOOT_FAIL": (NOT_THE_PROGRAMS, "did not start: its nodes did not boot"),
    "NODE_FAIL": (NOT_THE_PROGRAMS, "lost a node that it could not do without"),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job, or a task of a job array, stands.

    Attributes:
        job: its id, as Slurm's commands take it: ``9``, of a task of a job array ``9_3``, of several ``9_[4-7,9%2]``.
        state: the base word, as in ``states.ENDED``.
        exit_status: of its script; meaningful once it has ended by itself.
        output: the file with its output; None where Slurm does not say.
        is_preempted: it has been told to make room for another job, and may still run.
        is_requeueable: it may be queued again.
    """

    job: str
    state: str
    exit_status: ExitStatus
    output: str | None = None
    is_preempted: bool = False
    is_requeueable: bool = False

    @property
    def jobs(self) -> frozenset[str] | None:
        """The ids of all that it is about, one by one; None where Slurm has cut the list of tasks short."""
        array, _, tasks = self.job.partition("_[")
        if not tasks:
            return frozenset((self.job,))
        numbers: set[int] = set()
        for part in tasks.rstrip("]").partition("%")[0].split(","):
            found = _TASKS.fullmatch(part)
            if found is None:
                return None
            first = int(found[1])
            numbers.update(range(first, int(found[2] or first) + 1, int(found[3] or 1)))
        return frozenset(f"{array}_{number}" for number in numbers)

    @property
    def is_ended(self) -> bool:
        """Whether it will run no more."""
        return self.state in ENDED

    @property
    def exit_code(self) -> int:
        """Of a job that has ended: its script's, as a shell shows it, or one of this module."""
        return _CODES[self.state][0] if self.state in _CODES else self.exit_status.shell_code

    @property
    def description(self) -> str | None:
        """In words, what an exit code does not say; None where it says it."""
        if self.state not in _CODES:
            return None
        return f"job {self.job} {_CODES[self.state][1]} ({self.state})"


def from_scontrol(text: str) -> tuple[Outcome, ...]:
    """From ``scontrol show job``: one for each task of a job array.

    Raises:
        ValueError: it is no such text.
    """
    outcomes = []
    for record in parse_scontrol(text):
        try:
            outcome = Outcome(
                job=_id_of(record),
                state=record["JobState"],
                exit_status=ExitStatus.parse(record["ExitCode"]),
                output=record.get("StdOut"),
                # "None" and "Unknown" are no times.
                is_preempted=record.get("PreemptTime", "")[:1].isdigit(),
                is_requeueable=record.get("Requeue") == "1",
            )
        except KeyError as failure:
            raise ValueError(f"this is not what scontrol show job prints: {failure} is missing") from failure
        outcomes.append(outcome)
    return tuple(outcomes)


def _id_of(record: Mapping[str, str]) -> str:
    # Of an array, a task that has been started has a JobId of its own besides.
    tasks = record.get("ArrayTaskId")
    if tasks is None or tasks == "N/A":
        return record["JobId"]
    return f"{record['ArrayJobId']}_{tasks}" if tasks.isdigit() else f"{record['ArrayJobId']}_[{tasks}]"


def from_accounting(records: Sequence[Record], job_id: int) -> tuple[Outcome, ...]:
    """From the records of a job: its last start counts, of each task of a job array."""
    last: dict[str, Outcome] = {}
    for record in records:
        if not record.step and record.job.partition("_")[0] == str(job_id) and record.state != "RESIZING":
            last[record.job] = Outcome(record.job, record.state, record.exit_status)
    return tuple(last.values())


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The one with the highest exit code, as sbatch has it for job arrays; all must have ended."""
    return max(outcomes, key=lambda outcome: outcome.exit_code)
