"""Tunnels: what goes in comes out, who does not belong stays out, and nothing is left behind."""

import contextlib
import os
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pathways_runtime.transport import addresses, door, handshakes
from pathways_runtime.transport.credentials import Credentials
from pathways_runtime.transport.network import Network
from pathways_runtime.transport.tunnel import Carrier, Entrance, Exit

from .dataplane_ends import eventually, num_descriptors

TIMEOUT_S = 20.0
#: Longer than any test may take.
FOR_EVER_S = 3600.0


def read_all(sock: socket.socket) -> bytes:
    """Until the end."""
    received = b""
    while part := sock.recv(1 << 16):
        received += part
    return received


class Place:
    """A service, the exit beside it, and entrances elsewhere."""

    def __init__(self, folder: Path, credentials: Credentials) -> None:
        self._at_end = contextlib.ExitStack()
        self._folder = folder
        self._handshake = handshakes.tls_connecting(credentials)
        self._num_entrances = 0
        self.service_address = f"unix:{folder}/service"
        self.service = addresses.listen(self.service_address)
        self.service.settimeout(TIMEOUT_S)
        self._at_end.callback(self.stop_service)
        self.exit = Exit(self.service_address, Network(credentials, "127.0.0.1"))
        self._at_end.callback(self.exit.close)

    @property
    def where(self) -> tuple[str, int]:
        parsed = addresses.parse(self.exit.address)
        assert isinstance(parsed, addresses.TcpAddress)
        return parsed.host, parsed.port

    def stop_service(self) -> None:
        if self.service.fileno() >= 0:
            addresses.stop_listening(self.service, self.service_address)

    def entrance(self, credentials: Credentials | None = None, exit_address: str | None = None) -> Entrance:
        handshake = self._handshake if credentials is None else handshakes.tls_connecting(credentials)
        self._num_entrances += 1
        address = f"unix:{self._folder}/entrance-{self._num_entrances}"
        entrance = Entrance(address, exit_address or self.exit.address, handshake)
        self._at_end.callback(entrance.close)
        return entrance

    def connect(self, entrance: Entrance) -> socket.socket:
        """A client, which the service has not accepted yet."""
        client = addresses.connect_unix(entrance.address, TIMEOUT_S)
        client.settimeout(TIMEOUT_S)
        self._at_end.callback(client.close)
        return client

    def accept(self) -> socket.socket:
        """The service's end of the next connection."""
        served, _ = self.service.accept()
        served.settimeout(TIMEOUT_S)
        self._at_end.callback(served.close)
        return served

    def pair(self, entrance: Entrance | None = None) -> tuple[socket.socket, socket.socket]:
        client = self.connect(entrance or self.entrance())
        return client, self.accept()

    def has_no_more_visitors(self) -> bool:
        self.service.setblocking(False)
        with pytest.raises(BlockingIOError):
            self.service.accept()
        self.service.settimeout(TIMEOUT_S)
        return self.exit.num_passages() == 0

    def close(self) -> None:
        self._at_end.close()


@pytest.fixture
def place(tmp_path: Path, ours: Credentials) -> Iterator[Place]:
    """Leaves neither socket nor descriptor nor thread."""
    fds, threads = num_descriptors(), threading.active_count()
    made = Place(tmp_path, ours)
    yield made
    made.close()
    assert threading.active_count() == threads, f"threads left: {threading.enumerate()}"
    assert num_descriptors() == fds, "descriptors left"
    assert list(tmp_path.iterdir()) == [], "sockets left"


def test_bytes_go_both_ways(place: Place) -> None:
    client, served = place.pair()
    client.sendall(b"question")
    assert served.recv(100) == b"question"
    served.sendall(b"answer")
    assert client.recv(100) == b"answer"


def test_the_service_may_speak_first(place: Place) -> None:
    client, served = place.pair()
    served.sendall(b"welcome")
    assert client.recv(100) == b"welcome"


def test_each_connection_is_one_of_its_own(place: Place) -> None:
    entrances = [place.entrance(), place.entrance()]
    pairs = [place.pair(entrances[number % 2]) for number in range(6)]
    for number, (client, _) in enumerate(pairs):
        client.sendall(f"from {number}".encode())
    assert [served.recv(100) for _, served in pairs] == [f"from {number}".encode() for number in range(6)]
    assert place.exit.num_passages() == 6


def test_much_goes_both_ways_at_once_and_waits_for_who_reads_late(place: Place) -> None:
    """More than all buffers on the way hold, so either end has to wait for the other."""
    client, served = place.pair()
    there, back = os.urandom(12 << 20), os.urandom(12 << 20)
    received: dict[str, bytes] = {}

    def send(sock: socket.socket, content: bytes) -> None:
        sock.sendall(content)
        sock.shutdown(socket.SHUT_WR)

    senders = [threading.Thread(target=send, args=pair) for pair in ((client, there), (served, back))]
    for thread in senders:
        thread.start()
    readers = [
        threading.Thread(target=lambda name, sock: received.__setitem__(name, read_all(sock)), args=pair)
        for pair in (("there", served), ("back", client))
    ]
    for thread in readers:
        thread.start()
    for thread in (*senders, *readers):
        thread.join(TIMEOUT_S)
    assert received["there"] == there and received["back"] == back
    eventually(lambda: place.exit.num_passages() == 0, "the passage ends once both ends have")


@pytest.mark.parametrize("first", ["client", "service"])
def test_an_end_that_has_said_everything_still_hears_the_other(place: Place, first: str) -> None:
    client, served = place.pair()
    one, other = (client, served) if first == "client" else (served, client)
    one.sendall(b"all I have")
    one.shutdown(socket.SHUT_WR)
    assert read_all(other) == b"all I have"
    for _ in range(3):
        other.sendall(b"more")
        assert one.recv(100) == b"more"
    other.close()
    assert read_all(one) == b""
    eventually(lambda: place.exit.num_passages() == 0, "the passage ends once both ends have")


def test_an_end_that_has_closed_is_not_watched(place: Place) -> None:
    """The system would tell of it again and again."""
    client, served = place.pair()
    client.close()
    assert read_all(served) == b""
    carrier = place.exit._carrier
    with carrier._lock:
        [passage] = set(carrier._by_fd.values())
        assert len(passage.watched) == 1
    served.close()
    eventually(lambda: place.exit.num_passages() == 0, "the passage ends with the service's end")


@pytest.mark.parametrize("who", ["client", "service", "exit", "entrance"])
def test_whoever_goes_is_seen_by_the_others(place: Place, who: str) -> None:
    entrance = place.entrance()
    client, served = place.pair(entrance)
    client.sendall(b"x")
    assert served.recv(1) == b"x"
    if who in ("client", "service"):
        going, staying = (client, served) if who == "client" else (served, client)
        # With a reset, as of a process that dies with bytes unread.
        going.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        going.close()
        assert read_all(staying) == b""
    else:
        (place.exit if who == "exit" else entrance).close()
        for staying in (client, served):
            assert read_all(staying) == b""


def test_connections_outlive_the_socket_at_which_they_came(place: Place) -> None:
    entrance = place.entrance()
    client, served = place.pair(entrance)
    entrance.stop_listening()
    assert not Path(entrance.address.removeprefix("unix:")).exists()
    with pytest.raises(addresses.ConnectFailed, match="No such file"):
        addresses.connect_unix(entrance.address, 0.0)
    client.sendall(b"still here")
    assert served.recv(100) == b"still here"


def test_the_entrance_is_for_this_user_alone(place: Place) -> None:
    mode = Path(place.entrance().address.removeprefix("unix:")).stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_a_service_that_is_gone_is_an_end(place: Place) -> None:
    entrance = place.entrance()
    place.stop_service()
    assert read_all(place.connect(entrance)) == b""
    # And nobody waits at a door that is shut.
    assert place.exit.num_passages() == 0


def test_an_exit_that_is_gone_is_an_end(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pathways_runtime.transport.tunnel._CONNECT_TIMEOUT_S", 0.0)
    entrance = place.entrance()
    place.exit.close()
    assert read_all(place.connect(entrance)) == b""
    assert f"no tunnel: cannot connect to {place.exit.address}" in caplog.text


def test_an_exit_that_does_not_answer_can_be_left(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever closes does not wait for a handshake's deadline."""
    monkeypatch.setattr(addresses, "HANDSHAKE_TIMEOUT_S", FOR_EVER_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        entrance = place.entrance(exit_address=f"tcp:127.0.0.1:{silent.getsockname()[1]}")
        client = place.connect(entrance)
        silent.settimeout(TIMEOUT_S)
        caller, _ = silent.accept()
        with caller:
            entrance.close()
    assert read_all(client) == b""


# Strangers


def test_another_jobs_process_is_refused(place: Place, of_another_job: Credentials, caplog) -> None:
    assert read_all(place.connect(place.entrance(of_another_job))) == b""
    assert "no tunnel" in caplog.text
    assert place.has_no_more_visitors()


def test_who_shows_no_certificate_is_refused(place: Place, ours: Credentials) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(cadata=ours.authority)
    with (
        socket.create_connection(place.where, TIMEOUT_S) as sock,
        bare.wrap_socket(sock) as tls,
        pytest.raises(OSError, match="CERTIFICATE_REQUIRED"),
    ):
        # In TLS 1.3 the refusal comes after what is a whole handshake for this side.
        tls.recv(1)
    assert place.has_no_more_visitors()


@pytest.mark.parametrize(
    "garbage",
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04" + bytes(5), bytes(500), os.urandom(300)],
    ids=["plain grpc", "zeros", "noise"],
)
def test_plain_grpc_and_garbage_are_refused(place: Place, garbage: bytes) -> None:
    with socket.create_connection(place.where, TIMEOUT_S) as stranger:
        stranger.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            # At most a TLS alert.
            assert read_all(stranger)[:1] in (b"", b"\x15")
    assert place.has_no_more_visitors()


def test_strangers_who_say_nothing_delay_nobody(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_TIMEOUT_S", FOR_EVER_S)
    with contextlib.ExitStack() as strangers:
        for _ in range(50):
            strangers.enter_context(socket.create_connection(place.where, TIMEOUT_S))
        client, served = place.pair()
        client.sendall(b"x")
        assert served.recv(1) == b"x"
        assert place.exit.num_passages() == 1


def test_a_carrier_that_is_closed_takes_nothing_over() -> None:
    carrier = Carrier("closed")
    carrier.close()
    carrier.close()
    near, far = socket.socketpair()
    other_near, other_far = socket.socketpair()
    with near, other_near:
        carrier.join(far, other_far)
        assert near.recv(1) == b"" and other_near.recv(1) == b""
