"""Host buffers on their way in: their memory, where messages land, and when clients are held back."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_runtime.core.ids import Handle
from pathways_runtime.core.status import StatusError
from pathways_runtime.proxy import host_memory, upload_gate
from pathways_runtime.proxy.host_memory import HostMemory
from pathways_runtime.proxy.upload import HostBufferUpload
from pathways_runtime.proxy.upload_gate import UploadGate
from pathways_runtime.wire.ifrt import schema

from .turns import DEADLINE_S, until

MIB = 1 << 20


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))


class RecordedFlow:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


class FakeSession:
    """What an upload needs of its session."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.uploads = UploadGate(memory, lambda: True, tuple)
        self.is_over = False
        self.stored: dict[Handle, memoryview] = {}

    def store_host_buffer(self, handle: Handle, content: memoryview) -> None:
        self.stored[handle] = content


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


# Memory


def test_memory_is_counted_until_its_last_view_is_gone_and_used_again() -> None:
    async def body() -> None:
        memory = HostMemory(budget_bytes=4 * MIB)
        taken = memory.take(2 * MIB)
        assert (len(taken), address(taken) % 64, memory.in_use_bytes) == (2 * MIB, 0, 2 * MIB)
        other = memory.take(2 * MIB)
        assert not memory.is_scarce
        another = memory.take(MIB)
        assert memory.is_scarce
        part = taken[5:]
        before = address(taken)
        del taken, another
        await until(lambda: memory.in_use_bytes == 4 * MIB, "one is taken back")
        assert memory.free_bytes == 0, "more than the budget is not kept"
        thread = threading.Thread(target=part.release)
        thread.start()
        thread.join(DEADLINE_S)
        del part, thread
        await until(lambda: memory.in_use_bytes == 2 * MIB, "what was dropped on a thread is taken back")
        assert memory.free_bytes == 2 * MIB
        again = memory.take(2 * MIB - 100)
        assert address(again) == before
        assert memory.free_bytes == 0
        del again
        await until(lambda: memory.free_bytes == 2 * MIB, "it is taken back")
        large = memory.take(3 * MIB, headroom_bytes=64)
        assert (len(large), address(large[64:]) % 64) == (3 * MIB + 64, 0)
        assert memory.free_bytes == 0, "what is in use goes before what lies ready"
        del other, large

    run(body)


def test_small_buffers_are_not_counted() -> None:
    async def body() -> None:
        memory = HostMemory()
        assert bytes(memory.take(3)) == bytes(3)
        assert len(memory.take(0)) == 0
        assert memory.in_use_bytes == 0

    run(body)


def test_idle_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_IDLE_S", 0.01)

    async def body() -> None:
        memory = HostMemory(budget_bytes=4 * MIB)
        taken = [memory.take(3 * MIB), memory.take(1 * MIB), memory.take(1 * MIB)]
        while taken:
            taken.pop(0)
        await until(lambda: memory.in_use_bytes == 0, "all is taken back")
        assert memory.free_bytes <= 4 * MIB
        await until(lambda: memory.free_bytes == 0, "what is idle is given up")
        assert len(memory.take(3 * MIB)) == 3 * MIB

    run(body)


# In their place


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=8),
    st.integers(-1, 1),
)
def test_messages_land_in_their_place_however_they_come(
    pieces: list[tuple[int, bool, bool]], announced_too_much: int
) -> None:
    sizes = {0: 0, 1: 100, 2: 40_000, 3: 130_000}
    parts = [np.random.default_rng(i).bytes(sizes[size]) for i, (size, _, _) in enumerate(pieces)]
    whole = b"".join(parts)

    async def body() -> None:
        session = FakeSession(HostMemory())
        announced = len(whole) + announced_too_much
        if announced < 0:
            with pytest.raises(StatusError, match="INVALID_ARGUMENT"):
                HostBufferUpload(session, Handle(1), announced)  # type: ignore[arg-type]
            return
        upload = HostBufferUpload(session, Handle(1), announced)  # type: ignore[arg-type]
        upload.begin(RecordedFlow())
        try:
            for part, (_, is_placed, has_unknown) in zip(parts, pieces, strict=True):
                message = schema.HostBufferStoreRequest(data=part).SerializeToString()
                if has_unknown:
                    message = b"\x10\x01" + message
                place = upload.allocate(len(message)) if is_placed else None
                if place is None:
                    upload.write(message)
                else:
                    place[:] = message
                    upload.write(place)
            assert upload.finish() == b""
        except StatusError as failure:
            assert announced_too_much
            assert failure.status.message.startswith(f"host buffer 1: {announced} bytes were announced and")
        else:
            assert bytes(session.stored[Handle(1)]) == whole

    run(body)


def test_an_upload_that_is_cut_off_holds_no_memory() -> None:
    async def body() -> None:
        memory = HostMemory()
        upload = HostBufferUpload(FakeSession(memory), Handle(1), MIB)  # type: ignore[arg-type]
        upload.begin(RecordedFlow())
        place = upload.allocate(MIB // 2)
        assert memory.in_use_bytes >= MIB
        del place
        upload.cancel()
        await until(lambda: memory.in_use_bytes == 0, "the memory is taken back")

    run(body)


def test_what_no_memory_can_hold_is_refused() -> None:
    async def body() -> None:
        upload = HostBufferUpload(FakeSession(HostMemory()), Handle(1), 1 << 62)  # type: ignore[arg-type]
        assert upload.allocate(MIB) is None
        with pytest.raises(StatusError, match="RESOURCE_EXHAUSTED: the proxy has no room for host buffer 1"):
            upload.write(schema.HostBufferStoreRequest(data=b"abc").SerializeToString())

    run(body)


# Holding clients back


def test_which_uploads_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_gate, "_LOOK_AGAIN_S", 0.001)

    async def body() -> None:
        memory = HostMemory(budget_bytes=MIB)
        becomes_free = True
        wanted: list[Handle] = []
        gate = UploadGate(memory, lambda: becomes_free, lambda: wanted)
        flows = [RecordedFlow() for _ in range(4)]

        def going_on() -> list[int]:
            return [i for i, flow in enumerate(flows) if flow.calls[-1:] != ["pause"]]

        for i in (2, 0, 1):
            gate.enter(Handle(i), flows[i])
        gate.advanced()
        taken = memory.take(MIB)
        gate.advanced()
        assert going_on() == [0, 1, 2, 3]
        more = memory.take(MIB)
        gate.advanced()
        assert gate.is_choosing
        gate.enter(Handle(3), flows[3])
        assert going_on() == [], "memory becomes free without any"
        becomes_free = False
        await until(lambda: going_on() == [0], "the oldest goes on, as it may be what all wait for")
        wanted.append(Handle(3))
        await until(lambda: going_on() == [0, 3], "what is asked for goes on")
        gate.leave(flows[0])
        assert going_on() == [0, 1, 3], "the next oldest takes its place"
        del taken
        await until(lambda: not gate.is_choosing, "there is memory again")
        assert going_on() == [0, 1, 2, 3]
        del more
        # Nobody is told twice in a row to do the same.
        for flow in flows:
            assert all(before != after for before, after in zip(flow.calls, flow.calls[1:], strict=False))

    run(body)
