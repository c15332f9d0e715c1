"""Addresses: what they say when they cannot be used."""

import socket
import stat
import threading
from pathlib import Path

import pytest

from pathways_runtime.transport import addresses


def test_parse() -> None:
    assert addresses.parse("unix:/run/a b").path == "/run/a b"
    assert str(addresses.UnixAddress("/x")) == "unix:/x"
    assert addresses.parse("tcp:node-1.cluster:70") == addresses.TcpAddress("node-1.cluster", 70)
    assert addresses.parse("tcp:[fd00::1]:70") == addresses.TcpAddress("fd00::1", 70)
    assert str(addresses.TcpAddress("fd00::1", 70)) == "tcp:[fd00::1]:70"


def test_a_listener_with_two_addresses_is_reached_by_the_shorter_way() -> None:
    both = addresses.both_ways("tcp:host:70", "unix:/run/a,b")
    assert addresses.way_to(both, is_same_host=True) == "unix:/run/a,b"
    assert addresses.way_to(both, is_same_host=False) == "tcp:host:70"
    assert addresses.way_to("unix:/x,y", is_same_host=False) == "unix:/x,y"
    assert addresses.way_to("tcp:host:70", is_same_host=True) == "tcp:host:70"


def test_a_name_that_only_this_host_finds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [entry])
    with pytest.raises(addresses.AddressError, match=r"'node7' resolves to 127.0.1.1 on this host"):
        addresses.listen_tcp("tcp:node7:0")


def test_an_address_that_nobody_can_connect_to_is_not_published() -> None:
    with pytest.raises(addresses.AddressError, match=r"others cannot connect to 0\.0\.0\.0"):
        addresses.listen_tcp("tcp:0.0.0.0:0")


def test_the_real_port_is_published() -> None:
    sock, published = addresses.listen_tcp("tcp:0.0.0.0:0", advertise="127.0.0.1")
    with sock:
        assert published == f"tcp:127.0.0.1:{sock.getsockname()[1]}"


def test_tcp_needs_credentials() -> None:
    with pytest.raises(addresses.AddressError, match="need the job's credentials"):
        addresses.connect("tcp:127.0.0.1:1", 0.0)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("udp:host:1", "must look like unix:"),
        ("tcp:host", "must look like tcp:host:port"),
        ("tcp:host:70000", "must look like tcp:host:port"),
        ("tcp::1", "must look like tcp:host:port"),
        ("/run/x", "must look like unix:"),
        ("unix:x", "must be absolute"),
        ("unix:/" + "x" * 107, "has 108 bytes, a Unix socket allows 107"),
        ("unix:/" + "ä" * 54, "has 109 bytes"),
    ],
)
def test_what_is_no_address_is_explained(address: str, words: str) -> None:
    with pytest.raises(addresses.AddressError, match=words):
        addresses.parse(address)


def test_the_longest_path_works(tmp_path: Path) -> None:
    room = addresses.MAX_UNIX_PATH_BYTES - len(str(tmp_path)) - 1
    address = f"unix:{tmp_path / ('x' * room)}"
    with addresses.listen(address) as listener, addresses.connect(address, 1.0) as ours:
        theirs, _ = listener.accept()
        with theirs:
            ours.sendall(b"hello")
            assert theirs.recv(5) == b"hello"


def test_only_the_user_may_connect(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    with addresses.listen(address):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


def test_nobody_there_names_the_address_and_the_time(tmp_path: Path) -> None:
    with pytest.raises(addresses.ConnectFailed, match=r"cannot connect to unix:.*/s \(tried for 0.02 s\)"):
        addresses.connect(f"unix:{tmp_path}/s", 0.02)


def test_connecting_waits_for_the_listener(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    connected: list[socket.socket] = []
    thread = threading.Thread(target=lambda: connected.append(addresses.connect(address, 20.0)))
    thread.start()
    with addresses.listen(address):
        thread.join(20.0)
    assert len(connected) == 1
    connected[0].close()


def test_a_socket_file_that_was_left_is_replaced_but_a_listener_is_not(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    addresses.listen(address).close()
    with addresses.listen(address) as listener:
        with pytest.raises(addresses.AddressError, match="another process listens there"):
            addresses.listen(address)
        addresses.stop_listening(listener, address)
    assert not (tmp_path / "s").exists()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot listen at unix:.*/missing/s"):
        addresses.listen(f"unix:{tmp_path}/missing/s")
