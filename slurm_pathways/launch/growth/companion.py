"""The script of a companion: it lends the nodes of its job to a run, and ends when the run does."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import msgspec

from slurm_pathways.config import ConfigurationError
from slurm_pathways.launch.growth.messages import Answer, Lend, News, Over, Refused, Taken
from slurm_pathways.launch.growth.visit import STILL_THERE_INTERVAL_S, WAIT_TIMEOUT_S, Visit, go
from slurm_pathways.launch.placement import find_allocation
from slurm_pathways.launch.steps import STEP_PREFIX, enter_argv, enter_environment
from slurm_pathways.slurm.commands import CommandError, Slurm

#: The run's node is gone, or the network to it, when nothing was heard for so long. srun may need minutes to see it.
_SILENCE_TIMEOUT_S = 12 * STILL_THERE_INTERVAL_S
_END_GRACE_S = 5.0

Say = Callable[[str], None]


def visit_argv(job_id: int, node: str, visit: Visit) -> list[str]:
    """The step on the first node of a run's job that visits the run."""
    words = enter_argv(job_id, node, STEP_PREFIX + "grow", has_terminal=False)
    return [*words, sys.executable, "-m", "slurm_pathways.launch.growth.visit", msgspec.json.encode(visit).decode()]


def lend(job_id: int, run_dir: Path | None, environ: Mapping[str, str], say: Say) -> int:
    """Lend the nodes of the job that we are in to the run of another; returns when it needs them no more.

    A job that is preempted is queued again if it may be, and lends again when it is started. Slurm tells only its
    steps, which are the workers: without them it is asked.

    Returns:
        0 when the run is over or the nodes are another job's, 1 when the run has no use for them.

    Raises:
        ConfigurationError: we are in no job, or not in its script.
    """
    allocation = find_allocation(environ)
    if allocation.step is not None:
        raise ConfigurationError("lend is the script of a job that slurm-pathways grow submits, and no step")
    try:
        node = Slurm(enter_environment(environ)).first_node(job_id)
    except CommandError as failure:
        say(f"job {job_id} cannot be asked for: {failure}")
        return 1
    if node is None:
        say(f"job {job_id} does not run any more: there is nothing to lend nodes to")
        return 0
    request = Lend(
        f"job {allocation.job_id}",
        allocation.nodes,
        allocation.job_id,
        allocation.cpus_per_node,
        allocation.gres_per_node,
    )
    visit = Visit(job_id, None if run_dir is None else str(run_dir), request, WAIT_TIMEOUT_S)
    exit_code = _serve(_answers(visit_argv(job_id, node, visit), enter_environment(environ)), say)
    return exit_code if exit_code == 0 else _make_room(allocation.job_id, Slurm(environ), say, exit_code)


def _make_room(job_id: int, slurm: Slurm, say: Say, exit_code: int) -> int:
    """What follows for a preempted job whose workers are gone; ``exit_code`` for one that is not preempted."""
    try:
        outcomes = slurm.outcomes(job_id)
        if not outcomes or not outcomes[0].is_preempted:
            return exit_code
        if outcomes[0].is_requeueable:
            say(f"job {job_id} makes room for another one, and is queued again")
            slurm.requeue(job_id)
        else:
            say(f"job {job_id} makes room for another one")
    except CommandError as failure:
        say(f"whether job {job_id} is preempted cannot be known: {failure}")
        return exit_code
    return 0


def lend_here(run_dir: Path, num_workers: int, environ: Mapping[str, str], say: Say) -> int:
    """More workers on this machine for a run here; returns as ``lend``, or when it is interrupted.

    Its end, whatever that is, is the end of the workers.
    """
    request = Lend(f"grow (pid {os.getpid()})", tuple(f"more-{place}" for place in range(num_workers)))
    answers: list[Answer] = []

    def tell(answer: Answer) -> None:
        answers.append(answer)
        _say(answer, say)

    go(Visit(None, str(run_dir), request, WAIT_TIMEOUT_S), environ, tell)
    return _exit_code(answers[-1] if answers else None)


def _serve(answers: Iterator[Answer], say: Say) -> int:
    """Say what the run says, to its end; an end without its last word is that of the run's job."""
    last: Answer | None = None
    was_taken = False
    for answer in answers:
        was_taken |= isinstance(answer, Taken)
        if isinstance(answer, Refused | Over):
            last = answer
        _say(answer, say)
    if last is None and was_taken:
        say("the run's job is over, or its first node does not answer")
        return 0
    if last is None:
        say("the run could not be reached in its job")
    return _exit_code(last)


def _exit_code(last: Answer | None) -> int:
    return 0 if isinstance(last, Over) and not last.has_failed else 1


def _say(answer: Answer, say: Say) -> None:
    match answer:
        case Taken(workers):
            say(f"the run starts {', '.join(workers)} here")
        case News(text):
            say(text)
        case Refused(reason):
            say(f"the run does not take these nodes: {reason}")
        case Over(reason):
            say(reason)
        case _:
            pass


def _answers(argv: list[str], environ: Mapping[str, str]) -> Iterator[Answer]:
    """What a step says, until it ends, or is silent for too long. It ends with this generator, or with us."""
    decoder: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=dict(environ))

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        assert process.stdout is not None
        rest, heard_s = b"", time.monotonic()
        # A step that waits for its turn, or for the run to be ready, says nothing yet.
        while select.select([process.stdout], [], [], max(0.0, heard_s + _SILENCE_TIMEOUT_S - time.monotonic()))[0]:
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                return
            heard_s = time.monotonic()
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield decoder.decode(line)
    finally:
        # It has its step end.
        process.terminate()
        try:
            process.wait(_END_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
