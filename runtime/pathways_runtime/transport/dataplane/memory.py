"""Memory that payloads lie in: mapped, touched before use, and used again.

Fresh pages cost ten times what copying into warm ones costs, so blocks are kept for the next payload of about their
size.
"""

import ctypes
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

#: What XLA on CPU asks of memory that it shall use without copying; also a cache line.
ALIGNMENT_BYTES = 64

_PAGE_BYTES = mmap.PAGESIZE
_MIN_CLASS_BYTES = 64 << 10
_HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """``size_bytes`` of zeroed or shared memory, touched. Unmapped when the last array over it is gone.

    Python's own ``mmap`` keeps a descriptor per mapping and the GIL while pages are touched; this does neither.
    """

    def __init__(self, size_bytes: int, fd: int | None = None) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE if fd is not None else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1 if fd is None else fd, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise MemoryError(f"cannot map {size_bytes} bytes: {os.strerror(number)}")
        self._address = address
        self.size_bytes = size_bytes
        if fd is None:
            if size_bytes >= _HUGE_PAGE_BYTES:
                _madvise(address, size_bytes, mmap.MADV_HUGEPAGE)
            # Kernels before 5.14 do not know it; then the first use touches the pages.
            _madvise(address, size_bytes, _MADV_POPULATE_WRITE)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self._address, False), "shape": (self.size_bytes,), "typestr": "|u1", "version": 3}

    def array(self) -> Bytes:
        """The bytes; the array keeps the mapping alive."""
        return np.asarray(self)

    def __del__(self, munmap: Callable[[int, int], int] = _munmap) -> None:
        if hasattr(self, "_address"):
            munmap(self._address, self.size_bytes)


class Lease:
    """Memory that is given up when the last array over it (``numpy.asarray``) is gone.

    Args:
        release: called then, on any thread, with whatever locks that holds.
    """

    __slots__ = ("_memory", "_release")

    def __init__(self, memory: Bytes, release: Callable[[], None]) -> None:
        self._memory = memory
        self._release = release

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._release()


def shared_mapping(size_bytes: int) -> tuple[Mapping, int]:
    """New memory without a name, and the descriptor by which another process can map it; the caller closes that."""
    fd = os.memfd_create("pathways-data", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        return Mapping(size_bytes, fd), fd
    except BaseException:
        os.close(fd)
        raise


def aligned_bytes(size_bytes: int) -> Bytes:
    """Unpooled memory for a small payload, aligned to ``ALIGNMENT_BYTES``."""
    raw = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[skip : skip + size_bytes]


def class_bytes(length: int, least_bytes: int = _MIN_CLASS_BYTES, unit_bytes: int = _PAGE_BYTES) -> int:
    """The size of block that holds ``length`` bytes: four sizes per power of two, whole units (by default pages)."""
    if length <= least_bytes:
        return least_bytes
    step = max(unit_bytes, 1 << ((length - 1).bit_length() - 3))
    return -(-length // step) * step


class Block:
    """Memory of one size class. ``fd`` is set between the making of a shared one and its first sending."""

    __slots__ = ("fd", "id", "mapping", "size_bytes")

    def __init__(self, block_id: int, mapping: Mapping, fd: int | None) -> None:
        self.id = block_id
        self.size_bytes = mapping.size_bytes
        self.mapping = mapping
        self.fd = fd


class PoolClosed(Exception):
    """No block will come any more."""


class BlockPool:
    """Blocks for one peer's payloads, bounded.

    A block is *in use* from ``acquire`` to ``release``. What is in use and what is free together stay within
    ``budget_bytes``, or are one block, if that alone is larger. A block that its reader *keeps* (an array of its own
    lies in it) does not count: it is the reader's memory, as if it had been copied there, until it comes back.

    Args:
        make: maps memory of a size; gives a descriptor with it if it is to be shared.
        on_dropped: called, without locks, with the id of a block that the pool has let go of.
    """

    def __init__(
        self,
        budget_bytes: int,
        make: Callable[[int], tuple[Mapping, int | None]],
        on_dropped: Callable[[int], None],
    ) -> None:
        self._budget_bytes = budget_bytes
        self._make = make
        self._on_dropped = on_dropped
        self._changed = threading.Condition()
        self._in_use: dict[int, Block] = {}
        self._kept: dict[int, Block] = {}
        # Free blocks, the longest unused first, and their ids by size.
        self._free: OrderedDict[int, Block] = OrderedDict()
        self._free_by_size: dict[int, list[int]] = {}
        self._in_use_bytes = 0
        self._free_bytes = 0
        self._next_id = 1
        self._is_closed = False

    def acquire(self, length: int, on_wait: Callable[[], None] = lambda: None) -> Block:
        """A block of at least ``length`` bytes; waits while the budget is used up.

        Args:
            on_wait: called every 10 s of waiting.

        Raises:
            PoolClosed: the pool is closed, maybe while waiting. MemoryError: the system has no memory left.
        """
        size = class_bytes(length)
        dropped: list[Block] = []
        with self._changed:
            while self._in_use and self._in_use_bytes + size > self._budget_bytes and not self._is_closed:
                if not self._changed.wait(10.0):
                    on_wait()
            if self._is_closed:
                raise PoolClosed
            self._in_use_bytes += size
            block: Block | None = None
            if same_size := self._free_by_size.get(size):
                block = self._free.pop(same_size.pop())
                self._free_bytes -= size
                self._in_use[block.id] = block
            else:
                while self._free and self._in_use_bytes + self._free_bytes > self._budget_bytes:
                    dropped.append(self._drop_oldest())
                block_id, self._next_id = self._next_id, self._next_id + 1
        for old in dropped:
            self._on_dropped(old.id)
        if block is None:
            # Mapping touches pages and takes long: not under the lock.
            try:
                mapping, fd = self._make(size)
            except BaseException:
                with self._changed:
                    self._in_use_bytes -= size
                    self._changed.notify_all()
                raise
            block = Block(block_id, mapping, fd)
            with self._changed:
                self._in_use[block.id] = block
        return block

    def _drop_oldest(self) -> Block:
        block_id, block = self._free.popitem(last=False)
        self._free_by_size[block.size_bytes].remove(block_id)
        self._free_bytes -= block.size_bytes
        return block

    def keep(self, block_id: int) -> None:
        """The reader keeps the block; it stays out of the account until it is released."""
        with self._changed:
            block = self._in_use.pop(block_id, None)
            if block is not None:
                self._kept[block_id] = block
                self._in_use_bytes -= block.size_bytes
                self._changed.notify_all()

    def release(self, block_id: int) -> None:
        """The block may be used again. Unknown ids are ignored: the pool may have been emptied in between."""
        with self._changed:
            block = self._in_use.pop(block_id, None)
            if block is not None:
                self._in_use_bytes -= block.size_bytes
            else:
                block = self._kept.pop(block_id, None)
            if block is None:
                return
            account = self._in_use_bytes + self._free_bytes
            is_retained = not self._is_closed and (account == 0 or account + block.size_bytes <= self._budget_bytes)
            if is_retained:
                self._free[block_id] = block
                self._free_by_size.setdefault(block.size_bytes, []).append(block_id)
                self._free_bytes += block.size_bytes
            self._changed.notify_all()
        if not is_retained:
            self._on_dropped(block_id)

    def held_bytes(self) -> dict[str, int]:
        """Bytes in use, kept by readers, and free."""
        with self._changed:
            kept = sum(block.size_bytes for block in self._kept.values())
            return {"in_use": self._in_use_bytes, "kept": kept, "free": self._free_bytes}

    def close(self) -> None:
        """Let go of everything and wake who waits. Memory that arrays still lie in stays mapped until they are gone."""
        with self._changed:
            self._is_closed = True
            for block in [*self._in_use.values(), *self._kept.values(), *self._free.values()]:
                if block.fd is not None:
                    os.close(block.fd)
                    block.fd = None
            self._in_use.clear()
            self._kept.clear()
            self._free.clear()
            self._free_by_size.clear()
            self._in_use_bytes = self._free_bytes = 0
            self._changed.notify_all()
