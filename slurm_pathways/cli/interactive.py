"""``up``, ``down``, ``shell``, ``notebook``: runtimes that outlive programs, and people at them."""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from slurm_pathways.cli.options import CONTEXT, place_options, setting_options, verbosity_options
from slurm_pathways.config import SETTINGS, ConfigurationError


@click.command(context_settings=CONTEXT)
@click.option("--local", "is_local", is_flag=True, help="On this machine. Default: on the nodes of the Slurm job.")
@click.option("--foreground", is_flag=True, help="Stay, and end the runtime with a signal: for batch scripts.")
@setting_options
@verbosity_options
def up(is_local: bool, foreground: bool, config_path: Path | None, verbosity: int, **options: Any) -> None:
    """Start a runtime and keep it warm: every `run`, `shell` and `notebook` here uses it, until `down`.

    In a Slurm job it ends with the job at the latest.
    """
    from slurm_pathways.launch.warm import commands

    try:
        wishes = commands.Wishes(options, os.environ, config_path)
        sys.exit(commands.up(commands.Where(is_local), wishes, verbosity, in_foreground=foreground))
    except ConfigurationError as failure:
        raise click.UsageError(str(failure)) from failure


@click.command(context_settings=CONTEXT)
@click.option("--force", "is_forced", is_flag=True, help="Also when programs still run on it, which then fail.")
@place_options(has_local=False)
def down(is_forced: bool, job_id: int | None, warm_dir: Path | None) -> None:
    """End the runtime that `up` has started."""
    from slurm_pathways.launch.warm import commands

    try:
        commands.down(commands.Where(job_id=job_id, run_dir=warm_dir), os.environ, is_forced=is_forced)
    except commands.DownFailed as failure:
        raise click.ClickException(str(failure)) from failure
    except ConfigurationError as failure:
        raise click.UsageError(str(failure)) from failure


Runner = Callable[[Sequence[str]], None]


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say where and how a program runs, as ``run``: it runs one, and ends this process as it ends."""

    @place_options()
    @setting_options
    @verbosity_options
    @functools.wraps(command)
    def with_run(
        *,
        is_local: bool,
        job_id: int | None,
        warm_dir: Path | None,
        config_path: Path | None,
        verbosity: int,
        **options: Any,
    ) -> None:
        settings = {setting.key: options.pop(setting.key) for setting in SETTINGS}

        def run(argv: Sequence[str]) -> None:
            from slurm_pathways.launch.warm import commands

            try:
                where = commands.Where(is_local, job_id, warm_dir)
                wishes = commands.Wishes(settings, os.environ, config_path)
                sys.exit(commands.run_program(where, wishes, argv, verbosity))
            except ConfigurationError as failure:
                raise click.UsageError(str(failure)) from failure

        command(run=run, **options)

    return with_run


@click.command(context_settings=CONTEXT)
@run_options
def shell(run: Runner) -> None:
    """Python with all devices, to type at: IPython where it is installed.

    Ctrl-C interrupts what you have typed, not the workers; leaving it frees everything, or the warm runtime's place.
    """
    is_there = importlib.util.find_spec("IPython") is not None
    run([sys.executable, "-m", "IPython", "--no-banner"] if is_there else [sys.executable, "-q"])


@click.command(context_settings=CONTEXT)
@run_options
def notebook(run: Runner) -> None:
    """Jupyter with all devices, with the ssh command that brings it to your browser.

    It listens at a Unix socket that only you can open, on the job's first node; no port is opened on the cluster.
    """
    if importlib.util.find_spec("jupyter_server") is None:
        raise click.ClickException("Jupyter is not installed here: pip install 'slurm-pathways[notebook]'")
    run([sys.executable, "-m", "slurm_pathways.notebook"])
