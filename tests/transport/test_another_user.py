"""What another user of the same machine can do: nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pathways_runtime.transport import addresses, handshakes
from pathways_runtime.transport.credentials import Credentials
from pathways_runtime.transport.network import open_door
from pathways_runtime.transport.tls_socket import Connection

ANOTHER_UID = 65534

#: Becomes the other user once Python is loaded, which that user may not be able to read.
ATTEMPTS = """
import encodings.idna, os, pathlib, socket, sys
folder, host, port, unix, uid = sys.argv[1:]
os.setgroups([])
os.setgid(int(uid))
os.setuid(int(uid))
outcomes = []
def attempt(act):
    try:
        outcomes.append(repr(act()))
    except OSError as failure:
        outcomes.append(type(failure).__name__)
def greet():
    with socket.create_connection((host, int(port)), 20) as stranger:
        stranger.sendall(b"hello" * 100)
        received = b""
        while part := stranger.recv(4096):
            received += part
        return len(received) < 100 and b"+" not in received
attempt(lambda: pathlib.Path(folder, "credentials.pem").read_text())
attempt(lambda: list(pathlib.Path(folder).iterdir()))
attempt(lambda: socket.socket(socket.AF_UNIX).connect(unix))
attempt(greet)
print(*outcomes)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that the other user can get to."""
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o711)
    return tmp_path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user; .ci/run is root")
def test_another_user_can_neither_read_nor_connect(place: Path) -> None:
    credentials = Credentials.create(place / "credentials")
    entered: list[Connection] = []
    door, address = open_door("tcp:127.0.0.1:0", handshakes.tls_accepting(credentials), entered.append)
    parsed = addresses.parse(address)
    assert isinstance(parsed, addresses.TcpAddress)
    unix = f"{place}/s"
    try:
        with addresses.listen(f"unix:{unix}"):
            ran = subprocess.run(
                [
                    *(sys.executable, "-I", "-c", ATTEMPTS),
                    *(str(place / "credentials"), parsed.host, str(parsed.port), unix, str(ANOTHER_UID)),
                ],
                capture_output=True,
                text=True,
                timeout=60,
            )
        outcomes = ran.stdout.split()
        assert outcomes[:3] == ["PermissionError"] * 3, (outcomes, ran.stderr)
        # The door lets go of it, with a reset if it had more to say.
        assert outcomes[3] in ("True", "ConnectionResetError"), (outcomes, ran.stderr)
        assert entered == []
        addresses.connect(address, 20.0, handshake=handshakes.tls_connecting(credentials)).close()
    finally:
        door.close()
        for connection in entered:
            connection.close()
