"""The data plane between two ends in one process: what is sent arrives once, whatever the way, size and order."""

import gc
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pathways_runtime.transport import addresses
from pathways_runtime.transport.dataplane import DataPlane, Key
from pathways_runtime.transport.dataplane.memory import ALIGNMENT_BYTES, Bytes, class_bytes
from pathways_runtime.transport.dataplane.messages import (
    CHUNK,
    DATA_PLANE_VERSION,
    HEAD,
    INLINE_BYTES,
    Hello,
    encode_hello,
)
from pathways_runtime.transport.dataplane.outbound import CHUNK_BYTES

from .dataplane_ends import Arrival, MakePlane, Sending, eventually, expect

WAYS = pytest.mark.parametrize("force_sockets", [False, True], ids=["shared_memory", "sockets"])
SIZES = [
    *(0, 1, 63, 64, 1000, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 1 << 20),
    *(CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 12345),
]
NOISE = np.random.default_rng(0).integers(0, 256, 16 << 20, np.uint8)


def content(size: int, seed: int = 0) -> Bytes:
    """Bytes that differ from place to place and from seed to seed."""
    return NOISE[seed * 977 :][:size]


def check_array(arrival: Arrival, expected: Bytes) -> None:
    payload = arrival.payload()
    array = payload.array(np.uint8, expected.shape)
    np.testing.assert_array_equal(array, expected)
    assert array.size == 0 or array.ctypes.data % ALIGNMENT_BYTES == 0
    payload.release()


@WAYS
@pytest.mark.parametrize("is_expected_first", [True, False], ids=["expected_first", "arrives_first"])
def test_every_size_arrives(make_plane: MakePlane, force_sockets: bool, is_expected_first: bool) -> None:
    receiver, sender = make_plane(force_sockets=force_sockets), make_plane(force_sockets=force_sockets)
    for index, size in enumerate(SIZES):
        source, sending, key = content(size, index), Sending(), (1, 2, index)
        if is_expected_first:
            arrival = expect(receiver, key, 1)
            sender.send(0, key, source, sending)
        else:
            sender.send(0, key, source, sending)
            assert sending.failure() is None
            eventually(lambda: receiver.report()["arrived_early"] == 1, f"{size} bytes arrive unexpected")
            arrival = expect(receiver, key, 1)
            assert arrival.is_there, "what has arrived is handed over within expect"
        check_array(arrival, source)
        assert sending.failure() is None
    kind = "socket" if force_sockets else "shared_memory"
    other = "shared_memory" if force_sockets else "socket"
    assert sender.bytes_moved() == {kind: sum(SIZES), other: 0}
    assert receiver.bytes_moved() == {"shared_memory": 0, "socket": 0}


@pytest.mark.parametrize("host_keys", [("a", "b"), ("a", "a")])
def test_the_host_keys_decide_the_way(make_plane: MakePlane, host_keys: tuple[str, str]) -> None:
    receiver, sender = make_plane(host_keys[0]), make_plane(host_keys[1])
    source = content(1 << 20)
    arrival = expect(receiver, (1, 1, 1))
    sender.send(0, (1, 1, 1), source, Sending())
    check_array(arrival, source)
    is_shared = host_keys[0] == host_keys[1]
    eventually(lambda: sum(sender.bytes_moved().values()) == 1 << 20, "the bytes are counted")
    assert sender.bytes_moved()["shared_memory" if is_shared else "socket"] == 1 << 20


@WAYS
def test_a_plane_sends_to_itself(make_plane: MakePlane, force_sockets: bool) -> None:
    plane = make_plane(force_sockets=force_sockets)
    for size in (10, 1 << 20):
        arrival = expect(plane, (1, 1, size), 0)
        plane.send(0, (1, 1, size), content(size), Sending())
        check_array(arrival, content(size))


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 200_000), st.integers(4 << 20, 5 << 20)),
        min_size=1,
        max_size=12,
    ),
    order=st.randoms(use_true_random=False),
    is_socket=st.booleans(),
)
def test_any_sizes_in_any_order_of_expecting(
    ways: tuple[tuple[DataPlane, DataPlane], tuple[DataPlane, DataPlane]],
    sizes: list[int],
    order: object,
    is_socket: bool,
) -> None:
    receiver, sender = ways[is_socket]
    operation = next(OPERATIONS)
    expecting = [(index, "expect") for index in range(len(sizes))]
    steps = expecting + [(index, "send") for index in range(len(sizes))]
    order.shuffle(steps)  # type: ignore[attr-defined]
    arrivals: dict[int, Arrival] = {}
    sendings: dict[int, Sending] = {}
    for index, step in steps:
        key = (7, operation, index)
        if step == "expect":
            arrivals[index] = expect(receiver, key, 1)
        else:
            sendings[index] = Sending()
            sender.send(0, key, content(sizes[index], index), sendings[index])
    for index, size in enumerate(sizes):
        check_array(arrivals[index], content(size, index))
        assert sendings[index].failure() is None


OPERATIONS = iter(range(1, 1 << 30))


@pytest.fixture
def ways(make_plane: MakePlane) -> tuple[tuple[DataPlane, DataPlane], tuple[DataPlane, DataPlane]]:
    """(receiver, sender) with shared memory, and with sockets."""
    one, two = make_plane(), make_plane()
    three, four = make_plane("elsewhere"), make_plane("yet elsewhere")
    four.connect(0, three.address, three.host_key)
    three.connect(1, four.address, four.host_key)
    return (one, two), (three, four)


@WAYS
def test_many_threads_send_many_keys_at_once(make_plane: MakePlane, force_sockets: bool) -> None:
    receiver, *senders = [make_plane(force_sockets=force_sockets) for _ in range(3)]
    num_threads, num_keys = 3, 40
    sizes = (8, 1000, 70_000, 300_000)
    arrivals: dict[Key, Arrival] = {}
    for host in range(1, 3):
        for thread in range(num_threads):
            for index in range(num_keys):
                key = (host, thread + 1, index)
                arrivals[key] = expect(receiver, key, host)
    failures: list[Exception | None] = []

    def send(host: int, thread: int) -> None:
        sendings = []
        for index in range(num_keys):
            sendings.append(Sending())
            source = content(sizes[index % len(sizes)], index)
            senders[host - 1].send(0, (host, thread + 1, index), source, sendings[-1])
        failures.extend(sending.failure() for sending in sendings)

    threads = [threading.Thread(target=send, args=(host, thread)) for host in (1, 2) for thread in range(num_threads)]
    for one in threads:
        one.start()
    for key, arrival in arrivals.items():
        check_array(arrival, content(sizes[key[2] % len(sizes)], key[2]))
    for one in threads:
        one.join()
    assert failures == [None] * (2 * num_threads * num_keys)
    assert receiver.report()["expected"] == receiver.report()["arrived_early"] == 0


@pytest.mark.parametrize("dtype", [np.float32, np.complex128, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_dtypes_and_shapes_pass_through(make_plane: MakePlane, dtype: type) -> None:
    receiver, sender = make_plane(), make_plane()
    scalar, matrix = np.ones((), dtype), np.arange(30_000).reshape(100, 300).astype(dtype)
    for index, source in enumerate((scalar, matrix, matrix[:, :0])):
        arrival = expect(receiver, (1, 1, index))
        sender.send(0, (1, 1, index), source, Sending())
        payload = arrival.payload()
        array = payload.array(source.dtype, source.shape)
        assert array.dtype == source.dtype
        assert array.tobytes() == source.tobytes()
        with pytest.raises(ValueError, match="reshape"):
            payload.array(source.dtype, (7, 11))
        payload.release()


def test_what_cannot_be_sent_is_the_callers_mistake(make_plane: MakePlane) -> None:
    plane = make_plane()
    with pytest.raises(ValueError, match="contiguous"):
        plane.send(0, (1, 1, 1), np.zeros((4, 4), np.float32).T[:, :2], Sending())
    with pytest.raises(Exception, match=r"range|required"):
        plane.send(0, (1, -1, 1), np.zeros(1 << 20, np.uint8), Sending())
    sending = Sending()
    plane.send(5, (1, 1, 1), np.zeros(4, np.uint8), sending)
    assert "host 5 is not connected" in str(sending.failure())
    expect(plane, (1, 1, 2))
    with pytest.raises(ValueError, match="expected twice"):
        expect(plane, (1, 1, 2))


def test_a_reader_that_fails_does_not_stop_the_others(make_plane: MakePlane, caplog: pytest.LogCaptureFixture) -> None:
    receiver, sender = make_plane(), make_plane()

    def fail(_: object) -> None:
        raise RuntimeError("a reader's mistake")

    receiver.expect((1, 1, 1), fail)
    sender.send(0, (1, 1, 1), content(10), Sending())
    arrival = expect(receiver, (1, 1, 2))
    sender.send(0, (1, 1, 2), content(10), Sending())
    check_array(arrival, content(10))
    assert "a reader's mistake" in caplog.text


# Memory


@WAYS
def test_blocks_are_used_again(make_plane: MakePlane, force_sockets: bool) -> None:
    receiver, sender = make_plane(force_sockets=force_sockets), make_plane(force_sockets=force_sockets)
    addresses = set()
    for index in range(20):
        arrival = expect(receiver, (1, 1, index))
        sender.send(0, (1, 1, index), content(1 << 20, index), Sending())
        payload = arrival.payload()
        addresses.add(payload.array(np.uint8, (1 << 20,)).ctypes.data)
        payload.release()
        payload.release()
        if not force_sockets:
            eventually(lambda: held(sender)["in_use"] == 0, "the block comes back")
    # Over sockets the release passes through another thread, and one more block may have been needed.
    assert len(addresses) <= (3 if force_sockets else 1)


def held(plane: DataPlane) -> dict[str, int]:
    memory: dict[str, int] = plane.report()["peers"]["0"]["shared_memory"]
    return memory


@WAYS
def test_the_budget_holds_the_sender_back_until_a_release(make_plane: MakePlane, force_sockets: bool) -> None:
    budget = 4 << 20
    receiver = make_plane(force_sockets=force_sockets, budget_bytes=budget)
    sender = make_plane(force_sockets=force_sockets, budget_bytes=budget)
    num_payloads, size = 8, 1 << 20
    arrivals = [expect(receiver, (1, 1, index)) for index in range(num_payloads)]
    sendings = [Sending() for _ in range(num_payloads)]
    for index in range(num_payloads):
        sender.send(0, (1, 1, index), content(size, index), sendings[index])
    for index in range(4):
        arrivals[index].payload()
    assert not any(arrival.is_there for arrival in arrivals[4:])
    assert not sendings[7].is_reported
    for index in range(num_payloads):
        check_array(arrivals[index], content(size, index))
    assert [sending.failure() for sending in sendings] == [None] * num_payloads


@WAYS
def test_a_payload_beyond_the_budget_goes_alone(make_plane: MakePlane, force_sockets: bool) -> None:
    receiver = make_plane(force_sockets=force_sockets, budget_bytes=1 << 20)
    sender = make_plane(force_sockets=force_sockets, budget_bytes=1 << 20)
    for index in range(2):
        arrival = expect(receiver, (1, 1, index))
        sender.send(0, (1, 1, index), content(9 << 20, index), Sending())
        check_array(arrival, content(9 << 20, index))


def test_memory_is_given_in_the_order_of_tickets_whichever_connection_is_first(make_plane: MakePlane) -> None:
    """One block must do. Given to the payload that shows first, its rest would stand behind one that has none."""
    size, half = 1 << 20, 1 << 19
    receiver = make_plane(force_sockets=True, budget_bytes=size)
    arrivals = [expect(receiver, (1, 1, index)) for index in range(2)]
    with addresses.connect(receiver.address, 1.0) as one, addresses.connect(receiver.address, 1.0) as two:
        for sock in (one, two):
            sock.sendall(encode_hello(Hello(DATA_PLANE_VERSION, "unix:/somebody", "link")))
        second = (1, 1, 1)
        early = HEAD.pack(CHUNK, 1, *second, 0, half, size) + b"b" * half
        # It is not read to its end before the other connection has brought the first payload.
        sending = threading.Thread(target=two.sendall, args=(early,))
        sending.start()
        one.sendall(HEAD.pack(CHUNK, 0, 1, 1, 0, 0, size, size) + b"a" * size)
        check_array(arrivals[0], np.full(size, ord("a"), np.uint8))
        one.sendall(HEAD.pack(CHUNK, 1, *second, half, half, size) + b"c" * half)
        check_array(arrivals[1], np.repeat(np.frombuffer(b"bc", np.uint8), half))
        sending.join()


@WAYS
def test_adopted_arrays_outlive_the_plane_and_hold_nobody_back(make_plane: MakePlane, force_sockets: bool) -> None:
    receiver = make_plane(force_sockets=force_sockets, budget_bytes=2 << 20)
    sender = make_plane(force_sockets=force_sockets, budget_bytes=2 << 20)
    arrays = []
    for index in range(10):
        arrival = expect(receiver, (1, 1, index))
        sender.send(0, (1, 1, index), content(1 << 20, index), Sending())
        payload = arrival.payload()
        array = payload.adopt(np.float32, (512, 512))
        with pytest.raises(ValueError, match="released or adopted"):
            payload.array(np.uint8, (1 << 20,))
        assert array.ctypes.data % ALIGNMENT_BYTES == 0
        arrays.append(array)
        del payload, arrival, array
    if not force_sockets:
        eventually(lambda: held(sender)["kept"] == 10 << 20, "the sender knows what is kept")
        assert held(sender)["in_use"] == 0
        kept = arrays.pop()[3:]
        gc.collect()
        assert held(sender)["kept"] == 10 << 20, "a view keeps the block"
        del kept
        eventually(lambda: held(sender) == {"in_use": 0, "kept": 9 << 20, "free": 1 << 20}, "the block comes back")
        del arrays[:4]
        eventually(
            lambda: held(sender) == {"in_use": 0, "kept": 5 << 20, "free": 2 << 20}, "the budget bounds the rest"
        )
    receiver.close()
    sender.close()
    for index, array in enumerate(arrays):
        expected = content(1 << 20, index if force_sockets else index + 4)
        np.testing.assert_array_equal(array.reshape(-1).view(np.uint8), expected)


def test_blocks_of_other_sizes_make_room(make_plane: MakePlane) -> None:
    receiver, sender = make_plane(budget_bytes=4 << 20), make_plane(budget_bytes=4 << 20)
    for index, size in enumerate([1 << 20, 3 << 20, 200_000, 2 << 20, 1 << 20, 4 << 20, 100_000]):
        arrival = expect(receiver, (1, 1, index))
        sender.send(0, (1, 1, index), content(size, index), Sending())
        check_array(arrival, content(size, index))
        eventually(lambda: held(sender)["in_use"] == 0, "the block comes back")
        assert held(sender)["free"] <= 4 << 20


@given(st.integers(1, 1 << 40))
def test_size_classes_waste_at_most_a_quarter(length: int) -> None:
    size = class_bytes(length)
    assert size % 4096 == 0
    assert length <= size <= max(64 << 10, length + length // 4 + 4096)
    assert class_bytes(size) == size


# Sessions


@WAYS
def test_a_forgotten_session_is_silent_and_holds_nothing(make_plane: MakePlane, force_sockets: bool) -> None:
    receiver, sender = make_plane(force_sockets=force_sockets), make_plane(force_sockets=force_sockets)
    never = expect(receiver, (1, 1, 1))
    other = expect(receiver, (2, 1, 1))
    sender.send(0, (1, 1, 2), content(1 << 20), Sending())
    eventually(lambda: receiver.report()["arrived_early"] == 1, "a payload arrives unexpected")
    receiver.forget(1)
    assert receiver.report()["arrived_early"] == 0
    assert receiver.report()["expected"] == 1
    for index in (1, 3):
        sender.send(0, (1, 1, index), content(1 << 20), Sending())
    sender.send(0, (2, 1, 1), content(1 << 20), Sending())
    check_array(other, content(1 << 20))
    if not force_sockets:
        eventually(lambda: held(sender)["in_use"] == 0, "forgotten payloads are released")
    assert not never.is_there
    late = expect(receiver, (1, 1, 9))
    assert receiver.report() | {"peers": {}, "bytes_moved": {}} == {
        "expected": 0,
        "arrived_early": 0,
        "peers": {},
        "bytes_moved": {},
    }
    assert not late.is_there
