"""``compile``: what a program compiles, before there are devices."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from slurm_pathways.cli.options import CONTEXT, some_setting_options, verbosity_options
from slurm_pathways.config import MAX_HOSTS, SETTINGS, ConfigurationError
from slurm_pathways.launch.compiling.settings import USED_SETTINGS


# What follows the program's name is the program's, with or without "--" before it.
@click.command("compile", context_settings={**CONTEXT, "allow_interspersed_args": False})
@click.option(
    "--topology",
    required=True,
    metavar="NAME",
    help="One slice: v5e:XxY, v6e:XxY, v5p:XxYxZ, tpu7x:XxYxZ (chips); a100, h100, h200 or cpu with :N or :HxN "
    "(hosts x devices).",
)
@click.option("--slices", "num_slices", type=click.IntRange(1, MAX_HOSTS), default=1, help="How many of them.")
@click.option(
    "--stop-when-idle",
    "idle_launches",
    type=click.IntRange(min=1),
    metavar="N",
    help="Send PROGRAM SIGTERM when N launches in a row were of programs that are compiled already.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the report here.",
)
@some_setting_options([setting for setting in SETTINGS if setting.field in USED_SETTINGS])
@verbosity_options
@click.argument("program", nargs=-1, required=True, metavar="-- PROGRAM [ARGUMENTS]...", type=click.UNPROCESSED)
def compile_command(
    topology: str,
    num_slices: int,
    idle_launches: int | None,
    json_path: Path | None,
    config_path: Path | None,
    verbosity: int,
    program: tuple[str, ...],
    **options: Any,
) -> None:
    """Compile what PROGRAM compiles, for devices that need not exist, and say what memory it takes.

    PROGRAM runs as ever, but nothing is executed: what it computes on devices reads as zeros. With --compile-cache,
    later runs find the compiled programs. The report goes to stderr. Exit code: that of PROGRAM; 1 if it ended well and
    something did not compile.

    \b
    Example:
      slurm-pathways compile --topology v5e:4x4 --slices 2 -- python train.py --steps 1
    """
    from slurm_pathways.launch.compiling.command import compile_program

    try:
        sys.exit(
            compile_program(
                topology,
                num_slices,
                idle_launches or 0,
                options,
                os.environ,
                program,
                config_path=config_path,
                json_path=json_path,
                verbosity=verbosity,
            )
        )
    except ConfigurationError as failure:
        raise click.UsageError(str(failure)) from failure
