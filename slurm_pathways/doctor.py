"""``slurm-pathways doctor``: what on this machine would keep a run from going well, and how to get it right."""

import enum
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import psutil

from pathways_runtime.worker import private_sockets
from slurm_pathways.config import ConfigurationError, RuntimeSpec
from slurm_pathways.launch.client_environment import check_client_environment
from slurm_pathways.launch.placement import find_allocation
from slurm_pathways.launch.preflight import (
    open_files_limit,
    open_files_needed,
    shares_memory,
)
from slurm_pathways.launch.run_folder import make_private, runs_root
from slurm_pathways.launch.steps import StepOptions, srun_argv, step_environment
from slurm_pathways.slurm import hostlist
from slurm_pathways.slurm.accounting import AccountingError
from slurm_pathways.slurm.commands import CommandError, CommandMissing, Slurm
from slurm_pathways.slurm.environment import Allocation, is_in_job
from slurm_pathways.slurm.queries import Queries, choose, release
from slurm_pathways.slurm.queue import QueueError
from slurm_pathways.supported import OLDEST_JAX, TESTED_JAXES, TESTED_PYTHONS, TESTED_SLURMS, numbers

SCHEMA_VERSION = 1

#: Below this, the processes of a small run alone fill the memory.
_COMFORTABLE_MEMORY_BYTES = 4 << 30
#: What a run of eight hosts needs.
_COMFORTABLE_SPEC = RuntimeSpec(num_slices=8)

#: For the first answer of Slurm's. Its commands try for a minute where they find no configuration.
_FIRST_TIMEOUT_S = 5.0
#: For each further answer; a step on all nodes is one.
_SLURM_TIMEOUT_S = 30.0
HERE = "here"
#: In srun's help wherever plugstack.conf names the plugin.
PLUGIN_OPTION = "--pathways"
#: What a node says of itself, with the Python and the folder of a run and the plugin's option as arguments.
_ON_NODE = """
is() { "$@" >/dev/null 2>&1 && printf yes || printf no; }
plugin() { srun --help | grep -q -e "$3"; }
echo "$SLURMD_NODENAME $(is test -x "$1") $(is test -d "$2") $(is plugin "$@")"
"""

_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY")
_OPTIONAL_PACKAGES = {
    "flax": "for the examples",
    "optax": "for the examples",
    "scikit-learn": "for the examples",
    "pathwaysutils": "works with a run, is not needed for one",
}


class Level(enum.Enum):
    """How a finding bears on runs."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``remedy`` says how to get it right; empty when it is."""

    subject: str
    level: Level
    found: str
    remedy: str = ""


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Look at everything; changes nothing but for making the folder of runs."""
    return [
        check_python(sys.version_info[:3]),
        *(check_jax(name, _version(name)) for name in ("jax", "jaxlib")),
        check_shared_memory(shares_memory(), psutil.virtual_memory().available, _named_shared_memory_bytes()),
        check_open_files(open_files_limit()),
        _check_runs_root(environ),
        check_collectives(environ),
        *check_environment(environ),
        *check_slurm(environ),
        *(_check_optional(name, purpose) for name, purpose in _OPTIONAL_PACKAGES.items()),
    ]


def check_python(version: Sequence[int]) -> Finding:
    """Python's version, as in ``sys.version_info``."""
    text = ".".join(map(str, version))
    if ".".join(map(str, version[:2])) in TESTED_PYTHONS:
        return Finding("python", Level.OK, f"{text} ({platform.machine()})")
    tested = ", ".join(TESTED_PYTHONS)
    return Finding("python", Level.WARNING, f"{text}, not tested (tested: {tested})", "nothing, if it works for you")


def check_jax(name: str, version: str | None) -> Finding:
    """The version of jax or jaxlib; None when it is not installed."""
    if version is None:
        return Finding(name, Level.ERROR, "not installed", f"pip install 'jax>={OLDEST_JAX}'")
    if numbers(version) < numbers(OLDEST_JAX):
        return Finding(name, Level.ERROR, f"{version} is too old", f"pip install --upgrade 'jax>={OLDEST_JAX}'")
    if version not in TESTED_JAXES:
        tested = ", ".join(TESTED_JAXES)
        return Finding(
            name,
            Level.WARNING,
            f"{version}, not tested (tested: {tested})",
            f"if it misbehaves: pip install {name}=={_nearest_tested(version)}",
        )
    return Finding(name, Level.OK, f"{version}, tested")


def _nearest_tested(version: str) -> str:
    """The newest tested one that is not newer: a newer one may not exist for this Python."""
    return [tested for tested in TESTED_JAXES if numbers(tested) <= numbers(version)][-1]


def _named_shared_memory_bytes() -> int:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def check_shared_memory(is_shared: bool, available_bytes: int, named_bytes: int) -> Finding:
    """Memory that hosts on one machine pass tensors in.

    Args:
        is_shared: whether the system gives memory to share.
        available_bytes: of the machine's memory.
        named_bytes: free in /dev/shm. The runtime's memory has no names there; other libraries' may.
    """
    if not is_shared:
        return Finding("shared memory", Level.ERROR, "memfd_create fails", "run with --force-sockets")
    found = f"{available_bytes >> 20} MiB of memory available ({named_bytes >> 20} MiB in /dev/shm, not used by runs)"
    if available_bytes < _COMFORTABLE_MEMORY_BYTES:
        return Finding("shared memory", Level.WARNING, found, "ask for few hosts, or end what fills the memory")
    return Finding("shared memory", Level.OK, found)


def check_open_files(limit: int | None) -> Finding:
    """The hard limit of open files."""
    needed = open_files_needed(_COMFORTABLE_SPEC)
    if limit is not None and limit < needed:
        return Finding(
            "open files",
            Level.WARNING,
            f"at most {limit}; {_COMFORTABLE_SPEC.num_hosts} hosts need {needed}",
            "raise it with ulimit -Hn, or in /etc/security/limits.conf",
        )
    return Finding("open files", Level.OK, "no limit" if limit is None else f"at most {limit}")


def _check_runs_root(environ: Mapping[str, str]) -> Finding:
    root = runs_root(environ)
    try:
        make_private(root)
    except ConfigurationError as failure:
        return Finding("folder of runs", Level.ERROR, str(failure), "set SLURM_PATHWAYS_RUNS to a short path of yours")
    return Finding("folder of runs", Level.OK, str(root))


def check_collectives(environ: Mapping[str, str]) -> Finding:
    """Whether CPU devices of several hosts compute together by ways that nobody else can take."""
    subject = "CPU collectives"
    try:
        reason = private_sockets.try_preloading(environ)
    except (OSError, subprocess.TimeoutExpired) as failure:
        reason = f"it cannot be tried: {failure}"
    if not reason:
        return Finding(subject, Level.OK, "by Unix sockets, and as other data between machines")
    remedy = "install a C compiler (gcc, libc6-dev) and slurm-pathways again, or read docs/security.md"
    return Finding(subject, Level.WARNING, f"plain TCP: {reason}", remedy)


def check_environment(environ: Mapping[str, str]) -> list[Finding]:
    """Variables that would stop a run, or disturb it."""
    findings = []
    try:
        check_client_environment(environ)
    except ConfigurationError as failure:
        findings.append(Finding("JAX's variables", Level.ERROR, str(failure), "unset it"))
    else:
        findings.append(Finding("JAX's variables", Level.OK, "nothing that contradicts a run"))
    proxies = [name for name in _PROXY_VARIABLES if environ.get(name)]
    if proxies:
        findings.append(
            Finding("network proxies", Level.OK, f"{', '.join(proxies)} set; a run uses Unix sockets, which go by none")
        )
    else:
        findings.append(Finding("network proxies", Level.OK, "none set"))
    return findings


def check_slurm(environ: Mapping[str, str]) -> list[Finding]:
    """Slurm as it is seen from here, and the allocation that ``environ`` describes, with a step on its nodes."""
    slurm = Slurm(step_environment(environ), _SLURM_TIMEOUT_S)
    try:
        version = Slurm(slurm.environ, _FIRST_TIMEOUT_S).version()
    except CommandMissing as failure:
        if is_in_job(environ):
            return [Finding("Slurm", Level.ERROR, str(failure), "start slurm-pathways where srun is")]
        return [Finding("Slurm", Level.OK, "not here; run --local needs none")]
    except CommandError as failure:
        level = Level.ERROR if is_in_job(environ) else Level.WARNING
        return [Finding("Slurm", level, str(failure), "ask the site; run --local needs no Slurm")]
    tested = {release(name) for name in TESTED_SLURMS}
    finding = Finding("Slurm", Level.OK, f"{version}, tested")
    if release(version) not in tested:
        found = f"{version}, not tested (tested: {', '.join(TESTED_SLURMS)})"
        finding = Finding("Slurm", Level.WARNING, found, "nothing, if it works for you")
    chosen = choose(slurm)
    return [
        finding,
        Finding("Slurm is asked by", Level.OK, f"{chosen.name}: {chosen.reason}"),
        *_check_allocation(environ, slurm, chosen.queries, _has_plugin(slurm)),
    ]


def _has_plugin(slurm: Slurm) -> bool:
    """Whether srun has the plugin's option on this machine."""
    try:
        return PLUGIN_OPTION in slurm.run(["srun", "--help"])
    except CommandError:
        return False


def _check_allocation(environ: Mapping[str, str], slurm: Slurm, queries: Queries, has_plugin: bool) -> list[Finding]:
    if not is_in_job(environ):
        found = "none: this is not inside a job; start one with salloc or sbatch, or use run --local"
        return [Finding("allocation", Level.OK, found), check_plugin({HERE: has_plugin})]
    try:
        allocation = find_allocation(environ)
    except ConfigurationError as failure:
        return [Finding("allocation", Level.ERROR, str(failure), "see there")]
    what = f"job {allocation.job_id} on {len(allocation.nodes)} nodes, {hostlist.compress(allocation.nodes)}"
    try:
        job = queries.job(allocation.job_id)
        nodes = queries.nodes(job.nodes) if job is not None and job.nodes else ()
    except (CommandError, QueueError, AccountingError) as failure:
        return [Finding("allocation", Level.ERROR, f"{what}; {failure}", "ask the site whether slurmctld is well")]
    if job is None or job.state != "RUNNING":
        found = f"{what}, which is {'gone' if job is None else job.state}"
        return [Finding("allocation", Level.ERROR, found, "start in a job that runs: salloc, or sbatch")]
    if lost := [node for node in allocation.nodes if node not in job.nodes]:
        finding = Finding(
            "allocation",
            Level.ERROR,
            f"{what}, of which it has lost {hostlist.compress(lost)}",
            f"export SLURM_JOB_NODELIST={hostlist.compress(job.nodes)} SLURM_JOB_NUM_NODES={len(job.nodes)}; unset "
            "SLURM_JOB_CPUS_PER_NODE",
        )
        return [finding]
    silent = [node.name for node in nodes if not node.is_responding]
    if silent:
        found = f"slurmctld has no answer from {hostlist.compress(silent)}"
        return [Finding("allocation", Level.OK, what), Finding("nodes", Level.ERROR, found, "wait, or start a new job")]
    return [Finding("allocation", Level.OK, what), *_check_nodes(allocation, slurm, has_plugin)]


def _check_nodes(allocation: Allocation, slurm: Slurm, has_plugin: bool) -> list[Finding]:
    """What every node says of itself, in a step."""
    options = StepOptions("pathways-doctor", ",".join(allocation.nodes), num_nodes=len(allocation.nodes))
    on_node = ["/bin/sh", "-c", _ON_NODE, "sh", sys.executable, os.getcwd(), PLUGIN_OPTION]  # noqa: PTH109 (bytes-exact)
    try:
        lines = slurm.run(srun_argv(allocation, options, on_node)).splitlines()
    except CommandError as failure:
        return [Finding("nodes", Level.ERROR, str(failure), "srun --overlap hostname says more")]
    said = {words[0]: [word == "yes" for word in words[1:]] for words in map(str.split, lines) if len(words) == 4}
    plugin = {HERE: has_plugin, **{node: said[node][2] for node in allocation.nodes if node in said}}
    findings = check_nodes(allocation.nodes, said, sys.executable, os.getcwd())  # noqa: PTH109
    return [*findings, check_plugin(plugin)]


def check_nodes(nodes: Sequence[str], said: Mapping[str, Sequence[bool]], python: str, folder: str) -> list[Finding]:
    """What nodes have said of themselves: whether each has ``python``, and sees ``folder``."""
    findings = []
    without = {
        "no answer from": [node for node in nodes if node not in said],
        f"no {python} on": [node for node in nodes if node in said and not said[node][0]],
        f"no folder {folder} on": [node for node in nodes if node in said and not said[node][1]],
    }
    remedies = (
        "start a new job without them",
        "install slurm-pathways at one path for all",
        "start from a shared folder",
    )
    for (what, which), remedy in zip(without.items(), remedies, strict=True):
        if which:
            findings.append(Finding("nodes", Level.ERROR, f"{what} {hostlist.compress(which)}", remedy))
    if not findings:
        found = f"all {len(nodes)} start steps, and see {python} and {folder}"
        findings.append(Finding("nodes", Level.OK, found))
    return findings


def _listed(places: Sequence[str]) -> str:
    nodes = [place for place in places if place != HERE]
    parts = [HERE] if HERE in places else []
    return " and ".join([*parts, f"on {hostlist.compress(nodes)}"] if nodes else parts)


def check_plugin(places: Mapping[str, bool]) -> Finding:
    """The SPANK plugin, by place: a node, or ``here``."""
    having = [place for place, has in places.items() if has]
    lacking = [place for place, has in places.items() if not has]
    if not having:
        return Finding("SPANK plugin", Level.OK, "not here; only srun --pathways needs it")
    if not lacking:
        return Finding("SPANK plugin", Level.OK, f"loaded: srun --pathways works ({_listed(having)})")
    found = f"loaded {_listed(having)}, but not {_listed(lacking)}"
    return Finding("SPANK plugin", Level.WARNING, found, "srun --pathways needs it on all of them")


def _check_optional(name: str, purpose: str) -> Finding:
    version = _version(name)
    found = f"not installed ({purpose}: pip install {name})" if version is None else f"{version} ({purpose})"
    return Finding(name, Level.OK, found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def as_json(findings: Sequence[Finding]) -> str:
    """``{"schema_version", "is_ok", "findings": [{"subject", "level", "found", "remedy"}]}``."""
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "is_ok": all(finding.level is not Level.ERROR for finding in findings),
            "findings": [{**asdict(finding), "level": finding.level.value} for finding in findings],
        },
        indent=2,
    )


def as_text(findings: Sequence[Finding]) -> str:
    """One line per finding, remedies below."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.value:<8} {finding.subject}: {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<8}   -> {finding.remedy}")
    return "\n".join(lines)
