"""``up`` and ``down``, and which runtime ``run`` and its like use."""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from slurm_pathways.config import ConfigurationError, RuntimeSpec, gather, resolve
from slurm_pathways.launch.client_environment import check_client_environment
from slurm_pathways.launch.components import RuntimeEvent
from slurm_pathways.launch.local import LocalRuntime
from slurm_pathways.launch.preflight import check_devices, check_machine
from slurm_pathways.launch.progress import Progress
from slurm_pathways.launch.run import run_local
from slurm_pathways.launch.run_folder import RunRecord, is_live
from slurm_pathways.launch.slurm import in_allocation, run_in_allocation
from slurm_pathways.launch.steps import STEP_PREFIX, enter_argv, enter_environment
from slurm_pathways.launch.warm.attached import run_warm
from slurm_pathways.launch.warm.background import keep_in_background
from slurm_pathways.launch.warm.find import find_warm
from slurm_pathways.launch.warm.keeper import keep
from slurm_pathways.launch.warm.messages import Answer, Down, Lines, Refused
from slurm_pathways.slurm.commands import CommandError, Slurm
from slurm_pathways.slurm.environment import job_id_of

#: For a runtime to end all its processes, on every node.
DOWN_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.05


class DownFailed(Exception):
    """The warm runtime goes on, or its end was not seen; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Where:
    """Which runtime is meant.

    Attributes:
        is_local: one on this machine, started anew.
        job_id: of the Slurm job; None for the one that we are in, or the warm one of this machine alone.
        run_dir: the folder of a warm one.
    """

    is_local: bool = False
    job_id: int | None = None
    run_dir: Path | None = None

    def __post_init__(self) -> None:
        given = [
            option
            for option, is_given in (
                ("--local", self.is_local),
                ("--job", self.job_id is not None),
                ("--run", self.run_dir is not None),
            )
            if is_given
        ]
        if len(given) > 1:
            raise ConfigurationError(f"{' and '.join(given)} exclude each other")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for: the arguments of ``config.resolve``."""

    options: Mapping[str, object]
    environ: Mapping[str, str]
    config_path: Path | None = None

    def spec(self) -> RuntimeSpec:
        """For this machine."""
        return resolve(self.options, self.environ, self.config_path)

    def values(self) -> dict[str, Any]:
        """For what else there is."""
        return gather(self.options, self.environ, self.config_path)


def run_program(where: Where, wishes: Wishes, argv: Sequence[str], verbosity: int) -> int:
    """Run a program on the warm runtime if there is one, else on one that is started for it.

    Returns:
        As of ``run.run_local``. Does not return where the job is another than ours: this process becomes a step of it.

    Raises:
        ConfigurationError: what was asked for cannot be; nothing has been started.
    """
    environ = wishes.environ
    if where.is_local:
        return run_local(wishes.spec(), argv, environ, verbosity)
    values = wishes.values()
    warm = _find(where, environ)
    if warm is not None:
        return run_warm(*warm, values, argv, environ, verbosity)
    return run_in_allocation(values, argv, environ, verbosity)


def up(where: Where, wishes: Wishes, verbosity: int, *, in_foreground: bool) -> int:
    """Start a runtime that programs come to and leave; returns once it is ready, or with its end.

    Raises:
        ConfigurationError: what was asked for cannot be, or there is one already; nothing has been started.
    """
    environ = wishes.environ
    check_client_environment(environ)
    make_runtime: Callable[[Callable[[RuntimeEvent], None]], LocalRuntime]
    job_id = None
    if where.is_local:
        spec = wishes.spec()
        check_devices(spec, environ)

        def make_runtime(on_event: Callable[[RuntimeEvent], None]) -> LocalRuntime:
            return LocalRuntime(spec, on_event=on_event, environ=environ)
    else:
        spec, allocation, make_runtime = in_allocation(wishes.values(), environ)
        job_id = allocation.job_id
    if (warm := find_warm(environ, job_id)) is not None:
        raise ConfigurationError(f"a warm runtime is here already ({warm[0]}): slurm-pathways down ends it")
    check_machine(spec)
    progress = Progress(spec, verbosity)

    def keep_one(on_ready: Callable[[Path], None]) -> int:
        return keep(make_runtime, job_id, environ, progress, on_ready)

    return keep_one(lambda _: None) if in_foreground else keep_in_background(keep_one)


def down(where: Where, environ: Mapping[str, str], *, is_forced: bool) -> None:
    """End the warm runtime; returns when nothing of it is left.

    Raises:
        ConfigurationError: there is none. DownFailed: see the class.
    """
    warm = _find(where, environ)
    if warm is None:
        place = "on this machine" if job_id_of(environ) is None else f"of job {job_id_of(environ)} on this machine"
        raise ConfigurationError(f"there is no warm runtime {place}: slurm-pathways up starts one")
    path, record = warm
    assert record.warm is not None
    deadline_s = time.monotonic() + DOWN_TIMEOUT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(record.warm.address)
            lines: Lines[Answer] = Lines(sock, Answer)
            lines.send(Down(is_forced))
        except OSError as failure:
            raise DownFailed(f"the keeper of {path} does not answer: {failure}") from failure
        for answer in lines.receive():
            if isinstance(answer, Refused):
                raise DownFailed(f"the warm runtime goes on: {answer.reason}")
    while is_live(path):
        if time.monotonic() >= deadline_s:
            raise DownFailed(f"the warm runtime of {path} has not ended within {DOWN_TIMEOUT_S:g} s; its log is there")
        time.sleep(_POLL_INTERVAL_S)


def _find(where: Where, environ: Mapping[str, str]) -> tuple[Path, RunRecord] | None:
    own_job_id = job_id_of(environ)
    warm = find_warm(environ, own_job_id if where.job_id is None else where.job_id, where.run_dir)
    if warm is None and where.job_id is not None and where.job_id != own_job_id:
        enter_job(where.job_id, environ)
    return warm


def enter_job(job_id: int, environ: Mapping[str, str]) -> NoReturn:
    """Become a step on the first node of another job, where the same command finds what it needs.

    Raises:
        ConfigurationError: that job does not run.
    """
    environ = enter_environment(environ)
    try:
        node = Slurm(environ).first_node(job_id)
    except CommandError as failure:
        raise ConfigurationError(f"--job {job_id}: {failure}") from failure
    if node is None:
        raise ConfigurationError(f"--job {job_id}: this job does not run (squeue --jobs={job_id} shows what it does)")
    words = enter_argv(job_id, node, STEP_PREFIX + "enter", has_terminal=os.isatty(0) and os.isatty(1))
    argv = [*words, os.path.abspath(sys.argv[0]), *without_job(sys.argv[1:])]  # noqa: PTH100 (bytes-exact)
    os.execvpe(argv[0], argv, environ)


def without_job(words: Sequence[str]) -> list[str]:
    """A command line without its ``--job``, whose first occurrence stands before any program's words."""
    for place, word in enumerate(words):
        if word == "--job":
            return [*words[:place], *words[place + 2 :]]
        if word.startswith("--job="):
            return [*words[:place], *words[place + 1 :]]
    return list(words)
