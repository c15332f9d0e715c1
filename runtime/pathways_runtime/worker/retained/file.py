"""The file without a name, in an executor: mapped, and cut into ranges."""

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pathways_runtime.transport.dataplane.memory import ALIGNMENT_BYTES, Bytes, Lease, class_bytes

#: Beside what is in use, so much that is free stays in memory: fresh pages cost several times what warm ones cost.
_MIN_WARM_BYTES = 256 << 20
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def size_of(length: int) -> int:
    """The size of the range that holds ``length`` bytes. Small ones are many: scalars of a state."""
    return class_bytes(length, ALIGNMENT_BYTES, ALIGNMENT_BYTES)


class OutOfMemory(Exception):
    """There is no room for so much."""


class RetainedFile:
    """The file in an executor, from ``first`` on cut into ranges. Safe for use from several threads.

    Args:
        first: where ranges begin; what is before is another's (see ``buffer``).
        limit_bytes: of ranges that are in use together.

    Raises:
        OSError, ValueError: it cannot be mapped.
    """

    def __init__(self, fd: int, first: int, limit_bytes: int) -> None:
        self._fd = fd
        self._first = first
        self._limit_bytes = limit_bytes
        self._mapping = mmap.mmap(fd, 0)
        self._bytes = np.frombuffer(self._mapping, np.uint8)
        self._lock = threading.Lock()
        #: What leases have ended. A lease can end within any code that allocates, so within this class's own, too.
        self._ended: deque[int] = deque()
        #: Ranges in use: their sizes by where they begin.
        self._used: dict[int, int] = {}
        self._used_bytes = 0
        #: Free ranges whose pages are in memory, by size.
        self._warm: dict[int, list[int]] = {}
        self._warm_bytes = 0
        #: From here on nothing was ever used.
        self._end = first

    @property
    def buffer(self) -> Bytes:
        """What is before the first range."""
        return self._bytes[: self._first]

    def take(self, length: int) -> tuple[int, Bytes]:
        """A range of at least this many bytes: where it begins, and its first ``length`` bytes, of any content.

        It is in use until the last array over it is gone.

        Raises:
            OutOfMemory: that would be more than the limit, or no such range is free.
        """
        size = size_of(length)
        with self._lock:
            self._take_back()
            if self._used_bytes + size > self._limit_bytes:
                raise OutOfMemory(f"{self._used_bytes + size} bytes would be more than the limit, {self._limit_bytes}")
            if same_size := self._warm.get(size):
                start = same_size.pop()
                self._warm_bytes -= size
            else:
                start = self._cold(size)
            self._used[start] = size
            self._used_bytes += size
        return start, self._leased(start, length)

    def take_again(self, ranges: Iterable[tuple[int, int]]) -> list[Bytes]:
        """What an executor before this one took: each ``(start, length)``, in order. All other ranges are free.

        Called once, before ``take``. A range may be named more than once.
        """
        with self._lock:
            assert not self._used
            found = list(ranges)
            self._used = {start: size_of(length) for start, length in found}
            self._used_bytes = sum(self._used.values())
            self._end = max((start + size for start, size in self._used.items()), default=self._first)
            for start, end in self._gaps():
                self._give_back(start, end - start)
            self._give_back(self._end, len(self._bytes) - self._end)
        leased: dict[int, Bytes] = {}
        for start, length in found:
            if start not in leased:
                leased[start] = self._leased(start, length)
        return [leased[start] for start, _ in found]

    def held_bytes(self) -> dict[str, int]:
        """Bytes in use, and free but still in memory."""
        with self._lock:
            self._take_back()
            return {"in_use": self._used_bytes, "free": self._warm_bytes}

    def _leased(self, start: int, length: int) -> Bytes:
        return np.asarray(Lease(self._bytes[start : start + length], lambda: self._release(start)))

    def _release(self, start: int) -> None:
        self._ended.append(start)
        # Whoever has the lock now may have looked before.
        while self._ended and self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._ended:
            start = self._ended.popleft()
            size = self._used.pop(start)
            self._used_bytes -= size
            if self._warm_bytes + size > max(self._used_bytes, _MIN_WARM_BYTES):
                self._give_back(start, size)
            else:
                self._warm.setdefault(size, []).append(start)
                self._warm_bytes += size

    def _cold(self, size: int) -> int:
        if self._end + size <= len(self._bytes):
            start, self._end = self._end, self._end + size
            return start
        for start, end in self._gaps():
            if end - start >= size:
                # It may be of several that are warm: none of them is any more.
                for warm_size, starts in self._warm.items():
                    kept = [one for one in starts if one >= start + size or one + warm_size <= start]
                    self._warm_bytes -= warm_size * (len(starts) - len(kept))
                    starts[:] = kept
                return start
        raise OutOfMemory(f"no {size} bytes in a row are free")

    def _gaps(self) -> list[tuple[int, int]]:
        """Between ranges in use, and before ``_end``."""
        gaps, place = [], self._first
        for start, size in sorted(self._used.items()):
            if start > place:
                gaps.append((place, start))
            place = start + size
        if self._end > place:
            gaps.append((place, self._end))
        return gaps

    def _give_back(self, start: int, length: int) -> None:
        if length and _fallocate(self._fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, start, length) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"memory cannot be given back: {os.strerror(number)}")


def half_of_memory_bytes() -> int:
    """Half of what this process may use: of the machine, or of its control group, where that has a limit."""
    limits = [os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE]
    for path in _limit_files():
        try:
            text = path.read_text().strip()
        except OSError:
            # No such controller, or none of ours to read.
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits) // 2


def _limit_files() -> list[Path]:
    """Of the control groups that this process is in: version 2's, and version 1's of memory."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        for group in (Path(path), *Path(path).parents):
            if number == "0":
                found.append(Path(f"/sys/fs/cgroup{group}") / "memory.max")
            elif "memory" in controllers.split(","):
                found.append(Path(f"/sys/fs/cgroup/memory{group}") / "memory.limit_in_bytes")
    return found
