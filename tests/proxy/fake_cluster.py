"""A controller and its executors in one event loop, over real sockets, with numpy for devices.

It dispatches whatever comes at once and in order, and raises on what it does not know. Programs are looked up by their
bytes: the test says what each one does.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  (registers the element types with numpy)
import msgspec
import numpy as np

from pathways_runtime.core import operations
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, SessionId, WorkerId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.transport import addresses
from pathways_runtime.transport.frames import AsyncChannel, FrameCodec
from pathways_runtime.wire import links, messages

_operation: msgspec.msgpack.Decoder[operations.Operation] = msgspec.msgpack.Decoder(operations.Operation)

DEADLINE_S = 20.0


@dataclass
class FakeProgram:
    """What a program says of itself, and what it makes of one device's argument shards."""

    metadata: messages.ProgramMetadata
    function: Callable[..., Sequence[np.ndarray]]


@dataclass
class FakeSession:
    """Of one attached session, what the cluster holds; ``arrays[handle][device]``."""

    arrays: dict[Handle, dict[DeviceId, np.ndarray]] = field(default_factory=dict)
    poisons: dict[Handle, Status] = field(default_factory=dict)
    executables: dict[Handle, FakeProgram] = field(default_factory=dict)
    links: dict[HostIndex, AsyncChannel[Any]] = field(default_factory=dict)
    links_up: asyncio.Event = field(default_factory=asyncio.Event)
    buffers: dict[tuple[HostIndex, OpId, int], bytes] = field(default_factory=dict)
    waiting: list[operations.Operation] = field(default_factory=list)
    submits: list[messages.Submit] = field(default_factory=list)


class FakeCluster:
    """Serves one proxy at ``address``."""

    def __init__(self, address: str, topology: Topology, max_undispatched: int = 1000) -> None:
        self.address = address
        self.topology = topology
        self.max_undispatched = max_undispatched
        self.programs: dict[bytes, FakeProgram] = {}
        #: What programs that are not in ``programs`` do; None: they do not compile.
        self.any_program: FakeProgram | None = None
        self.sessions: dict[SessionId, FakeSession] = {}
        self.detached: list[SessionId] = []
        self.received: list[messages.Message] = []
        #: When False, submits are kept and ``dispatch`` lets them go.
        self.dispatches_at_once = True
        self.held: list[tuple[SessionId, messages.Submit]] = []
        self.status_replies: list[messages.StatusReply] = []
        self.seen_change = 0
        self.control: AsyncChannel[Any] | None = None
        self.failure: Exception | None = None
        self.changed = asyncio.Event()
        self._session_ids = 0

    async def __aenter__(self) -> "FakeCluster":
        codec: FrameCodec[Any] = FrameCodec(messages.AnyMessage)
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: AsyncChannel(codec, self._on_control, self._on_closed), sock=addresses.listen(self.address)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close_control()
        for session in self.sessions.values():
            for link in session.links.values():
                link.close()
        self._server.close()
        await self._server.wait_closed()
        if self.failure is not None:
            raise self.failure

    def close_control(self) -> None:
        """As if the controller were gone."""
        if self.control is not None:
            self.control.close()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something is so; looked at again after every message."""
        async with asyncio.timeout(DEADLINE_S) as deadline:
            try:
                while not condition():
                    self.changed.clear()
                    await self.changed.wait()
            finally:
                if deadline.expired():
                    raise AssertionError(f"in {DEADLINE_S} s it did not come about that {what}")

    def send(self, message: messages.Message) -> None:
        """To the proxy."""
        assert self.control is not None, "no proxy has connected"
        self.control.send(message)

    def dispatch(self, count: int) -> None:
        """Let ``count`` held submits go."""
        for session_id, submit in self.held[:count]:
            self._dispatch(session_id, submit)
        del self.held[:count]

    # The controller

    def _on_closed(self, channel: AsyncChannel[Any], failure: Exception | None) -> None:
        self.failure = self.failure or failure
        self.changed.set()

    def _on_control(self, channel: AsyncChannel[Any], frames: Sequence[Any]) -> None:
        for frame in frames:
            self.received.append(frame.message)
            match frame.message:
                case messages.Hello(role="proxy"):
                    self.control = channel
                case messages.Attach():
                    self._attach(frame.message)
                case messages.SubmitBatch(submits=submits):
                    for submit in submits:
                        self.sessions[submit.session].submits.append(submit)
                        if self.dispatches_at_once:
                            self._dispatch(submit.session, submit)
                        else:
                            self.held.append((submit.session, submit))
                case messages.CompileProgram():
                    self._compile(frame.message)
                case messages.Detach(session=session):
                    self.detached.append(session)
                    for link in self.sessions.pop(session).links.values():
                        link.close()
                case messages.HostChangesSeen(change=change):
                    self.seen_change = change
                case messages.StatusReply():
                    self.status_replies.append(frame.message)
                case other:
                    raise TypeError(f"the fake controller does not know {other!r}")
        self.changed.set()

    def _attach(self, attach: messages.Attach) -> None:
        self._session_ids += 1
        session_id = SessionId(self._session_ids)
        self.sessions[session_id] = FakeSession()
        hosts = tuple(
            messages.HostState(HostIndex(host), WorkerId(host), f"host-{host}")
            for host in range(self.topology.num_hosts)
        )
        self.send(messages.Attached(session_id, self.topology, hosts, "fake 1", "fake_kind", self.max_undispatched))
        for host in range(self.topology.num_hosts):
            task = asyncio.get_running_loop().create_task(
                self._open_link(session_id, HostIndex(host), attach.links_address)
            )
            task.add_done_callback(self._link_opened)

    def _link_opened(self, task: "asyncio.Task[None]") -> None:
        self.failure = self.failure or task.exception()  # type: ignore[assignment]

    def _compile(self, message: messages.CompileProgram) -> None:
        program = self.programs.get(message.program, self.any_program)
        if program is None:
            failure = Status(Code.NOT_FOUND, f"no program {message.program!r}")
            self.send(messages.ProgramCompiled(message.session, message.executable, None, failure))
            return
        self.sessions[message.session].executables[message.executable] = program
        self.send(messages.ProgramCompiled(message.session, message.executable, program.metadata, None))

    def _dispatch(self, session_id: SessionId, submit: messages.Submit) -> None:
        self.send(messages.Dispatched(session_id, 1))
        session = self.sessions[session_id]
        session.waiting.append(_operation.decode(submit.body))
        self._run(session_id, session)

    # The executors

    async def _open_link(self, session_id: SessionId, host: HostIndex, address: str, change: int = 0) -> None:
        codec: FrameCodec[Any] = FrameCodec(links.AnyLinkMessage)
        session = self.sessions[session_id]

        def on_frames(_: AsyncChannel[Any], frames: Sequence[Any]) -> None:
            for frame in frames:
                assert isinstance(frame.message, links.HostBuffer)
                session.buffers[host, frame.message.op_id, frame.message.index] = bytes(frame.payload)
            self._run(session_id, session)

        _, channel = await asyncio.get_running_loop().create_unix_connection(
            lambda: AsyncChannel(codec, on_frames, lambda *_: None), addresses.parse(address).path
        )
        channel.send(links.LinkHello(session_id, host, change))
        session.links[host] = channel
        if len(session.links) == self.topology.num_hosts:
            session.links_up.set()
            self._run(session_id, session)
        self.changed.set()

    def _run(self, session_id: SessionId, session: FakeSession) -> None:
        """Perform what waits, in order, up to one that lacks its bytes or its links."""
        while session.waiting and session.links_up.is_set():
            if not self._perform(session, session.waiting[0]):
                return
            session.waiting.pop(0)
        self.changed.set()

    def _perform(self, session: FakeSession, operation: operations.Operation) -> bool:
        match operation:
            case operations.MakeArrays():
                return self._make_arrays(session, operation)
            case operations.Alias(results=results, sources=sources):
                for result, froms in zip(results, sources, strict=True):
                    session.arrays[result.handle] = {
                        device: session.arrays[source][device]
                        for device, source in zip(result.devices, froms, strict=True)
                    }
            case operations.Transfer(results=results, moves=moves):
                for result in results:
                    shape, dtype = result.shape, np.dtype(result.dtype.numpy_name)
                    session.arrays[result.handle] = {device: np.zeros(shape, dtype) for device in result.devices}
                for move in moves:
                    source = session.arrays[move.source][move.source_device]
                    target = session.arrays[results[move.result_index].handle][move.target_device]
                    target[_slices(move.target_box)] = source[_slices(move.source_box)]
            case operations.Delete(handles=handles):
                for handle in handles:
                    session.arrays.pop(handle, None)
            case operations.Launch():
                self._launch(session, operation)
            case operations.DeleteExecutable(executable=executable):
                session.executables.pop(executable, None)
            case operations.Poison(handles=handles, status=status):
                session.poisons.update(dict.fromkeys(handles, status))
            case operations.Await(wait_id=wait_id, handles=handles):
                hosts = {self.topology.host_of(d) for handle in handles for d in session.arrays.get(handle, {})}
                for host in hosts:
                    session.links[host].send(links.ArraysReady(wait_id, None))
            case operations.Fetch(wait_id=wait_id, handle=handle, device=device):
                shard = np.ascontiguousarray(session.arrays[handle][device])
                link = session.links[self.topology.host_of(device)]
                link.send(links.Fetched(wait_id, None), shard.tobytes())
            case other:
                raise TypeError(f"the fake executor does not know {other!r}")
        return True

    def _make_arrays(self, session: FakeSession, operation: operations.MakeArrays) -> bool:
        made = {}
        for result, indices in zip(operation.results, operation.buffers, strict=True):
            shards = {}
            for device, index in zip(result.devices, indices, strict=True):
                content = session.buffers.get((self.topology.host_of(device), operation.op_id, index))
                if content is None:
                    return False
                shards[device] = np.frombuffer(content, result.dtype.numpy_name).reshape(result.shape)
            made[result.handle] = shards
        session.arrays.update(made)
        return True

    def _launch(self, session: FakeSession, launch: operations.Launch) -> None:
        program = session.executables[launch.executable]
        arguments = [session.arrays[handle] for handle in launch.arguments]
        results: list[dict[DeviceId, np.ndarray]] = [{} for _ in launch.results]
        for device in arguments[0]:
            for result, value in zip(results, program.function(*(each[device] for each in arguments)), strict=True):
                result[device] = value
        session.arrays.update(zip(launch.results, results, strict=True))


def _slices(box: Any) -> Any:
    return ... if box is None else tuple(slice(start, stop) for start, stop in box)
