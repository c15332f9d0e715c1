"""Options that several commands have: one for each setting of a run, and the file of settings."""

from collections.abc import Callable
from pathlib import Path

import click

from slurm_pathways.config import SETTINGS, Kind, Setting

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def setting_options(command: Callable[..., None]) -> Callable[..., None]:
    """An option for each setting, and ``--config``. Values stay text: ``config`` parses them, as those from other
    places."""
    command = click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="YAML file with settings: the options' names with underscores. [SLURM_PATHWAYS_CONFIG]",
    )(command)
    for setting in reversed(SETTINGS):
        command = _option(setting)(command)
    return command


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
