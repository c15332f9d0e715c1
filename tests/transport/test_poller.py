"""The data plane's poller: notices arrive whole and in order, also when the peer does not read for a while."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from pathways_runtime.transport.dataplane.poller import Poller

from .dataplane_ends import TIMEOUT_S, eventually, num_descriptors


@pytest.fixture
def poller() -> Iterator[Poller]:
    threads, descriptors = threading.active_count(), num_descriptors()
    poller = Poller("test")
    yield poller
    poller.close()
    assert threading.active_count() == threads
    assert num_descriptors() == descriptors


def test_what_is_posted_to_a_peer_that_does_not_read_waits_and_then_arrives(poller: Poller) -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(TIMEOUT_S)
    count = 200_000
    for number in range(count):
        poller.post(ours, struct.pack("<I", number))
    received = bytearray()
    while len(received) < 4 * count:
        received += theirs.recv(1 << 16)
    assert [number for (number,) in struct.iter_unpack("<I", received)] == list(range(count))
    poller.post(ours, b"more")
    assert theirs.recv(4) == b"more"
    poller.retire(ours)
    assert theirs.recv(1) == b""
    theirs.close()


def test_posts_to_a_peer_that_is_gone_are_dropped(poller: Poller) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    poller.post(ours, b"lost")
    poller.retire(ours)
    eventually(lambda: ours.fileno() == -1, "the socket is closed")
    poller.post(ours, b"late")
    done = threading.Event()
    poller.act(done.set)
    assert done.wait(TIMEOUT_S)


def test_handlers_run_until_unwatched_and_may_fail(poller: Poller, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    seen: list[bytes] = []

    def readable() -> None:
        seen.append(ours.recv(1))
        if seen[-1] == b"x":
            raise RuntimeError("a handler's mistake")
        if seen[-1] == b"z":
            poller.unwatch(ours)

    poller.watch(ours, readable)
    theirs.sendall(b"xyz!")
    eventually(lambda: len(seen) == 3, "three bytes are handled")
    assert seen == [b"x", b"y", b"z"]
    assert "a handler's mistake" in caplog.text
    assert ours.recv(1) == b"!"
    poller.retire(ours)
    theirs.close()
