"""Values in memory that an executor and a Python process of it share: each has one SharedMemory, the two are alike.

*Giving* a value copies it into a block, unless its bytes lie in a block already, of either end: then only the block's
name travels. *Taking* it gives an array over the block's memory. So a value that comes out of a call and goes into the
next is copied once, when it came out. Nobody writes to a value that was given.

An owner counts who looks at a block: one for each time that the other end was given it, and one for each array of its
own over it. The block is used again when nobody does.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Sequence

import numpy as np

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.transport.dataplane.memory import (
    Block,
    BlockPool,
    Bytes,
    Lease,
    Mapping,
    PoolClosed,
    shared_mapping,
)
from pathways_runtime.transport.frames import Buffer, ConnectionClosed
from pathways_runtime.worker.buffers import HostArray
from pathways_runtime.worker.colocated.connection import Connection
from pathways_runtime.worker.colocated.messages import ForgetBlock, FreeBlock, NewBlock, Piece
from pathways_runtime.worker.threads import tell

#: Smaller values travel in the frame: that costs less than the messages about a block.
SMALL_BYTES = 16 << 10
#: Blocks that hold nothing and are kept for the next value, of each end.
_SPARE_BYTES = 1 << 30


class SharedMemory:
    """One end's blocks and its view of the other's. For any thread, but ``new_block`` and the like: for the receiver's.

    Attributes:
        copied_bytes: what was copied into blocks so far.
        shared_bytes: what lay in one already.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._pool = BlockPool(_SPARE_BYTES, shared_mapping, self._dropped)
        self._own: dict[int, Block] = {}
        self._uses: dict[int, int] = {}
        self._theirs: dict[int, Mapping] = {}
        #: (block, whether it is the other end's) by address, of what arrays lie in at present.
        self._by_address: dict[int, tuple[int, bool]] = {}
        #: Numbers of arrays over the memory at an address.
        self._views: dict[int, int] = {}
        # Arrays end wherever the last reference goes, also within this class's locks: a thread takes note.
        self._ended: queue.SimpleQueue[tuple[int, int, bool] | None] = queue.SimpleQueue()
        self.copied_bytes = 0
        self.shared_bytes = 0
        threading.Thread(target=tell, args=(self._note_ends,), name="blocks", daemon=True).start()

    def give(self, device: DeviceId, value: HostArray, payload: list[Buffer]) -> Piece:
        """Make a dense value known to the other end by what is sent next; small ones are appended to ``payload``.

        The caller keeps ``value`` until that is sent.

        Raises:
            ConnectionClosed: the other end is gone. MemoryError: there is no memory for it.
        """
        flat = value.reshape(-1).view(np.uint8)
        size = flat.nbytes
        if size <= SMALL_BYTES:
            payload.append(flat.data)
            return Piece(device, size)
        address = flat.ctypes.data
        with self._lock:
            found = self._by_address.get(address)
            if found is not None:
                block_id, is_theirs = found
                if not is_theirs:
                    self._uses[block_id] += 1
                self.shared_bytes += size
                return Piece(device, size, block_id, is_theirs)
        try:
            block = self._pool.acquire(size)
        except PoolClosed as closed:
            raise ConnectionClosed("the other end is gone") from closed
        block.mapping.array()[:size] = flat
        self._pool.keep(block.id)
        with self._lock:
            self._own[block.id] = block
            self._uses[block.id] = 1
            self.copied_bytes += size
        fd = block.fd
        if fd is not None:
            block.fd = None
            try:
                self._connection.send(NewBlock(block.id, block.size_bytes), fd=fd)
            finally:
                os.close(fd)
        return Piece(device, size, block.id)

    def take(self, pieces: Sequence[Piece], payload: Buffer, start: int) -> tuple[list[Bytes], int]:
        """The bytes of pieces that were received, aligned where they lie in blocks, and where the payload goes on.

        Raises:
            ConnectionClosed: a block is named that nobody knows.
        """
        taken = []
        for piece in pieces:
            if piece.block:
                taken.append(self._view(piece))
            else:
                taken.append(np.frombuffer(payload, np.uint8, piece.num_bytes, start))
                start += piece.num_bytes
        return taken, start

    def _view(self, piece: Piece) -> Bytes:
        block_id, is_theirs = piece.block, not piece.is_receivers
        with self._lock:
            mapping: Mapping | None
            if is_theirs:
                mapping = self._theirs.get(block_id)
            else:
                block = self._own.get(block_id)
                mapping = None if block is None else block.mapping
                if block is not None:
                    self._uses[block_id] += 1
            if mapping is None:
                raise ConnectionClosed(f"block {block_id} is not known")
            memory = mapping.array()[: piece.num_bytes]
            address = memory.ctypes.data
            self._by_address[address] = (block_id, is_theirs)
            self._views[address] = self._views.get(address, 0) + 1
        ended = (address, block_id, is_theirs)
        lease = Lease(memory, lambda: self._ended.put(ended))
        return np.asarray(lease)

    def _note_ends(self) -> None:
        while (ended := self._ended.get()) is not None:
            address, block_id, is_theirs = ended
            with self._lock:
                self._views[address] -= 1
                if not self._views[address]:
                    del self._views[address]
                    del self._by_address[address]
            if is_theirs:
                with contextlib.suppress(ConnectionClosed):
                    self._connection.send(FreeBlock(block_id))
            else:
                self.freed(block_id)

    # What the other end says, for the thread that receives

    def new_block(self, message: NewBlock) -> None:
        """The other end announces a block."""
        fd = self._connection.take_fd()
        try:
            mapping = Mapping(message.num_bytes, fd)
        finally:
            os.close(fd)
        with self._lock:
            self._theirs[message.block] = mapping

    def forget_block(self, message: ForgetBlock) -> None:
        """It withdraws one; arrays over it keep its memory."""
        with self._lock:
            self._theirs.pop(message.block, None)

    def freed(self, block_id: int) -> None:
        """One who looked at a block of ours does not any more."""
        with self._lock:
            self._uses[block_id] -= 1
            if self._uses[block_id]:
                return
            del self._uses[block_id]
            del self._own[block_id]
        self._pool.release(block_id)

    def _dropped(self, block_id: int) -> None:
        with contextlib.suppress(ConnectionClosed):
            self._connection.send(ForgetBlock(block_id))

    def held_bytes(self) -> dict[str, int]:
        """Of blocks of this end: bytes that somebody looks at, and spare ones."""
        held = self._pool.held_bytes()
        return {"in_use": held["in_use"] + held["kept"], "spare": held["free"]}

    def close(self) -> None:
        """End the thread. Arrays keep the memory that they lie in."""
        self._ended.put(None)
        self._pool.close()
