"""The process that only compiles: to a proxy it is the controller and all the workers of a target.

Whatever a session asks for happens at once and in order: there is nothing to wait for where nothing is executed.
Compilations run on threads, everything else on one event loop.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import Handle, HostIndex, SessionId, WorkerId
from pathways_runtime.core.operations import Launch, Operation
from pathways_runtime.transport import streams
from pathways_runtime.transport.frames import AsyncChannel, Frame, FrameCodec
from pathways_runtime.transport.lifeline import EventWriter
from pathways_runtime.wire import messages as msg
from pathways_runtime.wire.links import AnyLinkMessage, ArraysReady, Fetched, HostBuffer, LinkHello
from pathways_runtime.worker.aot.arrays import AbstractSession, Answer, Ready
from pathways_runtime.worker.aot.compiler import Compiler, Outcome

logger = logging.getLogger(__name__)

#: Nobody is told of the executor's restarts here.
_EPOCH = 1
#: Operations are dispatched as they come, so this only bounds what a proxy has under way.
_MAX_UNDISPATCHED = 1024
_LINK_CONNECT_TIMEOUT_S = 10.0
_STATUS_REFUSED = "this runtime only compiles: it has no devices and no status"

ControlChannel = AsyncChannel[msg.AnyMessage]


class Ledger:
    """What was compiled and how often it was launched; told to the launcher as it happens.

    Events: ``compiled`` for each compilation; ``idle`` once ``idle_launches`` launches came one after another without a
    new program between them; ``launched`` at the end, with the launches by key of the program.

    Args:
        idle_launches: 0 for never.
    """

    def __init__(self, events: EventWriter, idle_launches: int) -> None:
        self._events = events
        self._idle_launches = idle_launches
        self._num_launches: dict[str, int] = {}
        self._since_new = 0

    def compiled(self, outcome: Outcome, num_devices: int, slices: Sequence[int]) -> None:
        """A compilation is over."""
        is_new = outcome.key not in self._num_launches
        self._num_launches.setdefault(outcome.key, 0)
        if is_new:
            self._since_new = 0
        fields: dict[str, Any] = {
            "name": outcome.name,
            "key": outcome.key,
            "devices": num_devices,
            "slices": list(slices),
            "took_s": round(outcome.took_s, 3),
            "is_from_cache": outcome.is_from_cache,
        }
        if outcome.failure is not None:
            fields |= {"failure": {"code": outcome.failure.code.name, "message": outcome.failure.message}}
        if outcome.compiled is not None:
            metadata = outcome.compiled.metadata
            fields |= {
                "memory": metadata.memory_stats,
                "generated_code_bytes": metadata.generated_code_bytes,
                "flops": metadata.cost_analysis.get("flops"),
                "bytes_accessed": metadata.cost_analysis.get("bytes accessed"),
                "estimated_s": metadata.cost_analysis.get("optimal_seconds"),
            }
        self._events.write("compiled", **fields)

    def launched(self, key: str) -> None:
        """A program was launched."""
        self._num_launches[key] += 1
        self._since_new += 1
        if self._since_new == self._idle_launches:
            self._events.write("idle", launches=self._since_new)

    def close(self) -> None:
        """The launcher hears the sums."""
        self._events.write("launched", launches=self._num_launches)
        self._events.close()


class _Session:
    """One client's session: its arrays, and a link for each host."""

    def __init__(self, session: SessionId, compiler: Compiler, control: ControlChannel) -> None:
        self.id = session
        self.control = control
        self.arrays = AbstractSession(compiler.topology.host_of)
        #: By executable.
        self.keys: dict[Handle, str] = {}
        self._links: dict[HostIndex, AsyncChannel[AnyLinkMessage]] = {}
        #: For hosts whose links are not up yet.
        self._unsent: dict[HostIndex, list[Answer]] = {}
        self._codec: FrameCodec[AnyLinkMessage] = FrameCodec(AnyLinkMessage)
        self.is_closed = False

    async def open_link(self, host: HostIndex, address: str) -> None:
        """Connect as the executor of ``host``.

        Raises:
            ConnectFailed: the proxy is gone.
        """

        def received(_: AsyncChannel[AnyLinkMessage], frames: Sequence[Frame[AnyLinkMessage]]) -> None:
            for frame in frames:
                message = frame.message
                if not isinstance(message, HostBuffer):
                    raise TypeError(f"{type(message).__name__} is not for an executor")
                self.answer(self.arrays.take_buffer(host, message.op_id, message.index, frame.payload))

        link = await streams.connect(
            address,
            lambda: AsyncChannel(self._codec, received, lambda *_: None),
            _LINK_CONNECT_TIMEOUT_S,
        )
        if self.is_closed:
            link.close()
            return
        link.send(LinkHello(self.id, host, _EPOCH))
        self._links[host] = link
        self.answer(self._unsent.pop(host, ()))

    def answer(self, answers: Sequence[Answer]) -> None:
        """Tell the proxy, as soon as the host's link is up."""
        for answer in answers:
            link = self._links.get(answer.host)
            if link is None:
                self._unsent.setdefault(answer.host, []).append(answer)
            elif isinstance(answer, Ready):
                link.send(ArraysReady(answer.wait_id, answer.failure))
            else:
                contents = bytes(answer.num_bytes) if answer.contents is None else answer.contents
                link.send(Fetched(answer.wait_id, None), contents)

    def close(self) -> None:
        """Forget everything."""
        self.is_closed = True
        if num_kept := self.arrays.num_kept_apart():
            logger.info("session %d ends with %d host buffers that no array has", self.id, num_kept)
        for link in self._links.values():
            link.close()


class _Peer:
    """One connection: a proxy's, or one that asks for the status."""

    def __init__(self) -> None:
        self.is_greeted = False
        self.host_sets: dict[int, tuple[HostIndex, ...]] = {}
        self.sessions: dict[SessionId, _Session] = {}


class Server:
    """Serves proxies until ``request_end``.

    Args:
        address: a Unix socket.
        events: what the launcher is told, by way of ``Ledger`` too.
    """

    def __init__(self, compiler: Compiler, address: str, events: EventWriter, ledger: Ledger) -> None:
        self._compiler = compiler
        self._address = address
        self._events = events
        self._ledger = ledger
        self._codec: FrameCodec[msg.AnyMessage] = FrameCodec(msg.AnyMessage)
        self._decoder: msgspec.msgpack.Decoder[Operation] = msgspec.msgpack.Decoder(Operation)
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[str] = self._loop.create_future()
        self._threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), thread_name_prefix="compiles")
        self._peers: dict[ControlChannel, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_session = 0

    async def run(self) -> None:
        """Listen and serve.

        Raises:
            AddressError, OSError: it cannot listen. Exception: what could not be handled; nothing is known then.
        """
        server = await streams.serve(self._address, lambda: AsyncChannel(self._codec, self._received, self._closed))
        try:
            self._events.write("listening", addresses=[server.address])
            self._events.write("ready")
            logger.info("ends: %s", await self._end)
        finally:
            server.close()
            # A compilation that is under way ends with the process.
            self._threads.shutdown(wait=False, cancel_futures=True)

    def request_end(self, reason: str) -> None:
        """Begin to end; may be called again."""
        if not self._end.done():
            self._end.set_result(reason)

    def _received(self, channel: ControlChannel, frames: Sequence[Frame[msg.AnyMessage]]) -> None:
        peer = self._peers.setdefault(channel, _Peer())
        for frame in frames:
            message = frame.message
            if isinstance(message, msg.Hello):
                peer.is_greeted = message.protocol_version == msg.PROTOCOL_VERSION
            elif isinstance(message, msg.StatusRequest):
                channel.send(msg.Refused(_STATUS_REFUSED))
            elif not peer.is_greeted:
                channel.send(msg.Refused(f"this runtime speaks version {msg.PROTOCOL_VERSION} of the protocol"))
                channel.close()
                return
            else:
                self._serve(channel, peer, message)

    def _closed(self, channel: ControlChannel, failure: Exception | None) -> None:
        peer = self._peers.pop(channel, None)
        if peer is not None:
            for session in peer.sessions.values():
                session.close()
        if failure is not None and not isinstance(failure, OSError) and not self._end.done():
            # A message that could not be handled; the channel has logged it.
            self._end.set_exception(failure)

    def _serve(self, channel: ControlChannel, peer: _Peer, message: msg.AnyMessage) -> None:
        match message:
            case msg.Attach(links_address=links_address):
                self._attach(channel, peer, links_address)
            case msg.NameHosts(number, hosts):
                peer.host_sets[number] = hosts
            case msg.SubmitBatch(submits):
                for submit in submits:
                    self._submit(peer, submit)
            case msg.Submit():
                self._submit(peer, message)
            case msg.CompileProgram(session=session):
                self._start(self._compile(peer.sessions[session], message))
            case msg.Detach(session):
                peer.sessions.pop(session).close()
                channel.send(msg.SessionEnded(session, None))
            case _:
                raise TypeError(f"{type(message).__name__} has no place here")

    def _attach(self, channel: ControlChannel, peer: _Peer, links_address: str) -> None:
        compiler, topology = self._compiler, self._compiler.topology
        self._last_session += 1
        session = SessionId(self._last_session)
        peer.sessions[session] = opened = _Session(session, compiler, channel)
        hosts = [HostIndex(host) for host in range(topology.num_hosts)]
        states = tuple(msg.HostState(host, WorkerId(host), f"host-{host}") for host in hosts)
        channel.send(
            msg.Attached(session, topology, states, compiler.platform_version, compiler.device_kind, _MAX_UNDISPATCHED)
        )
        for host in hosts:
            self._start(opened.open_link(host, links_address))

    def _start(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, OSError):
            # Links of a proxy that is gone; its control stream tells the same.
            logger.info("a link is not there: %s", failure)
        elif failure is not None and not self._end.done():
            self._end.set_exception(failure)

    def _submit(self, peer: _Peer, submit: msg.Submit) -> None:
        session = peer.sessions[submit.session]
        operation = self._decoder.decode(submit.body)
        hosts = submit.hosts or peer.host_sets.get(submit.host_set, ())
        session.answer(session.arrays.perform(operation, hosts))
        if isinstance(operation, Launch):
            self._ledger.launched(session.keys[operation.executable])
        session.control.send(msg.Dispatched(session.id, 1))

    async def _compile(self, session: _Session, message: msg.CompileProgram) -> None:
        outcome = await self._loop.run_in_executor(
            self._threads, self._compiler.compile, message.devices, message.program, message.options
        )
        self._ledger.compiled(outcome, len(set(message.devices)), self._compiler.topology.slices_of(message.devices))
        compiled = outcome.compiled
        if compiled is not None:
            session.keys[message.executable] = outcome.key
            session.arrays.add_program(message.executable, [(shape, DType(kind)) for shape, kind in compiled.outputs])
        metadata = None if compiled is None else compiled.metadata
        session.control.send(msg.ProgramCompiled(session.id, message.executable, metadata, outcome.failure))
