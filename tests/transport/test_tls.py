"""Connections between hosts: who gets in, who does not, and that nobody who waits delays others."""

import asyncio
import contextlib
import errno
import functools
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import numpy as np
import pytest

from pathways_runtime.transport import addresses, door, frames, handshakes, streams
from pathways_runtime.transport.credentials import Credentials
from pathways_runtime.transport.dataplane import DataPlane, PeerLost
from pathways_runtime.transport.handshakes import HandshakeFactory
from pathways_runtime.transport.network import Network, open_door
from pathways_runtime.transport.tls_socket import RECORD_BYTES, Connection, TlsSocket
from pathways_runtime.wire.messages import AnyMessage, Shutdown
from tests.waiting import until

from .dataplane_ends import num_descriptors

TIMEOUT_S = 20.0


class Entrance:
    """A door and the connections that it let in."""

    def __init__(self, handshake: HandshakeFactory) -> None:
        self.entered: Queue[Connection] = Queue()
        self.door, self.address = open_door("tcp:127.0.0.1:0", handshake, self.entered.put)
        parsed = addresses.parse(self.address)
        assert isinstance(parsed, addresses.TcpAddress)
        self.where = (parsed.host, parsed.port)

    def close(self) -> None:
        self.door.close()
        while not self.entered.empty():
            self.entered.get().close()


@pytest.fixture
def entrance(ours: Credentials) -> Iterator[Callable[[HandshakeFactory], Entrance]]:
    """Opens doors; closed after the test, which must leave no descriptor."""
    fds, threads = num_descriptors(), threading.active_count()
    opened: list[Entrance] = []

    def make(handshake: HandshakeFactory) -> Entrance:
        opened.append(Entrance(handshake))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
    assert num_descriptors() == fds, "descriptors left"
    assert threading.active_count() == threads, "threads left"


Pair = tuple[Callable[[Credentials], HandshakeFactory], Callable[[Credentials], HandshakeFactory]]
TLS: Pair = (handshakes.tls_accepting, handshakes.tls_connecting)
PLAIN: Pair = (handshakes.plain_accepting, handshakes.plain_connecting)
BOTH_KINDS = pytest.mark.parametrize("kind", [TLS, PLAIN], ids=["tls", "plain"])


def connect(entrance: Entrance, handshake: HandshakeFactory, timeout_s: float = TIMEOUT_S) -> Connection:
    return addresses.connect(entrance.address, timeout_s, handshake=handshake)


@BOTH_KINDS
def test_the_jobs_own_get_in(entrance: Callable[..., Entrance], ours: Credentials, kind: Pair) -> None:
    place = entrance(kind[0](ours))
    with connect(place, kind[1](ours)) as near, place.entered.get(timeout=TIMEOUT_S) as far:
        near.sendall(b"question")
        assert far.recv(100) == b"question"
        far.sendall(b"answer")
        assert near.recv(100) == b"answer"


@BOTH_KINDS
def test_another_jobs_are_refused_by_both_sides(
    entrance: Callable[..., Entrance], ours: Credentials, of_another_job: Credentials, kind: Pair
) -> None:
    place = entrance(kind[0](ours))
    with pytest.raises(addresses.ConnectFailed, match=r"cannot connect to tcp:127\.0\.0\.1:\d+ .*") as raised:
        connect(place, kind[1](of_another_job))
    assert raised.value.errno == errno.EACCES
    assert place.entered.empty()


def test_a_certificate_of_another_authority_is_refused_by_the_side_that_accepts(
    entrance: Callable[..., Entrance], ours: Credentials, of_another_job: Credentials
) -> None:
    """Somebody who trusts us, and shows what we do not."""
    place = entrance(handshakes.tls_accepting(ours))
    mixed = of_another_job.client_context()
    mixed.load_verify_locations(cadata=ours.authority)
    with pytest.raises(addresses.ConnectFailed, match="UNKNOWN_CA"):
        connect(place, lambda sock: handshakes._tls(sock, mixed, is_accepting=False))
    assert place.entered.empty()


def test_no_certificate_is_refused(entrance: Callable[..., Entrance], ours: Credentials) -> None:
    place = entrance(handshakes.tls_accepting(ours))
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(cadata=ours.authority)
    with pytest.raises(addresses.ConnectFailed, match="CERTIFICATE_REQUIRED"):
        connect(place, lambda sock: handshakes._tls(sock, bare, is_accepting=False))
    assert place.entered.empty()


def test_an_older_tls_is_refused(entrance: Callable[..., Entrance], ours: Credentials) -> None:
    place = entrance(handshakes.tls_accepting(ours))
    old = ours.client_context()
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(addresses.ConnectFailed, match="PROTOCOL_VERSION"):
        connect(place, lambda sock: handshakes._tls(sock, old, is_accepting=False))


@BOTH_KINDS
def test_who_accepts_must_prove_itself_too(
    entrance: Callable[..., Entrance], ours: Credentials, of_another_job: Credentials, kind: Pair
) -> None:
    impostor = entrance(kind[0](of_another_job))
    with pytest.raises(addresses.ConnectFailed):
        connect(impostor, kind[1](ours))


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 500, os.urandom(300), b"SPWplain" + b"x" * 100]
)
@BOTH_KINDS
def test_garbage_is_refused(entrance: Callable[..., Entrance], ours: Credentials, kind: Pair, garbage: bytes) -> None:
    place = entrance(kind[0](ours))
    with socket.create_connection(place.where, TIMEOUT_S) as stranger:
        stranger.sendall(garbage)
        try:
            while stranger.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert place.entered.empty()
    connect(place, kind[1](ours)).close()


def record_of(entrance: Entrance, handshake: HandshakeFactory) -> list[bytes]:
    """What a process of the job sends in a handshake and after it, as an eavesdropper sees it."""
    recorded: list[bytes] = []
    relay = socket.create_server(("127.0.0.1", 0))

    def pass_on() -> None:
        near, _ = relay.accept()
        with near, socket.create_connection(entrance.where, TIMEOUT_S) as far:

            def back() -> None:
                while part := far.recv(65536):
                    near.sendall(part)

            answering = threading.Thread(target=back)
            answering.start()
            while part := near.recv(65536):
                recorded.append(part)
                far.sendall(part)
            far.shutdown(socket.SHUT_WR)
            answering.join(TIMEOUT_S)

    thread = threading.Thread(target=pass_on)
    thread.start()
    with relay:
        port = relay.getsockname()[1]
        with addresses.connect(f"tcp:127.0.0.1:{port}", TIMEOUT_S, handshake=handshake) as connection:
            connection.sendall(b"secret order")
            with entrance.entered.get(timeout=TIMEOUT_S) as far:
                assert far.recv(100) == b"secret order"
        thread.join(TIMEOUT_S)
    return recorded


@BOTH_KINDS
def test_a_recorded_connection_cannot_be_replayed(
    entrance: Callable[..., Entrance], ours: Credentials, kind: Pair
) -> None:
    place = entrance(kind[0](ours))
    recorded = record_of(place, kind[1](ours))
    if kind is TLS:
        assert b"secret order" not in b"".join(recorded)
    with socket.create_connection(place.where, TIMEOUT_S) as stranger:
        try:
            for part in recorded:
                stranger.sendall(part)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
        except OSError:
            # Refused before everything was sent.
            pass
    assert place.entered.empty()


def test_an_answer_cannot_be_reflected(entrance: Callable[..., Entrance], ours: Credentials) -> None:
    """A stranger lets the side that accepts answer its own challenge."""
    place = entrance(handshakes.plain_accepting(ours))
    with (
        socket.create_connection(place.where, TIMEOUT_S) as first,
        socket.create_connection(place.where, TIMEOUT_S) as second,
    ):
        first.sendall(b"SPWplain" + b"n" * 32)
        challenge = first.recv(64, socket.MSG_WAITALL)[:32]
        second.sendall(b"SPWplain" + challenge)
        first.sendall(second.recv(64, socket.MSG_WAITALL)[32:])
        assert first.recv(1) == b""


@BOTH_KINDS
def test_who_says_nothing_delays_nobody(entrance: Callable[..., Entrance], ours: Credentials, kind: Pair) -> None:
    place = entrance(kind[0](ours))
    silent = [socket.create_connection(place.where, TIMEOUT_S) for _ in range(40)]
    slow = [socket.create_connection(place.where, TIMEOUT_S) for _ in range(40)]
    try:
        for one in slow:
            # The beginning of a ClientHello.
            one.sendall(b"\x16\x03\x01")
        started_s = time.monotonic()
        for _ in range(5):
            connect(place, kind[1](ours)).close()
        assert time.monotonic() - started_s < handshakes.HANDSHAKE_TIMEOUT_S / 2
    finally:
        for one in silent + slow:
            one.close()


def test_who_says_nothing_is_let_go_of(
    entrance: Callable[..., Entrance], ours: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_TIMEOUT_S", 0.1)
    place = entrance(handshakes.tls_accepting(ours))
    with socket.create_connection(place.where, TIMEOUT_S) as silent:
        assert silent.recv(1) == b""
    assert place.door.num_pending() == 0


def test_beyond_the_bound_the_longest_waiting_gives_way(
    entrance: Callable[..., Entrance], ours: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_PENDING", 3)
    place = entrance(handshakes.tls_accepting(ours))
    silent = [socket.create_connection(place.where, TIMEOUT_S) for _ in range(5)]
    try:
        assert silent[0].recv(1) == b"" and silent[1].recv(1) == b""
        assert place.door.num_pending() <= 3
        connect(place, handshakes.tls_connecting(ours)).close()
    finally:
        for one in silent:
            one.close()


def test_connecting_waits_for_a_door(ours: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    with pytest.raises(addresses.ConnectFailed, match=rf"tcp:127.0.0.1:{port} .tried for 0.05 s.: Connection refused"):
        addresses.connect(f"tcp:127.0.0.1:{port}", 0.05, handshake=handshakes.tls_connecting(ours))


# What goes over it


@pytest.fixture
def ends(entrance: Callable[..., Entrance], ours: Credentials) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    place = entrance(handshakes.tls_accepting(ours))
    near = connect(place, handshakes.tls_connecting(ours))
    far = place.entered.get(timeout=TIMEOUT_S)
    assert isinstance(near, TlsSocket) and isinstance(far, TlsSocket)
    with near, far:
        yield near, far


def test_both_directions_at_once(ends: tuple[TlsSocket, TlsSocket]) -> None:
    contents = [os.urandom(3 << 20), os.urandom(3 << 20)]
    received = [bytearray(3 << 20), bytearray(3 << 20)]

    def receive(index: int) -> None:
        assert ends[index].recv_into(received[index], 0, socket.MSG_WAITALL) == 3 << 20

    threads = [threading.Thread(target=ends[index].sendall, args=(contents[index],)) for index in (0, 1)]
    threads += [threading.Thread(target=receive, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert received == [contents[1], contents[0]]


def test_sending_without_waiting_keeps_the_bytes_in_order(ends: tuple[TlsSocket, TlsSocket]) -> None:
    near, far = ends
    content = os.urandom(24 << 20)
    with pytest.raises(BlockingIOError):
        far.recv(1, socket.MSG_DONTWAIT)
    sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            sent += near.send(content[sent : sent + 3 * RECORD_BYTES + 7], socket.MSG_DONTWAIT)
    # The peer reads nothing: it is full now, and a record is half sent.
    assert 0 < sent < len(content)
    received = bytearray(len(content))
    receiving = threading.Thread(target=far.recv_into, args=(received, 0, socket.MSG_WAITALL))
    receiving.start()
    near.sendall(memoryview(content)[sent:])
    receiving.join(TIMEOUT_S)
    assert received == content


def test_a_record_that_was_begun_is_finished_by_itself(ends: tuple[TlsSocket, TlsSocket]) -> None:
    near, far = ends
    sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            sent += near.send(b"x" * RECORD_BYTES, socket.MSG_DONTWAIT)
    received = bytearray(sent)
    receiving = threading.Thread(target=far.recv_into, args=(received, 0, socket.MSG_WAITALL))
    receiving.start()
    receiving.join(TIMEOUT_S)
    assert received == b"x" * sent


def test_shutdown_wakes_who_waits(ends: tuple[TlsSocket, TlsSocket]) -> None:
    near, _ = ends
    outcome: Queue[Any] = Queue()

    def receive() -> None:
        try:
            outcome.put(near.recv(1))
        except OSError as failure:
            outcome.put(failure)

    thread = threading.Thread(target=receive)
    thread.start()
    near.shutdown(socket.SHUT_RDWR)
    got = outcome.get(timeout=TIMEOUT_S)
    thread.join(TIMEOUT_S)
    assert got == b"" or isinstance(got, OSError)


# On an event loop


class Collected:
    """An end of a channel on the loop."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        codec: frames.FrameCodec[AnyMessage] = frames.FrameCodec(AnyMessage)
        self.channel = frames.AsyncChannel(
            codec,
            lambda _, got: [self.frames.put_nowait((one.message.reason, bytes(one.payload))) for one in got],
            lambda _, failure: self.closed.set_result(failure),
        )

    async def next(self) -> tuple[str, bytes]:
        return await asyncio.wait_for(self.frames.get(), TIMEOUT_S)


def on_both_loops(test: Callable[[Credentials], Any]) -> Callable[[Credentials, str], None]:
    def run(ours: Credentials, loop: str) -> None:
        import uvloop

        (uvloop.run if loop == "uvloop" else asyncio.run)(test(ours))

    run.__name__ = test.__name__
    return pytest.mark.parametrize("loop", ["asyncio", "uvloop"])(run)


async def channel_pair(ours: Credentials) -> tuple[Collected, Collected, streams.Server]:
    network = Network(ours)
    accepted: asyncio.Queue[Collected] = asyncio.Queue()

    def accept() -> asyncio.BufferedProtocol:
        accepted.put_nowait(Collected())
        return accepted._queue[-1].channel  # type: ignore[attr-defined,no-any-return]

    server = await streams.serve("tcp:127.0.0.1:0", accept, network)
    near = Collected()
    await streams.connect(server.address, lambda: near.channel, TIMEOUT_S, network)
    return near, await asyncio.wait_for(accepted.get(), TIMEOUT_S), server


@on_both_loops
async def test_frames_of_all_sizes_arrive_in_order(ours: Credentials) -> None:
    near, far, server = await channel_pair(ours)
    payloads = [b"", b"x", os.urandom(RECORD_BYTES), os.urandom(5 << 20), b"y" * 100_000, b"z"]
    for number, payload in enumerate(payloads):
        near.channel.send(Shutdown(str(number)), payload)
        far.channel.send(Shutdown(str(number)), payload)
    for number, payload in enumerate(payloads):
        assert await far.next() == (str(number), payload)
        assert await near.next() == (str(number), payload)
    near.channel.close()
    assert await asyncio.wait_for(far.closed, TIMEOUT_S) is None
    assert await asyncio.wait_for(near.closed, TIMEOUT_S) is None
    server.close()


@on_both_loops
async def test_what_was_sent_before_closing_arrives(ours: Credentials) -> None:
    near, far, server = await channel_pair(ours)
    # Unread when the other end closes: a reset would destroy what that has sent.
    near.channel.pause_reading()
    far.channel.pause_reading()
    near.channel.send(Shutdown("unread"), b"u" * (1 << 20))
    await asyncio.sleep(0)
    far.channel.send(Shutdown("last words"), b"w" * (8 << 20))
    far.channel.close()
    near.channel.resume_reading()
    assert await near.next() == ("last words", b"w" * (8 << 20))
    await asyncio.wait_for(far.closed, TIMEOUT_S)
    near.channel.close()
    await asyncio.wait_for(near.closed, TIMEOUT_S)
    server.close()


@on_both_loops
async def test_a_connection_that_is_reset_says_so(ours: Credentials) -> None:
    network, accepted = Network(ours), Collected()
    server = await streams.serve("tcp:127.0.0.1:0", lambda: accepted.channel, network)
    sock = await asyncio.to_thread(
        addresses.connect, server.address, TIMEOUT_S, lambda: False, handshakes.tls_connecting(ours)
    )
    assert isinstance(sock, TlsSocket)
    raw = sock.release()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()
    failure = await asyncio.wait_for(accepted.closed, TIMEOUT_S)
    assert isinstance(failure, ConnectionResetError), failure
    server.close()


@on_both_loops
async def test_who_accepts_asks_silent_peers(ours: Credentials) -> None:
    """What a host without power does not answer."""
    network, seen = Network(ours, unreachable_timeout_s=9.0), asyncio.Queue[streams.TlsTransport]()

    class Noting(frames.AsyncChannel[AnyMessage]):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, streams.TlsTransport)
            seen.put_nowait(transport)
            super().connection_made(transport)

    codec: frames.FrameCodec[AnyMessage] = frames.FrameCodec(AnyMessage)
    make = functools.partial(Noting, codec, lambda *_: None, lambda *_: None)
    server = await streams.serve("tcp:127.0.0.1:0", make, network)
    near = Collected()
    await streams.connect(server.address, lambda: near.channel, TIMEOUT_S, network)
    transport = await asyncio.wait_for(seen.get(), TIMEOUT_S)
    sock = transport._sock
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    asked = [
        sock.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    ]
    assert asked == [3, 3, 2]
    near.channel.close()
    await asyncio.wait_for(near.closed, TIMEOUT_S)
    server.close()


@on_both_loops
async def test_pausing_holds_the_peer_back(ours: Credentials) -> None:
    near, far, server = await channel_pair(ours)
    far.channel.pause_reading()
    near.channel.send(Shutdown("large"), b"l" * (64 << 20))
    for _ in range(20):
        await asyncio.sleep(0)
    assert near.channel.unsent_bytes() > 32 << 20
    assert far.frames.empty()
    far.channel.resume_reading()
    assert await far.next() == ("large", b"l" * (64 << 20))
    assert near.channel.unsent_bytes() == 0
    near.channel.close()
    await asyncio.wait_for(asyncio.gather(near.closed, far.closed), TIMEOUT_S)
    server.close()


@on_both_loops
async def test_the_loop_goes_on_beside_strangers(ours: Credentials) -> None:
    near, far, server = await channel_pair(ours)
    parsed = addresses.parse(server.address)
    assert isinstance(parsed, addresses.TcpAddress)
    strangers = [await asyncio.open_connection(parsed.host, parsed.port) for _ in range(20)]
    for _, writer in strangers:
        writer.write(os.urandom(100))
    near.channel.send(Shutdown("beside"))
    assert await far.next() == ("beside", b"")
    for _, writer in strangers:
        writer.close()
    near.channel.close()
    await asyncio.wait_for(asyncio.gather(near.closed, far.closed), TIMEOUT_S)
    server.close()


@on_both_loops
async def test_connecting_on_a_loop_needs_the_credentials(ours: Credentials) -> None:
    with pytest.raises(addresses.AddressError, match="need the job's credentials"):
        await streams.connect("tcp:127.0.0.1:1", Collected, TIMEOUT_S)  # type: ignore[type-var]
    with pytest.raises(addresses.AddressError, match="needs the job's credentials"):
        await streams.serve("tcp:127.0.0.1:0", asyncio.BufferedProtocol)


# The data plane


@pytest.mark.parametrize("encrypts", [True, False], ids=["tls", "plain"])
def test_data_planes_of_two_hosts(
    tmp_path: Any, ours: Credentials, of_another_job: Credentials, encrypts: bool
) -> None:
    """Small and large payloads arrive; another job finds the peer lost."""

    def plane(name: str, credentials: Credentials, encrypts: bool) -> DataPlane:
        network = Network(credentials, "127.0.0.1", encrypts)
        return DataPlane(f"unix:{tmp_path}/{name}", f"host of {name}", network=network)

    with contextlib.ExitStack() as at_end:
        sender, receiver = plane("a", ours, encrypts), plane("b", ours, encrypts)
        stranger = plane("c", of_another_job, encrypts)
        for one in (sender, receiver, stranger):
            at_end.callback(one.close)
            one.connect(1, receiver.address, receiver.host_key)
        assert receiver.address.startswith("tcp:127.0.0.1:") and receiver.address.endswith(f",unix:{tmp_path}/b")
        contents = [np.arange(size, dtype=np.uint8) for size in (1, 1000, 60_000, 70_000, 9 << 20)]
        arrived: Queue[tuple[int, Any]] = Queue()
        for index, content in enumerate(contents):
            receiver.expect((1, 2, index), functools.partial(lambda index, got: arrived.put((index, got)), index))
            sender.send(1, (1, 2, index), content, lambda failure: None)
        for _ in contents:
            index, got = arrived.get(timeout=TIMEOUT_S)
            np.testing.assert_array_equal(got.array(np.uint8, contents[index].shape), contents[index])
        assert sender.bytes_moved() == {"shared_memory": 0, "socket": sum(one.nbytes for one in contents)}
        outcomes: Queue[Any] = Queue()
        stranger.send(1, (1, 2, 99), contents[0], outcomes.put)
        assert isinstance(outcomes.get(timeout=TIMEOUT_S), PeerLost)


def test_data_planes_of_one_host_share_memory_beside_tcp(tmp_path: Any, ours: Credentials) -> None:
    network = Network(ours, "127.0.0.1")
    sender, receiver = (DataPlane(f"unix:{tmp_path}/{name}", "one host", network=network) for name in "ab")
    with contextlib.closing(sender), contextlib.closing(receiver):
        sender.connect(1, receiver.address, receiver.host_key)
        arrived: Queue[Any] = Queue()
        receiver.expect((1, 2, 3), arrived.put)
        sender.send(1, (1, 2, 3), np.full(1 << 20, 7, np.uint8), lambda failure: None)
        assert arrived.get(timeout=TIMEOUT_S).array(np.uint8, (1 << 20,)).min() == 7
        # Counted once it is sent, which the other side may see first.
        until(lambda: sender.bytes_moved() == {"shared_memory": 1 << 20, "socket": 0}, sender.bytes_moved, TIMEOUT_S)
