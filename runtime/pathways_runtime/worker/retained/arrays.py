"""Arrays in memory that outlives this executor: those that it makes, and those that it finds."""

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, SessionId
from pathways_runtime.core.worker.events import ArrayCopied, Event
from pathways_runtime.core.worker.instructions import DropArray, RecordArray, RetainArray
from pathways_runtime.worker import pjrt
from pathways_runtime.worker.buffers import HostArray
from pathways_runtime.worker.retained import file as retained_file
from pathways_runtime.worker.retained.file import OutOfMemory, RetainedFile
from pathways_runtime.worker.retained.journal import JOURNAL_BYTES, Journal, JournalFull, Retained, Shard
from pathways_runtime.worker.shards import Retaining, Shards
from pathways_runtime.worker.threads import Pool
from pathways_runtime.worker.worlds import World

logger = logging.getLogger(__name__)

#: Threads that wait for arrays and copy them. They are made as needed.
_MAX_THREADS = 32

#: Handle, devices here, value.
Found = tuple[Handle, tuple[DeviceId, ...], Shards]


class RetainedArrays:
    """Performs the core's instructions about such arrays. Safe for use from several threads.

    Args:
        fd: of the file, see ``retained.file``; this process's for good.
        on_use_changed: is told when there is the first, and when there is none any more, on the thread that
            brought it about. In order.

    Raises:
        OSError, ValueError: the file cannot be mapped.
    """

    def __init__(self, fd: int, on_use_changed: Callable[[bool], None]) -> None:
        self._file = RetainedFile(fd, JOURNAL_BYTES, retained_file.half_of_memory_bytes())
        self._journal = Journal(self._file.buffer)
        self._on_use_changed = on_use_changed
        self._lock = threading.Lock()
        self._threads = Pool("retained", _MAX_THREADS)
        #: Of what the journal has: so that its memory stays.
        self._contents = self._take_again()
        #: Of these, what was found and not adopted yet.
        self._found = set(self._contents)
        #: Of the two that come for each array, its record and its drop, one came and left nothing for the other: it was
        #: dropped first, or the journal had no room for it. Of sessions that are over, none is recorded any more.
        self._half_done: set[tuple[SessionId, Handle]] = set()
        self._closed: set[SessionId] = set()
        self._has_warned = False

    def close(self) -> None:
        """End threads; nothing more is performed."""
        self._threads.close()

    def held_bytes(self) -> dict[str, int]:
        """Bytes in use, and free but still in memory."""
        return self._file.held_bytes()

    # What an executor before this one had

    def _take_again(self) -> dict[tuple[SessionId, Handle], list[HostArray]]:
        records = self._journal.records
        ranges = [(shard.start, shard.num_bytes) for record in records.values() for shard in record.shards]
        contents = iter(self._file.take_again(ranges))
        return {key: [_typed(next(contents), record) for _ in record.shards] for key, record in records.items()}

    def found(self) -> tuple[HostIndex | None, tuple[tuple[SessionId, tuple[Handle, ...]], ...]]:
        """What was found: behind which virtual host the executor stood (None: there is nothing), and by session the
        handles."""
        by_session: dict[SessionId, list[Handle]] = {}
        host = None
        with self._lock:
            for record in map(self._journal.records.__getitem__, sorted(self._found)):
                by_session.setdefault(record.session, []).append(record.handle)
                host = record.host
        return host, tuple((session, tuple(handles)) for session, handles in by_session.items())

    def bind(self, host: HostIndex) -> None:
        """This executor stands behind a host: what was found is of no use behind another."""
        with self._lock:
            others = [key for key in self._found if self._journal.records[key].host != host]
        for key in others:
            self._drop(*key)

    def drop_found(self) -> None:
        """What was found and not adopted is of no use."""
        with self._lock:
            found = list(self._found)
        for key in found:
            self._drop(*key)

    def adopt(self, session: SessionId, home: Callable[[], World]) -> tuple[Found, ...]:
        """The arrays of a session that were found, in the world ``home``; once."""
        with self._lock:
            chosen = sorted(key for key in self._found if key[0] == session)
            self._found.difference_update(chosen)
            found = [(self._journal.records[key], self._contents[key]) for key in chosen]
        adopted = []
        for record, contents in found:
            devices = tuple(shard.device for shard in record.shards)
            placement = home().placement(devices, record.memory_kind)
            value = Shards(pjrt.put(contents, placement.sharding, placement.physical), placement)
            value.retaining = Retaining()
            ranges = zip(record.shards, contents, strict=True)
            value.retaining.ranges = tuple((shard.start, content) for shard, content in ranges)
            value.retaining.is_settled.set()
            adopted.append((record.handle, devices, value))
        return tuple(adopted)

    # What this one has

    def retain(self, instruction: RetainArray, host: HostIndex, post: Callable[[Event], None]) -> None:
        """Perform RetainArray. ``post`` takes an event and performs what follows."""
        value = instruction.array.value
        if value is None:
            # It has failed meanwhile, on another thread.
            return
        assert type(value) is Shards
        value.retaining = Retaining()
        self._threads.submit(self._retain, instruction, value, value.retaining, host, post)

    def _retain(
        self,
        instruction: RetainArray,
        value: Shards,
        retaining: Retaining,
        host: HostIndex,
        post: Callable[[Event], None],
    ) -> None:
        array = instruction.array
        try:
            pjrt.wait([value.array])
            ranges = self._shared_ranges(value) or tuple(
                self._copied(value.shard(place)) for place in range(len(array.devices))
            )
        except pjrt.PjrtError:
            # Whoever uses the array is told.
            logger.debug("array %d of session %d has failed and is not retained", array.handle, instruction.session)
        except OutOfMemory as full:
            self._warn(full)
        else:
            retaining.ranges = ranges
            shards = tuple(
                Shard(device, start, contents.nbytes)
                for device, (start, contents) in zip(array.devices, ranges, strict=True)
            )
            placement = value.placement
            first = ranges[0][1]
            names = (placement.memory_kind, first.dtype.name, first.shape)
            record = Retained(host, instruction.session, array.handle, *names, shards)
            copy = record, [contents for _, contents in ranges]
            post(ArrayCopied(instruction.session, array, self._in_place(value, ranges), copy))
        finally:
            value.origins = ()
            retaining.is_settled.set()

    @staticmethod
    def _shared_ranges(value: Shards) -> tuple[tuple[int, HostArray], ...]:
        """Of what was made of shards that are retained: theirs."""
        found = []
        for origin, place in value.origins:
            if origin.retaining is None:
                return ()
            origin.retaining.is_settled.wait()
            if not origin.retaining.ranges:
                return ()
            found.append(origin.retaining.ranges[place])
        return tuple(found)

    def _copied(self, shard: pjrt.Array) -> tuple[int, HostArray]:
        contents = pjrt.view(shard)
        start, memory = self._file.take(contents.nbytes)
        # As bytes: numpy then does it without the interpreter, whatever the type.
        np.copyto(memory, contents.reshape(-1).view(np.uint8))
        copied: HostArray = memory.view(contents.dtype).reshape(contents.shape)
        return start, copied

    @staticmethod
    def _in_place(value: Shards, ranges: Sequence[tuple[int, HostArray]]) -> Shards | None:
        """The array in the retained memory itself, where PJRT takes it as it is; None elsewhere."""
        placement = value.placement
        if placement.world.client.platform != "cpu":
            return None
        made = Shards(pjrt.put([contents for _, contents in ranges], placement.sharding, placement.physical), placement)
        made.retaining = value.retaining
        return made

    def record(self, instruction: RecordArray) -> None:
        """Perform RecordArray."""
        record: Retained
        record, contents = instruction.copy
        key = (record.session, record.handle)
        with self._lock:
            if key in self._half_done or record.session in self._closed:
                self._half_done.discard(key)
                return
            was_used = bool(self._journal.records)
            try:
                self._journal.add(record)
            except JournalFull as full:
                self._half_done.add(key)
                self._warn(full)
                return
            self._contents[key] = contents
            if not was_used:
                self._on_use_changed(True)

    def drop(self, instruction: DropArray) -> None:
        """Perform DropArray."""
        self._drop(instruction.session, instruction.handle, is_one=True)

    def drop_session(self, session: SessionId) -> None:
        """Drop all of a session, for good."""
        with self._lock:
            self._closed.add(session)
            self._half_done -= {key for key in self._half_done if key[0] == session}
            keys = [key for key in self._journal.records if key[0] == session]
        for key in keys:
            self._drop(*key)

    def _drop(self, session: SessionId, handle: Handle, *, is_one: bool = False) -> None:
        key = (session, handle)
        with self._lock:
            if key not in self._journal.records:
                if key in self._half_done:
                    self._half_done.discard(key)
                elif is_one and session not in self._closed:
                    self._half_done.add(key)
                return
            self._journal.drop(session, handle)
            # Not before the journal says so: memory that it names must not be used for anything else.
            self._found.discard(key)
            contents = self._contents.pop(key)
            if not self._journal.records:
                self._on_use_changed(False)
        del contents

    def _warn(self, full: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("arrays in host memory are not retained any more, and are lost with this process: %s", full)


def _typed(contents: HostArray, record: Retained) -> HostArray:
    return contents.view(np.dtype(record.dtype)).reshape(record.shape)
