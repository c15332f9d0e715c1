import dataclasses
from pathlib import Path

import pytest

from slurm_pathways.slurm import accounting
from slurm_pathways.slurm.outcome import Outcome, from_accounting, from_scontrol, worst
from slurm_pathways.slurm.states import ExitStatus

SAMPLES = Path(__file__).parent / "samples"


@pytest.mark.parametrize(
    ("state", "exit_status", "code", "words"),
    [
        ("COMPLETED", "0:0", 0, None),
        ("FAILED", "3:0", 3, None),
        ("FAILED", "137:0", 137, None),
        ("FAILED", "0:9", 137, None),
        ("CANCELLED", "0:0", 143, "job 7 was cancelled (CANCELLED)"),
        ("CANCELLED", "3:0", 143, "job 7 was cancelled (CANCELLED)"),
        ("PREEMPTED", "0:15", 143, "job 7 had to make room for another job (PREEMPTED)"),
        ("TIMEOUT", "0:15", 124, "job 7 reached its time limit (TIMEOUT)"),
        ("DEADLINE", "0:0", 124, "job 7 reached its deadline (DEADLINE)"),
        ("OUT_OF_MEMORY", "0:125", 137, "job 7 ran out of memory (OUT_OF_MEMORY)"),
        ("NODE_FAIL", "0:9", 125, "job 7 lost a node that it could not do without (NODE_FAIL)"),
        ("BOOT_FAIL", "0:0", 125, "job 7 did not start: its nodes did not boot (BOOT_FAIL)"),
    ],
)
def test_how_a_job_ends(state: str, exit_status: str, code: int, words: str | None) -> None:
    ended = Outcome("7", state, ExitStatus.parse(exit_status))
    assert ended.is_ended
    assert (ended.exit_code, ended.description) == (code, words)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "RESIZING"])
def test_what_has_not_ended(state: str) -> None:
    assert not Outcome("7", state, ExitStatus(0, 0)).is_ended


def test_what_scontrol_says() -> None:
    text = (SAMPLES / "scontrol_job_22.05.txt").read_text()
    outcome = Outcome("9", "RUNNING", ExitStatus(0, 0), "/dev/null", is_requeueable=True)
    assert from_scontrol(text) == (outcome,)
    # A name is text of the user's, and tasks of an array are records of their own.
    named = text.replace("JobName=workers", "JobName=a JobState=FAILED ExitCode=1:0")
    task = named.replace("JobId=9 ", "JobId=12 ArrayJobId=9 ArrayTaskId=3 ").replace("ExitCode=0:0", "ExitCode=0:9")
    assert from_scontrol(named.rstrip() + "\n\n" + task) == (
        outcome,
        dataclasses.replace(outcome, job="9_3", exit_status=ExitStatus(0, 9)),
    )
    [waiting] = from_scontrol(task.replace("ArrayTaskId=3 ", "ArrayTaskId=4-7,9%2 "))
    assert waiting.job == "9_[4-7,9%2]"
    for time, is_preempted in (("1764492983", True), ("None", False)):
        [told] = from_scontrol(
            text.replace(" Restarts=", f" PreemptEligibleTime=1764492900 PreemptTime={time} Restarts=")
        )
        assert told == dataclasses.replace(outcome, is_preempted=is_preempted)
    with pytest.raises(ValueError, match="not what scontrol show job prints: 'JobState' is missing"):
        from_scontrol("JobId=9 JobName=a\n")


def test_which_tasks_it_is_about() -> None:
    for job, jobs in (
        ("9", {"9"}),
        ("9_3", {"9_3"}),
        ("9_[4-6,9%2]", {"9_4", "9_5", "9_6", "9_9"}),
        ("9_[1-7:3]", {"9_1", "9_4", "9_7"}),
        ("9_[0]", {"9_0"}),
        ("9_[1,3,5,...]", None),
    ):
        assert Outcome(job, "PENDING", ExitStatus(0, 0)).jobs == jobs


def row(job: str, state: str, exit_code: str) -> str:
    values = {"JobID": job, "State": state, "ExitCode": exit_code}
    return accounting.DELIMITER.join(values.get(field, "") for field in accounting.FIELDS)


def test_what_accounting_says() -> None:
    lines = [
        accounting.DELIMITER.join(accounting.FIELDS),
        row("9", "RESIZING", "0:0"),
        row("9", "REQUEUED", "0:0"),
        row("9.batch", "CANCELLED", "0:15"),
        row("9", "CANCELLED by 1000", "0:0"),
        row("91", "FAILED", "1:0"),
        row("10_1", "FAILED", "3:0"),
        row("10_2", "COMPLETED", "0:0"),
    ]
    records = accounting.parse("\n".join(lines))
    assert from_accounting(records, 9) == (Outcome("9", "CANCELLED", ExitStatus(0, 0)),)
    assert from_accounting(records, 8) == ()
    tasks = from_accounting(records, 10)
    assert worst(tasks) == Outcome("10_1", "FAILED", ExitStatus(3, 0))
