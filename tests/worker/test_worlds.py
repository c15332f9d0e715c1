"""By which way a member reaches its world's coordination service. That worlds form by it is in other tests."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pathways_runtime.transport import addresses
from pathways_runtime.transport.credentials import Credentials
from pathways_runtime.transport.network import Network
from pathways_runtime.transport.tunnel import Exit
from pathways_runtime.worker.worlds import way_to_coordination

TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(Credentials.make(), "127.0.0.1")


class Service:
    """Greets whoever comes, and keeps the connection."""

    def __init__(self, folder: Path, network: Network) -> None:
        self._address = f"unix:{folder}/service"
        self._listener = addresses.listen(self._address)
        self._exit = Exit(self._address, network)
        self.address = addresses.both_ways(self._exit.address, self._address)
        self._served: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                served, _ = self._listener.accept()
            except OSError:
                return
            served.sendall(b"welcome")
            self._served.append(served)

    def say(self, text: bytes) -> None:
        for served in self._served:
            served.sendall(text)

    def close(self) -> None:
        addresses.stop_listening(self._listener, self._address)
        self._thread.join()
        self._exit.close()
        for served in self._served:
            served.close()


@pytest.fixture
def service(tmp_path: Path, network: Network) -> Iterator[Service]:
    started = Service(tmp_path, network)
    yield started
    started.close()


def greeted_at(address: str) -> socket.socket:
    member = addresses.connect_unix(address, TIMEOUT_S)
    member.settimeout(TIMEOUT_S)
    assert member.recv(100) == b"welcome"
    return member


def test_on_its_host_a_member_goes_to_the_service_itself(service: Service, tmp_path: Path, network: Network) -> None:
    with way_to_coordination(service.address, True, f"unix:{tmp_path}/ours", network) as way:
        assert way == f"unix:{tmp_path}/service"
        assert not (tmp_path / "ours").exists()
        greeted_at(way).close()


def test_from_another_host_it_goes_through_a_tunnel(service: Service, tmp_path: Path, network: Network) -> None:
    """Whose socket is there while the world forms, and whose connection is there for good."""
    with way_to_coordination(service.address, False, f"unix:{tmp_path}/ours", network) as way:
        assert way == f"unix:{tmp_path}/ours"
        member = greeted_at(way)
    assert not (tmp_path / "ours").exists()
    with member:
        service.say(b"still here")
        assert member.recv(100) == b"still here"


def test_a_world_that_cannot_form_leaves_no_tunnel(service: Service, tmp_path: Path, network: Network) -> None:
    with (
        pytest.raises(RuntimeError, match="nobody came"),
        way_to_coordination(service.address, False, f"unix:{tmp_path}/ours", network) as way,
    ):
        member = greeted_at(way)
        raise RuntimeError("nobody came")
    assert not (tmp_path / "ours").exists()
    with member:
        assert member.recv(100) == b""


def test_without_credentials_there_is_no_way_to_another_host(service: Service, tmp_path: Path) -> None:
    with (
        pytest.raises(addresses.AddressError, match="TCP needs the job's credentials"),
        way_to_coordination(service.address, False, f"unix:{tmp_path}/ours", None),
    ):
        raise AssertionError("there is no way")


def test_a_world_of_one_has_no_service(tmp_path: Path) -> None:
    with way_to_coordination("", False, f"unix:{tmp_path}/ours", None) as way:
        assert way == ""
