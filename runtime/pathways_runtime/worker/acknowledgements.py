"""What the executor tells the controller of its progress: many facts, few messages."""

import threading
from collections.abc import Callable

from pathways_runtime.core.ids import OpId, SessionId, WorkerId
from pathways_runtime.wire.messages import Acknowledge


class Acknowledgements:
    """Collects progress until ``flush``. Safe for use from several threads."""

    def __init__(self, worker: WorkerId, send: Callable[[Acknowledge], None]) -> None:
        self._worker = worker
        self._send = send
        self._lock = threading.Lock()
        self._launches = 0
        self._transfers: list[tuple[SessionId, OpId]] = []

    def launches_completed(self, count: int) -> None:
        """So many launches are over."""
        with self._lock:
            self._launches += count

    def transfer_started(self, session: SessionId, op_id: OpId) -> None:
        """The sources of a transfer that sends from here are ready."""
        with self._lock:
            self._transfers.append((session, op_id))

    def flush(self) -> None:
        """Send what was collected, in one message; nothing if there is nothing."""
        with self._lock:
            if not self._launches and not self._transfers:
                return
            message = Acknowledge(self._worker, self._launches, tuple(self._transfers))
            self._launches = 0
            self._transfers = []
        self._send(message)
