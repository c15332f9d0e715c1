"""A batch job whose first node is gone: its script and the controller are, and nobody would end it.

With ``--no-kill`` Slurm keeps such a job until its time limit, on nodes that do nothing. So when an agent has lost the
launcher without a word, it finds out whether the launcher's node still answers; if not, it ends the job, as asked for.
Agents take turns, so that one of them does it, and the next one if that one dies.
"""

import sys
import time
from collections.abc import Callable

import msgspec

from slurm_pathways.config import REQUEUE
from slurm_pathways.slurm.commands import CommandError, Slurm

#: So many agents watch; of more, each has another one before it that lives.
MAX_WATCHERS = 4
#: Between the turns of two agents: longer than one of them needs.
TURN_S = 12.0
#: A node that answers within this, at one of several attempts, is there.
PROBE_TIMEOUT_S = 8.0
NUM_PROBES = 2
_BETWEEN_PROBES_S = 2.0


class Head(msgspec.Struct, frozen=True):
    """The node on which a batch job's script runs, and what is to become of the job when it is gone.

    Attributes:
        on_loss: the setting ``on_head_loss``.
        turn: of the agent that is told this, from 0.
    """

    job_id: int
    node: str
    on_loss: str
    turn: int


def settle(head: Head, slurm: Slurm, pause: Callable[[float], None] = time.sleep) -> str | None:
    """The launcher is gone without a word: end its job if its node is gone too.

    Args:
        slurm: its deadline should be ``PROBE_TIMEOUT_S``.
        pause: sleeps for some seconds.

    Returns:
        What was done, in words; None: nothing was to be done.
    """
    pause(head.turn * TURN_S)
    try:
        outcomes = slurm.outcomes(head.job_id)
    except CommandError as failure:
        # Without slurmctld nothing can be ended; its own timers will.
        return f"job {head.job_id} may have lost its first node, and cannot be looked at: {failure}"
    if not outcomes or all(outcome.state != "RUNNING" for outcome in outcomes):
        return None
    for attempt in range(NUM_PROBES):
        if attempt:
            pause(_BETWEEN_PROBES_S)
        if _answers(head, slurm):
            return None
    lost = f"node {head.node}, on which the script of job {head.job_id} ran, does not answer"
    try:
        if head.on_loss == REQUEUE:
            try:
                slurm.requeue(head.job_id)
                return f"{lost}: the job is requeued"
            except CommandError as failure:
                lost += f", and the job cannot be requeued ({failure})"
        slurm.cancel(head.job_id)
    except CommandError as failure:
        return f"{lost}, and the job cannot be ended: {failure}"
    return f"{lost}: the job is cancelled"


def _answers(head: Head, slurm: Slurm) -> bool:
    step = ["--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--gres=none", "--input=none", "--quiet", "--mpi=none"]
    try:
        slurm.run(["srun", f"--jobid={head.job_id}", f"--nodelist={head.node}", *step, "true"])
    except CommandError as failure:
        print(f"{head.node} does not answer: {failure}", file=sys.stderr)
        return False
    return True
