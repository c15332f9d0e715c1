"""The whole runtime as between hosts: control streams, links and data over TCP with TLS, worlds across interfaces."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from client_programs import answer_of, plain_environment, run_program

from slurm_pathways.config import RUNS_VARIABLE, RuntimeSpec
from slurm_pathways.launch.over_tcp import OverTcp

pytestmark = pytest.mark.timeout(600)


class HostsApart(OverTcp):
    """Workers that do not see one another's files, so no two are of one host: worlds too span hosts."""

    def _start_component(self, name: str, module: str, *arguments: object) -> None:
        assert self._components is not None
        argv = ["unshare", "--mount", sys.executable, "-m", module, *map(str, arguments)]
        self._started.append(self._components.start(name, argv, self.folder.log_of(name)))


@pytest.fixture(scope="module", params=["tls", "none", "hosts apart"])
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OverTcp]:
    root = tmp_path_factory.mktemp("r")
    root.chmod(0o700)
    is_apart = request.param == "hosts apart"
    spec = RuntimeSpec(
        num_slices=2,
        hosts_per_slice=2,
        devices_per_host=2,
        force_sockets=not is_apart,
        relay_fanout=2,
        data_plane_encryption="none" if request.param == "none" else "tls",
    )
    started = HostsApart(spec) if is_apart else OverTcp(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNS_VARIABLE, str(root))
        with started as running:
            yield running
        assert list(root.iterdir()) == [], "the run left something behind"


def test_values_are_those_of_plain_jax(runtime: OverTcp, tmp_path: Path) -> None:
    """Values of any size there and back, collectives within and across slices."""
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "import jax, jax.numpy as jnp, numpy as np\n"
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec as P\n"
        "mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ('slice', 'device'))\n"
        "x = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024) / 1000\n"
        "y = jax.device_put(x, NamedSharding(mesh, P('slice', 'device')))\n"
        "z = jax.jit(lambda v: (v @ v.T, v.sum(0), jnp.tanh(v)))(y)\n"
        "one = jax.device_put(z[2], jax.devices()[-1])\n"
        "small = [float(jax.jit(lambda n: n + 1)(n)) for n in range(20)]\n"
        "sums = [float(np.asarray(v, np.float64).sum()) for v in (*z, one)]\n"
        "json.dump({'sums': sums, 'small': small, 'hosts': len(jax.devices())}, open(sys.argv[1], 'w'))\n"
    )
    answers = []
    for name, environ in (("plain", plain_environment()), ("runtime", runtime.environment())):
        output = tmp_path / name
        run_program(environ, program, output, timeout_s=200)
        answers.append(json.loads(output.read_text()))
    plain, ours = answers
    assert ours["hosts"] == plain["hosts"] == 8
    assert ours["small"] == plain["small"]
    assert ours["sums"] == pytest.approx(plain["sums"], rel=1e-5)


def test_bytes_go_from_worker_to_worker(runtime: OverTcp) -> None:
    answer = answer_of(runtime.environment(), "transfers")
    assert all(answer["right"].values()), answer["right"]
    assert sum(moved["shared_memory"] for moved in answer["moved"].values()) == 0
    assert sum(moved["socket"] for moved in answer["moved"].values()) > 20 << 20


def test_processes_listen_only_where_they_were_told(runtime: OverTcp) -> None:
    """Executors on their own host's address; nobody on all interfaces."""
    listening = set()
    for pid in runtime.pids().values():
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            found = one.net_connections("tcp")
            listening |= {
                # gRPC, in coordination services, names IPv4 addresses in IPv6.
                connection.laddr.ip.removeprefix("::ffff:")
                for connection in found
                if connection.status == psutil.CONN_LISTEN
            }
    assert listening <= {"127.0.0.1", *(f"127.0.1.{host + 1}" for host in range(4))}, listening
    assert {"127.0.0.1", "127.0.1.1", "127.0.1.4"} <= listening


def test_strangers_get_nothing(runtime: OverTcp) -> None:
    """The controller lets go of who does not show the job's certificate."""
    host, _, port = runtime._controller_tcp.removeprefix("tcp:").rpartition(":")
    with socket.create_connection((host, int(port)), 20.0) as stranger:
        stranger.sendall(b"\x00" * 64)
        with contextlib.suppress(ConnectionResetError):
            # The end, or a TLS alert before it.
            assert stranger.recv(1 << 16)[:1] in (b"", b"\x15")


def test_no_secret_is_on_a_command_line_or_open_to_others(runtime: OverTcp) -> None:
    secret = (runtime.credentials_folder / "credentials.pem").read_text().splitlines()[-2]
    for pid in runtime.pids().values():
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            assert secret not in " ".join(process.cmdline())
            assert all(secret not in value for value in process.environ().values())
    open_to_others = [path for path in runtime.credentials_folder.rglob("*") if path.stat().st_mode & 0o077]
    assert open_to_others == []


@pytest.mark.parametrize("module", ["controller", "proxy", "worker"])
def test_tcp_without_credentials_fails_at_once(module: str, tmp_path: Path) -> None:
    arguments = {
        "controller": f"--listen unix:{tmp_path}/c --listen tcp:127.0.0.1:0 "
        "--num-slices 1 --hosts-per-slice 1 --devices-per-host 1",
        "proxy": f"--controller tcp:127.0.0.1:1 --listen unix:{tmp_path}/p --links tcp:127.0.0.1:0",
        "worker": "--controller tcp:127.0.0.1:1 --worker-id 0 --name h --devices-per-host 1 "
        f"--compile-cache {tmp_path} --run-dir {tmp_path} --log-dir {tmp_path}",
    }[module]
    argv = [sys.executable, "-m", f"pathways_runtime.{module}", *arguments.split()]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "the job's credentials" in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
