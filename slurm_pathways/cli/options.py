"""Options that several commands have: one for each setting of a run, and the file of settings."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from slurm_pathways.config import SETTINGS, Kind, Setting

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """An option for each setting, and ``--config``. Values stay text: ``config`` parses them, as those from other
    places."""
    return some_setting_options(SETTINGS)(command)


def some_setting_options(settings: Sequence[Setting]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same for some settings."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        return _with_settings(command, settings)

    return add


def _with_settings(command: Callable[..., None], settings: Sequence[Setting]) -> Callable[..., None]:
    command = click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="YAML file with settings: the options' names with underscores. [SLURM_PATHWAYS_CONFIG]",
    )(command)
    for setting in reversed(settings):
        command = _option(setting)(command)
    return command


def verbosity_options(command: Callable[..., None]) -> Callable[..., None]:
    """``-q`` and ``-v`` as ``verbosity``: -1, 0 or 1."""

    @functools.wraps(command)
    def with_verbosity(*args: Any, quiet: bool, verbose: bool, **options: Any) -> None:
        if quiet and verbose:
            raise click.UsageError("-q and -v exclude each other")
        command(*args, verbosity=-1 if quiet else int(verbose), **options)

    described = click.option("-v", "--verbose", is_flag=True, help="Say what every process of the runtime reports.")
    return click.option("-q", "--quiet", is_flag=True, help="Say nothing but what fails.")(described(with_verbosity))


def place_options(*, has_local: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Which runtime: ``is_local``, ``job_id``, ``warm_dir``, as ``launch.warm.commands.Where`` takes them."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        command = click.option(
            "--run",
            "warm_dir",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="The warm runtime whose run folder this is.",
        )(command)
        command = click.option(
            "--job",
            "job_id",
            type=click.IntRange(min=1),
            metavar="ID",
            help="In this Slurm job of yours, from outside of it. Default: the job that this is in.",
        )(command)
        if has_local:
            command = click.option(
                "--local",
                "is_local",
                is_flag=True,
                help="Start the runtime on this machine. Default: the warm one that `up` has started, else on the "
                "nodes of the Slurm job that this is in.",
            )(command)
        return command

    return add


def _option(setting: Setting) -> Callable[[Callable[..., None]], Callable[..., None]]:
    described = setting.help if setting.variable is None else f"{setting.help} [{setting.variable}]"
    if setting.kind is Kind.FLAG:
        both = f"{setting.option}/--no-{setting.option.removeprefix('--')}"
        return click.option(both, setting.key, is_flag=True, default=None, help=described)
    metavar = {
        Kind.FOLDER: "DIR",
        Kind.CHOICE: "|".join(setting.choices),
        Kind.SECONDS: "SECONDS",
        Kind.NETWORK: "NAME|CIDR",
    }.get(setting.kind, "N")
    return click.option(setting.option, setting.key, metavar=metavar, default=None, help=described)
