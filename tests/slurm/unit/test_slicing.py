import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pathways.slurm.quantities import Gres
from slurm_pathways.slurm.queue import Node, Switch
from slurm_pathways.slurm.slicing import (
    SliceCounts,
    SlicingError,
    by_counts,
    by_labels,
    by_topology,
    feature_labels,
    gres_labels,
)

HOSTS = tuple("abcdefgh")
#: Two leaves of four under each of two switches; the names do not go with the tree.
TREE = (
    Switch("top", 2, tuple("abcdefgh"), ("m0", "m1")),
    Switch("m0", 1, tuple("aceg"), ("l0", "l1")),
    Switch("m1", 1, tuple("bdfh"), ("l2", "l3")),
    Switch("l0", 0, tuple("ae"), ()),
    Switch("l1", 0, tuple("cg"), ()),
    Switch("l2", 0, tuple("bf"), ()),
    Switch("l3", 0, tuple("dh"), ()),
)


def joined(slices: tuple[tuple[str, ...], ...]) -> list[str]:
    return ["".join(members) for members in slices]


@pytest.mark.parametrize(
    ("counts", "slices", "spares"),
    [
        (SliceCounts(), ["abcdefgh"], ""),
        (SliceCounts(num_spares=1), ["abcdefg"], "h"),
        (SliceCounts(2), ["abcd", "efgh"], ""),
        (SliceCounts(2, num_spares=1), ["abc", "def"], "gh"),
        (SliceCounts(None, 3), ["abc", "def"], "gh"),
        (SliceCounts(2, 2), ["ab", "cd"], "efgh"),
        (SliceCounts(8, 1), list("abcdefgh"), ""),
        (SliceCounts(None, 8), ["abcdefgh"], ""),
    ],
)
def test_counts(counts: SliceCounts, slices: list[str], spares: str) -> None:
    plan = by_counts(HOSTS, counts)
    assert (joined(plan.slices), "".join(plan.spares)) == (slices, spares)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (SliceCounts(3, 3), "3 slices of 3 hosts and 0 spares were asked for, and there are 8 hosts"),
        (SliceCounts(4, 2, 1), "4 slices of 2 hosts and 1 spares were asked for, and there are 8 hosts"),
        (SliceCounts(9), "9 slices of 1 hosts and 0 spares"),
        (SliceCounts(None, 9), "1 slices of 9 hosts and 0 spares"),
        (SliceCounts(num_spares=8), "8 of 8 hosts were asked for as spares"),
        (SliceCounts(0), "0 slices were asked for: at least 1"),
        (SliceCounts(None, 0), "0 hosts per slice were asked for: at least 1"),
        (SliceCounts(num_spares=-1), "-1 of 8 hosts"),
    ],
)
def test_what_cannot_be(counts: SliceCounts, words: str) -> None:
    with pytest.raises(SlicingError, match=words):
        by_counts(HOSTS, counts)


@pytest.mark.parametrize(
    ("counts", "slices", "spares"),
    [
        (SliceCounts(4, 2), ["ae", "cg", "bf", "dh"], ""),
        (SliceCounts(2, 4), ["aecg", "bfdh"], ""),
        (SliceCounts(1), ["aecgbfdh"], ""),
        (SliceCounts(3, 2), ["ae", "cg", "bf"], "dh"),
        (SliceCounts(None, 3), ["aec", "gbf"], "dh"),
    ],
)
def test_a_slice_stays_under_one_switch(counts: SliceCounts, slices: list[str], spares: str) -> None:
    plan = by_topology(HOSTS, TREE, counts)
    assert (joined(plan.slices), "".join(plan.spares)) == (slices, spares)


def test_a_slice_crosses_leaves_only_when_it_must() -> None:
    # Three hosts under one switch, three under the other: one pair of each first, then the two that are left.
    switches = (Switch("l0", 0, tuple("abc"), ()), Switch("l1", 0, tuple("def"), ()))
    assert joined(by_topology(tuple("abcdef"), switches, SliceCounts(3, 2)).slices) == ["ab", "de", "cf"]


def test_without_switches_the_order_is_kept() -> None:
    assert by_topology(HOSTS, (), SliceCounts(2)) == by_counts(HOSTS, SliceCounts(2))


def test_labels_are_not_mixed() -> None:
    labels = dict(zip("abcdefgh", "xyxyxyyy", strict=True))
    plan = by_labels(HOSTS, labels, SliceCounts())
    assert (joined(plan.slices), "".join(plan.spares)) == (["ace", "bdf"], "gh")
    plan = by_labels(HOSTS, labels, SliceCounts(3, 2))
    assert (joined(plan.slices), "".join(plan.spares)) == (["ac", "bd", "fg"], "eh")
    with pytest.raises(SlicingError, match=r"4 slices of 2 .* and 3 are possible .*\(x: 3, y: 5\)"):
        by_labels(HOSTS, labels, SliceCounts(4, 2))
    with pytest.raises(SlicingError, match="nothing is known of h:"):
        by_labels(HOSTS, dict.fromkeys("abcdefg", "x"), SliceCounts())


def _node(name: str, features: tuple[str, ...], gres: tuple[Gres, ...]) -> Node:
    return Node(name, ("IDLE",), True, features, gres, 8, 8000, name, ("tpu",), "")


def test_what_labels_are_made_of() -> None:
    nodes = (
        _node("a", ("linux", "pod1", "v5p"), (Gres("tpu", "v5p", 4),)),
        _node("b", ("linux", "pod2", "v5p"), (Gres("tpu", "v6e", 8), Gres("nic", "", 1))),
        _node("c", ("linux", "v5p"), ()),
    )
    assert feature_labels(nodes) == {"a": "pod1", "b": "pod2", "c": ""}
    assert gres_labels(nodes) == {"a": "tpu:v5p", "b": "nic,tpu:v6e", "c": ""}
    assert feature_labels(()) == {}


@st.composite
def _clusters(draw: st.DrawFn) -> tuple[tuple[str, ...], tuple[Switch, ...]]:
    hosts = tuple(f"n{i}" for i in range(draw(st.integers(1, 20))))
    leaf_of = [draw(st.integers(0, 4)) for _ in hosts]
    leaves = tuple(
        Switch(f"l{leaf}", 0, tuple(host for host, of in zip(hosts, leaf_of, strict=True) if of == leaf), ())
        for leaf in sorted(set(leaf_of))
    )
    return hosts, (*leaves, Switch("top", 1, hosts, tuple(leaf.name for leaf in leaves)))


_counts = st.builds(SliceCounts, st.none() | st.integers(1, 6), st.none() | st.integers(1, 6), st.integers(0, 3))


@settings(deadline=None)
@given(_clusters(), _counts)
def test_every_host_has_one_place(cluster: tuple[tuple[str, ...], tuple[Switch, ...]], counts: SliceCounts) -> None:
    hosts, switches = cluster
    try:
        plan = by_topology(hosts, switches, counts)
    except SlicingError:
        with pytest.raises(SlicingError):
            by_counts(hosts, counts)
        return
    placed = [host for members in plan.slices for host in members]
    assert sorted([*placed, *plan.spares]) == sorted(hosts)
    assert len({len(members) for members in plan.slices}) == 1
    assert len(plan.spares) >= counts.num_spares
    assert counts.num_slices in (None, len(plan.slices))
    assert counts.hosts_per_slice in (None, len(plan.slices[0]))
    # As many slices stay whole as the leaves have room for.
    size = len(plan.slices[0])
    leaf_of = {node: switch.name for switch in switches if switch.level == 0 for node in switch.nodes}
    room = sum(len(switch.nodes) // size for switch in switches if switch.level == 0)
    whole = sum(len({leaf_of[host] for host in members}) == 1 for members in plan.slices)
    assert whole == min(room, len(plan.slices)) or size == 1
