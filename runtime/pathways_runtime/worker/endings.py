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


class WorldEnd:
    """Whether a world is over. Safe for use from several threads.

    Attributes:
        formed_s: when it was formed, on ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.formed_s = time.monotonic()
        self._changed = threading.Condition()
        self._failure: Status | None = None
        self._doubted_until_s = 0.0

    def doubt(self) -> None:
        """A collective has failed: it may be over, and the controller is about to say so."""
        with self._changed:
            self._doubted_until_s = time.monotonic() + VERDICT_TIMEOUT_S

    def declare(self, failure: Status) -> None:
        """It is over."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def failure(self) -> Status | None:
        """Why it is over; None: it is not, as far as is known."""
        return self._failure

    def verdict(self) -> Status | None:
        """The same, once there is no doubt. Not for the thread that reads what the controller sends."""
        if self._failure is None and self._doubted_until_s:
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, self._doubted_until_s - time.monotonic())
                self._doubted_until_s = 0.0
        return self._failure


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

    def explain(self, status: Status, formed_s: float) -> Status:
        """Why that failed: the loss of a member if there was one, else ``status``. May block for the timeout.

        Not for the thread that reads what the controller sends.

        Args:
            formed_s: when the world was formed in which it failed. What was lost before is gone on account of what is
                lost since, if it comes.
        """
        if not self.may_explain(status):
            return status
        with self._changed:
            self._changed.wait_for(lambda: self._recent(formed_s) is not None, VERDICT_TIMEOUT_S)
            # What is of an earlier world may be passed on in this one.
            return self._recent(formed_s) or self._recent(0.0) or status

    def _recent(self, since_s: float) -> Status | None:
        if self._last is None:
            return None
        failure, noted_s = self._last
        return failure if noted_s >= since_s and time.monotonic() - noted_s < _AFTERMATH_S else None
