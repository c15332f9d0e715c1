"""The memory that host buffers lie in: counted while it is in use, and used again.

Touching fresh memory costs more than receiving into it, so what was in use lies ready for a moment for the next buffer
of about the same size; then the system has it back.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from pathways_runtime.transport.dataplane.memory import ALIGNMENT_BYTES, Bytes, class_bytes

#: What may be in use before clients are held back. Clients that wait for nothing of ours are held back by nothing else.
DEFAULT_BUDGET_BYTES = 512 << 20
#: Smaller buffers are neither counted nor kept.
MIN_COUNTED_BYTES = 64 << 10
#: What may lie ready.
_MAX_FREE_BYTES = 512 << 20
#: For at least so long, and at most twice.
_IDLE_S = 0.5


class HostMemory:
    """Made on the event loop. ``take`` is called there; what it gives may be dropped on any thread.

    Args:
        budget_bytes: see ``DEFAULT_BUDGET_BYTES``. Nothing is refused beyond it: ``is_scarce`` says so.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._loop = asyncio.get_running_loop()
        self.in_use_bytes = 0
        self.free_bytes = 0
        # By size; with each, the round in which it came back.
        self._free: dict[int, list[tuple[Bytes, int]]] = {}
        self._round = 0
        self._is_trim_due = False

    @property
    def is_scarce(self) -> bool:
        """More is in use than the budget allows."""
        return self.in_use_bytes > self._budget_bytes

    def take(self, num_bytes: int) -> memoryview:
        """Memory of no particular contents. It is in use until the last view of it is gone.

        Raises:
            MemoryError, ValueError: it is too much.
        """
        if num_bytes < MIN_COUNTED_BYTES:
            return memoryview(bytearray(num_bytes))
        size = class_bytes(num_bytes)
        free = self._free.get(size)
        if free:
            memory, _ = free.pop()
            self.free_bytes -= size
        else:
            # numpy asks for huge pages. They are touched when bytes come: what a client announces costs nothing.
            memory = np.empty(size + ALIGNMENT_BYTES, np.uint8)
        self.in_use_bytes += size
        skip = -memory.ctypes.data % ALIGNMENT_BYTES
        lease = _Lease(memory, self._dropped)
        return np.asarray(lease)[skip : skip + num_bytes].data

    def _dropped(self, memory: Bytes) -> None:
        # Any thread, and within the collection of garbage.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take_back, memory)

    def _take_back(self, memory: Bytes) -> None:
        size = memory.nbytes - ALIGNMENT_BYTES
        self.in_use_bytes -= size
        if self.free_bytes + size > _MAX_FREE_BYTES:
            return
        self._free.setdefault(size, []).append((memory, self._round))
        self.free_bytes += size
        self._schedule_trim()

    def _schedule_trim(self) -> None:
        if not self._is_trim_due:
            self._is_trim_due = True
            self._loop.call_later(_IDLE_S, self._trim)

    def _trim(self) -> None:
        """Give back what nobody has wanted since the last time."""
        self._is_trim_due = False
        for size, free in list(self._free.items()):
            kept = [entry for entry in free if entry[1] == self._round]
            self.free_bytes -= size * (len(free) - len(kept))
            if kept:
                self._free[size] = kept
            else:
                del self._free[size]
        self._round += 1
        if self._free:
            self._schedule_trim()


class _Lease:
    """Memory that goes back when the last array over it is gone."""

    __slots__ = ("_memory", "_on_dropped")

    def __init__(self, memory: Bytes, on_dropped: Callable[[Bytes], None]) -> None:
        self._memory = memory
        self._on_dropped = on_dropped

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._on_dropped(self._memory)
