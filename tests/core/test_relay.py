"""What a relay adds up is exactly what its children have said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_runtime.core.bitmaps import bitmap_of, members, to_bytes
from pathways_runtime.core.relay import LAUNCHES_HELD_NS, NEWS_HELD_NS, Aggregate, Aggregation


@given(st.sets(st.integers(0, 300)))
def test_bitmaps_hold_what_was_put_in_and_equal_sets_are_equal_bytes(numbers):
    bitmap = bitmap_of(numbers)
    assert members(bitmap) == sorted(numbers)
    assert bitmap == to_bytes(sum(1 << n for n in numbers)) and (not bitmap or bitmap[-1])


def aggregation_of(num_children):
    aggregation = Aggregation()
    for child in range(num_children):
        aggregation.add_child(child)
    return aggregation


def test_children_who_say_the_same_are_told_of_together_once_all_have_spoken():
    aggregation = aggregation_of(3)
    for child in (2, 0):
        aggregation.acknowledge(child, 4, (), now_ns=10)
        assert not aggregation.is_due(10)
    aggregation.acknowledge(1, 4, (), now_ns=20)
    assert aggregation.is_due(20)
    assert aggregation.take() == Aggregate(((b"\x07", 4),), (), ())
    assert aggregation.due_ns is None and not aggregation.is_due(10**12)


def test_what_is_pending_is_due_after_a_time_that_depends_on_who_waits_for_it():
    aggregation = aggregation_of(2)
    aggregation.acknowledge(0, 1, (), now_ns=100)
    assert aggregation.due_ns == 100 + LAUNCHES_HELD_NS
    aggregation.arrays_ready(0, 7, 3, now_ns=200)
    assert aggregation.due_ns == 200 + NEWS_HELD_NS
    assert not aggregation.is_due(200 + NEWS_HELD_NS - 1) and aggregation.is_due(200 + NEWS_HELD_NS)
    assert aggregation.take() == Aggregate(((b"\x01", 1),), (), ((7, 3, b"\x01"),))


def test_nobody_waits_for_a_child_that_is_gone_and_what_it_said_stands():
    aggregation = aggregation_of(3)
    aggregation.acknowledge(0, 1, ((7, 5),), now_ns=0)
    aggregation.acknowledge(2, 3, ((7, 5),), now_ns=0)
    assert not aggregation.is_due(0)
    aggregation.remove_child(1)
    aggregation.remove_child(2)
    assert aggregation.is_due(0)
    assert aggregation.take() == Aggregate(((b"\x01", 1), (b"\x04", 3)), ((7, 5, b"\x05"),), ())


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="child 1 completed -2 launches"):
        aggregation_of(2).acknowledge(1, -2, (), now_ns=0)


said = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.lists(st.integers(1, 3), max_size=2), st.booleans()),
    max_size=40,
)


@given(said)
def test_sums_and_sets_are_those_of_the_children(said):
    aggregation = aggregation_of(5)
    counts, starts, told_counts, told_starts = {}, set(), {}, set()
    for child, count, transfers, is_taken in said:
        aggregation.acknowledge(child, count, tuple((1, n) for n in transfers), now_ns=0)
        counts[child] = counts.get(child, 0) + count
        starts |= {(1, n, child) for n in transfers}
        if is_taken:
            note(aggregation.take(), told_counts, told_starts)
    note(aggregation.take(), told_counts, told_starts)
    assert told_counts == {child: count for child, count in counts.items() if count}
    assert told_starts == starts


def note(told, counts, starts):
    spoken_for = [child for bitmap, _ in told.completed for child in members(bitmap)]
    assert len(spoken_for) == len(set(spoken_for))
    for bitmap, count in told.completed:
        for child in members(bitmap):
            counts[child] = counts.get(child, 0) + count
    starts |= {
        (session, op_id, child) for session, op_id, bitmap in told.transfers_started for child in members(bitmap)
    }
