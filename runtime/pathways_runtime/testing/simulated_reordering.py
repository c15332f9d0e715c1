"""A host that breaks the order on purpose."""

import functools

from pathways_runtime.core.ids import SessionId
from pathways_runtime.core.operations import Launch
from pathways_runtime.testing.manual_clock import ManualClock
from pathways_runtime.testing.simulated_executor import SimulatedExecutor
from pathways_runtime.testing.simulated_parts import SharedOperation

_LONGEST_REORDERING_NS = 500_000


class Reordering:
    """Keeps a launch, and what its session sends behind it, until another session's launch has overtaken it."""

    def __init__(self, executor: SimulatedExecutor, clock: ManualClock) -> None:
        self._executor = executor
        self._clock = clock
        self._kept: list[tuple[SessionId, SharedOperation]] = []
        self._num_started = 0

    def start(self, session: SessionId, shared: SharedOperation) -> None:
        """What the executor's ``start`` is in good times."""
        if not self._kept:
            if isinstance(shared.operation, Launch):
                self._kept = [(session, shared)]
                self._clock.call_later(_LONGEST_REORDERING_NS, functools.partial(self._let_go, self._kept))
            else:
                self._start(session, shared)
        elif session == self._kept[0][0]:
            self._kept.append((session, shared))
        else:
            self._start(session, shared)
            if isinstance(shared.operation, Launch):
                self._let_go(self._kept)

    def _let_go(self, kept: list[tuple[SessionId, SharedOperation]]) -> None:
        if kept is self._kept:
            self._kept = []
            for session, shared in kept:
                self._start(session, shared)

    def _start(self, session: SessionId, shared: SharedOperation) -> None:
        # Numbers ascend all the same: the executor must not notice.
        self._num_started += 1
        self._executor.start(self._num_started, session, shared)
