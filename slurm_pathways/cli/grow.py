"""``slurm-pathways grow`` and the script of what it submits: thin; what they do is in ``launch.growth``."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from slurm_pathways.cli.options import CONTEXT
from slurm_pathways.cli.submit import SBATCH, sbatch_options
from slurm_pathways.config import MAX_HOSTS, ConfigurationError

_RUN = click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The run whose run folder this is: one on this machine alone, or one of several in a job.",
)


@click.command(context_settings=CONTEXT)
@click.argument("job_id", type=click.IntRange(min=1), required=False, metavar="[JOB]")
@_RUN
@click.option(
    "--nodes",
    "num_nodes",
    type=click.IntRange(1, MAX_HOSTS),
    required=True,
    metavar="N",
    help="How many nodes the run gets; each becomes one worker.",
)
@sbatch_options(without=("--nodes",))
@click.option("--dry-run", is_flag=True, help="Print the script, and submit nothing.")
@click.option(
    "--wait", "is_waiting", is_flag=True, help="Wait until all workers have joined; exit code 1 if they do not."
)
def grow(
    job_id: int | None,
    run_dir: Path | None,
    num_nodes: int,
    raw: tuple[str, ...],
    dry_run: bool,
    is_waiting: bool,
    **options: Any,
) -> None:
    """Submit a job that lends N nodes to the run of JOB; print its job id.

    Its workers take the places of lost hosts, and are spares until then. They leave when that job ends, is cancelled or
    preempted; it ends with the run. JOB is by default the job that this is in.

    With --run DIR of a run on this machine alone, N more workers are started here, until this command is ended.

    \b
    Examples:
      slurm-pathways grow 4711 --nodes 2 --time 2:00:00 --partition preemptible
      slurm-pathways grow 4711 --nodes 1 --wait --sbatch --reservation=may
    """
    from slurm_pathways.launch.growth import command
    from slurm_pathways.slurm.commands import CommandError, Slurm
    from slurm_pathways.slurm.sbatch import Option, SbatchError

    given = {name: options.pop("sbatch_" + name[2:].replace("-", "_"), None) for name in SBATCH}
    try:
        own = tuple(Option(name, value) for name, value in given.items() if value is not None)
        asked = (*own, *map(Option.parse, raw))
        target = command.find_target(job_id, run_dir, os.environ)
        if target.job_id is None:
            _grow_here(target.run_dir, num_nodes, is_alone=not (asked or dry_run or is_waiting))
        slurm = Slurm(os.environ)
        # abspath, not resolve: links are how environments are named.
        executable = os.path.abspath(sys.argv[0])  # noqa: PTH100
        if dry_run:
            facts = command.inquire(target, slurm)
            click.echo(command.make_script(target, num_nodes, asked, facts, executable)[0], nl=False)
            return
        companion_id, said = command.submit(target, num_nodes, asked, slurm, executable)
        click.echo(said, err=True, nl=False)
        click.echo(companion_id)
        if is_waiting:
            sys.exit(command.wait_joined(target, companion_id, slurm, _say))
    except (ConfigurationError, SbatchError) as failure:
        raise click.UsageError(str(failure)) from failure
    except CommandError as failure:
        raise click.ClickException(str(failure)) from failure


def _grow_here(run_dir: Path | None, num_nodes: int, *, is_alone: bool) -> None:
    from slurm_pathways.launch.growth.companion import lend_here

    assert run_dir is not None, "a run outside of jobs is named by its folder"
    if not is_alone:
        raise ConfigurationError(
            f"the run {run_dir} is on this machine alone: no job is submitted for it, so leave out options of sbatch, "
            "--dry-run and --wait"
        )
    try:
        sys.exit(lend_here(run_dir, num_nodes, os.environ, _say))
    except KeyboardInterrupt:
        sys.exit(130)


@click.command(hidden=True, context_settings=CONTEXT)
@click.option("--job", "job_id", type=click.IntRange(min=1), required=True, metavar="ID")
@_RUN
def lend(job_id: int, run_dir: Path | None) -> None:
    """Lend the nodes of this job to the run of another; the script that `grow` submits."""
    from slurm_pathways.launch.growth.companion import lend as lend_nodes

    try:
        sys.exit(lend_nodes(job_id, run_dir, os.environ, _say))
    except ConfigurationError as failure:
        raise click.UsageError(str(failure)) from failure


def _say(line: str) -> None:
    click.echo(f"slurm-pathways: {line}", err=True)
