"""What is whole in the file: records that survive the process that writes them, at whatever moment it ends.

Two areas take turns. A record is there once the length before it is: the length is written last. When an area is full,
what still counts is written to the other one, and then the file's first byte says that that one counts.
"""

import msgspec
import numpy as np

from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, SessionId
from pathways_runtime.transport.dataplane.memory import Bytes

_HEADER_BYTES = 4096
_LENGTH_BYTES = 8
#: Of both areas together; pages take memory once they are written.
JOURNAL_BYTES = 256 << 20


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of one shard: where they begin in the file, and how many they are."""

    device: DeviceId
    start: int
    num_bytes: int


class Retained(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An array's shards on this host are whole.

    Attributes:
        host: the virtual host that the executor stood behind.
        dtype: numpy's name. shape: of each shard.
        shards: in the order of the array's devices here.
    """

    host: HostIndex
    session: SessionId
    handle: Handle
    memory_kind: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """An array counts no more."""

    session: SessionId
    handle: Handle


class JournalFull(Exception):
    """What counts does not fit."""


class Journal:
    """Records in a buffer that may hold those of a writer before. One caller at a time.

    Attributes:
        records: what counts, by session and handle.
    """

    def __init__(self, buffer: Bytes) -> None:
        self._buffer = buffer
        self._size = (len(buffer) - _HEADER_BYTES) // 2 // _LENGTH_BYTES * _LENGTH_BYTES
        self._area = int(buffer[0])
        self._place = 0
        self.records: dict[tuple[SessionId, Handle], Retained] = {}
        self._read()

    def add(self, record: Retained) -> None:
        """An array counts from now on.

        Raises:
            JournalFull: it does not fit; nothing has changed.
        """
        key = (record.session, record.handle)
        self.records[key] = record
        try:
            self._append(record)
        except JournalFull:
            del self.records[key]
            raise

    def drop(self, session: SessionId, handle: Handle) -> None:
        """An array counts no more; nothing happens if it did not."""
        if self.records.pop((session, handle), None) is not None:
            self._append(Dropped(session, handle))

    def _append(self, record: Retained | Dropped) -> None:
        content = msgspec.msgpack.encode(record)
        if not self._fits(content):
            # What counts is known here, this record with it.
            self._rewrite()
        else:
            self._place = self._write(self._area, self._place, content)

    def _fits(self, content: bytes) -> bool:
        # The length after the last record is zero.
        return self._place + _padded(content) + 2 * _LENGTH_BYTES <= self._size

    def _rewrite(self) -> None:
        contents = list(map(msgspec.msgpack.encode, self.records.values()))
        if sum(map(_padded, contents)) + (len(contents) + 1) * _LENGTH_BYTES > self._size:
            raise JournalFull(f"{len(contents)} records do not fit into {self._size} bytes")
        other, place = 1 - self._area, 0
        self._lengths(other, 0)[0] = 0
        for content in contents:
            place = self._write(other, place, content)
        self._buffer[0] = other
        self._area, self._place = other, place

    def _write(self, area: int, place: int, content: bytes) -> int:
        after = place + _LENGTH_BYTES + _padded(content)
        start = self._start(area) + place + _LENGTH_BYTES
        self._lengths(area, after)[0] = 0
        self._buffer[start : start + len(content)] = np.frombuffer(content, np.uint8)
        self._lengths(area, place)[0] = len(content)
        return after

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(Retained | Dropped)
        while length := int(self._lengths(self._area, self._place)[0]):
            start = self._start(self._area) + self._place + _LENGTH_BYTES
            content = self._buffer[start : start + length].tobytes()
            match decoder.decode(content):
                case Retained() as record:
                    self.records[record.session, record.handle] = record
                case Dropped(session, handle):
                    self.records.pop((session, handle), None)
            self._place += _LENGTH_BYTES + _padded(content)

    def _start(self, area: int) -> int:
        return _HEADER_BYTES + area * self._size

    def _lengths(self, area: int, place: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
        start = self._start(area) + place
        return self._buffer[start : start + _LENGTH_BYTES].view(np.uint64)


def _padded(content: bytes) -> int:
    return -(-len(content) // _LENGTH_BYTES) * _LENGTH_BYTES
