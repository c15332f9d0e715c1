"""The steps of a run: how ``srun`` is called for each component, and with what environment. Pure.

One step per component, so that accounting shows each by its name and the death of one ends no other. Everything that a
step depends on is said on the command line, because srun takes what is not from the environment of the job, where
``sbatch`` options, the site and the user have left theirs.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_pathways.config import RUNS_VARIABLE
from slurm_pathways.slurm.environment import Allocation

#: Of the names of all steps of a runtime.
STEP_PREFIX = "pathways-"

#: The SPANK plugin's option, as Slurm passes it on. A step of ours with it would start a runtime in the runtime.
PLUGIN_OPTION = ("SLURM_SPANK__SLURM_SPANK_OPTION_pathways_pathways", "_SLURM_SPANK_OPTION_pathways_pathways")

#: What srun reads as options of a step, from its environment, and what contradicts those that we give.
_STEP_OPTIONS = frozenset(
    {
        "SLURM_CPU_BIND",
        "SLURM_CPUS_PER_GPU",
        "SLURM_CPUS_PER_TASK",
        "SLURM_DEBUG",
        "SLURM_DISTRIBUTION",
        "SLURM_EXACT",
        "SLURM_EXCLUSIVE",
        "SLURM_EXPORT_ENV",
        "SLURM_GPUS",
        "SLURM_GPUS_PER_NODE",
        "SLURM_GPUS_PER_SOCKET",
        "SLURM_GPUS_PER_TASK",
        "SLURM_HINT",
        "SLURM_JOB_NUM_NODES",
        "SLURM_KILL_BAD_EXIT",
        "SLURM_LABELIO",
        "SLURM_MEM_PER_CPU",
        "SLURM_MEM_PER_GPU",
        "SLURM_MEM_PER_NODE",
        "SLURM_MPI_TYPE",
        "SLURM_MULTI_PROG",
        "SLURM_NNODES",
        "SLURM_NPROCS",
        "SLURM_NTASKS",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_OVERLAP",
        "SLURM_REMOTE_CWD",
        "SLURM_STDERRMODE",
        "SLURM_STDINMODE",
        "SLURM_STDOUTMODE",
        "SLURM_STEP_GRES",
        "SLURM_STEP_KILLED_MSG_NODE_ID",
        "SLURM_THREADS_PER_CORE",
        "SLURM_TIMELIMIT",
        "SLURM_TRES_PER_TASK",
        "SLURM_UNBUFFEREDIO",
        "SLURM_WAIT",
        "SLURM_WORKING_DIR",
    }
)


#: Signals at which srun kills its step instead of passing them on to the task.
KILL_STEPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What one step is.

    Attributes:
        name: shown by ``squeue -s`` and ``sacct``.
        node: where its one task runs; with ``num_nodes``, a comma between each two, one task on each.
        has_devices: whether it gets the node's generic resources, or none.
        has_terminal: whether it gets a terminal of its own, connected to ours.
    """

    name: str
    node: str
    has_devices: bool = False
    has_terminal: bool = False
    num_nodes: int = 1


def srun_argv(allocation: Allocation, options: StepOptions, argv: Sequence[str]) -> list[str]:
    """The command that runs ``argv`` on its node beside all other steps there."""
    result = [
        *("srun", f"--jobid={allocation.job_id}", "--overlap"),
        *(f"--nodes={options.num_nodes}", f"--ntasks={options.num_nodes}"),
        *(f"--nodelist={options.node}", f"--job-name={options.name}"),
        # All memory of the job on that node, shared with the other steps.
        "--mem=0",
        # Not the default where sbatch was given --export.
        "--export=ALL",
        "--kill-on-bad-exit=0",
        "--mpi=none",
        # Ctrl-C is the program's at once, without a report of srun's and a second press.
        *("--disable-status", "--quiet"),
    ]
    if allocation.cpus_per_node is not None and options.num_nodes == 1:
        # Since 22.05 a step has one CPU unless it says how many.
        num_cpus = allocation.cpus_per_node[allocation.nodes.index(options.node)]
        result.append(f"--cpus-per-task={num_cpus}")
    if not options.has_devices:
        result.append("--gres=none")
    elif allocation.gres_per_node:
        gres = (
            f"{item.name}:{item.type}:{item.count}" if item.type else f"{item.name}:{item.count}"
            for item in allocation.gres_per_node
        )
        result.append("--gres=" + ",".join(gres))
    if options.has_terminal:
        result.append("--pty")
    return [*result, *argv]


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for an srun of ours and for what it starts: without options of steps."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _STEP_OPTIONS and name not in PLUGIN_OPTION and not name.startswith("SRUN_")
    }


def enter_argv(job_id: int, node: str, name: str, *, has_terminal: bool) -> list[str]:
    """What stands before a command that is to run on a node of a job that is not ours: a step without devices."""
    argv = ["srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--mem=0"]
    argv += ["--gres=none", "--export=ALL", "--mpi=none", "--disable-status", "--quiet", f"--job-name={name}"]
    return [*argv, *(["--pty"] if has_terminal else [])]


def enter_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without the job that it describes; where run folders are, it says still."""
    return {
        name: value
        for name, value in environ.items()
        if name in ("SLURM_CONF", RUNS_VARIABLE) or not name.startswith(("SLURM_", "SLURMD_", "SRUN_"))
    }
