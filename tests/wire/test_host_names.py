"""Names of sets of hosts: large ones get one, once."""

from pathways_runtime.wire.host_names import HostNames


def test_large_sets_get_a_number_once_and_small_ones_none():
    names = HostNames()
    large, other = tuple(range(16)), tuple(range(1, 17))
    assert names.name((0, 1, 2)) == (0, False)
    assert names.name(large) == (1, True)
    assert names.name(large) == (1, False)
    assert names.name(tuple(range(16))) == (1, False)
    assert names.name(other) == (2, True)


def test_many_tuples_of_few_sets_do_not_grow_without_end():
    names = HostNames()
    for _ in range(10_000):
        number, _ = names.name(tuple(range(12)))
        assert number == 1
    assert len(names._cache) <= 4096
