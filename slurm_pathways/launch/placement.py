"""Which nodes a run uses and what each of them does, decided before anything starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_pathways.config import SLICINGS, ConfigurationError, RuntimeSpec
from slurm_pathways.slurm import hostlist
from slurm_pathways.slurm.commands import CommandError, Slurm
from slurm_pathways.slurm.environment import Allocation, EnvironmentProblem, read_allocation
from slurm_pathways.slurm.queries import choose
from slurm_pathways.slurm.queue import QueueError
from slurm_pathways.slurm.slicing import (
    SliceCounts,
    SlicePlan,
    SlicingError,
    by_counts,
    by_labels,
    by_topology,
    feature_labels,
    gres_labels,
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which node does what. ``workers[N]`` is the node of worker N: slices first, in their order, then spares."""

    head: str
    workers: tuple[str, ...]


def plan(values: Mapping[str, Any], nodes: Sequence[str], slurm: Slurm) -> tuple[RuntimeSpec, Placement]:
    """The runtime that was asked for (``config.gather``) on these nodes; nodes that no slice needs are spares.

    Args:
        slurm: asked once, unless nodes are taken in their order.

    Raises:
        ConfigurationError: it cannot be had there.
    """
    counts = SliceCounts(values.get("num_slices"), values.get("hosts_per_slice"), values.get("num_spares", 0))
    slice_by = values.get("slice_by", SLICINGS[0])
    try:
        slices = _divide(slice_by, nodes, counts, slurm)
    except SlicingError as failure:
        raise ConfigurationError(f"{failure} (the nodes are {hostlist.compress(nodes)})") from failure
    except (CommandError, QueueError) as failure:
        raise ConfigurationError(
            f"--slice-by {slice_by} needs what Slurm knows of the nodes: {failure}. Without it, --slice-by order takes "
            "nodes as they stand in the allocation"
        ) from failure
    spec = RuntimeSpec(
        **{
            **values,
            "num_slices": len(slices.slices),
            "hosts_per_slice": len(slices.slices[0]),
            "num_spares": len(slices.spares),
        }
    )
    workers = tuple(node for members in slices.slices for node in members) + slices.spares
    return spec, Placement(nodes[0], workers)


def _divide(slice_by: str, nodes: Sequence[str], counts: SliceCounts, slurm: Slurm) -> SlicePlan:
    match slice_by:
        case "topology":
            switches = slurm.topology()
            if not switches:
                raise SlicingError(
                    "--slice-by topology: Slurm knows of no switches here (scontrol show topology prints none): use "
                    "feature, gres or order"
                )
            return by_topology(nodes, switches, counts)
        case "feature":
            return by_labels(nodes, feature_labels(choose(slurm).queries.nodes(nodes)), counts)
        case "gres":
            return by_labels(nodes, gres_labels(choose(slurm).queries.nodes(nodes)), counts)
        case _:
            return by_counts(nodes, counts)


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """The allocation to run in.

    Raises:
        ConfigurationError: there is none, or it is of a kind that a run cannot use.
    """
    try:
        allocation = read_allocation(environ)
    except EnvironmentProblem as failure:
        raise ConfigurationError(str(failure)) from failure
    if allocation.num_components > 1:
        raise ConfigurationError(
            f"job {allocation.job_id} is a heterogeneous job of {allocation.num_components} components, which cannot "
            "survive the loss of a node: ask for one component with all nodes, and for spares"
        )
    return allocation


def tcp_address(listening: Mapping[str, Any]) -> str:
    """Where other nodes reach a controller, from the fields of its ``listening`` event."""
    address: str
    [address] = (address for address in listening["addresses"] if address.startswith("tcp:"))
    return address
