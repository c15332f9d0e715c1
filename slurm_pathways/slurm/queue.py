"""What slurmctld says of jobs, nodes and switches: the output of squeue and scontrol as values.

Jobs are read from ``squeue --json``, in every form that it has had from 22.05 to 25.11. The ``key=value`` text of
scontrol is for nodes and switches, which administrators name, and for people: in a job's text, a name or comment that
its user chose can look like further keys.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_pathways.slurm import hostlist, quantities
from slurm_pathways.slurm.quantities import Gres
from slurm_pathways.slurm.states import BASE, ENDED, ExitStatus

#: Keys of scontrol whose value is free text and goes on to the end of the line.
_FREE_TEXT = frozenset(
    {"JobName", "Comment", "AdminComment", "SystemComment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Reason"}
    | {"OS", "Extra", "SubmitLine"}
)
#: What scontrol writes behind the reason for a node's state.
_WHO_AND_WHEN = re.compile(r" \[[^\[\]@]*@[^\[\]@]*\]$")
_PAIR = re.compile(r"(?P<key>[A-Za-z][\w/:.]*)=(?P<value>\S*)\s*", re.ASCII)


class QueueError(ValueError):
    """A text is not what the command prints; the message quotes the part that is wrong."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job in the queue.

    Attributes:
        array_job_id, array_task_id: of a job array's task.
        het_job_id: the leader's id, in a heterogeneous job.
        states: the base state first, then flags: ``("RUNNING", "COMPLETING")``.
        nodes: those it has now, in Slurm's order: a node that was lost is not among them.
        exit_status: meaningful once the job has ended.
        reason: why it waits or failed; "None" if there is none.
        started_at_unix_s, ends_at_unix_s: None while Slurm does not know; the end may be expected or real.
        time_limit_min: None without a limit.
        tres: what is allocated, by name, as far as the answer tells; ``mem`` in bytes.
    """

    job_id: int
    name: str
    user: str
    states: tuple[str, ...]
    reason: str
    nodes: tuple[str, ...]
    exit_status: ExitStatus
    comment: str
    partition: str
    array_job_id: int | None
    array_task_id: int | None
    het_job_id: int | None
    restart_count: int
    started_at_unix_s: int | None
    ends_at_unix_s: int | None
    time_limit_min: int | None
    tres: Mapping[str, int]

    @property
    def state(self) -> str:
        """The base state."""
        return self.states[0]

    @property
    def is_ended(self) -> bool:
        """Whether it will run no more, unless it is requeued."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster.

    Attributes:
        states: the base state first, then flags: ``("IDLE", "DRAIN")``.
        is_responding: False when slurmd has been silent (the ``*`` behind the state).
        features: those that are active now.
        memory_mib: as configured.
        reason: why it is down or drained, as it was given; "" if there is none.
    """

    name: str
    states: tuple[str, ...]
    is_responding: bool
    features: tuple[str, ...]
    gres: tuple[Gres, ...]
    num_cpus: int
    memory_mib: int
    address: str
    partitions: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch of the tree, or a block of a block topology, which is a switch of level 0.

    Attributes:
        level: 0 for those that nodes hang on.
        nodes: all below it.
        children: names of the switches directly below it.
    """

    name: str
    level: int
    nodes: tuple[str, ...]
    children: tuple[str, ...]


# Jobs


def parse_squeue_json(text: str) -> tuple[Job, ...]:
    """The jobs of ``squeue --json``.

    Raises:
        QueueError: it is no such JSON, or Slurm reports errors in it.
    """
    try:
        document = json.loads(text)
        errors = document.get("errors") or ()
        records = document["jobs"]
    except (ValueError, AttributeError, KeyError) as failure:
        raise QueueError(f"this is not squeue's JSON: {text[:100]!r}") from failure
    if errors:
        raise QueueError(f"squeue reports errors: {json.dumps(errors)}")
    return tuple(_job(record) for record in records)


def _job(record: Mapping[str, Any]) -> Job:
    try:
        return Job(
            job_id=record["job_id"],
            name=record["name"],
            user=record["user_name"],
            states=_states(record["job_state"]),
            reason=record.get("state_reason") or "None",
            nodes=_job_nodes(record),
            exit_status=_exit_status(record["exit_code"]),
            comment=record["comment"],
            partition=record["partition"],
            array_job_id=_number(record["array_job_id"]) or None,
            array_task_id=_number(record["array_task_id"]),
            het_job_id=_number(record["het_job_id"]) or None,
            restart_count=record["restart_cnt"],
            started_at_unix_s=_number(record["start_time"]) or None,
            ends_at_unix_s=_number(record["end_time"]) or None,
            time_limit_min=_number(record["time_limit"]),
            tres=quantities.tres(record["tres_alloc_str"]),
        )
    except (KeyError, TypeError, AttributeError) as failure:
        raise QueueError(f"job {record.get('job_id', '?')}: unknown form of {failure}") from failure
    except ValueError as failure:
        raise QueueError(f"job {record.get('job_id', '?')}: {failure}") from failure


def _number(value: Any) -> int | None:
    """A number that may be absent: plain or null in 22.05, ``{set, infinite, number}`` since. Infinite is absent."""
    if isinstance(value, dict):
        return int(value["number"]) if value["set"] and not value["infinite"] else None
    # --json=v0.0.4x+complex writes "Infinity" as text.
    return None if value is None or isinstance(value, str) else int(value)


def _states(value: Any) -> tuple[str, ...]:
    """One word until 23.02, a list of words since."""
    words = [value] if isinstance(value, str) else list(value)
    base = [word for word in words if word in BASE]
    if not words:
        raise ValueError("it has no state")
    return (*base, *(word for word in words if word not in base))


def _job_nodes(record: Mapping[str, Any]) -> tuple[str, ...]:
    """``nodes`` is the allocation in every version; a pending job has "" there."""
    return hostlist.expand(record["nodes"] or "")


def _exit_status(value: Any) -> ExitStatus:
    """A wait status until 23.02 (plain, then as an absent-able number), code and signal since 23.11."""
    if isinstance(value, dict) and "return_code" in value:
        signal = value.get("signal", {})
        return ExitStatus(_number(value["return_code"]) or 0, _number(signal.get("id", signal.get("signal_id"))) or 0)
    return ExitStatus.from_wait_status(_number(value) or 0)


# scontrol


def parse_scontrol(text: str) -> tuple[Mapping[str, str], ...]:
    """The records of ``scontrol show job|node|step`` (without ``-o``), each as its keys and values.

    Of a key that is there twice the first counts. Values keep what they are, ``(null)`` and ``N/A`` included.
    """
    records = []
    for block in re.split(r"\n[ \t]*\n", text.strip("\n")):
        pairs: dict[str, str] = {}
        for line in block.splitlines():
            _read_pairs(line.strip(), pairs)
        if pairs:
            records.append(pairs)
    return tuple(records)


def _read_pairs(line: str, pairs: dict[str, str]) -> None:
    place = 0
    while match := _PAIR.match(line, place):
        key, value = match["key"], match["value"]
        if key in _FREE_TEXT:
            pairs.setdefault(key, line[match.start("value") :])
            return
        pairs.setdefault(key, value)
        place = match.end()


def parse_nodes(text: str) -> tuple[Node, ...]:
    """The nodes of ``scontrol show node`` (without ``-o``).

    Raises:
        QueueError: a record has not the keys of a node.
    """
    nodes = []
    for record in parse_scontrol(text):
        try:
            states, is_responding = node_states(record["State"])
            nodes.append(
                Node(
                    name=record["NodeName"],
                    states=states,
                    is_responding=is_responding,
                    features=_words(record["ActiveFeatures"]),
                    gres=quantities.gres_list(record["Gres"]),
                    num_cpus=int(record["CPUTot"]),
                    memory_mib=int(record["RealMemory"]),
                    address=record["NodeAddr"],
                    partitions=_words(record.get("Partitions", "")),
                    reason=_WHO_AND_WHEN.sub("", record.get("Reason", "")),
                )
            )
        except (KeyError, ValueError) as failure:
            raise QueueError(f"node {record.get('NodeName', '?')}: unknown form of {failure}") from failure
    return tuple(nodes)


def node_states(text: str) -> tuple[tuple[str, ...], bool]:
    """A node's states, as in ``DOWN*+DRAIN``, and whether it responds."""
    return (
        tuple(word.rstrip("*~#$@%^!-") for word in text.split("+")),
        "*" not in text and "NOT_RESPONDING" not in text,
    )


def _words(text: str) -> tuple[str, ...]:
    return () if text in ("", "(null)", "N/A") else tuple(text.split(","))


def parse_topology(text: str) -> tuple[Switch, ...]:
    """The switches of ``scontrol show topology``, or its blocks; none where the cluster has no topology.

    Raises:
        QueueError: a line is of neither form.
    """
    switches = []
    for line in text.splitlines():
        pairs: dict[str, str] = {}
        _read_pairs(line.strip(), pairs)
        name = pairs.get("SwitchName", pairs.get("BlockName"))
        if name is None:
            if line.strip() and "=" in line and "AggregatedBlock" not in pairs:
                raise QueueError(f"{line!r} is no switch and no block")
            continue
        try:
            nodes = hostlist.expand(pairs.get("Nodes", ""))
            children = hostlist.expand(pairs.get("Switches", ""))
            switches.append(Switch(name, int(pairs.get("Level", "0")), nodes, children))
        except ValueError as failure:
            raise QueueError(f"{line!r}: {failure}") from failure
    return tuple(switches)
