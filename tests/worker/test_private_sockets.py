"""Stand-ins in processes with the library: who they lead to, by which way, and that nobody else gets there.

What gloo does with them is in tests/e2e/test_over_tcp.py and tests/slurm/test_collectives.py.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pathways_runtime.core.ids import HostIndex
from pathways_runtime.transport.credentials import Credentials
from pathways_runtime.worker import private_sockets
from pathways_runtime.worker.private_sockets import LIBRARY, PLAIN_VARIABLE, preload, stand_in, why_not

ANOTHER_UID = 65534

#: An executor without JAX: a data plane, private sockets, and at its stand-in a server that answers in capitals. Does
#: what it is told, line by line.
MEMBER = """
import contextlib, json, os, socket, sys, threading
from pathlib import Path
from pathways_runtime.transport.dataplane import DataPlane
from pathways_runtime.transport.network import Network
from pathways_runtime.worker.private_sockets import PrivateSockets, folder_beside, stand_in

folder, host, credentials, encryption = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
network = Network.from_options(Path(credentials), "127.0.0.1", encryption)
address = f"unix:{folder}/data-{host}.sock"
sockets = None
data = DataPlane(address, f"host {host}", network=network, on_tunnel=lambda port: sockets.take_in(port))
sockets = PrivateSockets(folder_beside(address), host, data.open_tunnel)

def serve():
    while True:
        client, _ = server.accept()
        threading.Thread(target=answer, args=(client,), daemon=True).start()

def answer(client):
    with client:
        while received := client.recv(1 << 16):
            client.sendall(received.upper())

server = socket.create_server((sockets.own_stand_in, 0))
threading.Thread(target=serve, daemon=True).start()

def ask(host, port, size):
    said = b"abc" * (size // 3)
    heard = b""
    with socket.create_connection((stand_in(host), port), 30) as sock:
        def say():
            with contextlib.suppress(ConnectionError):
                sock.sendall(said)
        sender = threading.Thread(target=say)
        sender.start()
        with contextlib.suppress(ConnectionError):
            while len(heard) < len(said) and (part := sock.recv(1 << 16)):
                heard += part
        sender.join()
        return heard == said.upper(), sock.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == socket.AF_UNIX

held = []

def do(what, *arguments):
    if what == "connect":
        data.connect(*arguments)
    elif what == "lead":
        sockets.lead_to(arguments[0], arguments[1] and folder_beside(arguments[1]))
    elif what == "hold":
        held.append(socket.create_connection((stand_in(arguments[0]), arguments[1]), 30))
        return True
    elif what == "heard":
        with held.pop() as sock, contextlib.suppress(ConnectionError):
            assert not sock.recv(1)
        return "the end"
    elif what == "ask":
        return ask(*arguments)
    elif what == "end":
        data.close()
        sockets.close()
    elif what == "sent":
        return sockets.bytes_out()

print(json.dumps([data.address, server.getsockname()]), flush=True)
for line in sys.stdin:
    try:
        print(json.dumps(do(*json.loads(line))), flush=True)
    except OSError as failure:
        print(json.dumps(type(failure).__name__), flush=True)
os._exit(0)
"""

#: Tries, as another user, to see a folder and to connect to what is in it.
ATTEMPTS = """
import os, pathlib, socket, sys
folder, uid, *names = sys.argv[1:]
os.setgroups([])
os.setgid(int(uid))
os.setuid(int(uid))
def attempt(act):
    try:
        print(repr(act()))
    except OSError as failure:
        print(type(failure).__name__)
attempt(lambda: list(pathlib.Path(folder).iterdir()))
for name in names:
    attempt(lambda: socket.socket(socket.AF_UNIX).connect(f"{folder}/{name}"))
"""


class Member:
    """A process of ``MEMBER``."""

    def __init__(self, folder: Path, host: int, credentials: Path, encryption: str) -> None:
        self.host = host
        self.folder = folder / f"data-{host}.d"
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(folder), str(host), str(credentials), encryption],
            env={**os.environ, **preload(os.environ, folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address, (self.stand_in, self.port) = self._answer()

    def do(self, *command: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a short path that other users can get to."""
    assert LIBRARY.exists(), f"{LIBRARY} is missing: install slurm-pathways where there is a C compiler"
    made = Path(tempfile.mkdtemp(prefix="sockets-", dir="/tmp"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Member]]:
    """Starts members."""
    Credentials.create(folder / "credentials")
    started: list[Member] = []

    def start_one(host: int, encryption: str = "tls") -> Member:
        started.append(Member(folder, host, folder / "credentials", encryption))
        return started[-1]

    yield start_one
    for member in started:
        member.close()


def test_members_of_one_machine_meet_at_unix_sockets(start: Callable[..., Member]) -> None:
    here, there = start(0), start(70000)
    assert (here.stand_in, there.stand_in) == ("127.192.0.0", "127.193.17.112")
    here.do("lead", there.host, there.address)
    assert here.do("ask", there.host, there.port, 3 << 20) == [True, True]
    assert here.do("ask", here.host, here.port, 300) == [True, True], "its own"
    assert here.do("sent") == there.do("sent") == 0
    assert here.do("ask", 5, 1, 3) == "ConnectionRefusedError", "of whom nothing was said"
    assert here.do("ask", there.host, there.port + 1, 3) == "ConnectionRefusedError"


@pytest.mark.parametrize("encryption", ["tls", "none"])
def test_between_machines_they_meet_behind_the_door(start: Callable[..., Member], encryption: str) -> None:
    here, there = start(1, encryption), start(2, encryption)
    here.do("connect", there.host, there.address, "another machine")
    here.do("lead", there.host, None)
    assert here.do("ask", there.host, there.port, 3 << 20) == [True, encryption == "tls"]
    # What is not encrypted needs nobody to carry it.
    carried = 3 << 20 if encryption == "tls" else 0
    assert (here.do("sent"), there.do("sent")) == (carried, carried)
    assert here.do("ask", there.host, there.port + 1, 3) == "ConnectionRefusedError", "nobody is at that port"
    assert here.do("ask", there.host, there.port, 300) == [True, encryption == "tls"]
    # Each has its door and nothing else.
    for member in (here, there):
        ways = psutil.Process(member.process.pid).net_connections("tcp")
        assert len([way for way in ways if way.status == psutil.CONN_LISTEN]) == 1


def test_who_takes_the_place_of_another_is_found(start: Callable[..., Member]) -> None:
    """Another executor behind the same host, on this machine and then on another."""
    here, first, second = start(0), start(1), start(2)
    here.do("lead", first.host, first.address)
    assert here.do("ask", first.host, first.port, 300) == [True, True]
    first.do("end")
    assert not first.folder.exists()
    assert here.do("ask", first.host, first.port, 3) == "ConnectionRefusedError"
    here.do("lead", first.host, second.address)
    assert here.do("ask", first.host, second.port, 300) == [True, True]
    assert here.do("sent") == 0
    here.do("connect", first.host, second.address, "another machine")
    here.do("lead", first.host, None)
    assert here.do("ask", first.host, second.port, 300) == [True, True]
    assert here.do("sent") == 300


def test_a_peer_that_ends_ends_the_connection(start: Callable[..., Member]) -> None:
    here, there = start(0), start(1)
    here.do("connect", there.host, there.address, "another machine")
    here.do("lead", there.host, None)
    assert here.do("ask", there.host, there.port, 300) == [True, True]
    assert here.do("hold", there.host, there.port)
    there.process.kill()
    assert here.do("heard") == "the end"
    assert here.do("ask", there.host, there.port, 300) == "ConnectionRefusedError"
    here.do("end")
    assert not here.folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user; .ci/run is root")
def test_another_user_gets_nowhere(start: Callable[..., Member]) -> None:
    here, there = start(0), start(1)
    here.do("connect", there.host, there.address, "another machine")
    here.do("lead", there.host, None)
    names = [str(here.port), "out", f"m{there.host}"]
    assert {path.name for path in here.folder.iterdir()} == set(names)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in here.folder.iterdir())
    argv = [sys.executable, "-I", "-c", ATTEMPTS, str(here.folder), str(ANOTHER_UID), *names]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == ["PermissionError"] * 4, (ran.stdout, ran.stderr)


def test_how_it_is_preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "library.so"
    monkeypatch.setattr(private_sockets, "LIBRARY", library)
    assert why_not({}) == f"{library} is missing: there was no C compiler when slurm-pathways was built"
    assert preload({}, tmp_path) == {}
    library.touch()
    assert (why_not({}), preload({}, tmp_path)) == ("", {"LD_PRELOAD": str(library)})
    assert preload({"LD_PRELOAD": "/theirs.so"}, tmp_path) == {"LD_PRELOAD": f"{library}:/theirs.so"}
    assert why_not({PLAIN_VARIABLE: "1"}) == f"{PLAIN_VARIABLE} is set"
    assert preload({PLAIN_VARIABLE: "1"}, tmp_path) == {}


def test_a_path_that_the_loader_would_take_apart_gets_a_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parted = folder / "a b:c"
    parted.mkdir()
    monkeypatch.setattr(private_sockets, "LIBRARY", Path(shutil.copy(LIBRARY, parted)))
    for _ in range(2):
        environ = preload({}, folder)
    assert environ == {"LD_PRELOAD": str(folder / LIBRARY.name)}
    looks = "from pathways_runtime.worker.private_sockets import is_preloaded; print(is_preloaded())"
    argv = [sys.executable, "-c", looks]
    for variables, is_there in ((environ, "True\n"), ({}, "False\n")):
        ran = subprocess.run(argv, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
        assert (ran.stdout, ran.stderr) == (is_there, "")


def test_stand_ins_are_of_the_range() -> None:
    assert [stand_in(HostIndex(host)) for host in (0, 255, 4095)] == ["127.192.0.0", "127.192.0.255", "127.192.15.255"]
    with pytest.raises(IndexError):
        stand_in(HostIndex(1 << 22))
