"""Launches that are ready but for credit, and whose turn it is."""

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from pathways_runtime.core.controller.credits import Credits
from pathways_runtime.core.controller.held import HeldOperation
from pathways_runtime.core.controller.host_groups import HostGroup
from pathways_runtime.core.ids import SessionId

_LaneKey = tuple[SessionId, int]


class FairQueue:
    """Start-time fair queueing over sessions.

    A launch that comes gets a tag: the tag after its session's last one, or the tag being served if that is later.
    Launches are served by tag, so each session gets every n-th turn, however many launches it has waiting. A launch
    whose hosts have no credit lets others pass only if they share no host with it: then it gets its hosts in finite
    time, as the tags of others grow.

    Launches of one session on one group form a *lane*, first in first out.
    """

    def __init__(self) -> None:
        self._lanes: dict[_LaneKey, deque[HeldOperation]] = {}
        #: One entry per lane: (tag of its first launch, the launch's place in the order of arrival, lane).
        self._heads: list[tuple[int, int, _LaneKey]] = []
        #: Lanes per group number.
        self._num_lanes: dict[int, int] = {}
        self._next_tags: dict[SessionId, int] = {}
        self._served_tag = 0
        self._num_arrivals = 0

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __iter__(self) -> Iterator[HeldOperation]:
        for lane in self._lanes.values():
            yield from lane

    def blocks(self, group: HostGroup) -> bool:
        """Whether something that waits shares a host with a group, so that a launch there must take its turn."""
        return any(number in self._num_lanes for number in group.overlapping)

    def add(self, operation: HeldOperation) -> None:
        """A launch waits for its turn and for credit from now on."""
        session = operation.submission.session
        operation.tag = max(self._served_tag, self._next_tags.get(session, 0))
        operation.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._next_tags[session] = operation.tag + 1
        number = operation.group.number
        lane = self._lanes.get((session, number))
        if lane is None:
            self._lanes[session, number] = deque((operation,))
            self._num_lanes[number] = self._num_lanes.get(number, 0) + 1
            heapq.heappush(self._heads, (operation.tag, operation.arrival, (session, number)))
        else:
            lane.append(operation)

    def pop(self, credits: Credits) -> HeldOperation | None:
        """The launch whose turn it is, its credit taken; None when all wait for credit."""
        passed: list[tuple[int, int, _LaneKey]] = []
        without_credit: set[int] = set()
        found = None
        while self._heads and found is None:
            head = heapq.heappop(self._heads)
            lane = self._lanes[head[2]]
            group = lane[0].group
            if without_credit.isdisjoint(group.overlapping) and credits.take(group):
                found = lane.popleft()
                self._served_tag = found.tag
                if lane:
                    heapq.heappush(self._heads, (lane[0].tag, lane[0].arrival, head[2]))
                else:
                    self._remove_lane(head[2])
            else:
                without_credit.add(group.number)
                passed.append(head)
        for head in passed:
            heapq.heappush(self._heads, head)
        return found

    def remove(self, is_removed: Callable[[SessionId, HostGroup], bool]) -> list[HeldOperation]:
        """Take out whole lanes; return their launches in the order of arrival."""
        removed: list[HeldOperation] = []
        for key, lane in list(self._lanes.items()):
            if is_removed(key[0], lane[0].group):
                removed += lane
                self._remove_lane(key)
        self._heads = [head for head in self._heads if head[2] in self._lanes]
        heapq.heapify(self._heads)
        removed.sort(key=lambda operation: operation.arrival)
        return removed

    def forget_session(self, session: SessionId) -> None:
        """Drop everything of a session."""
        self.remove(lambda owner, group: owner == session)
        self._next_tags.pop(session, None)

    def first_in_way(self, operation: HeldOperation) -> HeldOperation | None:
        """The launch with the smallest tag that comes before ``operation`` and shares a host with it."""
        for _, _, key in sorted(self._heads):
            other = self._lanes[key][0]
            if (other.tag, other.arrival) >= (operation.tag, operation.arrival):
                return None
            if other.group.number in operation.group.overlapping:
                return other
        return None

    def check_invariants(self, credits: Credits) -> None:
        """Lanes are in order, one head each, and nothing waits that could go."""
        assert sorted(head[2] for head in self._heads) == sorted(self._lanes)
        for key, lane in self._lanes.items():
            assert lane, f"lane {key} is empty"
            assert (lane[0].tag, lane[0].arrival, key) in self._heads
            order = [(operation.tag, operation.arrival) for operation in lane]
            assert order == sorted(order), f"lane {key} is out of order"
            head = lane[0]
            assert credits.full_hosts(head.group) or self.first_in_way(head), f"{head} waits for nothing"
        counts: dict[int, int] = {}
        for _, number in self._lanes:
            counts[number] = counts.get(number, 0) + 1
        assert counts == self._num_lanes

    def _remove_lane(self, key: _LaneKey) -> None:
        del self._lanes[key]
        number = key[1]
        self._num_lanes[number] -= 1
        if not self._num_lanes[number]:
            del self._num_lanes[number]
