"""Hosts become slices: which of the allocation's nodes stand together behind one slice, and which are spares.

A slice's hosts talk to each other most, so they are chosen close: under one switch where that is possible, else under
neighbouring ones. All slices have the same number of hosts. What is left over are spares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_pathways.slurm.queue import Node, Switch


class SlicingError(ValueError):
    """The wish cannot be had with these hosts; the message says what there is and what to change."""


@dataclass(frozen=True, slots=True)
class SliceCounts:
    """What the user asked for; None where it is to follow from the number of hosts."""

    num_slices: int | None = None
    hosts_per_slice: int | None = None
    num_spares: int = 0


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """``slices[i]`` are the hosts of slice i, all of one length; every host is in one slice or a spare."""

    slices: tuple[tuple[str, ...], ...]
    spares: tuple[str, ...]


def by_counts(hosts: Sequence[str], counts: SliceCounts) -> SlicePlan:
    """Slices of neighbours in the order given.

    Raises:
        SlicingError: see the class.
    """
    return by_labels(hosts, dict.fromkeys(hosts, ""), counts)


def by_topology(hosts: Sequence[str], switches: Sequence[Switch], counts: SliceCounts) -> SlicePlan:
    """Slices under one switch of the lowest level each, as far as hosts allow; the rest across neighbouring switches.

    Without ``hosts_per_slice`` and ``num_slices`` each such switch is one slice, as large as the smallest allows.

    Raises:
        SlicingError: see the class.
    """
    order = _tree_order(hosts, switches)
    groups = _groups(order, _leaf_of(switches))
    if (each := _one_of_each(groups, counts)) is not None:
        return _plan(order, each)
    num_slices, size = _resolve(len(hosts), counts)
    whole: list[tuple[str, ...]] = []
    rest: list[str] = []
    for group in groups:
        num_whole = len(group) // size
        whole.extend(tuple(group[i * size : (i + 1) * size]) for i in range(num_whole))
        rest.extend(group[num_whole * size :])
    crossing = [tuple(rest[i : i + size]) for i in range(0, len(rest) - size + 1, size)]
    slices = (whole + crossing)[:num_slices]
    return _plan(order, slices)


def by_labels(hosts: Sequence[str], labels: Mapping[str, str], counts: SliceCounts) -> SlicePlan:
    """Slices of hosts with one label each: no slice has hosts of two. Labels in the order of their first hosts.

    Without ``hosts_per_slice`` and ``num_slices`` each label is one slice, as large as the smallest label allows.

    Raises:
        SlicingError: see the class; also a host without a label.
    """
    missing = [host for host in hosts if host not in labels]
    if missing:
        raise SlicingError(f"nothing is known of {', '.join(missing)}: they are not among the cluster's nodes")
    groups = _groups(hosts, labels)
    if (each := _one_of_each(groups, counts)) is not None:
        return _plan(hosts, each)
    num_slices, size = _resolve(len(hosts), counts)
    slices = [tuple(group[i : i + size]) for group in groups for i in range(0, len(group) - size + 1, size)]
    if len(slices) < num_slices:
        sizes = ", ".join(f"{labels[group[0]] or 'all'}: {len(group)}" for group in groups)
        raise SlicingError(
            f"{num_slices} slices of {size} hosts were asked for, and {len(slices)} are possible with hosts of one "
            f"kind each ({sizes}): ask for fewer slices, smaller ones, or more nodes"
        )
    return _plan(hosts, slices[:num_slices])


def feature_labels(nodes: Sequence[Node]) -> dict[str, str]:
    """A label per node from the features that tell nodes apart: those that all have say nothing."""
    common = set.intersection(*(set(node.features) for node in nodes)) if nodes else set()
    return {node.name: ",".join(sorted(set(node.features) - common)) for node in nodes}


def gres_labels(nodes: Sequence[Node]) -> dict[str, str]:
    """A label per node from the kinds of generic resources that it has."""
    return {node.name: ",".join(sorted(f"{gres.name}:{gres.type}".rstrip(":") for gres in node.gres)) for node in nodes}


def _resolve(num_hosts: int, counts: SliceCounts) -> tuple[int, int]:
    """Number and size of the slices."""
    usable = num_hosts - counts.num_spares
    for name, value in (("slices", counts.num_slices), ("hosts per slice", counts.hosts_per_slice)):
        if value is not None and value < 1:
            raise SlicingError(f"{value} {name} were asked for: at least 1")
    if counts.num_spares < 0 or usable < 1:
        raise SlicingError(
            f"{counts.num_spares} of {num_hosts} hosts were asked for as spares: leave at least one host"
        )
    num_slices, size = counts.num_slices, counts.hosts_per_slice
    if size is None:
        num_slices = num_slices or 1
        size = usable // num_slices
    if num_slices is None:
        num_slices = usable // size
    if num_slices < 1 or size < 1 or num_slices * size > usable:
        wanted = f"{num_slices or counts.num_slices or 1} slices of {size or 1} hosts and {counts.num_spares} spares"
        raise SlicingError(f"{wanted} were asked for, and there are {num_hosts} hosts: ask for more nodes, or for less")
    return num_slices, size


def _groups(hosts: Sequence[str], labels: Mapping[str, str]) -> list[list[str]]:
    """Hosts with one label, in the order of first appearance. Hosts without a label are a group of their own."""
    groups: dict[str | None, list[str]] = {}
    for host in hosts:
        groups.setdefault(labels.get(host), []).append(host)
    return list(groups.values())


def _one_of_each(groups: Sequence[Sequence[str]], counts: SliceCounts) -> list[tuple[str, ...]] | None:
    """A slice of every group, all as large as the smallest group and the spares allow.

    None where the user has said what the slices are, where there is nothing to tell apart, or where spares leave no
    host for each.
    """
    usable = sum(len(group) for group in groups) - max(0, counts.num_spares)
    size = min(min(len(group) for group in groups), usable // len(groups))
    if counts.num_slices is not None or counts.hosts_per_slice is not None or len(groups) == 1 or size < 1:
        return None
    return [tuple(group[:size]) for group in groups]


def _leaf_of(switches: Sequence[Switch]) -> dict[str, str]:
    return {node: switch.name for switch in switches if switch.level == 0 for node in switch.nodes}


def _tree_order(hosts: Sequence[str], switches: Sequence[Switch]) -> list[str]:
    """Hosts such that those under one switch stand together, on every level; in the order given otherwise."""
    place = {host: index for index, host in enumerate(hosts)}
    levels = sorted({switch.level for switch in switches}, reverse=True)
    path: dict[str, list[int]] = {host: [] for host in hosts}
    for level in levels:
        first_of: dict[str, int] = {}
        for switch in switches:
            if switch.level == level:
                below = [place[node] for node in switch.nodes if node in place]
                # Switches go by their first host, so that the user's order is kept where the tree leaves a choice.
                first_of.update({hosts[index]: min(below) for index in below})
        for host in hosts:
            path[host].append(first_of.get(host, place[host]))
    return sorted(hosts, key=lambda host: (*path[host], place[host]))


def _plan(hosts: Sequence[str], slices: Sequence[tuple[str, ...]]) -> SlicePlan:
    used = {host for members in slices for host in members}
    return SlicePlan(tuple(slices), tuple(host for host in hosts if host not in used))
