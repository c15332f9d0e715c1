"""Sets of hosts: which compete for credit, and what is missing of them."""

from pathways_runtime.core.controller.host_groups import HostGroups


def test_groups_compete_for_credit_once_launches_go_to_them():
    groups = HostGroups(4)
    left, right = groups.intern((0, 1)), groups.intern((2, 3))
    everywhere, one = groups.intern((0, 1, 2, 3)), groups.intern((1,))
    groups.let_launch(left)
    groups.let_launch(right)
    assert [left.overlapping, right.overlapping] == [[left.number], [right.number]]
    groups.let_launch(everywhere)
    assert everywhere.overlapping == [everywhere.number, left.number, right.number]
    assert left.overlapping == [left.number, everywhere.number]
    # A host that is only fetched from costs no launch anything, however many there are.
    assert one.overlapping == []
    assert list(groups.launching_on(1)) == [left, everywhere]


def test_what_is_missing_is_known_to_all_groups_and_to_those_made_later():
    groups = HostGroups(4)
    early = groups.intern((0, 1, 2))
    groups.mark_missing(1)
    late = groups.intern((1, 3))
    assert (early.missing, late.missing) == ((1,), (1,))
    assert groups.present(early).hosts == (0, 2) and groups.present(early, but={2}).hosts == (0,)
    groups.mark_present(1)
    assert (early.missing, late.missing) == ((), ()) and groups.present(early) is early


def test_a_group_contains_its_hosts():
    group = HostGroups(8).intern((1, 4, 6))
    assert [host for host in range(8) if host in group] == [1, 4, 6]
