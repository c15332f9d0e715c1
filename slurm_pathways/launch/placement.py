"""Which nodes a run uses and what each of them does, decided before anything starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_pathways.config import ConfigurationError, RuntimeSpec
from slurm_pathways.slurm.environment import Allocation, EnvironmentProblem, read_allocation
from slurm_pathways.slurm.slicing import SliceCounts, SlicePlan, SlicingError, by_counts


@dataclass(frozen=True, slots=True)
class Placement:
    """Which node does what. ``workers[N]`` is the node of worker N: slices first, in their order, then spares."""

    head: str
    workers: tuple[str, ...]


def plan(values: Mapping[str, Any], nodes: Sequence[str]) -> tuple[RuntimeSpec, Placement]:
    """The runtime that was asked for (``config.gather``) on these nodes; nodes that no slice needs are spares.

    Raises:
        ConfigurationError: it cannot be had there.
    """
    counts = SliceCounts(values.get("num_slices"), values.get("hosts_per_slice"), values.get("num_spares", 0))
    try:
        slices: SlicePlan = by_counts(nodes, counts)
    except SlicingError as failure:
        raise ConfigurationError(f"{failure} (the nodes are {', '.join(nodes)})") from failure
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
