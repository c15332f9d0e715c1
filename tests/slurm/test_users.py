"""Two users on the same nodes at once: each gets what is right, and neither gets at the other's runtime."""

import json
import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import pathways_runtime
import slurm_pathways
from slurm_pathways.sandbox.cluster import Sandbox

from .jobs import COMMAND, COMMAND_TIMEOUT_S, Job, commands

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(240)]

#: There on every Debian, and nobody's.
USERS = ("nobody", "games")

Address = tuple[str, int]
EXECUTOR = "pathways_runtime.worker.executor"
MODULES = {
    *("pathways_runtime.controller", "pathways_runtime.controller.coordination"),
    *("pathways_runtime.proxy", "pathways_runtime.worker", EXECUTOR),
}
#: As in /proc/net/tcp.
LISTENS, CONNECTED = "0A", "01"

#: Computes, then tries the doors of which a file tells it, and says what came of it.
PROGRAM = """
import json, os, pathlib, socket, ssl, subprocess, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
total = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
print("uid", os.getuid(), "psum", float(total(jnp.arange(1.0, 5.0))[0]), flush=True)
status = subprocess.run([sys.argv[2], "status", "--json"], capture_output=True, text=True, check=True).stdout
print("collectives", json.loads(status)["bytes_moved"]["collectives"], flush=True)
doors = pathlib.Path(sys.argv[1])
while not doors.exists():
    time.sleep(0.1)

def try_folder(path):
    os.listdir(path)

def try_unix(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)

def try_plain(address):
    with socket.create_connection(address, 20) as sock:
        sock.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n")
        if sock.recv(1) in (b"", b"\\x15"):
            raise PermissionError("closed, or a TLS alert")

def try_tls(address):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(address, 20) as sock, context.wrap_socket(sock) as tls:
        tls.sendall(b"hello")
        if tls.recv(1) == b"":
            raise PermissionError("closed")

for kind, where in json.loads(doors.read_text()):
    try:
        globals()["try_" + kind](where if isinstance(where, str) else tuple(where))
        print("open:", kind, where, flush=True)
    except (PermissionError, ConnectionError, ssl.SSLError) as refusal:
        print("refused:", kind, type(refusal).__name__, flush=True)
"""


@pytest.fixture(scope="module")
def reachable() -> Iterator[None]:
    """Others may pass through the folders in which Python and our packages are; the modes are put back."""
    packages = [Path(str(module.__file__)) for module in (slurm_pathways, pathways_runtime, jax)]
    changed = {}
    for path in (COMMAND, Path(sys.executable), Path(os.path.realpath(sys.executable)), *packages):
        for folder in path.parents:
            mode = folder.stat().st_mode & 0o7777
            if not mode & 0o001:
                changed[folder] = mode
                folder.chmod(mode | 0o001)
    yield
    for folder, mode in changed.items():
        folder.chmod(mode)


@pytest.fixture
def homes() -> Iterator[dict[str, Path]]:
    """A folder of each user's own."""
    root = Path(tempfile.mkdtemp(prefix="users-", dir="/tmp"))
    root.chmod(0o755)
    found = {}
    for user in USERS:
        found[user] = root / user
        for folder in (root / user, root / user / "runs"):
            folder.mkdir(mode=0o700)
            os.chown(folder, pwd.getpwnam(user).pw_uid, 0)
    yield found
    shutil.rmtree(root)


@pytest.mark.usefixtures("reachable")
def test_two_users_on_the_same_nodes(sandbox: Sandbox, homes: dict[str, Path]) -> None:
    program = homes[USERS[0]].parent / "program.py"
    program.write_text(PROGRAM)
    jobs = {user: _submit(sandbox, user, homes[user], program) for user in USERS}
    for user, job in jobs.items():
        job.until_said(f"uid {pwd.getpwnam(user).pw_uid} psum 10.0\n")
    assert {job.fields()["NodeList"] for job in jobs.values()} == {"node[0-1]"}
    doors = {user: _doors(sandbox, homes[user]) for user in USERS}
    for user, other in (USERS, USERS[::-1]):
        (homes[user] / "doors").write_text(json.dumps(doors[other]))
        (homes[user] / "doors").chmod(0o644)
    for user, other in (USERS, USERS[::-1]):
        assert jobs[user].wait() == "0:0", jobs[user].said()
        said = jobs[user].said().splitlines()
        assert [line for line in said if line.startswith("open")] == []
        tried = [line.split()[1] for line in said if line.startswith("refused")]
        assert tried == [kind for kind, _ in doors[other]]
        assert set(tried) == {"folder", "unix", "plain", "tls"}
        # Its sum went between the nodes, and by no other way than the doors that were tried.
        [sent] = [int(line.split()[1]) for line in said if line.startswith("collectives")]
        assert sent > 0
        assert list((homes[user] / "runs").iterdir()) == []


def _submit(sandbox: Sandbox, user: str, home: Path, program: Path) -> Job:
    output = home / "out"
    script = home / "job.sbatch"
    script.write_text(
        f"#!/bin/sh\nexec {COMMAND} run -q --slices 2 --devices-per-host 2 -- \\\n"
        f"    {sys.executable} {program} {home}/doors {COMMAND}\n"
    )
    script.chmod(0o644)
    done = sandbox.run(
        [
            *("setpriv", f"--reuid={user}", "--regid=nogroup", "--clear-groups"),
            *("env", "-C", str(home), f"HOME={home}", f"SLURM_PATHWAYS_RUNS={home}/runs"),
            *("sbatch", "--parsable", "--nodes=2", "--nodelist=node[0-1]", "--cpus-per-task=2", "--gres=tpu:2"),
            *(f"--output={output}", str(script)),
        ],
        COMMAND_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return Job(sandbox, int(done.stdout), output)


def _doors(sandbox: Sandbox, home: Path) -> list[tuple[str, object]]:
    """Where the processes of a user's runtime listen; what goes between executors goes in at one of these places."""
    found: list[tuple[str, object]] = [("folder", str(home / "runs"))]
    found += [("folder", str(path)) for path in (home / "runs").iterdir()]
    found += [("unix", str(path)) for path in (home / "runs").rglob("*") if path.is_socket()]
    processes = {pid: argv for pid, argv in commands(sandbox) if str(home) in " ".join(argv) and MODULES & set(argv)}
    executors = [pid for pid, argv in processes.items() if EXECUTOR in argv]
    connections = {pid: _connections(pid) for pid in processes}
    listens = {pid: [here for here, _, state in connections[pid] if state == LISTENS] for pid in processes}
    doors = {address for addresses in listens.values() for address in addresses}
    assert [len(listens[pid]) for pid in executors] == [1, 1]
    for pid in executors:
        assert [ends for *ends, state in connections[pid] if state == CONNECTED and not doors & set(ends)] == []
    for address in sorted(doors):
        found += [("plain", address), ("tls", address)]
    return found


def _connections(pid: int) -> list[tuple[Address, Address, str]]:
    """The two ends of a process's TCP sockets, in whatever network it is, and their states."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        link = str(entry.readlink())
        if link.startswith("socket:["):
            sockets.add(link.removeprefix("socket:[").removesuffix("]"))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, here, there, state, *rest = line.split()
        if rest[5] in sockets:
            found.append((_address(here), _address(there), state))
    return found


def _address(text: str) -> Address:
    host, port = text.split(":")
    return ".".join(str(byte) for byte in bytes.fromhex(host)[::-1]), int(port, 16)
