"""What can be asked of Slurm, behind one interface, and the choice of who answers: its commands, or pyslurm.

The commands answer everywhere. pyslurm answers what a run asks over and over (is the job whole, how are its nodes) in
milliseconds and without a process; it is used where it is installed and made for the Slurm that is here.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slurm_pathways.slurm.accounting import Record
from slurm_pathways.slurm.commands import CommandError, Slurm
from slurm_pathways.slurm.queue import Job, Node, Switch

_CONFIGURATION = "SLURM_CONF"


class Queries(Protocol):
    """Questions to slurmctld and to accounting. Each is answered anew; nothing is kept.

    All raise ``CommandError`` when no answer is to be had, and ``QueueError`` or ``AccountingError`` when it has a form
    that is not known.
    """

    def job(self, job_id: int) -> Job | None:
        """The job, or None when slurmctld has forgotten it (minutes after its end)."""

    def nodes(self, names: Sequence[str]) -> tuple[Node, ...]:
        """The records of these nodes, in the cluster's order."""

    def topology(self) -> tuple[Switch, ...]:
        """The switches; none where the cluster has no topology."""

    def records(self, job_id: int) -> tuple[Record, ...]:
        """What accounting has of the job and its steps. It lags by seconds, so the last states may be missing."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Who answers.

    Attributes:
        name: ``pyslurm`` or ``commands``.
        reason: why it is that one, for people.
    """

    queries: Queries
    name: str
    reason: str


def choose(
    commands: Slurm,
    installed_version: Callable[[], str | None] | None = None,
    load: Callable[[], Any] | None = None,
) -> Choice:
    """pyslurm where it is installed and made for the Slurm that is here, else the commands.

    pyslurm is not even imported before its version is known to match: without a Slurm that it can read, its import
    waits for a minute and then ends the whole process.

    Args:
        installed_version: of pyslurm, None when it is not installed; default: looks.
        load: imports it; default: does so.
    """
    version = (installed_version or _installed_version)()
    if version is None:
        return Choice(commands, "commands", "pyslurm is not installed")
    try:
        here = commands.version()
    except CommandError as failure:
        return Choice(commands, "commands", f"Slurm's version is not known: {failure}")
    if release(version) is None or release(version) != release(here):
        return Choice(commands, "commands", f"pyslurm {version} is made for another Slurm than {here}, which is here")
    chosen, own = (environ.get(_CONFIGURATION) for environ in (commands.environ, os.environ))
    if chosen != own:
        return Choice(
            commands, "commands", f"{_CONFIGURATION} is {chosen}, and pyslurm reads this process's own, which is {own}"
        )
    from slurm_pathways.slurm.pyslurm_queries import PyslurmQueries

    try:
        module = (load or _load)()
    except (ImportError, OSError) as failure:
        return Choice(commands, "commands", f"pyslurm {version} cannot be imported: {failure}")
    return Choice(PyslurmQueries(module, commands), "pyslurm", f"pyslurm {version} is made for the Slurm {here} here")


def release(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version: of ``22.05.8`` and of pyslurm's ``22.5.3``, 22 and 5."""
    found = re.search(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def _installed_version() -> str | None:
    # Here: the import takes longer than all else in this module, and most runs ask nothing.
    import importlib.metadata

    try:
        return importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        return None


def _load() -> Any:
    # It asks the linker to show the symbols of whatever is loaded later to all; JAX's libraries are not to be.
    flags = sys.getdlopenflags()
    try:
        return importlib.import_module("pyslurm")
    finally:
        sys.setdlopenflags(flags)
