"""A scripted controller and proxy for executors in processes of their own, over real sockets."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxlib import _jax, xla_client
from jaxlib.mlir.dialects import stablehlo

from pathways_runtime.core import operations as ops
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, Seq, SessionId, WaitId, WorldId
from pathways_runtime.core.topology import Topology
from pathways_runtime.transport import addresses
from pathways_runtime.transport.frames import Channel, ConnectionClosed, FrameCodec
from pathways_runtime.wire import links as wire_links
from pathways_runtime.wire import messages as wire

DEADLINE_S = 60.0


class Inbox:
    """What came over a connection, to be waited for."""

    def __init__(self, name: str, sock: socket.socket, union: Any) -> None:
        self.name = name
        self.channel: Channel[Any] = Channel(sock, FrameCodec(union))
        self._arrived = threading.Condition()
        self._frames: list[Any] = []
        self.is_closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while True:
                frames = self.channel.receive()
                with self._arrived:
                    self._frames += frames
                    self._arrived.notify_all()
        except ConnectionClosed:
            with self._arrived:
                self.is_closed = True
                self._arrived.notify_all()

    def take(self, kind: type, matches: Callable[[Any], bool] = lambda message: True, what: str = "") -> Any:
        """The first frame with such a message, removed; waits for it."""
        deadline_s = time.monotonic() + DEADLINE_S
        with self._arrived:
            while True:
                for frame in self._frames:
                    if isinstance(frame.message, kind) and matches(frame.message):
                        self._frames.remove(frame)
                        return frame
                left_s = deadline_s - time.monotonic()
                have = [type(frame.message).__name__ for frame in self._frames]
                if left_s <= 0 or self.is_closed:
                    raise AssertionError(f"{self.name} sent no {kind.__name__} {what}; closed={self.is_closed}; {have}")
                self._arrived.wait(left_s)

    def all(self, kind: type) -> list[Any]:
        """The messages of a kind so far, removed."""
        with self._arrived:
            found = [frame for frame in self._frames if isinstance(frame.message, kind)]
            self._frames = [frame for frame in self._frames if frame not in found]
        return [frame.message for frame in found]

    def wait_closed(self) -> None:
        """Wait for the end of the connection."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.is_closed, DEADLINE_S), f"{self.name} keeps its connection"

    def close(self) -> None:
        self.channel.close()
        self._reader.join(DEADLINE_S)


class Host:
    """One executor process as its controller sees it."""

    def __init__(self, host: HostIndex, process: "subprocess.Popen[bytes]", inbox: Inbox, lifeline: int) -> None:
        self.host = host
        self.process = process
        self.inbox = inbox
        self.lifeline = lifeline
        self.registered: Any = None
        self.link: Any = None
        self.num_launched = 0
        self.num_completed = 0

    def send(self, message: Any) -> None:
        self.inbox.channel.send(message)

    def wait_completed(self, count: int) -> None:
        """Wait until so many launches in all have been acknowledged."""
        while self.num_completed < count:
            self.num_completed += self.inbox.take(
                wire.Acknowledge, what=f"({self.num_completed} of {count} launches)"
            ).message.launches_completed
        assert self.num_completed == count

    def wait_transfer(self, op_id: int) -> None:
        """Wait until a transfer is said to be under way."""
        frame = self.inbox.take(wire.Acknowledge, lambda m: any(o == op_id for _, o in m.transfers_started))
        self.num_completed += frame.message.launches_completed


class Lab:
    """Executors of a topology, with one session open on all of them."""

    def __init__(
        self, folder: Path, topology: Topology, extra: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.topology = topology
        self._at_end = contextlib.ExitStack()
        # Ended last: a coordination service that ends takes its members with it.
        self._services = self._at_end.enter_context(contextlib.ExitStack())
        self._seq = 0
        self._op_id = 0
        self._handle = 0
        self._wait_id = 0
        self._world = 0
        self.worlds: dict[tuple[int, ...], WorldId] = {}
        self.cache = folder / "cache"
        self.session = SessionId(0)
        self._control = addresses.listen(f"unix:{folder}/control")
        self._links = addresses.listen(f"unix:{folder}/links")
        self._control.settimeout(DEADLINE_S)
        self._links.settimeout(DEADLINE_S)
        self._at_end.callback(self._control.close)
        self._at_end.callback(self._links.close)
        self.hosts: list[Host] = []
        pending = {h: self._start(h, extra, env or {}) for h in range(topology.num_hosts)}
        for _ in range(topology.num_hosts):
            sock, _ = self._control.accept()
            inbox = Inbox("an executor", sock, wire.AnyMessage)
            assert inbox.take(wire.Hello).message.role == "executor"
            registered = inbox.take(wire.RegisterExecutor).message
            process, lifeline = pending[registered.worker]
            inbox.name = f"host {registered.worker}"
            host = Host(HostIndex(registered.worker), process, inbox, lifeline)
            host.registered = registered
            self.hosts.append(host)
            self._at_end.callback(inbox.close)
        self.hosts.sort(key=lambda host: host.host)
        peers = tuple(
            wire.PeerAddress(h.host, f"host-{h.host}", h.registered.data_address, h.registered.host_key)
            for h in self.hosts
        )
        for host in self.hosts:
            host.send(wire.Bind(host.host, topology, peers))
        for slice_index in range(topology.num_slices):
            self.form_world(topology.hosts_of_slice(slice_index))

    def _start(self, host: int, extra: Sequence[str], env: dict[str, str]) -> tuple["subprocess.Popen[bytes]", int]:
        read, write = os.pipe()
        log = (self.folder / f"executor-{host}.log").open("wb")
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pathways_runtime.worker.executor",
                *("--controller", f"unix:{self.folder}/control", "--worker-id", str(host), "--name", f"host-{host}"),
                *("--epoch", "1", "--num-devices", str(self.topology.devices_per_host), "--platform", "cpu"),
                *("--compile-cache", str(self.cache), "--data-listen", str(self.folder), "--lifeline-fd", str(read)),
                *extra,
            ],
            pass_fds=(read,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **env},
        )
        log.close()
        os.close(read)

        def stop() -> None:
            with contextlib.suppress(OSError):
                os.close(write)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise

        self._at_end.callback(stop)
        return process, write

    def close(self) -> None:
        self._at_end.close()

    def log(self, host: int) -> str:
        return (self.folder / f"executor-{host}.log").read_text()

    def form_world(self, hosts: Sequence[int]) -> WorldId:
        self._world += 1
        world = WorldId(self._world)
        address = ""
        if len(hosts) > 1:
            address = f"unix:{self.folder}/world-{world}.sock"
            service = _jax.get_distributed_runtime_service(
                address, len(hosts), heartbeat_timeout=100, shutdown_timeout=5, recoverable=True
            )
            self._services.callback(service.shutdown)
        for rank, host in enumerate(hosts):
            self.hosts[host].send(wire.FormWorld(world, address, "", rank, tuple(HostIndex(h) for h in hosts)))
        for host in hosts:
            formed = self.hosts[host].inbox.take(wire.WorldFormed).message
            assert formed.failure is None, formed.failure
        self.worlds[tuple(hosts)] = world
        return world

    def open_session(self) -> SessionId:
        """A new session, which operations are of from now on, with a link to each host."""
        session = self.session = SessionId(self.session + 1)
        for host in self.hosts:
            host.send(wire.OpenSession(session, f"unix:{self.folder}/links", 0))
        for _ in self.hosts:
            sock, _ = self._links.accept()
            inbox = Inbox("a link", sock, wire_links.AnyLinkMessage)
            hello = inbox.take(wire_links.LinkHello).message
            assert hello.session == session
            assert hello.change == 0
            inbox.name = f"link of host {hello.host}"
            self.hosts[hello.host].link = inbox
            self._at_end.callback(inbox.close)
        return session

    def close_session(self) -> None:
        """Close the session, and check that all launches were counted and nothing of it is left."""
        for host in self.hosts:
            host.send(wire.CloseSession(self.session))
        for host in self.hosts:
            host.link.wait_closed()
            host.link.close()
            host.wait_completed(host.num_launched)
            report = self.status(host.host)
            assert report["sessions"] == []
            assert report["waiting"] == []
            assert report["launches_in_flight"] == 0
            host.num_launched = host.num_completed = 0
            host.inbox.all(wire.Heartbeat)
            host.inbox.all(wire.OperationFailed)

    # Making operations

    def op_id(self) -> OpId:
        self._op_id += 1
        return OpId(self._op_id)

    def handle(self) -> Handle:
        self._handle += 1
        return Handle(self._handle)

    def wait_id(self) -> WaitId:
        self._wait_id += 1
        return WaitId(self._wait_id)

    def submit(self, *operations: Any, hosts: Sequence[int] | None = None) -> None:
        """Send operations in one batch to all hosts (or some)."""
        sequenced = []
        for operation in operations:
            self._seq += 1
            sequenced.append(
                wire.Sequenced(Seq(self._seq), self.session, msgspec.Raw(msgspec.msgpack.encode(operation)))
            )
        for host in self.hosts if hosts is None else [self.hosts[h] for h in hosts]:
            host.num_launched += sum(isinstance(operation, ops.Launch) for operation in operations)
            host.send(wire.Batch(tuple(sequenced)))

    def hosts_of(self, devices: Sequence[int]) -> list[int]:
        return list(self.topology.hosts_of(DeviceId(d) for d in devices))

    def compile(
        self, program: bytes, options: bytes, devices: Sequence[int], hosts: Sequence[int] | None = None
    ) -> tuple[Handle, list[Any]]:
        """Compile on all hosts of ``devices``, the first one first. Returns the Compiled messages."""
        executable = self.handle()
        involved = self.hosts_of(devices)
        slices = self.topology.slices_of(DeviceId(d) for d in devices)
        members = tuple(h for s in slices for h in self.topology.hosts_of_slice(s))
        world = self.worlds.get(members) or self.form_world(members)
        answers = []
        for place, host in enumerate(involved):
            self.hosts[host].send(
                wire.Compile(
                    self.session, executable, world, program, options, tuple(DeviceId(d) for d in devices), place == 0
                )
            )
            answers.append(self.hosts[host].inbox.take(wire.Compiled, lambda m: m.executable == executable).message)
        return executable, answers

    def jit(self, function: Callable[..., Any], *arguments: Any, devices: Sequence[int], **options: Any) -> "Compiled":
        """Lower, compile and load a function on devices."""
        program, compile_options = lower_program(function, *arguments, devices=devices, **options)
        executable, answers = self.compile(program, compile_options, devices)
        for answer in answers:
            assert answer.failure is None, answer.failure
        return Compiled(self, executable, answers, tuple(DeviceId(d) for d in devices))

    def make_array(
        self,
        shards: Sequence[np.ndarray],
        devices: Sequence[int],
        memory_kind: str | None = None,
        kind: DType | None = None,
    ) -> Handle:
        """An array of one host buffer per shard, sent before the operation."""
        op_id, handle = self.op_id(), self.handle()
        if kind is None:
            kind = next(k for k in DType if k not in _NO_NUMPY and k.numpy_name == shards[0].dtype.name)
        result = ops.ShardedResult(handle, kind, shards[0].shape, memory_kind, tuple(DeviceId(d) for d in devices))
        for index, (shard, device) in enumerate(zip(shards, devices, strict=True)):
            link = self.hosts[self.topology.host_of(DeviceId(device))].link
            link.channel.send(
                wire_links.HostBuffer(op_id, index), np.ascontiguousarray(shard).reshape(-1).view(np.uint8).data
            )
        self.submit(ops.MakeArrays(op_id, (result,), (tuple(range(len(shards))),)), hosts=self.hosts_of(devices))
        return handle

    def fetch(self, handle: Handle, device: int, dtype: Any, shape: Sequence[int]) -> np.ndarray:
        """A shard's value."""
        wait_id = self.wait_id()
        host = self.topology.host_of(DeviceId(device))
        self.submit(ops.Fetch(self.op_id(), wait_id, handle, DeviceId(device)), hosts=[host])
        frame = self.hosts[host].link.take(wire_links.Fetched, lambda m: m.wait_id == wait_id)
        assert frame.message.failure is None, frame.message.failure
        return np.frombuffer(bytes(frame.payload), np.uint8).view(np.dtype(dtype)).reshape(shape)

    def fetch_failure(self, handle: Handle, device: int) -> Any:
        """Why a shard has no value."""
        wait_id = self.wait_id()
        host = self.topology.host_of(DeviceId(device))
        self.submit(ops.Fetch(self.op_id(), wait_id, handle, DeviceId(device)), hosts=[host])
        return self.hosts[host].link.take(wire_links.Fetched, lambda m: m.wait_id == wait_id).message.failure

    def wait_ready(self, handles: Sequence[Handle], hosts: Sequence[int] | None = None) -> list[Any]:
        """Each host's answer: None or its failure."""
        wait_id = self.wait_id()
        asked = range(len(self.hosts)) if hosts is None else hosts
        self.submit(ops.Await(self.op_id(), wait_id, tuple(handles)), hosts=asked)
        return [
            self.hosts[h].link.take(wire_links.ArraysReady, lambda m: m.wait_id == wait_id).message.failure
            for h in asked
        ]

    def status(self, host: int) -> dict[str, Any]:
        self.hosts[host].send(wire.StatusRequest(5))
        return self.hosts[host].inbox.take(wire.StatusReply).message.report


_NO_NUMPY = (DType.TOKEN, DType.OPAQUE, DType.STRING)


class Compiled:
    """A program of a lab."""

    def __init__(self, lab: Lab, executable: Handle, answers: list[Any], devices: tuple[DeviceId, ...]) -> None:
        self.lab = lab
        self.executable = executable
        self.answers = answers
        self.devices = devices

    @property
    def metadata(self) -> Any:
        return self.answers[0].metadata

    def launch(self, *arguments: Handle, num_results: int = 1, **fields: Any) -> ops.Launch:
        """The operation, not submitted."""
        results = tuple(self.lab.handle() for _ in range(num_results))
        return ops.Launch(self.lab.op_id(), self.executable, arguments, results, **fields)

    def __call__(self, *arguments: Handle, num_results: int = 1, **fields: Any) -> Any:
        """Launch; returns the handle of its result, or their tuple."""
        launch = self.launch(*arguments, num_results=num_results, **fields)
        self.lab.submit(launch, hosts=self.lab.hosts_of(self.devices))
        return launch.results[0] if num_results == 1 else launch.results


def make_sharded(shape: Sequence[int], dtype: Any, num_devices: int, *spec: str | None) -> jax.ShapeDtypeStruct:
    """An abstract argument over a mesh of one axis ``x``."""
    # Said, as the default is another from jax 0.12 on: the compiler finds out how results are sharded.
    mesh = AbstractMesh((num_devices,), ("x",), axis_types=(AxisType.Auto,))
    with jax.enable_x64(True):
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def lower_program(
    function: Callable[..., Any], *arguments: Any, devices: Sequence[int], **options: Any
) -> tuple[bytes, bytes]:
    """A program as a client sends it: a VHLO artifact, and compile options with virtual device ids."""
    from jax._src import compiler
    from jax._src.interpreters import mlir

    with jax.enable_x64(True):
        lowered = jax.jit(function, keep_unused=True, **options).trace(*arguments).lower(lowering_platforms=("cpu",))
        bytecode = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    artifact = _jax.mlir.serialize_portable_artifact(bytecode, stablehlo.get_current_version())
    settings = compiler.get_compile_options(
        num_replicas=1, num_partitions=len(devices), device_assignment=np.array([list(devices)])
    )
    assert isinstance(settings, xla_client.CompileOptions)
    return artifact, settings.SerializeAsString()


def _print_logs(lab: Lab) -> None:
    for host in lab.hosts:
        print(f"log of host {host.host}:\n{lab.log(host.host)}")


@pytest.fixture
def make_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Lab]]:
    """Starts executors and opens a session: ``make_lab(num_slices, hosts_per_slice, devices_per_host)``."""
    labs: list[Lab] = []

    def make(num_slices: int, hosts_per_slice: int, devices_per_host: int, *extra: str, **options: Any) -> Lab:
        folder = tmp_path_factory.mktemp("w")
        try:
            lab = Lab(folder, Topology(num_slices, hosts_per_slice, devices_per_host, "cpu"), extra, **options)
        except BaseException:
            for path in sorted(folder.glob("*.log")):
                print(path.name, path.read_text())
            raise
        labs.append(lab)
        lab.open_session()
        return lab

    yield make
    for lab in labs:
        _print_logs(lab)
        lab.close()


_Labs = dict[tuple[int, int, int], Lab]


@pytest.fixture(scope="session")
def standing_labs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Labs]:
    """Executors that all tests use one after the other, by topology; started on demand with ``_standing``."""
    labs: _Labs = {}
    yield labs
    for lab in labs.values():
        lab.close()


def _standing(labs: _Labs, folders: pytest.TempPathFactory, *topology: int) -> Iterator[Lab]:
    num_slices, hosts_per_slice, devices_per_host = topology
    key = (num_slices, hosts_per_slice, devices_per_host)
    if key not in labs:
        labs[key] = Lab(folders.mktemp("w"), Topology(*key, "cpu"))
    lab = labs[key]
    lab.open_session()
    try:
        yield lab
        lab.close_session()
    except BaseException:
        # Its state is not known; the next test gets another one.
        del labs[key]
        lab.close()
        raise
    finally:
        _print_logs(lab)


@pytest.fixture
def lab(standing_labs: _Labs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One host of two devices, with a session of this test's own."""
    yield from _standing(standing_labs, tmp_path_factory, 1, 1, 2)


@pytest.fixture
def own_lab(make_lab: Callable[..., Lab]) -> Lab:
    """One host of two devices, for tests that end it or look at its compile cache."""
    return make_lab(1, 1, 2)


@pytest.fixture
def slice_lab(standing_labs: _Labs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One slice of two hosts of two devices."""
    yield from _standing(standing_labs, tmp_path_factory, 1, 2, 2)


@pytest.fixture
def slices_lab(standing_labs: _Labs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two slices of one host of two devices."""
    yield from _standing(standing_labs, tmp_path_factory, 2, 1, 2)


@pytest.fixture(scope="session")
def sharded() -> Callable[..., Any]:
    """``sharded(shape, dtype, num_devices, *spec)``: an abstract argument."""
    return make_sharded


@pytest.fixture(scope="session")
def lower() -> Callable[..., tuple[bytes, bytes]]:
    """``lower(function, *arguments, devices)``: a program and its compile options."""
    return lower_program
