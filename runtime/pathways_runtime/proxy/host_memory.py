"""The memory that host buffers lie in: counted while it is in use, and used again.

Touching fresh memory costs more than receiving into it, so what was in use lies ready for a moment for the next buffer
of about the same size; then the system has it back.
"""

import asyncio
import contextlib
import functools
import mmap

import numpy as np

from pathways_runtime.transport.dataplane.memory import ALIGNMENT_BYTES, Bytes, Lease, class_bytes

#: What may be in use before clients are held back. Clients that wait for nothing of ours are held back by nothing else.
DEFAULT_BUDGET_BYTES = 512 << 20
#: Smaller buffers are neither counted nor kept.
MIN_COUNTED_BYTES = 64 << 10
#: Behind every block: to align it, and for what is wanted in front of it.
_SLACK_BYTES = 2 * ALIGNMENT_BYTES
_MIN_MAPPED_BYTES = 1 << 20
#: For at least so long, and at most twice.
_IDLE_S = 0.5


class HostMemory:
    """Made on the event loop. ``take`` is called there; what it gives may be dropped on any thread.

    Args:
        budget_bytes: see ``DEFAULT_BUDGET_BYTES``. Nothing is refused beyond it: ``is_scarce`` says so. What lies ready
            is given up in favour of what is in use.
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

    def take(self, num_bytes: int, headroom_bytes: int = 0) -> memoryview:
        """Memory of no particular contents. It is in use until the last view of it is gone.

        Args:
            headroom_bytes: at most ``ALIGNMENT_BYTES`` more, in front of what is aligned.

        Raises:
            MemoryError, OverflowError, ValueError: it is too much.
        """
        if num_bytes < MIN_COUNTED_BYTES:
            return memoryview(bytearray(headroom_bytes + num_bytes))
        size = class_bytes(num_bytes)
        free = self._free.get(size)
        if free:
            memory, _ = free.pop()
            self.free_bytes -= size
            if not free:
                del self._free[size]
        else:
            memory = _new_memory(size + _SLACK_BYTES)
        self.in_use_bytes += size
        self._make_room(0)
        start = -memory.ctypes.data % ALIGNMENT_BYTES + ALIGNMENT_BYTES
        lease = Lease(memory, functools.partial(self._dropped, memory))
        return np.asarray(lease)[start - headroom_bytes : start + num_bytes].data

    def _dropped(self, memory: Bytes) -> None:
        # Any thread, and within the collection of garbage.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take_back, memory)

    def _take_back(self, memory: Bytes) -> None:
        size = memory.nbytes - _SLACK_BYTES
        self.in_use_bytes -= size
        if not self._make_room(size):
            return
        self._free.setdefault(size, []).append((memory, self._round))
        self.free_bytes += size
        self._schedule_trim()

    def _make_room(self, num_bytes: int) -> bool:
        """Give up what lies ready until so many bytes more are within the budget; whether they are."""
        while self._free and self.in_use_bytes + self.free_bytes + num_bytes > self._budget_bytes:
            size, free = next(iter(self._free.items()))
            free.pop(0)
            self.free_bytes -= size
            if not free:
                del self._free[size]
        return self.in_use_bytes + self.free_bytes + num_bytes <= self._budget_bytes

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


def _new_memory(num_bytes: int) -> Bytes:
    """Pages that are touched when bytes come, so that what a client announces costs nothing.

    Mapped: the allocator would keep what is given up, and use small pages.
    """
    if num_bytes < _MIN_MAPPED_BYTES:
        return np.empty(num_bytes, np.uint8)
    try:
        mapping = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as failure:
        raise MemoryError(f"cannot map {num_bytes} bytes: {failure.strerror}") from failure
    # Kernels without them refuse.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)
