"""The executor's end of a session link."""

from collections.abc import Iterator

import numpy as np
import pytest

from pathways_runtime.core.ids import OpId, WaitId
from pathways_runtime.transport.frames import ConnectionClosed
from pathways_runtime.wire.links import ArraysReady, Fetched, HostBuffer

from .link_ends import DEADLINE_S, Ends


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_buffers_come_in(ends: Ends) -> None:
    big = bytes(range(256)) * 4096
    for index, contents in enumerate((b"", b"abc", big)):
        ends.proxy.send(HostBuffer(OpId(5), index), contents)
        assert ends.arrived.acquire(timeout=DEADLINE_S), f"buffer {index} did not arrive"
    assert ends.buffers == [(5, 0, b""), (5, 1, b"abc"), (5, 2, big)]
    assert ends.link.bytes_received == 3 + len(big)


def test_values_go_out_in_order_and_nobody_blocks(ends: Ends) -> None:
    # Far more than the socket takes while nobody reads.
    values = [np.arange(size, dtype=np.int32) for size in (3, 1 << 20, 0, 5, 1 << 18, 7)]
    for number, value in enumerate(values):
        ends.link.send(ArraysReady(WaitId(number), None))
        ends.link.send(Fetched(WaitId(number), None), value)
    for number, value in enumerate(values):
        assert ends.receive().message == ArraysReady(WaitId(number), None)
        frame = ends.receive()
        assert frame.message == Fetched(WaitId(number), None)
        np.testing.assert_array_equal(np.frombuffer(frame.payload, np.int32), value)
    assert ends.link.bytes_sent == sum(value.nbytes for value in values)


def test_many_small_messages_wait_for_a_slow_reader(ends: Ends) -> None:
    for number in range(20_000):
        ends.link.send(ArraysReady(WaitId(number), None))
    assert [ends.receive().message.wait_id for _ in range(20_000)] == list(range(20_000))


def test_a_link_whose_proxy_is_gone_takes_messages_and_drops_them(ends: Ends) -> None:
    ends.proxy.close()
    ends.link._reader.join(DEADLINE_S)
    assert not ends.link._reader.is_alive()
    ends.link.send(Fetched(WaitId(1), None), np.zeros(1 << 20))


def test_a_message_that_is_not_for_executors_ends_the_link(ends: Ends) -> None:
    ends.proxy.send(ArraysReady(WaitId(1), None))
    with pytest.raises(ConnectionClosed):
        ends.receive()


def test_closing_twice_is_closing_once(ends: Ends) -> None:
    ends.link.close()
    ends.link.close()
    with pytest.raises(ConnectionClosed):
        ends.receive()
