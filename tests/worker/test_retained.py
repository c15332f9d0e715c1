"""Memory that outlives executors: ranges of the file, and the journal of what is whole."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, SessionId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.worker.arrays import LocalArray
from pathways_runtime.core.worker.events import Event
from pathways_runtime.core.worker.instructions import DropArray, RecordArray, RetainArray
from pathways_runtime.worker.retained import arrays as retained_arrays
from pathways_runtime.worker.retained import descriptor
from pathways_runtime.worker.retained import file as retained_file
from pathways_runtime.worker.retained.arrays import RetainedArrays
from pathways_runtime.worker.retained.file import OutOfMemory, RetainedFile
from pathways_runtime.worker.retained.journal import Journal, JournalFull, Retained, Shard

_FIRST = 1 << 16
_LIMIT_BYTES = 64 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    made = descriptor.make()
    yield made
    os.close(made)


def _pages_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_a_range_is_free_when_its_last_array_is_gone(fd: int) -> None:
    memory = RetainedFile(fd, _FIRST, _LIMIT_BYTES)
    start, contents = memory.take(1 << 20)
    part = contents[10:20]
    del contents
    assert memory.held_bytes() == {"in_use": 1 << 20, "free": 0}
    del part
    assert memory.held_bytes() == {"in_use": 0, "free": 1 << 20}
    again, _ = memory.take((1 << 20) - 5)
    assert again == start


def test_ranges_are_aligned_and_apart(fd: int) -> None:
    memory = RetainedFile(fd, _FIRST, _LIMIT_BYTES)
    taken = [memory.take(length) for length in (1, 100_000, 64, 1 << 20)]
    for number, (start, contents) in enumerate(taken):
        assert contents.ctypes.data % 64 == 0
        assert start >= _FIRST
        contents[:] = number
    assert [set(contents.tolist()) for _, contents in taken] == [{0}, {1}, {2}, {3}]


def test_the_limit_is_kept_and_said(fd: int) -> None:
    memory = RetainedFile(fd, _FIRST, 1 << 20)
    _, first = memory.take(1 << 19)
    with pytest.raises(OutOfMemory, match="1572864 bytes would be more than the limit, 1048576"):
        memory.take(1 << 20)
    del first
    assert len(memory.take(1 << 20)[1]) == 1 << 20


def test_free_pages_are_given_back_beyond_what_is_kept_warm(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retained_file, "_MIN_WARM_BYTES", 1 << 20)
    memory = RetainedFile(fd, _FIRST, _LIMIT_BYTES)
    taken = [memory.take(1 << 20)[1] for _ in range(4)]
    for contents in taken:
        contents[:] = 1
    assert _pages_bytes(fd) == 4 << 20
    del contents
    taken.clear()
    # As long as as much was in use: the last two were too much.
    assert memory.held_bytes() == {"in_use": 0, "free": 2 << 20}
    assert _pages_bytes(fd) == 2 << 20


def test_what_one_executor_wrote_the_next_one_reads(fd: int) -> None:
    before = RetainedFile(fd, _FIRST, _LIMIT_BYTES)
    start, contents = before.take(1000)
    contents[:] = np.arange(1000) % 251
    _, other = before.take(5000)
    other[:] = 7
    after = RetainedFile(fd, _FIRST, _LIMIT_BYTES)
    kept, same = after.take_again([(start, 1000), (start, 1000)])
    assert kept.tolist() == (np.arange(1000) % 251).tolist()
    assert same is kept
    assert after.held_bytes() == {"in_use": 1024, "free": 0}
    assert _pages_bytes(fd) == 4096, "what was not taken again holds memory"
    del kept, same
    assert after.held_bytes() == {"in_use": 0, "free": 1024}


def test_sizes_hold_and_are_few() -> None:
    for length in (*range(1, 5000), 65_535, 65_536, 65_537, 10_000_000):
        size = retained_file.size_of(length)
        assert size % 64 == 0
        assert length <= size <= max(length + 63, length * 1.25), length
    assert len({retained_file.size_of(length) for length in range(1 << 20)}) < 60


def test_gaps_are_used_when_the_end_is_reached(fd: int) -> None:
    os.ftruncate(fd, _FIRST + (4 << 20))
    memory = RetainedFile(fd, _FIRST, _LIMIT_BYTES)
    taken = [memory.take(1 << 20) for _ in range(4)]
    with pytest.raises(OutOfMemory, match="in a row"):
        memory.take(1 << 20)
    starts = [start for start, _ in taken]
    del taken[1:3]
    start, contents = memory.take(2 << 20)
    assert start == starts[1]
    contents[:] = 9
    assert memory.held_bytes() == {"in_use": 4 << 20, "free": 0}
    with pytest.raises(OutOfMemory):
        memory.take(1)


def test_a_limit_of_memory_is_found() -> None:
    assert 0 < retained_file.half_of_memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _record(handle: int, num_shards: int = 1) -> Retained:
    shards = tuple(Shard(DeviceId(device), 4096 * device, 64) for device in range(num_shards))
    return Retained(HostIndex(1), SessionId(3), Handle(handle), "pinned_host", "float32", (4, 4), shards)


def _buffer(size: int = 4096 + 2 * 1024) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.zeros(size, np.uint8)


def test_records_are_read_by_the_next_journal() -> None:
    buffer = _buffer()
    journal = Journal(buffer)
    assert journal.records == {}
    journal.add(_record(1))
    journal.add(_record(2, num_shards=3))
    journal.drop(SessionId(3), Handle(1))
    journal.drop(SessionId(3), Handle(99))
    assert Journal(buffer).records == {(3, 2): _record(2, num_shards=3)}


def test_a_record_that_was_not_finished_does_not_count() -> None:
    buffer = _buffer()
    journal = Journal(buffer)
    journal.add(_record(1))
    whole = buffer.copy()
    journal.add(_record(2))
    # The length comes last: without it, the rest is nothing.
    differing = np.flatnonzero(buffer != whole)
    buffer[differing[0]] = 0
    assert Journal(buffer).records == {(3, 1): _record(1)}


def test_a_full_area_is_left_for_the_other_with_what_counts() -> None:
    buffer = _buffer()
    journal = Journal(buffer)
    for handle in range(1, 200):
        journal.add(_record(handle))
        journal.drop(SessionId(3), Handle(handle - 5))
        assert Journal(buffer).records == journal.records, handle
    assert sorted(handle for _, handle in journal.records) == [195, 196, 197, 198, 199]


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    buffer = _buffer()
    journal = Journal(buffer)
    with pytest.raises(JournalFull, match="records do not fit into 1024 bytes"):
        for handle in range(1, 1000):
            journal.add(_record(handle))
    count = len(journal.records)
    assert count >= 10
    assert Journal(buffer).records == journal.records
    journal.drop(SessionId(3), Handle(1))
    journal.add(_record(2000))
    assert len(Journal(buffer).records) == count


def test_arrays_that_the_journal_has_no_room_for_are_not_retained_and_said_once(
    fd: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retained_arrays, "JOURNAL_BYTES", 8192)
    used: list[bool] = []
    retained = RetainedArrays(fd, used.append)
    records = [_record(handle) for handle in range(100)]
    for record in records:
        array = LocalArray(record.handle, (DeviceId(0),))
        retained.record(RecordArray(record.session, array, (record, [np.zeros(16, np.float32)])))
    fitting = len(Journal(RetainedFile(fd, 8192, _LIMIT_BYTES).buffer).records)
    assert 0 < fitting < 100
    for record in records:
        retained.drop(DropArray(record.session, record.handle))
    assert used == [True, False]
    # As if they had never been: what is recorded now counts.
    retained.record(RecordArray(records[-1].session, array, (records[-1], [np.zeros(16, np.float32)])))
    assert used == [True, False, True]
    retained.close()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "arrays in host memory are not retained any more, and are lost with this process"
    ]


def test_an_array_that_has_failed_meanwhile_is_not_retained(fd: int) -> None:
    used: list[bool] = []
    retained = RetainedArrays(fd, used.append)
    array = LocalArray(Handle(1), (DeviceId(0),))
    array.failure = Status(Code.DATA_LOSS, "it failed")
    posted: list[Event] = []
    retained.retain(RetainArray(SessionId(1), array), HostIndex(0), posted.append)
    retained.close()
    assert (posted, used, retained.found()) == ([], [], (None, ()))
    assert retained.held_bytes() == {"in_use": 0, "free": 0}
