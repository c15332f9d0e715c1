"""Values in shared memory: what is copied, what is not, and when blocks are used again."""

import gc
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.transport.frames import Buffer, ConnectionClosed
from pathways_runtime.worker.colocated.connection import Connection
from pathways_runtime.worker.colocated.memory import SMALL_BYTES, SharedMemory
from pathways_runtime.worker.colocated.messages import Call, ForgetBlock, FreeBlock, NewBlock, Piece
from tests.waiting import until

DEVICE = DeviceId(3)


class End:
    """One end: keeps what values it was sent, and answers for blocks as executors and processes do."""

    def __init__(self, sock: socket.socket) -> None:
        self.connection = Connection(sock)
        self.memory = SharedMemory(self.connection)
        self.received: list[np.ndarray[Any, Any]] = []
        self.forgotten: list[int] = []
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def send(self, value: np.ndarray[Any, Any]) -> Piece:
        payload: list[Buffer] = []
        piece = self.memory.give(DEVICE, value, payload)
        self.connection.send(Call(1, 1, 1, ((piece,),), ()), payload)
        return piece

    def take(self) -> np.ndarray[Any, Any]:
        until(lambda: bool(self.received), lambda: "no value came", 30, 0.001)
        return self.received.pop()

    def _receive(self) -> None:
        try:
            while True:
                for frame in self.connection.receive():
                    match frame.message:
                        case Call(arguments=(pieces,)):
                            (value,), _ = self.memory.take(pieces, frame.payload, 0)
                            self.received.append(value)
                            del value
                        case NewBlock() as message:
                            self.memory.new_block(message)
                        case FreeBlock(block=block):
                            self.memory.freed(block)
                        case ForgetBlock() as message:
                            self.forgotten.append(message.block)
                            self.memory.forget_block(message)
                    del frame
        except ConnectionClosed:
            return

    def close(self) -> None:
        self.connection.close()
        self._thread.join(30)
        self.memory.close()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    first, second = (End(sock) for sock in socket.socketpair())
    yield first, second
    first.close()
    second.close()


def large(fill: int) -> np.ndarray[Any, Any]:
    return np.full(SMALL_BYTES, fill, np.int32)


def test_small_values_travel_in_the_frame(ends: tuple[End, End]) -> None:
    ours, theirs = ends
    piece = ours.send(np.arange(5, dtype=np.uint8))
    assert piece == Piece(DEVICE, 5)
    assert theirs.take().tolist() == [0, 1, 2, 3, 4]
    assert ours.send(np.zeros((0, 3), np.float32)) == Piece(DEVICE, 0)
    assert theirs.take().tolist() == []
    assert ours.memory.copied_bytes == ours.memory.shared_bytes == 0


def test_a_large_value_is_copied_once_whichever_way_it_goes(ends: tuple[End, End]) -> None:
    ours, theirs = ends
    value = large(7)
    assert ours.send(value).block
    there = theirs.take()
    assert (there.view(np.int32) == 7).all() and there.ctypes.data % 64 == 0
    back = theirs.send(there)
    assert back.is_receivers, "it lies in a block of the other end's"
    here = ours.take()
    again = ours.send(here)
    assert (again.block, again.is_receivers) == (back.block, False)
    assert (theirs.take().view(np.int32) == 7).all()
    assert ours.memory.copied_bytes == value.nbytes and theirs.memory.copied_bytes == 0
    assert theirs.memory.shared_bytes == ours.memory.shared_bytes == value.nbytes


def test_a_block_is_used_again_only_when_nobody_looks_at_it(ends: tuple[End, End]) -> None:
    ours, theirs = ends
    first = ours.send(large(1))
    there = theirs.take()
    derived = there.view(np.int32)[3:]
    del there
    gc.collect()
    second = ours.send(large(2))
    assert second.block != first.block
    assert (theirs.take().view(np.int32) == 2).all()
    assert (derived == 1).all(), "a view keeps its block"
    del derived
    until(lambda: ours.memory.held_bytes()["in_use"] == 0, lambda: str(ours.memory.held_bytes()), 30, 0.001)
    third = ours.send(large(3))
    assert third.block in (first.block, second.block)
    assert (theirs.take().view(np.int32) == 3).all()


def test_one_block_may_be_looked_at_from_both_ends(ends: tuple[End, End]) -> None:
    ours, theirs = ends
    ours.send(large(5))
    there = theirs.take()
    theirs.send(there)
    here = ours.take()
    del there
    other = ours.send(large(6))
    assert theirs.take().view(np.int32)[0] == 6
    assert (here.view(np.int32) == 5).all() and other.block != 1
    del here
    until(lambda: ours.memory.held_bytes()["in_use"] == 0, lambda: str(ours.memory.held_bytes()), 30, 0.001)


def test_values_outlive_the_connection(ends: tuple[End, End]) -> None:
    ours, theirs = ends
    ours.send(large(9))
    there = theirs.take()
    ours.close()
    assert (there.view(np.int32) == 9).all()
    with pytest.raises(ConnectionClosed):
        for fill in range(100):
            theirs.send(large(fill))
    with pytest.raises(ConnectionClosed, match="the other end is gone"):
        ours.send(large(1))
