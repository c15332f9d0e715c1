"""Arrays to and from files: performs the core's instructions about them, on threads of its own."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from pathways_runtime.core.sharding import Box
from pathways_runtime.core.status import Code, Status, StatusError, error
from pathways_runtime.core.worker.events import ArrayFailed, ArrayMade, Event, ReadTaken
from pathways_runtime.core.worker.instructions import AnswerAwait, LoadArray, StoreTiles, Tile
from pathways_runtime.worker import pjrt, zarr
from pathways_runtime.worker.buffers import HostArray
from pathways_runtime.worker.shards import Shards
from pathways_runtime.worker.threads import Pool
from pathways_runtime.worker.transfers import value_of
from pathways_runtime.worker.worlds import World

#: Files written or read side by side; each thread blocks in the file system.
_MAX_THREADS = 16


class Storage:
    """See the module.

    Args:
        name: the host's, for messages.
        post: takes an event and performs what follows.
        answer: tells the proxy.
        home: the world in which arrays are made.
    """

    def __init__(
        self,
        name: str,
        post: Callable[[Event], None],
        answer: Callable[[AnswerAwait], None],
        home: Callable[[], World],
    ) -> None:
        self._name = name
        self._post = post
        self._answer = answer
        self._home = home
        self._threads = Pool("files", _MAX_THREADS)

    def close(self) -> None:
        """End threads; nothing more is performed."""
        self._threads.close()

    def store(self, instruction: StoreTiles) -> None:
        """Perform StoreTiles."""
        storing = _Storing(self, instruction)
        for tile in instruction.tiles:
            self._threads.submit(storing.write, tile)

    def load(self, instruction: LoadArray) -> None:
        """Perform LoadArray."""
        self._threads.submit(self._load, instruction, time.monotonic() + instruction.timeout_s)

    def _load(self, instruction: LoadArray, deadline_s: float) -> None:
        array = instruction.array
        try:
            made = self._made(instruction, deadline_s)
        except (pjrt.PjrtError, ValueError, OSError, StatusError) as failure:
            self._post(ArrayFailed(instruction.session, instruction.op_id, array, self._status_of(failure)))
        else:
            self._post(ArrayMade(instruction.session, array, made))

    def _made(self, instruction: LoadArray, deadline_s: float) -> Shards:
        source, result = instruction.source, instruction.result
        folder = Path(source.folder)
        layout = zarr.read_layout(folder)
        if layout.shape != source.shape or layout.dtype != pjrt.dtype_of(source.dtype):
            raise error(
                Code.INVALID_ARGUMENT,
                f"{folder} holds {layout.dtype}{list(layout.shape)}, "
                f"not {source.dtype.numpy_name}{list(source.shape)}, which was asked for",
            )
        parts: dict[Box, HostArray] = {}
        for box in instruction.boxes:
            if box not in parts:
                self.check_deadline(deadline_s, instruction.timeout_s, f"reading {folder}")
                parts[box] = zarr.read_box(folder, layout, box, result.shape)
        placement = self._home().placement(instruction.array.devices, result.memory_kind)
        made = pjrt.put([parts[box] for box in instruction.boxes], placement.sharding, placement.physical)
        return Shards(made, placement)

    def check_deadline(self, deadline_s: float, timeout_s: float, what: str) -> None:
        """Raise StatusError DEADLINE_EXCEEDED if it has passed."""
        if time.monotonic() > deadline_s:
            raise error(Code.DEADLINE_EXCEEDED, f"{what} on {self._name} took longer than {timeout_s:g} s")

    def _status_of(self, failure: Exception) -> Status:
        if isinstance(failure, OSError):
            return Status(Code.FAILED_PRECONDITION, f"{failure} (on {self._name})")
        return pjrt.status_of(failure)

    def written(self, instruction: StoreTiles, failure: Exception | None) -> None:
        """All tiles are on the disk, or one is not."""
        self._post(ReadTaken(instruction.arrays))
        status = None if failure is None else self._status_of(failure)
        self._answer(AnswerAwait(instruction.session, instruction.wait_id, status))


class _Storing:
    """A StoreTiles under way: the last of its tiles tells."""

    def __init__(self, storage: Storage, instruction: StoreTiles) -> None:
        self._storage = storage
        self._instruction = instruction
        self._deadline_s = time.monotonic() + instruction.timeout_s
        self._lock = threading.Lock()
        self._missing = len(instruction.tiles)
        self._failure: Exception | None = None

    def write(self, tile: Tile) -> None:
        """Write one tile, unless another has failed."""
        failure: Exception | None = None
        if self._failure is None:
            try:
                self._write(tile)
            except (pjrt.PjrtError, ValueError, OSError, StatusError) as raised:
                failure = raised
        with self._lock:
            self._failure = self._failure or failure
            self._missing -= 1
            is_last = self._missing == 0
        if is_last:
            self._storage.written(self._instruction, self._failure)

    def _write(self, tile: Tile) -> None:
        target = tile.target
        folder = Path(target.folder)
        self._storage.check_deadline(self._deadline_s, self._instruction.timeout_s, f"writing {folder}")
        shard_shape = target.sharding.shard_shape(target.shape)
        layout = zarr.layout_of(target.shape, shard_shape, target.dtype)
        if tile.is_first:
            zarr.write_layout(folder, layout)
        if tile.source is None:
            return
        content = pjrt.view(value_of(tile.source.array).shard(tile.source.position))
        zarr.write_chunk(folder, layout, tile.index, content)
