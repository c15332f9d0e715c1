"""``Queries`` by pyslurm's new API (``Job``, ``Nodes``), as it is in 22.5 and in 25.11.

pyslurm answers only what it says as fully as the commands do, which are asked for the rest:

* Jobs that do not run. It takes 128 off exit codes from 128 up, names only one of a job's states, and tells apart
  neither task 0 of an array from its waiting rest nor the reason for waiting from its description.
* Topology: it has none.
* Accounting: ``pyslurm.db`` keeps one row for each job id, and a job that has lost a node has several; in 22.5 it has
  no generic resources.

A call holds the interpreter until slurmctld answers: when it is away, for some tens of seconds (MessageTimeout).
"""

from collections.abc import Sequence
from typing import Any

from slurm_pathways.slurm import hostlist, queue
from slurm_pathways.slurm.accounting import Record
from slurm_pathways.slurm.commands import Slurm
from slurm_pathways.slurm.quantities import Gres
from slurm_pathways.slurm.queue import Job, Node, Switch
from slurm_pathways.slurm.states import ExitStatus

#: Slurm's ESLURM_INVALID_JOB_ID: there is no such job (any more).
_INVALID_JOB_ID = 2017


class PyslurmQueries:
    """See the module; ``slurm.queries.Queries`` has the contract.

    Args:
        module: pyslurm.
        commands: who is asked for what pyslurm does not say.
    """

    def __init__(self, module: Any, commands: Slurm) -> None:
        self._pyslurm = module
        self._commands = commands

    def job(self, job_id: int) -> Job | None:
        """As in ``Queries``. ``tres`` has only ``cpu`` and ``node`` of a job that runs."""
        try:
            found = self._pyslurm.Job.load(job_id)
        except self._pyslurm.RPCError as failure:
            if failure.errno == _INVALID_JOB_ID:
                return None
            # They say what is wrong, and what to do.
            return self._commands.job(job_id)
        # Asked for an array, it may answer with any of its tasks.
        if found.id != job_id or found.state != "RUNNING":
            return self._commands.job(job_id)
        return _job(found)

    def nodes(self, names: Sequence[str]) -> tuple[Node, ...]:
        """As in ``Queries``."""
        wanted = set(names)
        try:
            nodes = tuple(_node(node) for node in self._pyslurm.Nodes.load().values() if node.name in wanted)
        except (self._pyslurm.RPCError, ValueError, IndexError):
            # The last two: forms of generic resources that it cannot read.
            return self._commands.nodes(names)
        return nodes if len(nodes) == len(wanted) else self._commands.nodes(names)

    def topology(self) -> tuple[Switch, ...]:
        """As in ``Queries``."""
        return self._commands.topology()

    def records(self, job_id: int) -> tuple[Record, ...]:
        """As in ``Queries``."""
        return self._commands.records(job_id)


def _job(job: Any) -> Job:
    """A job that runs."""
    array_task_id = job.array_task_id
    if job.array_id is not None and array_task_id is None:
        # It takes 0 for nothing; what runs of an array is a task.
        array_task_id = 0
    return Job(
        job_id=job.id,
        name=job.name or "",
        user=job.user_name,
        states=(job.state,),
        reason=job.state_reason or "None",
        nodes=hostlist.expand(job.allocated_nodes or ""),
        exit_status=ExitStatus(0, 0),
        comment=job.comment or "",
        partition=job.partition or "",
        array_job_id=job.array_id,
        array_task_id=array_task_id,
        het_job_id=job.heterogeneous_id or None,
        restart_count=job.requeue_count,
        started_at_unix_s=job.start_time,
        ends_at_unix_s=job.end_time,
        time_limit_min=job.time_limit,
        tres={"cpu": job.cpus, "node": job.num_nodes},
    )


def _node(node: Any) -> Node:
    states, is_responding = queue.node_states(node.state)
    if states[0] == "ALLOCATED" and node.allocated_cpus < node.total_cpus:
        # As scontrol says it; until 25.11 pyslurm leaves this to its caller.
        states = ("MIXED", *states[1:])
    return Node(
        name=node.name,
        states=states,
        is_responding=is_responding,
        features=tuple(node.active_features or ()),
        gres=tuple(_gres(name, count) for name, count in (node.configured_gres or {}).items()),
        num_cpus=node.total_cpus,
        memory_mib=node.real_memory,
        address=node.address,
        partitions=tuple(node.partitions or ()),
        reason=node.reason or "",
    )


def _gres(key: str, count: int) -> Gres:
    name, _, kind = key.partition(":")
    return Gres(name, kind, count)
