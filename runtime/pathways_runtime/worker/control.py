"""The executor: follows the controller's stream and keeps it told."""

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pathways_runtime.core.ids import DeviceId, HostIndex, OpId, WorkerId, WorldId
from pathways_runtime.core.operations import FUNCTION_OPTIONS, Operation
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.worker.arrays import Program
from pathways_runtime.core.worker.events import (
    ArraysRetained,
    BufferArrived,
    OperationReceived,
    ProgramLoaded,
    SessionClosed,
    SessionOpened,
)
from pathways_runtime.core.worker.worker import WorkerCore
from pathways_runtime.transport import addresses
from pathways_runtime.transport.dataplane import DataPlane
from pathways_runtime.transport.frames import Channel, ConnectionClosed, FrameCodec
from pathways_runtime.transport.network import Network
from pathways_runtime.transport.tls_socket import Connection
from pathways_runtime.wire.colocated import FUNCTION_METADATA
from pathways_runtime.wire.links import LinkHello
from pathways_runtime.wire.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Batch,
    Bind,
    CloseSession,
    Compile,
    Compiled,
    DropRetained,
    FormWorld,
    Heartbeat,
    Hello,
    LeaveWorld,
    OpenSession,
    PeerReplaced,
    PeersLost,
    Refused,
    RegisterExecutor,
    RetainsMemory,
    Shutdown,
    StatusReply,
    StatusRequest,
    WorldFormed,
    WorldLeft,
)
from pathways_runtime.worker import pjrt, programs, worlds
from pathways_runtime.worker.acknowledgements import Acknowledgements
from pathways_runtime.worker.collectives import Collectives
from pathways_runtime.worker.colocated.process import Place
from pathways_runtime.worker.colocated.sessions import PythonProcesses
from pathways_runtime.worker.compile_cache import CompileCache
from pathways_runtime.worker.dispatch import Dispatcher, LaunchDelay
from pathways_runtime.worker.endings import Endings
from pathways_runtime.worker.links import SessionLink
from pathways_runtime.worker.report import report_of
from pathways_runtime.worker.retained.arrays import RetainedArrays
from pathways_runtime.worker.threads import Pool

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0
#: The proxy listens before it attaches; this only bridges a full listen queue.
_LINK_CONNECT_TIMEOUT_S = 2.0
#: How long programs may take to end once a member of their world is lost, and how often that is looked at.
_FREE_TIMEOUT_S = 2.0
_FREE_POLL_S = 0.01
#: When to look whether nothing needs a world any more that is over: programs are loaded anew, arrays are deleted.
_LET_GO_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_NUM_COMPILE_THREADS = 2
#: Compilation gives way to dispatch.
_COMPILE_NICENESS = 5


class ExecutorConfig(NamedTuple):
    """What the supervisor says when it starts an executor.

    Attributes:
        name: the host's name for people.
        epoch: which start of this worker's executor this is.
        data_address: the Unix socket of the data plane, for executors of this host.
        network: for connections between hosts; None: there is one host.
        is_behind_relay: whether it is a relay that speaks for the controller; readiness is then told to it.
        python_log: where functions of colocated Python print to; None is this process's log.
        retained_fd: the file of ``worker.retained``; None: there is none.
    """

    worker: WorkerId
    name: str
    epoch: int
    num_devices: int
    platform: str
    compile_cache: Path
    data_address: str
    host_key: str
    force_sockets: bool = False
    delay: LaunchDelay | None = None
    is_behind_relay: bool = False
    network: Network | None = None
    python_log: Path | None = None
    retained_fd: int | None = None


class Stopped(Exception):
    """The executor's work is over: the controller said so, refused it, or is gone."""


class Executor:
    """One worker's executor on a connection to the controller. ``run`` is its life."""

    def __init__(self, config: ExecutorConfig, sock: Connection) -> None:
        self._config = config
        self._channel: Channel[AnyMessage] = Channel(sock, FrameCodec(AnyMessage))
        self._decoder: msgspec.msgpack.Decoder[Operation] = msgspec.msgpack.Decoder(Operation)
        self._cache = CompileCache(config.compile_cache)
        self._data_plane = DataPlane(
            config.data_address,
            config.host_key,
            config.force_sockets,
            network=config.network,
            on_tunnel=self._on_tunnel,
        )
        self._handshake = None if config.network is None else config.network.connecting()
        self._acknowledgements = Acknowledgements(config.worker, self._send)
        self._collectives = Collectives(config.platform, config.data_address, self._data_plane.open_tunnel)
        self._retained = self._retained_arrays(config.retained_fd)
        self._bound: Bind | None = None
        self._core: WorkerCore | None = None
        self._dispatcher: Dispatcher | None = None
        self._python: PythonProcesses | None = None
        self._worlds: dict[WorldId, worlds.World] = {}
        self._home: worlds.World | None = None
        #: Guards which worlds are formed, and which are over.
        self._worlds_lock = threading.Lock()
        self._over: dict[WorldId, Status] = {}
        self._endings = Endings()
        self._last_seq = 0
        self._ended = threading.Event()
        self._compiling = Pool("compiles", _NUM_COMPILE_THREADS, initializer=_give_way)
        self._on_message: dict[type[Any], Callable[[Any], None]] = {
            Bind: self._bind,
            PeersLost: self._peers_lost,
            PeerReplaced: self._peer_replaced,
            FormWorld: self._form_world,
            LeaveWorld: self._leave_world,
            Compile: self._compile,
            OpenSession: self._open_session,
            CloseSession: self._close_session,
            DropRetained: self._drop_retained,
            Batch: self._batch,
            StatusRequest: self._status_request,
            Shutdown: self._shutdown,
            Refused: self._refused,
        }

    def run(self) -> None:
        """Register, then follow the controller until it is over.

        Raises:
            Stopped: always, in the end; the message says why.
        """
        config = self._config
        version, kind = pjrt.describe_platform(config.platform)
        retained_host, retained = (None, ()) if self._retained is None else self._retained.found()
        self._send(Hello("executor", PROTOCOL_VERSION, os.getpid()))
        self._send(
            RegisterExecutor(
                worker=config.worker,
                epoch=config.epoch,
                pid=os.getpid(),
                data_address=self._collectives.announce(self._data_plane.address),
                host_key=self._data_plane.host_key,
                platform=config.platform,
                platform_version=version,
                device_kind=kind,
                num_devices=config.num_devices,
                retained_host=retained_host,
                retained=retained,
            )
        )
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        on_message = self._on_message
        try:
            while True:
                for frame in self._channel.receive():
                    message = frame.message
                    handler = on_message.get(type(message))
                    if handler is None:
                        raise ValueError(f"{type(message).__name__} is not for an executor")
                    handler(message)
                    del frame, message
                self._acknowledgements.flush()
        except ConnectionClosed as gone:
            raise Stopped(f"the connection to the controller is gone: {gone}") from gone
        finally:
            self._ended.set()

    def close(self) -> None:
        """Close connections and the data plane, after ``run`` has ended."""
        self._channel.close()
        if self._python is not None:
            self._python.close()
        if self._dispatcher is not None:
            self._dispatcher.close()
        if self._retained is not None:
            self._retained.close()
        self._compiling.close()
        self._data_plane.close()
        self._collectives.close()

    def _send(self, message: AnyMessage) -> None:
        # The thread that receives sees the end too, and ends the process.
        with contextlib.suppress(ConnectionClosed):
            self._channel.send(message)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL_S):
            self._send(Heartbeat(time.monotonic_ns()))

    def _retained_arrays(self, fd: int | None) -> RetainedArrays | None:
        if fd is None:
            return None
        try:
            return RetainedArrays(fd, lambda is_used: self._send(RetainsMemory(self._config.worker, is_used)))
        except (OSError, ValueError) as failure:
            logger.warning("arrays in host memory are lost with this process: its memory cannot be mapped: %s", failure)
            return None

    # Who and where

    def _bind(self, message: Bind) -> None:
        if self._bound is not None and (self._bound.host, self._bound.topology) != (message.host, message.topology):
            raise ValueError(f"bound to host {self._bound.host} already, now to host {message.host}")
        for peer in message.peers:
            if peer.host != message.host:
                self._data_plane.connect(peer.host, addresses.without_mark(peer.data_address)[0], peer.host_key)
        if self._bound is None:
            if self._retained is not None:
                self._retained.bind(message.host)
            self._collectives.bind(message.host)
            self._core = WorkerCore(message.host, message.topology, self._config.name)
            self._dispatcher = Dispatcher(
                self._core,
                self._data_plane,
                self._acknowledgements,
                self._send,
                self._home_world,
                self._endings,
                self._config.delay,
                self._config.is_behind_relay,
                self._retained,
            )
            self._python = self._python_processes(message, self._dispatcher)
            self._dispatcher.serve_functions(self._python)
        self._bound = message

    def _peers_lost(self, message: PeersLost) -> None:
        for host, failure in message.lost:
            self._data_plane.peer_lost(host, failure.message)
            self._collectives.lose(host)

    def _peer_replaced(self, message: PeerReplaced) -> None:
        bound, _ = self._require_bound()
        peer = message.peer
        self._data_plane.connect(peer.host, addresses.without_mark(peer.data_address)[0], peer.host_key)
        others = (other for other in bound.peers if other.host != peer.host)
        self._bound = msgspec.structs.replace(bound, peers=(*others, peer))

    def _python_processes(self, bound: Bind, dispatcher: Dispatcher) -> PythonProcesses:
        folder = Path(addresses.parse_unix(self._config.data_address).path).parent
        place = Place(self._config.name, bound.host, bound.topology, folder, self._config.python_log)
        return PythonProcesses(place, self._acknowledgements, dispatcher.post, self._home_world)

    def _require_bound(self) -> tuple[Bind, Dispatcher]:
        if self._bound is None or self._dispatcher is None:
            raise ValueError("the controller sent work before Bind")
        return self._bound, self._dispatcher

    def _home_world(self) -> worlds.World:
        if self._home is None:
            raise ValueError(f"the world of this slice is not formed on {self._config.name}")
        return self._home

    def _form_world(self, message: FormWorld) -> None:
        # A daemon: the other members may never come.
        threading.Thread(target=self._join_world, args=(message,), name="world", daemon=True).start()

    def _join_world(self, message: FormWorld) -> None:
        bound, _ = self._require_bound()
        failure = None
        try:
            with self._way_to_coordination(message) as coordinator_address:
                world = worlds.form(
                    message.world,
                    bound.topology,
                    self._config.platform,
                    message.hosts,
                    message.rank,
                    coordinator_address,
                    self._collectives_host(message.hosts),
                )
        except (pjrt.PjrtError, OSError, RuntimeError, ValueError) as raised:
            logger.exception("world %d cannot be formed", message.world)
            failure = pjrt.status_of(raised)
        else:
            with self._worlds_lock:
                over = self._over.get(message.world)
                if over is None:
                    self._worlds[message.world] = world
                    if message.hosts == bound.topology.hosts_of_slice(bound.topology.slice_of_host(bound.host)):
                        self._home = world
            if over is not None:
                self._leave(world, over)
        self._send(WorldFormed(self._config.worker, message.world, failure))

    def _leave_world(self, message: LeaveWorld) -> None:
        with self._worlds_lock:
            self._over[message.world] = message.failure
            world = self._worlds.get(message.world)
        # One that is being formed is left once it is.
        if world is not None:
            threading.Thread(target=self._leave, args=(world, message.failure), name="leave", daemon=True).start()

    def _leave(self, world: worlds.World, failure: Status) -> None:
        """Free whoever waits in a world that is over, and then have no more to do with it."""
        _, dispatcher = self._require_bound()
        self._endings.note(failure)
        # What is not launched by now is not launched any more.
        world.end.declare(failure)
        deadline_s = time.monotonic() + _FREE_TIMEOUT_S
        world.cut_collectives()
        while dispatcher.is_busy_in(world):
            if time.monotonic() > deadline_s:
                # The end of the process is what frees it on any hardware. The supervisor starts another one.
                raise RuntimeError(f"programs do not end although a member of their world is lost: {failure.message}")
            # A program may have come to its collective only now, and nobody says so.
            if self._ended.wait(_FREE_POLL_S):
                return
            world.cut_collectives()
        with self._worlds_lock:
            self._worlds.pop(world.id, None)
        dispatcher.forget_world(world)
        world.disconnect()
        self._send(WorldLeft(self._config.worker, world.id))
        # On another thread: this one refers to the world until it ends.
        threading.Thread(target=self._let_go, args=(weakref.ref(world),), name="let go", daemon=True).start()

    def _let_go(self, left: "weakref.ref[worlds.World]") -> None:
        """See that a world's PJRT client goes, with its threads, once no program and no array needs it."""
        for pause_s in _LET_GO_AFTER_S:
            if self._ended.wait(pause_s):
                return
            pjrt.let_go_of_clients()
            if left() is None:
                return

    def _way_to_coordination(self, message: FormWorld) -> contextlib.AbstractContextManager[str]:
        config = self._config
        folder = Path(addresses.parse_unix(config.data_address).path).parent
        path = folder / f"world-{message.world}-{config.worker}-{config.epoch}.sock"
        return worlds.way_to_coordination(
            message.coordinator_address,
            message.coordinator_host_key == config.host_key,
            str(addresses.UnixAddress(str(path))),
            config.network,
        )

    def _collectives_host(self, members: tuple[HostIndex, ...]) -> str:
        """Where members of a world reach this one."""
        bound, _ = self._require_bound()
        others = [peer for peer in bound.peers if peer.host in members and peer.host != bound.host]
        network, key = self._config.network, self._config.host_key
        return self._collectives.way_for(others, key, None if network is None else network.host)

    def _on_tunnel(self, port: int) -> Callable[[Connection], None]:
        return self._collectives.take_in(port)

    def _drop_retained(self, _: DropRetained) -> None:
        if self._retained is not None:
            self._retained.drop_found()

    # Programs

    def _compile(self, message: Compile) -> None:
        self._require_bound()
        if message.options == FUNCTION_OPTIONS:
            self._load_function(message)
        else:
            self._compiling.submit(self._load, message)

    def _load_function(self, message: Compile) -> None:
        """A function of colocated Python; there is nothing to compile."""
        _, dispatcher = self._require_bound()
        assert self._python is not None
        started_s = time.monotonic()

        def done(program: Program | None, failure: Status | None) -> None:
            if program is not None:
                dispatcher.post(ProgramLoaded(message.session, message.executable, program))
            metadata = FUNCTION_METADATA if failure is None and message.wants_metadata else None
            took_s = time.monotonic() - started_s
            worker, session = self._config.worker, message.session
            self._send(Compiled(worker, session, message.executable, metadata, failure, False, took_s))

        self._python.load(message.session, message.program, done)

    def _load(self, message: Compile) -> None:
        bound, dispatcher = self._require_bound()
        started_s = time.monotonic()
        loaded, failure = None, None
        try:
            world = self._worlds.get(message.world)
            if world is None and self._is_alone_on(message.devices):
                # The slice has lost a host, and its world was left; a program on this host needs nobody else.
                world = self._home_world()
            if world is None:
                raise ValueError(f"world {message.world} is not formed on {self._config.name}")
            if world.beside is not None and any(map(bound.topology.is_beside, message.devices)):
                world = _world_beside(world, message.devices)
            call = functools.partial(dispatcher.call_client, message.session)
            loaded = programs.load(world, message.devices, message.program, message.options, self._cache, call)
            dispatcher.post(ProgramLoaded(message.session, message.executable, loaded.program))
        except pjrt.PjrtError as raised:
            failure = pjrt.status_of(raised)
        except Exception as raised:
            # Whatever a client's bytes bring about in parsers must end in an answer.
            logger.exception("executable %d of session %d", message.executable, message.session)
            failure = Status(Code.INVALID_ARGUMENT, f"{type(raised).__name__}: {raised}")
        self._send(
            Compiled(
                worker=self._config.worker,
                session=message.session,
                executable=message.executable,
                metadata=loaded.compiled.metadata if loaded is not None and message.wants_metadata else None,
                failure=failure,
                from_cache=loaded is not None and loaded.is_from_cache,
                took_s=time.monotonic() - started_s,
            )
        )

    def _is_alone_on(self, devices: Sequence[DeviceId]) -> bool:
        bound, _ = self._require_bound()
        return all(bound.topology.host_of(device) == bound.host for device in devices)

    # Sessions and operations

    def _open_session(self, message: OpenSession) -> None:
        bound, dispatcher = self._require_bound()
        session = message.session
        dispatcher.feed(SessionOpened(session))
        if self._retained is not None and (found := self._retained.adopt(session, self._home_world)):
            dispatcher.feed(ArraysRetained(session, found))
        try:
            sock = addresses.connect(message.links_address, _LINK_CONNECT_TIMEOUT_S, handshake=self._handshake)
            hello = LinkHello(session, bound.host, message.change)

            def on_buffer(op_id: OpId, index: int, contents: bytearray | memoryview) -> None:
                dispatcher.post(BufferArrived(session, op_id, index, contents))
                self._acknowledgements.flush()

            dispatcher.add_link(session, SessionLink(session, sock, hello, on_buffer))
        except (OSError, addresses.AddressError) as failure:
            # The proxy is gone, so the controller will close the session.
            logger.warning("no link for session %d: %s", session, failure)

    def _close_session(self, message: CloseSession) -> None:
        _, dispatcher = self._require_bound()
        dispatcher.feed(SessionClosed(message.session))
        if self._python is not None:
            self._python.end_session(message.session)
        link = dispatcher.remove_link(message.session)
        if link is not None:
            link.close()

    def _batch(self, message: Batch) -> None:
        _, dispatcher = self._require_bound()
        decode, feed = self._decoder.decode, dispatcher.feed
        now_ns = time.monotonic_ns()
        for sequenced in message.operations:
            if sequenced.seq <= self._last_seq:
                raise ValueError(f"operation {sequenced.seq} came after {self._last_seq}")
            self._last_seq = sequenced.seq
            feed(OperationReceived(sequenced.session, decode(sequenced.body), now_ns))

    # Life

    def _status_request(self, message: StatusRequest) -> None:
        _, dispatcher = self._require_bound()
        report = report_of(self._config.name, dispatcher, self._data_plane, self._collectives)
        self._send(StatusReply(message.request, report))

    def _shutdown(self, message: Shutdown) -> None:
        raise Stopped(f"the controller said so: {message.reason}")

    def _refused(self, message: Refused) -> None:
        raise Stopped(f"the controller refused this executor: {message.reason}")


def _world_beside(world: worlds.World, devices: Sequence[DeviceId]) -> worlds.World:
    """Where a program for CPUs beside accelerators runs.

    Raises:
        ValueError: they are not all CPUs of this host.
    """
    assert world.beside is not None
    try:
        world.beside.devices(devices)
    except KeyError:
        raise ValueError(
            "a program for the CPUs beside accelerators must be for those of one host alone. Functions of colocated "
            "Python run on several"
        ) from None
    return world.beside


def _give_way() -> None:
    thread_id = threading.get_native_id()
    # Who has been made nicer already may not go back.
    niceness = max(_COMPILE_NICENESS, os.getpriority(os.PRIO_PROCESS, thread_id))
    os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
