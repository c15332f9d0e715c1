"""What an agent does about a job whose launcher is gone, with a Slurm that answers as told."""

import pytest

from slurm_pathways.launch.head_loss import NUM_PROBES, TURN_S, Head, settle
from slurm_pathways.slurm.commands import CommandFailed
from slurm_pathways.slurm.outcome import Outcome
from slurm_pathways.slurm.states import ExitStatus


class PlayedSlurm:
    def __init__(self, state="RUNNING", answers=(), may_requeue=True, is_there=True):
        self.state = state
        self.answers = list(answers)
        self.may_requeue = may_requeue
        self.is_there = is_there
        self.done = []

    def outcomes(self, job_id):
        if not self.is_there:
            raise CommandFailed("slurmctld does not answer", 1, "")
        return None if self.state is None else (Outcome(str(job_id), self.state, ExitStatus(0, 0)),)

    def run(self, argv):
        self.done.append(argv[0])
        assert "--jobid=9" in argv and "--nodelist=node3" in argv and argv[-1] == "true"
        if not self.answers or not self.answers.pop(0):
            raise CommandFailed("Communication connection failure", 1, "")

    def cancel(self, job_id):
        self.done.append(f"cancel {job_id}")

    def requeue(self, job_id):
        if not self.may_requeue:
            raise CommandFailed("Requested operation is presently disabled", 1, "")
        self.done.append(f"requeue {job_id}")


def settled(slurm, on_loss="cancel", turn=0):
    pauses = []
    return settle(Head(9, "node3", on_loss, turn), slurm, pauses.append), pauses


def test_a_job_without_its_first_node_is_cancelled():
    slurm = PlayedSlurm()
    said, _ = settled(slurm)
    assert slurm.done == ["srun"] * NUM_PROBES + ["cancel 9"]
    assert said == "node node3, on which the script of job 9 ran, does not answer: the job is cancelled"


def test_it_is_requeued_where_that_was_asked_for():
    slurm = PlayedSlurm()
    said, _ = settled(slurm, "requeue")
    assert slurm.done[-1] == "requeue 9"
    assert said.endswith("the job is requeued")


def test_one_that_may_not_be_requeued_is_cancelled():
    slurm = PlayedSlurm(may_requeue=False)
    said, _ = settled(slurm, "requeue")
    assert slurm.done[-1] == "cancel 9"
    assert "cannot be requeued (Requested operation is presently disabled): the job is cancelled" in said


@pytest.mark.parametrize("answers", [(True,), (False, True)])
def test_a_node_that_answers_keeps_its_job(answers):
    """The launcher was killed, and the script goes on or ends as it will."""
    slurm = PlayedSlurm(answers=answers)
    assert settled(slurm)[0] is None
    assert slurm.done == ["srun"] * len(answers)


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETING", "PENDING", None])
def test_a_job_that_does_not_run_any_more_is_nobodys_business(state):
    slurm = PlayedSlurm(state)
    assert settled(slurm)[0] is None
    assert slurm.done == []


def test_agents_take_turns():
    assert settled(PlayedSlurm(), turn=2)[1][0] == 2 * TURN_S
    assert settled(PlayedSlurm(state=None), turn=0)[1] == [0.0]


def test_without_slurmctld_it_is_only_said():
    slurm = PlayedSlurm(is_there=False)
    said, _ = settled(slurm)
    assert said == "job 9 may have lost its first node, and cannot be looked at: slurmctld does not answer"
    assert slurm.done == []
