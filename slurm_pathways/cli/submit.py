"""``slurm-pathways submit``: thin; what it does is in ``launch.submit``."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from slurm_pathways.cli.options import CONTEXT, setting_options
from slurm_pathways.config import ConfigurationError, gather

#: Options of sbatch that have a name here too.
SBATCH = {
    "--job-name": ("NAME", "Shown by squeue and sacct."),
    "--nodes": ("N", "Default: slices x hosts per slice + spares if one of them is given, else the template's."),
    "--time": ("TIME", "The time limit."),
    "--partition": ("NAME", ""),
    "--account": ("NAME", ""),
    "--qos": ("NAME", ""),
    "--constraint": ("FEATURES", ""),
    "--gres": ("LIST", "Devices of each node, like tpu:4."),
    "--cpus-per-task": ("N", "CPUs of each node. Default: all, as nodes are exclusive."),
    "--mem": ("SIZE", "Memory of each node."),
}


def sbatch_options(*, without: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option for each of ``SBATCH``, as ``sbatch_NAME``, and ``--sbatch`` for all others, as ``raw``."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        command = click.option(
            "--sbatch",
            "raw",
            metavar="OPTION",
            multiple=True,
            help="Any other option of sbatch, as one word: --sbatch --reservation=may --sbatch -Cv5p. May be repeated.",
        )(command)
        for name, (metavar, described) in reversed(SBATCH.items()):
            if name not in without:
                field = "sbatch_" + name[2:].replace("-", "_")
                command = click.option(name, field, metavar=metavar, help=described)(command)
        return command

    return add


@click.command(context_settings={**CONTEXT, "allow_interspersed_args": False})
@click.option(
    "--template",
    metavar="NAME|FILE",
    default="run",
    help="The script to start from: run (default), train, pipeline, rl, requeue, service, interactive, or your own.",
)
@sbatch_options()
@click.option("--dry-run", is_flag=True, help="Print the script, and submit nothing.")
@click.option("--wait", "is_waiting", is_flag=True, help="Wait for the job's end, and end with its exit code.")
@setting_options
@click.argument("program", nargs=-1, metavar="-- PROGRAM [ARGUMENTS]...", type=click.UNPROCESSED)
def submit(
    template: str,
    raw: tuple[str, ...],
    dry_run: bool,
    is_waiting: bool,
    config_path: Path | None,
    program: tuple[str, ...],
    **options: Any,
) -> None:
    """Submit a batch job that runs PROGRAM; print its job id.

    The script is that of the template, which sbatch takes as it stands too, with what is given here. Settings of the
    run are those of `slurm-pathways run`; they are taken from options, the environment and --config now, and written
    into the script.

    With --wait the exit code is PROGRAM's, or 124 the time limit was reached, 125 the job failed and not PROGRAM, 137
    out of memory, 143 cancelled or preempted, 128+n killed by signal n. Ctrl-C ends the waiting and not the job.

    \b
    Examples:
      slurm-pathways submit --slices 2 --hosts-per-slice 2 --time 1:00:00 -- python train.py --epochs 3
      slurm-pathways submit --template train --nodes 5 --dry-run -- python train.py > train.sbatch
    """
    from slurm_pathways.launch import submit as job
    from slurm_pathways.slurm.commands import CommandError, Slurm
    from slurm_pathways.slurm.sbatch import Option, SbatchError

    try:
        given = {name: options.pop("sbatch_" + name[2:].replace("-", "_")) for name in SBATCH}
        own = tuple(Option(name, value) for name, value in given.items() if value is not None)
        request = job.Request(
            template, gather(options, os.environ, config_path), (*own, *map(Option.parse, raw)), program
        )
        # abspath, not resolve: links are how environments are named.
        script, asked = job.make_script(request, os.path.abspath(sys.argv[0]))  # noqa: PTH100
        job.check_options(asked, is_waiting=is_waiting)
    except (ConfigurationError, SbatchError) as failure:
        raise click.UsageError(str(failure)) from failure
    if dry_run:
        click.echo(script, nl=False)
        return
    slurm = Slurm(os.environ)
    try:
        job_id, said = job.submit(script, asked, slurm)
    except CommandError as failure:
        raise click.ClickException(str(failure)) from failure
    click.echo(said, err=True, nl=False)
    click.echo(job_id)
    if is_waiting:
        try:
            sys.exit(job.wait(job_id, slurm, lambda line: click.echo(f"slurm-pathways: {line}", err=True)))
        except KeyboardInterrupt:
            click.echo(f"slurm-pathways: job {job_id} goes on; to end it: scancel {job_id}", err=True)
            sys.exit(130)
