"""Worlds that are over, and what failed because of it.

When a member of a world is lost, PJRT on the others says that a connection was reset; the controller says who was lost,
when and why. The two come by different ways, so whoever has the former waits a moment for the latter.
"""

import re
import threading
import time

from pathways_runtime.core.status import Status

#: How long the controller may take to say that a member was lost. It is told by the kernel when a process ends, and
#: waits half a second at most for a supervisor's word.
VERDICT_TIMEOUT_S = 2.0
#: How long after the loss of a member failures may still come from it.
_AFTERMATH_S = 30.0

#: What failures of collectives have in their text, on CPU (gloo) and on GPU.
_OF_COLLECTIVES = re.compile("gloo|nccl|collective", re.IGNORECASE)


class Endings:
    """Safe for use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._last: tuple[Status, float] | None = None

    def note(self, failure: Status) -> None:
        """A world is over for ``failure``."""
        with self._changed:
            self._last = failure, time.monotonic()
            self._changed.notify_all()

    @staticmethod
    def may_explain(status: Status) -> bool:
        """Whether this may be what the loss of a member looks like from here."""
        return _OF_COLLECTIVES.search(status.message) is not None

    def explain(self, status: Status) -> Status:
        """Why that failed: the loss of a member if there was one, else ``status``. May block for the timeout.

        Not for the thread that reads what the controller sends.
        """
        if not self.may_explain(status):
            return status
        with self._changed:
            self._changed.wait_for(lambda: self._recent() is not None, VERDICT_TIMEOUT_S)
            return self._recent() or status

    def _recent(self) -> Status | None:
        if self._last is None:
            return None
        failure, noted_s = self._last
        return failure if time.monotonic() - noted_s < _AFTERMATH_S else None
