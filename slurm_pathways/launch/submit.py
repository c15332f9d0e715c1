"""``slurm-pathways submit``: a batch job from a template, and the wait for its end."""

import dataclasses
import importlib.resources
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_pathways.config import MAX_HOSTS, SETTINGS, ConfigurationError, Kind
from slurm_pathways.slurm import outcome
from slurm_pathways.slurm.commands import CommandError, Slurm
from slurm_pathways.slurm.outcome import NOT_THE_PROGRAMS, Outcome
from slurm_pathways.slurm.sbatch import Option, SbatchError, Template, render
from slurm_pathways.slurm.slicing import SliceCounts, SlicingError, by_counts

TEMPLATES = "slurm_pathways.sbatch_templates"
SUFFIX = ".sbatch"

#: A busy slurmctld makes sbatch wait and try again. A job may have been made of what is not waited for.
SUBMIT_TIMEOUT_S = 120.0
#: Between two looks at the job: a tenth of the time waited so far, within these.
MIN_POLL_S, MAX_POLL_S = 0.5, 30.0
#: A slurmctld that is away for longer is not waited for: whoever restarts it is asleep.
AWAY_TIMEOUT_S = 3600.0
#: In place of tasks that Slurm did not name.
_CUT_SHORT = "…"
#: Accounting lags behind slurmctld by seconds.
ACCOUNTING_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """A job to submit.

    Attributes:
        template: a name of ``template_names``, or the path of a script (one that has a slash or ``.sbatch`` in it).
        values: the settings of the run, from ``config.gather``.
        options: of sbatch, in the order in which they count; the last wins.
        program: with its arguments; empty for templates that run none.
    """

    template: str
    values: Mapping[str, Any]
    options: tuple[Option, ...]
    program: tuple[str, ...]


def template_names() -> list[str]:
    """Of those that are installed with this package."""
    folder = importlib.resources.files(TEMPLATES)
    return sorted(entry.name.removesuffix(SUFFIX) for entry in folder.iterdir() if entry.name.endswith(SUFFIX))


def read_template(name: str) -> Template:
    """A template by its name, or path.

    Raises:
        ConfigurationError: there is none, or it cannot be used.
    """
    try:
        if "/" in name or name.endswith(SUFFIX):
            text = Path(name).read_text(encoding="utf-8")
        elif name in template_names():
            text = (importlib.resources.files(TEMPLATES) / (name + SUFFIX)).read_text(encoding="utf-8")
        else:
            raise ConfigurationError(
                f"there is no template {name!r}; there are {', '.join(template_names())}, or give the path of a script "
                "of yours"
            )
        return Template.parse(text)
    except OSError as failure:
        raise ConfigurationError(f"the template {name} cannot be read: {failure.strerror}") from failure
    except (SbatchError, UnicodeDecodeError) as failure:
        raise ConfigurationError(f"the template {name} cannot be used: {failure}") from failure


def make_script(request: Request, executable: str) -> tuple[str, tuple[Option, ...]]:
    """The batch script, and the options in it that were asked for, the number of nodes included.

    Args:
        executable: the path of ``slurm-pathways`` on the nodes.

    Raises:
        ConfigurationError: it cannot be made, or the job could not do what is asked for.
    """
    template = read_template(request.template)
    options = (*_nodes(template, request), *request.options)
    try:
        script = render(
            template,
            options=options,
            executable=executable,
            settings=_setting_options(request.values),
            program=request.program,
        )
    except SbatchError as failure:
        raise ConfigurationError(str(failure)) from failure
    return script, options


def _setting_options(values: Mapping[str, Any]) -> dict[str, str | None]:
    options: dict[str, str | None] = {}
    for setting in SETTINGS:
        value = values.get(setting.field)
        if value is None:
            continue
        if setting.kind is Kind.FLAG:
            options[setting.option if value else "--no-" + setting.option.removeprefix("--")] = None
        else:
            options[setting.option] = str(value)
    return options


_COUNTS = {"num_slices": "--slices", "hosts_per_slice": "--hosts-per-slice", "num_spares": "--spares"}


def _nodes(template: Template, request: Request) -> tuple[Option, ...]:
    """How many nodes to ask for where the user has not said it; none where the template's number stands."""
    counts = {
        field: request.values.get(field, _count(template.settings.get(option))) for field, option in _COUNTS.items()
    }
    given = next((option.value for option in reversed(request.options) if option.name in ("--nodes", "-N")), None)
    is_asked = any(field in request.values for field in _COUNTS)
    if given is None and is_asked:
        num_nodes = max(1, counts["num_slices"]) * max(1, counts["hosts_per_slice"]) + counts["num_spares"]
        return (Option("--nodes", str(num_nodes)),)
    if given is not None and 0 < (num_nodes := _count(given)) <= MAX_HOSTS:
        wanted = SliceCounts(counts["num_slices"] or None, counts["hosts_per_slice"] or None, counts["num_spares"])
        try:
            by_counts([str(number) for number in range(num_nodes)], wanted)
        except SlicingError as failure:
            raise ConfigurationError(f"--nodes {given}: {failure}") from failure
    return ()


def _count(text: str | None) -> int:
    """0 for what is only known in the job (a variable), or no one number (``4-8``)."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() else 0


#: They change what sbatch prints, or when it returns.
_REFUSED = {
    "--wait": "give submit --wait instead",
    "-W": "give submit --wait instead",
    "--wrap": "the script is the template's",
    "--test-only": "submit --dry-run prints the script, which sbatch --test-only takes",
}


def check_options(options: Sequence[Option], *, is_waiting: bool) -> None:
    """See that options of sbatch leave the job one that can be submitted, and waited for.

    Raises:
        ConfigurationError: one does not.
    """
    for option in options:
        if option.name in _REFUSED:
            raise ConfigurationError(f"--sbatch {option.word}: {_REFUSED[option.name]}")
        if is_waiting and option.name in ("--clusters", "--cluster", "-M"):
            raise ConfigurationError(f"--sbatch {option.word}: a job on another cluster cannot be waited for from here")


def submit(script: str, options: Sequence[Option], slurm: Slurm) -> tuple[int, str]:
    """Submit a script. Returns the job id, and what sbatch said besides.

    Args:
        options: of the script, those that count more than the user's SBATCH_* variables.

    Raises:
        CommandError: sbatch did not take it.
    """
    return dataclasses.replace(slurm, timeout_s=SUBMIT_TIMEOUT_S).submit(script, [option.word for option in options])


def wait(
    job_id: int,
    slurm: Slurm,
    say: Callable[[str], None],
    *,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait until a job has ended, for as long as it takes.

    Args:
        say: gets lines for the user: what the exit code does not say, and what the wait is about if it is long.

    Returns:
        Its exit code, as ``Outcome.exit_code`` has it; of a job array the highest one. ``NOT_THE_PROGRAMS`` when it
        cannot be known.
    """
    begun_s = heard_s = now_s()
    is_forgotten = has_complained = False
    # Tasks of a job array are forgotten one by one, perhaps before they were seen to end.
    seen: set[str] = set()
    ended: dict[str, Outcome] = {}
    while True:
        try:
            outcomes = None if is_forgotten else slurm.outcomes(job_id)
            if outcomes is not None:
                seen |= _jobs(outcomes)
                ended |= {job: one for one in outcomes if one.is_ended for job in one.jobs or (one.job,)}
                if all(one.is_ended for one in outcomes) and seen - ended.keys():
                    outcomes = None
            if outcomes is None:
                is_forgotten = True
                outcomes = _accounted(job_id, slurm, seen)
                ended |= {one.job: one for one in outcomes}
        except (CommandError, ValueError) as failure:
            patience_s = ACCOUNTING_TIMEOUT_S if is_forgotten else AWAY_TIMEOUT_S
            if now_s() - heard_s >= patience_s:
                say(f"how job {job_id} ends, or has ended, cannot be known: {failure}")
                return NOT_THE_PROGRAMS
            if not has_complained:
                say(f"job {job_id}: trying again for {patience_s / 60:g} min: {failure}")
                has_complained = True
        else:
            heard_s, has_complained = now_s(), False
            if all(one.is_ended for one in outcomes):
                return _report(outcome.worst(list(ended.values())), say)
        sleep(min(MAX_POLL_S, max(MIN_POLL_S, (now_s() - begun_s) / 10)))


def _jobs(outcomes: Sequence[Outcome]) -> set[str]:
    """One by one; of a list that was cut short only that there is one, so that accounting is asked."""
    return {job for one in outcomes for job in one.jobs or (_CUT_SHORT,)}


def _accounted(job_id: int, slurm: Slurm, seen: Set[str]) -> tuple[Outcome, ...]:
    """What accounting has of a job of which slurmctld has forgotten all or some tasks."""
    outcomes = outcome.from_accounting(slurm.records(job_id), job_id)
    if not outcomes or not all(one.is_ended for one in outcomes) or seen - _jobs(outcomes) - {_CUT_SHORT}:
        raise CommandError("slurmctld has forgotten it, and accounting (sacct) does not have its end yet")
    return outcomes


def _report(ended: Outcome, say: Callable[[str], None]) -> int:
    if ended.description is not None:
        say(ended.description)
    if ended.exit_code and ended.output:
        say(f"its output is in {ended.output}")
    return ended.exit_code
