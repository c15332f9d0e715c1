"""``slurm-pathways grow``: submits a companion, a job whose nodes become workers of a run."""

import os
import pwd
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slurm_pathways.config import ConfigurationError
from slurm_pathways.launch.growth.companion import visit_argv
from slurm_pathways.launch.growth.messages import Answer, Await, Facts, Inquire, Joined, Over, Refused
from slurm_pathways.launch.growth.visit import Visit
from slurm_pathways.launch.run_folder import is_live, read_record
from slurm_pathways.launch.steps import enter_environment
from slurm_pathways.launch.submit import MAX_POLL_S, MIN_POLL_S, check_options
from slurm_pathways.launch.submit import submit as submit_script
from slurm_pathways.slurm.commands import CommandError, CommandFailed, Slurm
from slurm_pathways.slurm.environment import job_id_of
from slurm_pathways.slurm.quantities import Gres
from slurm_pathways.slurm.sbatch import Option, SbatchError, Template, render

#: The job's script. Nodes are taken whole, and a node that is lost leaves the others.
TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name=pathways-grow
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --output=%x-%j.out

exec slurm-pathways lend
"""
#: Options of sbatch that ask for devices.
_DEVICES = ("--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--tres-per-task")
_STEP_TIMEOUT_S = 60.0
#: How long one step waits for the workers of a companion that runs; then it is looked whether that still does.
AWAIT_STEP_S = 60.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """Which run.

    Attributes:
        job_id: of its job; None for one on this machine alone.
        run_dir: its folder, where the user has named that.
    """

    job_id: int | None
    run_dir: Path | None


def find_target(job_id: int | None, run_dir: Path | None, environ: Mapping[str, str]) -> Target:
    """The run that the user means.

    Raises:
        ConfigurationError: none is named, or ``run_dir`` is not one's.
    """
    if run_dir is not None:
        record = read_record(run_dir)
        if record is not None and is_live(run_dir):
            if job_id is not None and record.job_id != job_id:
                whose = "on this machine alone" if record.job_id is None else f"in job {record.job_id}"
                raise ConfigurationError(f"--run {run_dir}: this run is {whose}, and not in job {job_id}")
            return Target(record.job_id, run_dir.absolute())
        if job_id is None:
            raise ConfigurationError(
                f"--run {run_dir}: this is not the folder of a run that runs now on this machine; of a run on another "
                "node, give the job too"
            )
        return Target(job_id, run_dir.absolute())
    job_id = job_id_of(environ) if job_id is None else job_id
    if job_id is None:
        raise ConfigurationError(
            "which run is to grow? Give the id of its job, as squeue --me shows it, or its folder with --run"
        )
    return Target(job_id, None)


def inquire(target: Target, slurm: Slurm) -> Facts:
    """What nodes have to be for a run in a job. It is asked by a step on the job's first node.

    Raises:
        ConfigurationError: the job is none of ours, does not run, or has no run that grows. CommandError: Slurm does
            not answer.
    """
    job_id = target.job_id
    assert job_id is not None
    try:
        found = slurm.running_job(job_id)
    except CommandFailed as failure:
        raise ConfigurationError(f"job {job_id}: {failure}") from failure
    if found is None:
        raise ConfigurationError(f"job {job_id} does not run now (squeue --jobs={job_id} shows what it does)")
    node, user = found
    own = pwd.getpwuid(os.getuid()).pw_name
    if user != own:
        raise ConfigurationError(f"job {job_id} is {user}'s, and Slurm lets only its user start workers for it")
    visit = Visit(job_id, None if target.run_dir is None else str(target.run_dir), Inquire())
    asking = Slurm(enter_environment(slurm.environ), _STEP_TIMEOUT_S)
    answer: Answer = msgspec.json.decode(asking.run(visit_argv(job_id, node, visit)).splitlines()[-1], type=Answer)
    if isinstance(answer, Refused):
        raise ConfigurationError(f"job {job_id} cannot grow: {answer.reason}")
    if not isinstance(answer, Facts):
        raise CommandError(f"the run in job {job_id} was asked what nodes it needs, and answered {answer}")
    return answer


def make_script(
    target: Target, num_nodes: int, options: Sequence[Option], facts: Facts, executable: str
) -> tuple[str, tuple[Option, ...]]:
    """The companion's batch script, and the options in it that were asked for.

    Raises:
        ConfigurationError: it cannot be made.
    """
    check_options(options, is_waiting=False)
    if any(option.name in ("--nodes", "-N") for option in options):
        raise ConfigurationError("the number of nodes is grow's own --nodes, not one of --sbatch")
    asked = [Option("--nodes", str(num_nodes)), *options]
    if facts.gres_per_node and not any(option.name in _DEVICES for option in options):
        asked.append(Option("--gres", ",".join(map(_gres_word, facts.gres_per_node))))
    settings: dict[str, str | None] = {"--job": str(target.job_id)}
    if target.run_dir is not None:
        settings["--run"] = str(target.run_dir)
    try:
        script = render(Template.parse(TEMPLATE), options=asked, executable=executable, settings=settings)
    except SbatchError as failure:
        raise ConfigurationError(str(failure)) from failure
    return script, tuple(asked)


def _gres_word(gres: Gres) -> str:
    return f"{gres.name}:{gres.type}:{gres.count}" if gres.type else f"{gres.name}:{gres.count}"


def submit(target: Target, num_nodes: int, options: Sequence[Option], slurm: Slurm, executable: str) -> tuple[int, str]:
    """Submit a companion; its job id, and what sbatch said besides.

    Raises:
        ConfigurationError: the run cannot grow, or not so. CommandError: Slurm does not do it.
    """
    facts = inquire(target, slurm)
    script, asked = make_script(target, num_nodes, options, facts, executable)
    return submit_script(script, asked, slurm)


def wait_joined(target: Target, companion_id: int, slurm: Slurm, say: Say) -> int:
    """Wait until all workers of a companion have joined the run, for as long as it takes; 0 then, 1 if it has ended.

    Raises:
        CommandError: Slurm does not answer.
    """
    begun_s = time.monotonic()
    assert target.job_id is not None
    run_dir = None if target.run_dir is None else str(target.run_dir)
    visit = Visit(target.job_id, run_dir, Await(f"job {companion_id}", AWAIT_STEP_S))
    asking = Slurm(enter_environment(slurm.environ), AWAIT_STEP_S + _STEP_TIMEOUT_S)
    while True:
        outcomes = slurm.outcomes(companion_id)
        if outcomes is None or all(one.is_ended for one in outcomes):
            state = "has ended" if outcomes is None else f"is {outcomes[0].state}"
            output = f"; its output is in {outcomes[0].output}" if outcomes and outcomes[0].output else ""
            say(f"job {companion_id} {state}, and its nodes have not joined the run{output}")
            return 1
        if outcomes[0].state == "RUNNING":
            node = slurm.first_node(target.job_id)
            if node is None:
                say(f"job {target.job_id} does not run any more")
                return 1
            lines = asking.run(visit_argv(target.job_id, node, visit)).splitlines()
            answers = [msgspec.json.decode(line, type=Answer) for line in lines]
            if any(isinstance(answer, Joined) for answer in answers):
                return 0
            if any(isinstance(answer, Over | Refused) for answer in answers):
                say(f"the run in job {target.job_id} is over")
                return 1
        time.sleep(min(MAX_POLL_S, max(MIN_POLL_S, (time.monotonic() - begun_s) / 10)))
