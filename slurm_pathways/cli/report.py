"""``slurm-pathways report``."""

import json
import os

import click

from slurm_pathways.cli.options import CONTEXT


@click.command(context_settings=CONTEXT)
@click.argument("job", required=False)
@click.option("--json", "is_json", is_flag=True, help="Print the report as JSON; docs/report.md has its schema.")
@click.option("--run-id", metavar="ID", help="One run only: its id, or the name of its run folder.")
def report(job: str | None, is_json: bool, run_id: str | None) -> None:
    """Say what JOB used and what became of it: busy and idle devices, programs, failures, steps.

    JOB is the id of a Slurm job that runs or has ended, or of one task of a job array (9_3). Without it: the run that
    was started last, --local ones too. Exit code 1 if nothing is known of it.
    """
    from slurm_pathways import report as reports
    from slurm_pathways.report_text import as_text

    if job is not None and run_id is not None:
        raise click.UsageError("give a job or --run-id, not both")
    if job is not None and not reports.is_job(job):
        raise click.UsageError(f"{job!r} is no job id: give a number, or 9_3 for a task of a job array")
    try:
        found = reports.gather(job, run_id, os.environ)
    except reports.UnknownJob as failure:
        raise click.ClickException(str(failure)) from failure
    click.echo(json.dumps(found, indent=2) if is_json else as_text(found))
