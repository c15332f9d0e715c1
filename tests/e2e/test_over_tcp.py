"""The whole runtime as between hosts: control streams, links and data over TCP with TLS, worlds across interfaces."""

import contextlib
import json
import queue
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from client_programs import answer_of, plain_environment, run_program

from pathways_runtime.worker.private_sockets import PLAIN_VARIABLE
from slurm_pathways.config import RUNS_VARIABLE, RuntimeSpec
from slurm_pathways.launch.components import ComponentEvent, RuntimeEvent
from slurm_pathways.launch.local import LocalRuntime
from slurm_pathways.launch.over_tcp import OverTcp

pytestmark = pytest.mark.timeout(600)

COORDINATION = "pathways_runtime.controller.coordination"


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


def test_callbacks_reach_the_client(runtime: OverTcp) -> None:
    plain = answer_of(plain_environment(), "callbacks_between_hosts")
    assert plain["seen"] == [[True, 2016.0], [True, 4032.0]] and plain["failure"] == "failed: True"
    assert answer_of(runtime.environment(), "callbacks_between_hosts") == plain


def test_bytes_go_from_worker_to_worker(runtime: OverTcp) -> None:
    answer = answer_of(runtime.environment(), "transfers")
    assert all(answer["right"].values()), answer["right"]
    assert sum(moved["shared_memory"] for moved in answer["moved"].values()) == 0
    assert sum(moved["socket"] for moved in answer["moved"].values()) > 20 << 20


def listening(runtime: OverTcp) -> list[tuple[psutil.Process, str, int]]:
    """Who listens at which address and TCP port."""
    processes = {
        process
        for pid in runtime.pids().values()
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
    }
    return [
        (process, connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def test_processes_listen_only_where_they_were_told(runtime: OverTcp) -> None:
    """Executors on their own host's address; nobody on all interfaces."""
    addresses = {address for _, address, _ in listening(runtime)}
    assert addresses <= {"127.0.0.1", *(f"127.0.1.{host + 1}" for host in range(4))}, addresses
    assert {"127.0.0.1", "127.0.1.1", "127.0.1.4"} <= addresses


def is_executor(process: psutil.Process) -> bool:
    return "pathways_runtime.worker.executor" in process.cmdline()


def test_members_reach_coordination_services_by_the_nearest_way(runtime: OverTcp) -> None:
    """At their Unix sockets on the same host, through tunnels from another."""
    controller = psutil.Process(runtime.pids()["controller"])
    services = [process for process in controller.children() if COORDINATION in process.cmdline()]
    numbers_of_members = [int(process.cmdline()[process.cmdline().index("--num-members") + 1]) for process in services]
    assert sorted(numbers_of_members) == [2, 2, *([4] if len(services) > 2 else [])]
    tunnels = [
        len([one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED])
        for process in services
    ]
    assert tunnels == (numbers_of_members if isinstance(runtime, HostsApart) else [0] * len(services))
    # The sockets from which tunnels lead are needed only while worlds form.
    sockets = [path.name for path in runtime.run_dir.glob("world-*")]
    assert sorted(sockets) == [f"world-{world + 1}.sock" for world in range(len(services))]


#: What gRPC without TLS begins with; its server would answer in kind. And what is nothing at all.
PLAIN_GRPC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
NOISE = b"\xff" * 64


@pytest.mark.parametrize("opening", [PLAIN_GRPC, NOISE], ids=["plain grpc", "noise"])
def test_strangers_get_nothing(runtime: OverTcp, opening: bytes) -> None:
    """Every listener lets go of who does not show the job's certificate. Executors have one each, for their data."""
    found = listening(runtime)
    assert len([process for process, _, _ in found if is_executor(process)]) == 4
    with contextlib.ExitStack() as at_end, selectors.DefaultSelector() as selector:
        for process, address, port in found:
            stranger = at_end.enter_context(socket.create_connection((address, port), 20.0))
            stranger.sendall(opening)
            selector.register(stranger, selectors.EVENT_READ, process)
        deadline_s = time.monotonic() + 60.0
        while waiting := selector.get_map().values():
            ready = selector.select(deadline_s - time.monotonic())
            assert ready, f"did not refuse a stranger within 60 s: {[key.data.cmdline()[1:4] for key in waiting]}"
            for key, _ in ready:
                stranger = key.fileobj
                assert isinstance(stranger, socket.socket)
                with contextlib.suppress(ConnectionResetError):
                    # The end, or a TLS alert before it.
                    assert stranger.recv(1 << 16)[:1] in (b"", b"\x15"), key.data
                selector.unregister(stranger)


#: Sums what is large enough for all ways of sending, over slices of one world and of two; prints whether it is right.
SUMS = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = np.array(jax.devices())
for part in (devices[:4], devices[4:], devices):
    mesh = Mesh(part, ("x",))
    place = NamedSharding(mesh, P("x"))
    host = np.arange(len(part) << 18, dtype=np.float32).reshape(len(part), -1) % 1000
    total = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
    print((np.asarray(total(jax.device_put(host, place))) == host.sum(0)).all())
"""


def check_doors(runtime: OverTcp, num_hosts: int) -> None:
    """Each executor listens at one port; of each of its connections one end is at a port at which somebody listens."""
    found = listening(runtime)
    doors = {(address, port) for _, address, port in found}
    executors = [process for process, _, _ in found if is_executor(process)]
    assert len(executors) == len(set(executors)) == num_hosts
    for executor in executors:
        ends = [(one.laddr, one.raddr) for one in executor.net_connections("tcp") if one.raddr]
        assert [end for end in ends if not doors & set(end)] == []


def test_collectives_go_where_only_this_user_and_this_job_can(runtime: OverTcp) -> None:
    """Between executors of one host through Unix sockets, between hosts through the doors that strangers don't pass."""
    before = runtime.status(30.0)["bytes_moved"].get("collectives", 0)
    assert run_program(runtime.environment(), "-c", SUMS).stdout.split() == ["True"] * 3
    sent = runtime.status(30.0)["bytes_moved"]["collectives"] - before
    # Each part of 4 MiB a device is added up over 2 hosts, 2 hosts and 4 hosts.
    assert sent > 12 << 20 if isinstance(runtime, HostsApart) else sent == 0
    check_doors(runtime, 4)
    folders = list(runtime.run_dir.glob("data-*.d"))
    assert [folder.stat().st_mode & 0o7777 for folder in folders] == [0o700] * 4
    logs = [runtime.folder.log_of(f"executor-{worker}").read_text() for worker in range(4)]
    assert all("plain TCP" not in log for log in logs)


def test_collectives_that_are_not_encrypted_need_nobody_to_carry_them(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo gets the connections themselves, behind the same doors."""
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path_factory.mktemp("r")))
    spec = RuntimeSpec(num_slices=2, hosts_per_slice=1, devices_per_host=4, data_plane_encryption="none")
    with HostsApart(spec) as running:
        assert run_program(running.environment(), "-c", SUMS).stdout.split() == ["True"] * 3
        assert running.status(30.0)["bytes_moved"]["collectives"] == 0
        check_doors(running, 2)


def test_where_the_library_is_missing_collectives_work_as_ever_and_it_is_said(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path_factory.mktemp("r")))
    monkeypatch.setenv(PLAIN_VARIABLE, "1")
    with LocalRuntime(RuntimeSpec(num_slices=2, hosts_per_slice=1, devices_per_host=4)) as running:
        assert run_program(running.environment(), "-c", SUMS).stdout.split() == ["True"] * 3
        for worker in range(2):
            log = running.folder.log_of(f"executor-{worker}").read_text()
            assert log.count("collectives between CPU devices of several hosts speak plain TCP") == 1
            assert f"{PLAIN_VARIABLE} is set" in log


def test_a_world_whose_tunnels_break_is_lost(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a service that its members reach without one: jaxlib ends them."""
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path_factory.mktemp("r")))
    events: queue.SimpleQueue[RuntimeEvent] = queue.SimpleQueue()
    spec = RuntimeSpec(num_slices=1, hosts_per_slice=2, devices_per_host=1)
    with HostsApart(spec, on_event=events.put) as running:
        [service] = psutil.Process(running.pids()["controller"]).children()
        service.kill()
        told: dict[str, list[dict[str, Any]]] = {"coordination_lost": [], "host_lost": []}
        while not told["coordination_lost"] or len(told["host_lost"]) < 2:
            event = events.get(timeout=60.0)
            if isinstance(event, ComponentEvent) and event.name in told:
                told[event.name].append(dict(event.fields))
    assert told["coordination_lost"] == [{"world": 1, "reason": "its process ended with -9"}]
    assert sorted((lost["host"], lost["cause"]) for lost in told["host_lost"]) == [
        (host, "its executor was killed by signal 6 (SIGABRT)") for host in (0, 1)
    ]


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
