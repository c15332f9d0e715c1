"""The data plane when peers go away: whoever waits is told, by name, and nothing is left."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pathways_runtime.transport import addresses
from pathways_runtime.transport.dataplane import DataPlane, PeerLost, outbound
from pathways_runtime.transport.dataplane.messages import (
    CHUNK,
    DATA_PLANE_VERSION,
    HEAD,
    Hello,
    encode_hello,
    encode_tunnel,
)

from .dataplane_ends import TIMEOUT_S, MakePlane, Sending, eventually, expect

WAYS = pytest.mark.parametrize("force_sockets", [False, True], ids=["shared_memory", "sockets"])
BIG = np.ones(1 << 20, np.uint8)


@WAYS
def test_a_peer_that_closes_fails_what_is_expected_from_it(make_plane: MakePlane, force_sockets: bool) -> None:
    receiver, sender, third = (make_plane(force_sockets=force_sockets) for _ in range(3))
    arrived, waiting, from_third = (
        expect(receiver, (1, 1, 1), 1),
        expect(receiver, (1, 1, 2), 1),
        expect(receiver, (1, 1, 3), 2),
    )
    sender.send(0, (1, 1, 1), BIG, Sending())
    payload = arrived.payload()
    sender.close()
    failure = waiting.payload().failure
    assert isinstance(failure, PeerLost)
    assert "host 1" in str(failure)
    assert sender.address in str(failure)
    with pytest.raises(PeerLost):
        waiting.payload().array(np.uint8, (1,))
    # What came before stays readable; what is expected later fails at once; others are not concerned.
    np.testing.assert_array_equal(payload.array(np.uint8, BIG.shape), BIG)
    payload.release()
    assert expect(receiver, (1, 1, 4), 1).payload().failure is not None
    assert not from_third.is_there
    third.send(0, (1, 1, 3), BIG, Sending())
    from_third.payload().release()


def test_a_peer_that_dies_in_the_middle_of_a_payload(make_plane: MakePlane, tmp_path: Path) -> None:
    receiver = make_plane(force_sockets=True)
    peer = f"unix:{tmp_path}/peer"
    receiver.connect(1, peer, "elsewhere")
    waiting = expect(receiver, (1, 1, 1), 1)
    with addresses.connect(receiver.address, TIMEOUT_S) as one, addresses.connect(receiver.address, TIMEOUT_S) as two:
        for sock in (one, two):
            sock.sendall(encode_hello(Hello(DATA_PLANE_VERSION, peer, "link")))
        one.sendall(HEAD.pack(CHUNK, 0, 1, 1, 1, 0, 1 << 20, 3 << 20) + b"x" * 1000)
        two.sendall(HEAD.pack(CHUNK, 0, 1, 1, 1, 1 << 20, 1 << 20, 3 << 20) + b"x" * (1 << 20))
    failure = waiting.payload().failure
    assert "host 1" in str(failure)
    assert "middle of a payload" in str(failure) or "closed its data connection" in str(failure)


@WAYS
def test_peer_lost_fails_both_directions_until_connected_again(make_plane: MakePlane, force_sockets: bool) -> None:
    one, two = make_plane(force_sockets=force_sockets), make_plane(force_sockets=force_sockets)
    waiting = expect(one, (1, 1, 1), 1)
    one.peer_lost(1, "missed its heartbeats")
    assert str(waiting.payload().failure) == "host 1 missed its heartbeats"
    sending = Sending()
    one.send(1, (1, 1, 2), BIG, sending)
    assert str(sending.failure()) == "host 1 missed its heartbeats"
    one.connect(1, two.address, two.host_key)
    arrival, back = expect(two, (1, 1, 3), 0), expect(one, (1, 1, 4), 1)
    one.send(1, (1, 1, 3), BIG, Sending())
    two.send(0, (1, 1, 4), BIG, Sending())
    for arrived in (arrival, back):
        payload = arrived.payload()
        np.testing.assert_array_equal(payload.array(np.uint8, BIG.shape), BIG)
        payload.release()


def test_a_host_that_moves_is_another_peer(make_plane: MakePlane) -> None:
    one, old, new = (make_plane() for _ in range(3))
    waiting = expect(one, (1, 1, 1), 1)
    one.connect(1, new.address, new.host_key)
    assert "host 1" in str(waiting.payload().failure)
    assert "was replaced" in str(waiting.payload().failure)
    arrival = expect(new, (1, 1, 2))
    one.send(1, (1, 1, 2), BIG, Sending())
    arrival.payload().release()
    assert old.report()["arrived_early"] == 0


def test_nobody_at_the_address(make_plane: MakePlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_runtime.transport.dataplane.outbound._CONNECT_TIMEOUT_S", 0.05)
    plane = make_plane()
    plane.connect(1, f"unix:{tmp_path}/nobody", plane.host_key)
    sendings = [Sending(), Sending()]
    for index, sending in enumerate(sendings):
        plane.send(1, (1, 1, index), BIG[: 10 + index * 100_000], sending)
    for sending in sendings:
        assert "host 1" in str(sending.failure())
        assert "cannot connect to unix:" in str(sending.failure())


def test_closing_does_not_wait_for_a_peer_that_does_not_listen(make_plane: MakePlane, tmp_path: Path) -> None:
    plane = make_plane()
    plane.connect(1, f"unix:{tmp_path}/nobody", plane.host_key)
    sending = Sending()
    plane.send(1, (1, 1, 1), BIG, sending)
    began_s = time.monotonic()
    plane.close()
    assert time.monotonic() - began_s < outbound._CONNECT_TIMEOUT_S / 2
    assert "closed" in str(sending.failure())


@WAYS
def test_closing_ends_senders_that_are_held_back(make_plane: MakePlane, force_sockets: bool) -> None:
    receiver = make_plane(force_sockets=force_sockets, budget_bytes=1 << 20)
    sender = make_plane(force_sockets=force_sockets, budget_bytes=1 << 20)
    sendings = [Sending() for _ in range(10)]
    for index, sending in enumerate(sendings):
        sender.send(0, (1, 1, index), BIG, sending)
    eventually(lambda: receiver.report()["arrived_early"] == 1, "the first payload arrives")
    never = expect(receiver, (2, 1, 1))
    sender.close()
    failures = [sending.failure() for sending in sendings]
    assert failures[0] is None
    assert isinstance(failures[-1], PeerLost)
    receiver.close()
    assert "closed" in str(never.payload().failure)
    late = Sending()
    sender.send(0, (1, 1, 99), BIG, late)
    assert isinstance(late.failure(), PeerLost)


@pytest.mark.parametrize(
    ("opening", "reason"),
    [
        (b"\x09" * 100, "without a hello"),
        (encode_tunnel(5), "which leads nowhere here"),
        (encode_hello(Hello(DATA_PLANE_VERSION + 1, "unix:/x", "l")), "speaks data plane version"),
        (encode_hello(Hello(DATA_PLANE_VERSION, "unix:/x", "l")) + b"\x09" * HEAD.size, "unknown message 9"),
        (
            encode_hello(Hello(DATA_PLANE_VERSION, "unix:/x", "l")) + HEAD.pack(5, 77, 1, 1, 1, 0, 10, 10),
            "shared memory 77, which does not hold them",
        ),
        (
            encode_hello(Hello(DATA_PLANE_VERSION, "unix:/x", "l")) + HEAD.pack(4, 77, 0, 0, 0, 0, 0, 1 << 20),
            "without a descriptor",
        ),
        (
            encode_hello(Hello(DATA_PLANE_VERSION, "unix:/x", "l")) + HEAD.pack(3, 0, 1, 1, 1, 1 << 20, 100, 200),
            "beyond its end",
        ),
    ],
)
def test_who_does_not_speak_the_protocol_is_disconnected(
    make_plane: MakePlane, caplog: pytest.LogCaptureFixture, opening: bytes, reason: str
) -> None:
    plane = make_plane()
    with addresses.connect(plane.address, TIMEOUT_S) as stranger:
        stranger.settimeout(TIMEOUT_S)
        stranger.sendall(opening)
        # A reset says the same, while not all that we sent has been read.
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    eventually(lambda: reason in caplog.text, f"the log says {reason!r}")
    arrival = expect(plane, (1, 1, 1))
    plane.send(0, (1, 1, 1), BIG, Sending())
    arrival.payload().release()


def test_closing_does_not_wait_for_a_stranger_that_says_nothing(make_plane: MakePlane) -> None:
    plane = make_plane()
    with addresses.connect(plane.address, TIMEOUT_S) as stranger:
        eventually(lambda: threading.active_count() > 2, "the stranger is accepted")
        closing = threading.Thread(target=plane.close)
        closing.start()
        closing.join(TIMEOUT_S)
        assert not closing.is_alive()
        stranger.settimeout(TIMEOUT_S)
        # It is over either way.
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


#: Sends one payload of each size on its command line, forever if told so; dies where it is told to.
PEER = """
import sys, threading
import numpy as np
from pathways_runtime.transport.dataplane import DataPlane
own, other, way, *sizes = sys.argv[1:]
plane = DataPlane(own, "here", force_sockets=way == "sockets")
plane.connect(0, other, "here")
echoed = threading.Semaphore(0)
def echo(payload):
    array = payload.adopt(np.uint8, (-1,))
    plane.send(0, (2, 1, len(array)), array, lambda failure: echoed.release())
for size in map(int, sizes):
    plane.expect((1, 1, size), echo)
print("ready", flush=True)
for _ in sizes:
    assert echoed.acquire(timeout=20)
print("echoed", flush=True)
sys.stdin.readline()
plane.close()
"""


@WAYS
def test_two_processes_exchange_and_one_is_killed(make_plane: MakePlane, tmp_path: Path, force_sockets: bool) -> None:
    plane = make_plane(force_sockets=force_sockets)
    other = f"unix:{tmp_path}/other"
    sizes = (3, 70_000, 5 << 20)
    shared = set(Path("/dev/shm").iterdir())
    argv = [sys.executable, "-c", PEER, other, plane.address, "sockets" if force_sockets else "shared"]
    with subprocess.Popen(
        [*argv, *map(str, sizes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        plane.connect(1, other, "here")
        arrivals = [expect(plane, (2, 1, size), 1) for size in sizes]
        for size in sizes:
            plane.send(1, (1, 1, size), np.full(size, size % 251, np.uint8), Sending())
        for size, arrival in zip(sizes, arrivals, strict=True):
            payload = arrival.payload(f"the echo of {size} bytes")
            assert (payload.array(np.uint8, (size,)) == size % 251).all()
            payload.release()
        assert process.stdout.readline() == "echoed\n"
        waiting = expect(plane, (9, 9, 9), 1)
        process.kill()
    assert "host 1" in str(waiting.payload().failure)
    sending = Sending()
    eventually(lambda: plane_has_lost(plane), "the sending end notices too")
    plane.send(1, (1, 1, 9), BIG, sending)
    assert isinstance(sending.failure(), PeerLost)
    assert set(Path("/dev/shm").iterdir()) <= shared


def plane_has_lost(plane: DataPlane) -> bool:
    sending = Sending()
    plane.send(1, (8, 8, 8), np.zeros(1, np.uint8), sending)
    return sending.is_reported and sending.failure() is not None


def test_the_listening_socket_is_private_and_removed(make_plane: MakePlane) -> None:
    plane = make_plane()
    path = Path(addresses.parse(plane.address).path)
    assert path.stat().st_mode & 0o777 == 0o600
    plane.close()
    plane.close()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(FileNotFoundError):
        sock.connect(str(path))
