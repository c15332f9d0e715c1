"""What a run needs of a runtime, whoever started it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from slurm_pathways.config import SETTINGS, Kind, RuntimeSpec
from slurm_pathways.launch.controller_status import Report
from slurm_pathways.launch.program import Program


class Folder(Protocol):
    """Where a runtime's logs are."""

    @property
    def path(self) -> Path:
        """The run folder; its name is the runtime's."""

    @property
    def logs(self) -> Path:
        """The folder of all logs."""

    def log_of(self, component: str) -> Path:
        """The log of one process."""


class Runtime(Protocol):
    """A runtime for one program: ``start``, wait until ``is_ready``, ``program``, and in the end ``close``.

    Its events (``components.RuntimeEvent``) arrive where its maker was told to send them.
    """

    @property
    def spec(self) -> RuntimeSpec:
        """What it is made of."""

    @property
    def folder(self) -> Folder:
        """Between ``start`` and ``close``."""

    @property
    def startup_deadline_s(self) -> float:
        """When the start has failed, on ``time.monotonic``."""

    @property
    def kept_logs(self) -> Path | None:
        """After ``close``: where the logs are, if they stay."""

    def start(self) -> None:
        """Begin; returns at once."""

    def is_ready(self) -> bool:
        """Whether a program can be served."""

    def check_startup(self) -> None:
        """Raise StartupFailed if it will not become ready, or not in time."""

    def hosts_ready(self) -> dict[str, float]:
        """The hosts that are ready, by name, with the seconds that it took."""

    def program(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The command line and environment of a process that runs ``argv`` here."""

    def signal_program(self, program: Program, number: int) -> None:
        """Send a signal to the program behind the process that ``program`` gave the command line of."""

    def record(self, **changes: object) -> None:
        """Write down what runs; the fields are those of ``run_folder.RunRecord``."""

    def status(self, timeout_s: float) -> Report:
        """The controller's report; docs/status.md has the schema. For any thread.

        Raises:
            NoAnswer: there was none in time.
        """

    def describe_component(self, name: str) -> str:
        """A component's name for people."""

    def close(self) -> None:
        """End it, or leave it. May be called twice."""


def is_at_terminal() -> bool:
    """Whether a program that is started now would read from and write to a terminal."""
    return os.isatty(0) and os.isatty(1)


def settings_of(spec: RuntimeSpec) -> dict[str, str | int | float | bool | None]:
    """A spec to be written down; ``spec_of`` reads it."""
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    return {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}


def spec_of(settings: Mapping[str, str | int | float | bool | None]) -> RuntimeSpec:
    """The spec that ``settings_of`` has written.

    Raises:
        ConfigurationError, TypeError: another version wrote it.
    """
    folders = {setting.field for setting in SETTINGS if setting.kind is Kind.FOLDER}
    return RuntimeSpec(
        **{name: Path(str(value)) if name in folders and value else value for name, value in settings.items()}  # type: ignore[arg-type]
    )
