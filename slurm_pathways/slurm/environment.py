"""The allocation that this process is in, from the ``SLURM_*`` variables of its environment.

Slurm sets different variables for batch scripts, steps, ``salloc`` shells, and across versions; shells entered by ssh
or an editor have some or none. What is missing or contradicts itself is an error that names the variables and says what
to do.

The variables are those of the moment when the process started: a job that has lost a node keeps the old list in its
environment. Ask ``commands`` where the present state matters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from slurm_pathways.slurm import hostlist, quantities
from slurm_pathways.slurm.quantities import Gres

_T = TypeVar("_T")

#: Names before Slurm 14 and those that steps still get, behind the present ones.
JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")
JOB_NODELIST = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
JOB_NUM_NODES = ("SLURM_JOB_NUM_NODES",)
JOB_CPUS_PER_NODE = ("SLURM_JOB_CPUS_PER_NODE",)
STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")


class EnvironmentProblem(Exception):
    """The environment does not describe an allocation; the message says what is wrong and what to do."""


class NotInJob(EnvironmentProblem):
    """This process is in no Slurm job."""


class PartialEnvironment(EnvironmentProblem):
    """Some variables of a job are there and others, which are needed, are not.

    Attributes:
        missing: the names that are missing.
    """

    def __init__(self, message: str, missing: tuple[str, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class BadVariable(EnvironmentProblem):
    """A variable has a value that cannot be, by itself or beside another one."""


@dataclass(frozen=True, slots=True)
class Step:
    """The step that this process is a task of.

    Attributes:
        step_id: a number; batch scripts and ``salloc`` shells are no steps.
        nodes: of the step; None where Slurm does not say.
        node: the name of this node, as Slurm calls it; None where Slurm does not say.
        node_index, task_index, local_task_index: of this task: its node in ``nodes``, its rank, its rank on the node.
        num_tasks: of the whole step.
        port_range: low and high port that Slurm keeps for the step, both usable; None without ``MpiParams=ports``.
    """

    step_id: int
    nodes: tuple[str, ...] | None
    node: str | None
    node_index: int | None
    task_index: int | None
    local_task_index: int | None
    num_tasks: int | None
    port_range: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Allocation:
    """What Slurm gave the job.

    Attributes:
        job_id: as ``squeue`` and ``scancel`` know it. Of a heterogeneous job: the leader's.
        nodes: in Slurm's order, at least one. Of a heterogeneous job: the first component's.
        cpus_per_node: one number for each of ``nodes``; None where Slurm does not say.
        memory_mib_per_node: as asked for; 0 means all of the node; None where it was asked for per CPU or not at all.
        memory_mib_per_cpu: likewise.
        gres_per_node: as asked for per node; empty where Slurm does not say, which is usual: see the nodes' records.
        num_components: 1, or the size of a heterogeneous job.
        array_job_id, array_task_id: of a job array's task.
        restart_count: how often the job has been requeued.
        step: None in a batch script and in a shell of ``salloc``.
    """

    job_id: int
    nodes: tuple[str, ...]
    cpus_per_node: tuple[int, ...] | None = None
    memory_mib_per_node: int | None = None
    memory_mib_per_cpu: int | None = None
    gres_per_node: tuple[Gres, ...] = ()
    job_name: str | None = None
    partition: str | None = None
    cluster: str | None = None
    submit_dir: str | None = None
    num_components: int = 1
    array_job_id: int | None = None
    array_task_id: int | None = None
    restart_count: int = 0
    step: Step | None = None


def is_in_job(environ: Mapping[str, str]) -> bool:
    """Whether the environment names a job at all; it may be partial."""
    return any(environ.get(name) for name in JOB_ID)


def job_id_of(environ: Mapping[str, str]) -> int | None:
    """The job that the environment names, which may be partial; None if it names none.

    Raises:
        BadVariable: it is no number.
    """
    return _Reader(environ).first(JOB_ID, _whole_number)


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """The allocation that ``environ`` describes.

    Raises:
        NotInJob, PartialEnvironment, BadVariable: see the classes.
    """
    read = _Reader(environ)
    job_id = read.first(JOB_ID, _whole_number)
    if job_id is None:
        raise NotInJob(_not_in_job(environ))
    nodes = read.first(JOB_NODELIST, hostlist.expand)
    if not nodes:
        raise PartialEnvironment(
            f"{JOB_ID[0]} says that this is job {job_id}, but {JOB_NODELIST[0]} is missing: this environment is not "
            "the job's own (a shell entered by ssh or an editor, or one that was cut down on the way). Start from "
            f"inside the job: srun --jobid={job_id} --overlap --pty bash, or set {JOB_NODELIST[0]} to what "
            f"squeue -h -j {job_id} -o %N prints",
            (JOB_NODELIST[0],),
        )
    _check_count(read, JOB_NUM_NODES, nodes, "nodes")
    cpus_per_node = read.first(JOB_CPUS_PER_NODE, quantities.expand_counts)
    if cpus_per_node is not None and len(cpus_per_node) != len(nodes):
        raise BadVariable(
            f"{JOB_CPUS_PER_NODE[0]}={environ[JOB_CPUS_PER_NODE[0]]} is for {len(cpus_per_node)} nodes, and the node "
            f"list {hostlist.compress(nodes)} has {len(nodes)}: {_STALE}"
        )
    return Allocation(
        job_id=job_id,
        nodes=nodes,
        cpus_per_node=cpus_per_node,
        memory_mib_per_node=read.first(("SLURM_MEM_PER_NODE",), _mebibytes),
        memory_mib_per_cpu=read.first(("SLURM_MEM_PER_CPU",), _mebibytes),
        gres_per_node=read.first(("SLURM_JOB_GRES", "SLURM_TRES_PER_NODE"), quantities.gres_list) or (),
        job_name=environ.get("SLURM_JOB_NAME"),
        partition=environ.get("SLURM_JOB_PARTITION"),
        cluster=environ.get("SLURM_CLUSTER_NAME"),
        submit_dir=environ.get("SLURM_SUBMIT_DIR"),
        num_components=read.first(("SLURM_HET_SIZE", "SLURM_PACK_SIZE"), _whole_number) or 1,
        array_job_id=read.first(("SLURM_ARRAY_JOB_ID",), _whole_number),
        array_task_id=read.first(("SLURM_ARRAY_TASK_ID",), _whole_number),
        restart_count=read.first(("SLURM_RESTART_COUNT",), _whole_number) or 0,
        step=_read_step(read),
    )


_STALE = "these variables do not belong together. Start from a fresh shell of the job, or unset them"


def _not_in_job(environ: Mapping[str, str]) -> str:
    others = sorted(name for name in environ if name.startswith(("SLURM_", "SLURMD_")) and "PATHWAYS" not in name)
    found = f" (of Slurm's variables there are only {', '.join(others[:5])})" if others else ""
    return (
        f"this is not inside a Slurm job: {JOB_ID[0]} is missing{found}. Start inside one, with salloc or sbatch; or "
        "add --local for a runtime on this machine"
    )


def _read_step(read: "_Reader") -> Step | None:
    step_id = read.first(STEP_ID, _whole_number)
    # Batch scripts and shells of salloc have no step id; older versions show a special number, above every real one.
    if step_id is None or step_id >= 0xFFFFFFF0:
        return None
    nodes = read.first(("SLURM_STEP_NODELIST",), hostlist.expand)
    if nodes is not None:
        _check_count(read, ("SLURM_STEP_NUM_NODES",), nodes, "nodes of the step")
    return Step(
        step_id=step_id,
        nodes=nodes,
        node=read.first(("SLURMD_NODENAME",), str),
        node_index=read.first(("SLURM_NODEID",), _whole_number),
        task_index=read.first(("SLURM_PROCID",), _whole_number),
        local_task_index=read.first(("SLURM_LOCALID",), _whole_number),
        num_tasks=read.first(("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), _whole_number),
        port_range=read.first(("SLURM_STEP_RESV_PORTS",), _port_range),
    )


class _Reader:
    """Reads variables and says which one is wrong."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def first(self, names: tuple[str, ...], parse: Callable[[str], _T]) -> _T | None:
        """The value of the first of the names that is set and not empty; None when none is.

        Raises:
            BadVariable: ``parse`` refused it.
        """
        for name in names:
            text = self.environ.get(name)
            if text:
                try:
                    return parse(text)
                except ValueError as failure:
                    raise BadVariable(f"{name}={text} cannot be: {failure}") from failure
        return None


def _check_count(read: _Reader, names: tuple[str, ...], nodes: tuple[str, ...], what: str) -> None:
    count = read.first(names, _whole_number)
    if count is not None and count != len(nodes):
        raise BadVariable(
            f"{names[0]}={count}, and there are {len(nodes)} {what}, {hostlist.compress(nodes)}: {_STALE}"
        )


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("it must be a whole number")
    return int(text)


def _mebibytes(text: str) -> int:
    # A plain number is in MiB; newer versions may write a unit.
    if text.isascii() and text.isdigit():
        return int(text)
    return quantities.size_bytes(text) >> 20


def _port_range(text: str) -> tuple[int, int]:
    # Several ranges are possible where ports were taken: the first is as good as any.
    low, _, high = text.split(",")[0].partition("-")
    return _whole_number(low), _whole_number(high or low)
