"""``slurm-pathways``: the command line. Thin: it reads options and prints.

What it does is in ``launch.run``, ``status`` and ``doctor``.
"""

import os
import sys
from pathlib import Path

import click

from slurm_pathways.cli.compile import compile_command
from slurm_pathways.cli.grow import grow, lend
from slurm_pathways.cli.interactive import Runner, down, notebook, run_options, shell, up
from slurm_pathways.cli.options import CONTEXT
from slurm_pathways.cli.report import report
from slurm_pathways.cli.sandbox import sandbox
from slurm_pathways.cli.submit import submit
from slurm_pathways.config import ConfigurationError, gather

# What only one command needs is imported in that command: each millisecond here is one of every start.


@click.group(context_settings=CONTEXT)
@click.version_option(package_name="slurm-pathways", message="slurm-pathways %(version)s")
def main() -> None:
    """One ordinary Python program drives every accelerator of an allocation."""


main.add_command(sandbox)
for command in (up, down, shell, notebook):
    main.add_command(command)
main.add_command(submit)
main.add_command(grow)
main.add_command(lend)
main.add_command(report)
main.add_command(compile_command)


# What follows the program's name is the program's, with or without "--" before it.
@main.command(context_settings={**CONTEXT, "allow_interspersed_args": False})
@run_options
@click.argument("program", nargs=-1, required=True, metavar="-- PROGRAM [ARGUMENTS]...", type=click.UNPROCESSED)
def run(run: Runner, program: tuple[str, ...]) -> None:
    """Run PROGRAM with the devices of a runtime: the warm one that `up` has started, else one that is started for it.

    PROGRAM is an ordinary JAX program; its input, output, signals and exit code are its own. Exit codes besides its
    own: 2 wrong use, 125 the runtime did not start, 126 PROGRAM cannot be executed, 127 PROGRAM not found, 128+n
    killed by signal n.

    Settings are taken from options, else from the environment, else from the file of --config.

    \b
    Example:
      slurm-pathways run --local --slices 2 --hosts-per-slice 2 --devices-per-host 2 -- python train.py --epochs 3
    """
    run(program)


@main.command("srun-task", hidden=True, context_settings={**CONTEXT, "allow_interspersed_args": False})
@click.option("--node-dir", type=click.Path(path_type=Path), metavar="DIR", help="Private folder of the job here.")
@click.argument("program", nargs=-1, required=True, metavar="-- PROGRAM [ARGUMENTS]...", type=click.UNPROCESSED)
def srun_task(node_dir: Path | None, program: tuple[str, ...]) -> None:
    """Be one task of `srun --pathways PROGRAM`; started by the SPANK plugin. docs/spank.md has the contract."""
    from slurm_pathways.launch.srun_task import run_task

    try:
        sys.exit(run_task(gather({}, os.environ), program, os.environ, node_dir))
    except ConfigurationError as failure:
        raise click.UsageError(str(failure)) from failure


@main.command(context_settings=CONTEXT)
@click.option("--json", "is_json", is_flag=True, help="Print the report as JSON; docs/status.md has its schema.")
@click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The run folder. Default: that of the run we are in, else of the only one that runs.",
)
@click.option("--job", "job_id", type=click.IntRange(min=1), metavar="ID", help="The run in this Slurm job of yours.")
def status(is_json: bool, run_dir: Path | None, job_id: int | None) -> None:
    """Say what a running runtime is doing: devices, workers, sessions, transfers, and what waits for what."""
    from slurm_pathways import status as runtime_status

    try:
        if job_id is not None and not runtime_status.is_here(job_id, os.environ):
            from slurm_pathways.launch.warm.commands import enter_job

            enter_job(job_id, os.environ)
        report = runtime_status.fetch(run_dir, os.environ, job_id)
    except ConfigurationError as failure:
        raise click.UsageError(str(failure)) from failure
    except runtime_status.StatusUnavailable as failure:
        raise click.ClickException(str(failure)) from failure
    click.echo(runtime_status.as_json(report) if is_json else runtime_status.as_text(report))


@main.command(context_settings=CONTEXT)
@click.option("--json", "is_json", is_flag=True, help="Print the findings as JSON.")
def doctor(is_json: bool) -> None:
    """Check this machine: what would keep a run from going well, and how to get it right.

    Exit code 1 if something would keep it from starting.
    """
    from slurm_pathways import doctor as checks

    findings = checks.examine(os.environ)
    click.echo(checks.as_json(findings) if is_json else checks.as_text(findings))
    sys.exit(1 if any(finding.level is checks.Level.ERROR for finding in findings) else 0)
