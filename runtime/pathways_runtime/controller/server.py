"""The controller's shell: connections, timers and child processes around a ``ControllerCore``."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from pathways_runtime.controller.coordinators import Coordinators
from pathways_runtime.controller.gathering import Asked, Gathering
from pathways_runtime.controller.peers import Peer, Peers
from pathways_runtime.controller.relayed import RelayConnection, RelayedChannel
from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.controller.core import ControllerCore
from pathways_runtime.core.controller.events import Event, PeerId
from pathways_runtime.core.ids import SessionId, WorldId
from pathways_runtime.core.topology import Topology
from pathways_runtime.transport import addresses, streams
from pathways_runtime.transport.frames import AsyncChannel, Buffer, Frame, FrameCodec, FrameError
from pathways_runtime.transport.host_key import local_host_key
from pathways_runtime.transport.lifeline import EventWriter
from pathways_runtime.transport.network import Network
from pathways_runtime.wire import messages as msg
from pathways_runtime.wire.messages import PROTOCOL_VERSION, AnyMessage

logger = logging.getLogger(__name__)

ROLES = ("proxy", "supervisor", "executor", "status")

#: A host that takes its operations more slowly than they come holds back all sessions, before memory grows.
_UNSENT_HIGH_BYTES = 64 << 20
_UNSENT_LOW_BYTES = 8 << 20
_UNSENT_CHECK_S = 0.01

_TICK_S = 0.1
#: How long peers may take to end after Shutdown; then their connections are closed.
_SHUTDOWN_GRACE_S = 3.0


class Controller:
    """Serves until ``request_end``; ``run`` returns the exit code.

    Operations of one turn of the loop reach each executor as one Batch, and each session hears of its dispatched
    operations once per turn.

    Args:
        core: decides everything.
        topology: of ``core``.
        listen: the addresses to listen at: a Unix socket for this host, in a folder that is this user's alone, and
            perhaps a TCP port for others.
        network: needed for TCP. Members of other hosts then reach coordination services over it.
        announcements: what the launcher is told.

    Raises:
        AddressError: it has no Unix socket.
    """

    def __init__(
        self,
        core: ControllerCore,
        topology: Topology,
        listen: Sequence[str],
        announcements: EventWriter,
        network: Network | None = None,
    ) -> None:
        self._core = core
        self._topology = topology
        self._listen = tuple(listen)
        self._network = network
        self._announcements = announcements
        self._loop = asyncio.get_running_loop()
        self._codec: FrameCodec[AnyMessage] = FrameCodec(AnyMessage)
        self._peers = Peers(topology.num_hosts)
        self._streams = self._peers.streams
        self._coordinators = Coordinators(
            self._coordination_started, self._coordination_failed, _folder_beside(listen), network
        )
        self._host_key = local_host_key()
        self._dispatched: dict[SessionId, tuple[PeerId, int]] = {}
        self._is_flush_due = False
        self._is_holding_proxies = False
        self._gatherings: dict[int, tuple[PeerId, Gathering]] = {}
        self._last_request = 0
        self._end: asyncio.Future[str] = self._loop.create_future()
        self._failure: BaseException | None = None
        self._is_ending = False
        self._everyone_gone = asyncio.Event()
        self._readers: dict[tuple[str, type[Any]], Callable[[Peer, Any], None]] = {
            ("proxy", msg.SubmitBatch): self._read_submit_batch,
            ("proxy", msg.NameHosts): self._read_name_hosts,
            ("proxy", msg.Submit): self._read_submit,
            ("proxy", msg.CompileProgram): self._read_compile_program,
            ("proxy", msg.Attach): self._read_attach,
            ("proxy", msg.Detach): self._read_detach,
            ("proxy", msg.HostChangesSeen): self._read_host_changes_seen,
            ("proxy", msg.StatusReply): self._read_status_reply,
            ("supervisor", msg.RegisterWorker): self._read_register_worker,
            ("supervisor", msg.WorkerLeaves): self._read_worker_leaves,
            ("supervisor", msg.ExecutorExited): self._read_executor_exited,
            ("supervisor", msg.Heartbeat): self._read_heartbeat,
            ("supervisor", msg.RelayListening): self._read_relay_listening,
            ("supervisor", msg.ChildrenAcknowledge): self._read_children_acknowledge,
            ("supervisor", msg.ChildClosed): self._read_child_closed,
            ("supervisor", msg.RelayBacklog): self._read_relay_backlog,
            ("executor", msg.RegisterExecutor): self._read_register_executor,
            ("executor", msg.RetainsMemory): self._read_retains_memory,
            ("executor", msg.Acknowledge): self._read_acknowledge,
            ("executor", msg.WorldFormed): self._read_world_formed,
            ("executor", msg.WorldLeft): self._read_world_left,
            ("executor", msg.Compiled): self._read_compiled,
            ("executor", msg.OperationFailed): self._read_operation_failed,
            ("executor", msg.StatusReply): self._read_status_reply,
            ("executor", msg.Heartbeat): self._read_heartbeat,
            ("status", msg.StatusRequest): self._read_status_request,
        }
        self._performers: dict[type[Any], Callable[[Any], None]] = {
            ins.Dispatch: self._perform_dispatch,
            ins.Substitute: self._perform_substitute,
            ins.ReportDispatched: self._perform_report_dispatched,
            ins.ReportFailed: self._perform_report_failed,
            ins.StartExecutor: self._perform_start_executor,
            ins.StopExecutor: self._perform_stop_executor,
            ins.StartRelay: self._perform_start_relay,
            ins.ReportReady: self._perform_report_ready,
            ins.Refuse: self._perform_refuse,
            ins.BindExecutors: self._perform_bind_executors,
            ins.LosePeers: self._perform_lose_peers,
            ins.ReplacePeer: self._perform_replace_peer,
            ins.ChangeHost: self._perform_change_host,
            ins.StartCoordination: self._perform_start_coordination,
            ins.StopCoordination: self._perform_stop_coordination,
            ins.FormMember: self._perform_form_member,
            ins.LeaveWorld: self._perform_leave_world,
            ins.CompileMember: self._perform_compile_member,
            ins.ReportCompiled: self._perform_report_compiled,
            ins.AcceptSession: self._perform_accept_session,
            ins.OpenSession: self._perform_open_session,
            ins.CloseSession: self._perform_close_session,
            ins.DropRetained: self._perform_drop_retained,
            ins.EndSession: self._perform_end_session,
            ins.Announce: self._perform_announce,
        }

    # Life

    async def run(self) -> int:
        """Serve until ``request_end`` or a failure of our own. Returns the exit code.

        Raises:
            AddressError, OSError: it cannot listen.
        """
        self._handle(ev.Started(time.monotonic_ns(), time.time()))
        async with contextlib.AsyncExitStack() as listening:
            servers = []
            for address in self._listen:
                servers.append(await streams.serve(address, self._accept, self._network))
                listening.callback(servers[-1].close)
            reason = await self._serve([server.address for server in servers])
        await self._shut_down(reason)
        return 1 if self._failure is not None else 0

    async def _serve(self, addresses: Sequence[str]) -> str:
        """Until there is a reason to end, which is returned."""
        ticker = self._loop.create_task(self._tick())
        self._announcements.write("listening", addresses=list(addresses))
        try:
            reason = await self._end
            logger.info("ending: %s", reason)
        except Exception as failure:
            logger.critical("ending because of a failure of the controller itself", exc_info=failure)
            self._failure = failure
            reason = f"the controller failed: {failure!r}"
        ticker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticker
        return reason

    def request_end(self, reason: str) -> None:
        """Begin to end in good order; may be called again."""
        if not self._end.done():
            self._end.set_result(reason)

    async def _shut_down(self, reason: str) -> None:
        self._is_ending = True
        for _, gathering in self._gatherings.values():
            gathering.cancel()
        # Relays last, because they close when they are told.
        for peer in sorted(self._peers.by_id.values(), key=lambda peer: peer.relay is not None):
            peer.channel.send(msg.Shutdown(reason))
        if self._peers.by_id:
            try:
                await asyncio.wait_for(self._everyone_gone.wait(), _SHUTDOWN_GRACE_S)
            except TimeoutError:
                names = ", ".join(peer.label for peer in self._peers.by_id.values())
                logger.warning("still connected %g s after Shutdown: %s", _SHUTDOWN_GRACE_S, names)
                for peer in self._peers.by_id.values():
                    peer.channel.close()
        # Last, as the end of a service aborts the executors that are connected to it.
        await self._coordinators.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._handle(ev.TimePassed(time.monotonic_ns()))

    # Events in, instructions out

    def _handle(self, event: Event) -> None:
        try:
            performers = self._performers
            for instruction in self._core.handle(event):
                performer = performers.get(type(instruction))
                if performer is None:
                    raise TypeError(f"nobody performs {type(instruction).__name__}")
                performer(instruction)
        except Exception as failure:
            # The core's state cannot be trusted any more, and neither can an order that was half sent.
            if self._end.done():
                raise
            self._end.set_exception(failure)

    def _coordination_started(self, world: WorldId, address: str) -> None:
        self._handle(ev.CoordinationStarted(world, address))

    def _coordination_failed(self, world: WorldId, reason: str) -> None:
        self._handle(ev.CoordinationFailed(world, reason))

    # Connections

    def _accept(self) -> AsyncChannel[AnyMessage]:
        peer = self._peers.add()
        channel = AsyncChannel(
            self._codec, functools.partial(self._received, peer), functools.partial(self._closed, peer)
        )
        peer.channel = channel
        return channel

    def _received(self, peer: Peer, channel: AsyncChannel[AnyMessage], frames: Sequence[Frame[AnyMessage]]) -> None:
        for frame in frames:
            if peer.peer not in self._peers.by_id:
                # Refused: what it sent behind is of no interest.
                return
            message = frame.message
            if type(message) is msg.FromChild and peer.relay is not None:
                self._received_from_child(peer, message.child, frame.payload)
            else:
                self._read(peer, message)

    def _read(self, peer: Peer, message: AnyMessage) -> None:
        reader = self._readers.get((peer.role, type(message)))
        if reader is not None:
            reader(peer, message)
        elif type(message) is msg.Hello and not peer.role:
            self._read_hello(peer, message)
        else:
            role = peer.role or "peer that has not said hello"
            self._refuse(peer, f"a {role} must not send {type(message).__name__}")

    def _received_from_child(self, relay: Peer, number: int, header: Buffer) -> None:
        child = relay.children.get(number)
        if child is None:
            assert relay.relay is not None
            child = relay.children[number] = self._peers.add()
            child.channel = RelayedChannel(relay.relay, number)
        elif child.peer not in self._peers.by_id:
            return
        try:
            # A copy, as messages may keep views of their header.
            message = self._codec.decode(bytes(header))
        except FrameError as failure:
            self._refuse(child, str(failure))
            return
        if type(message) is msg.Hello and message.role != "executor":
            self._refuse(child, f"a relay has no place for a {message.role}")
        else:
            self._read(child, message)

    def _closed(self, peer: Peer, channel: AsyncChannel[AnyMessage], failure: Exception | None) -> None:
        # The core knows who is lost with a relay.
        for child in peer.children.values():
            self._drop(child)
        self._gone(peer, str(failure) if failure is not None else "closed")

    def _drop(self, peer: Peer) -> bool:
        """Forget a connection; whether it was known."""
        was_known = self._peers.remove(peer)
        for asker, gathering in list(self._gatherings.values()):
            gathering.drop(peer.peer)
            if asker == peer.peer:
                gathering.cancel()
        return was_known

    def _gone(self, peer: Peer, reason: str) -> None:
        was_known = self._drop(peer)
        if self._is_ending:
            if not self._peers.by_id:
                self._everyone_gone.set()
        elif was_known or peer.role:
            if peer.role not in ("", "status"):
                logger.info("%s is gone: %s", peer.label, reason)
            self._handle(ev.PeerClosed(peer.peer, reason, time.monotonic_ns()))

    def _refuse(self, peer: Peer, reason: str) -> None:
        """Tell a peer why and close. Its ``PeerClosed`` follows."""
        logger.warning("%s is refused: %s", peer.label, reason)
        peer.channel.send(msg.Refused(reason))
        peer.channel.close()
        self._peers.remove(peer)

    def _flush_turn(self) -> None:
        self._is_flush_due = False
        if self._streams:
            self._streams.flush()
        dispatched, self._dispatched = self._dispatched, {}
        for session, (peer, count) in dispatched.items():
            self._peers.send(peer, msg.Dispatched(session, count))
        if not self._is_holding_proxies and self._peers.most_unsent_bytes() > _UNSENT_HIGH_BYTES:
            self._is_holding_proxies = True
            self._peers.hold_proxies(True)
            self._loop.call_later(_UNSENT_CHECK_S, self._release_proxies)

    def _release_proxies(self) -> None:
        if self._peers.most_unsent_bytes() > _UNSENT_LOW_BYTES:
            self._loop.call_later(_UNSENT_CHECK_S, self._release_proxies)
            return
        self._is_holding_proxies = False
        self._peers.hold_proxies(False)

    # What peers say

    def _read_hello(self, peer: Peer, message: msg.Hello) -> None:
        if message.protocol_version != PROTOCOL_VERSION:
            self._refuse(peer, f"protocol version {message.protocol_version}; ours is {PROTOCOL_VERSION}")
        elif message.role not in ROLES:
            self._refuse(peer, f"no such role: {message.role!r}; there are {', '.join(ROLES)}")
        else:
            peer.role, peer.pid = message.role, message.pid
            peer.label = f"{message.role} with pid {message.pid}"

    def _read_submit_batch(self, peer: Peer, message: msg.SubmitBatch) -> None:
        self._handle(ev.OperationsSubmitted(peer.peer, message.submits, time.monotonic_ns()))

    def _read_name_hosts(self, peer: Peer, message: msg.NameHosts) -> None:
        self._handle(ev.HostsNamed(peer.peer, message.number, message.hosts))

    def _read_submit(self, peer: Peer, message: msg.Submit) -> None:
        self._handle(ev.OperationsSubmitted(peer.peer, (message,), time.monotonic_ns()))

    def _read_compile_program(self, peer: Peer, message: msg.CompileProgram) -> None:
        self._handle(
            ev.ProgramRequested(
                peer.peer,
                message.session,
                message.executable,
                message.program,
                message.options,
                message.devices,
                time.monotonic_ns(),
            )
        )

    def _read_attach(self, peer: Peer, message: msg.Attach) -> None:
        self._handle(
            ev.SessionRequested(
                peer.peer, message.client_name, message.client_pid, message.links_address, time.monotonic_ns()
            )
        )

    def _read_detach(self, peer: Peer, message: msg.Detach) -> None:
        self._handle(ev.SessionDetached(peer.peer, message.session))

    def _read_host_changes_seen(self, peer: Peer, message: msg.HostChangesSeen) -> None:
        self._handle(ev.HostChangesSeen(peer.peer, message.change))

    def _read_register_worker(self, peer: Peer, message: msg.RegisterWorker) -> None:
        peer.label = f"supervisor of {message.name}"
        self._handle(
            ev.WorkerRegistered(
                peer.peer,
                message.worker,
                message.name,
                message.pid,
                message.devices_per_host,
                time.monotonic_ns(),
                message.companion,
            )
        )

    def _read_worker_leaves(self, peer: Peer, message: msg.WorkerLeaves) -> None:
        self._handle(ev.WorkerLeaving(peer.peer, message.reason, time.monotonic_ns()))

    def _read_executor_exited(self, peer: Peer, message: msg.ExecutorExited) -> None:
        self._handle(
            ev.ExecutorExited(message.worker, message.epoch, message.returncode, message.log_tail, time.monotonic_ns())
        )

    def _read_relay_listening(self, peer: Peer, message: msg.RelayListening) -> None:
        # A supervisor's connection is its own: only executors are behind relays.
        peer.relay = RelayConnection(peer.peer, cast(AsyncChannel[AnyMessage], peer.channel))
        self._handle(ev.RelayListening(peer.peer, message.address))

    def _read_children_acknowledge(self, peer: Peer, message: msg.ChildrenAcknowledge) -> None:
        self._handle(ev.ChildrenAcknowledged(peer.peer, message.completed, message.transfers_started, message.ready))

    def _read_child_closed(self, peer: Peer, message: msg.ChildClosed) -> None:
        child = peer.children.pop(message.child, None)
        if child is not None:
            self._gone(child, message.reason)

    def _read_relay_backlog(self, peer: Peer, message: msg.RelayBacklog) -> None:
        if peer.relay is not None:
            peer.relay.backlog_bytes = message.unsent_bytes

    def _read_heartbeat(self, peer: Peer, message: msg.Heartbeat) -> None:
        self._handle(ev.HeartbeatsReceived((peer.peer,), time.monotonic_ns()))
        if peer.role == "supervisor":
            # So that it knows whether it is cut off.
            peer.channel.send(message)

    def _read_register_executor(self, peer: Peer, message: msg.RegisterExecutor) -> None:
        peer.label = f"executor of worker {message.worker}"
        channel = peer.channel
        self._handle(
            ev.ExecutorRegistered(
                peer.peer,
                message.worker,
                message.epoch,
                message.pid,
                message.data_address,
                message.host_key,
                message.platform,
                message.platform_version,
                message.device_kind,
                message.num_devices,
                time.monotonic_ns(),
                channel.connection.relay if isinstance(channel, RelayedChannel) else None,
                channel.child if isinstance(channel, RelayedChannel) else 0,
                message.retained_host,
                message.retained,
            )
        )

    def _read_retains_memory(self, peer: Peer, message: msg.RetainsMemory) -> None:
        self._handle(ev.MemoryRetained(peer.peer, message.is_used))

    def _read_acknowledge(self, peer: Peer, message: msg.Acknowledge) -> None:
        self._handle(ev.Acknowledged(peer.peer, message.launches_completed, message.transfers_started))

    def _read_world_formed(self, peer: Peer, message: msg.WorldFormed) -> None:
        self._handle(ev.MemberFormed(peer.peer, message.world, message.failure, time.monotonic_ns()))

    def _read_world_left(self, peer: Peer, message: msg.WorldLeft) -> None:
        self._handle(ev.MemberLeft(peer.peer, message.world))

    def _read_compiled(self, peer: Peer, message: msg.Compiled) -> None:
        logger.info(
            "%s: program %d of session %d %s in %.3f s%s",
            peer.label,
            message.executable,
            message.session,
            "loaded" if message.failure is None else f"failed ({message.failure.code.name})",
            message.took_s,
            " from the cache" if message.from_cache else "",
        )
        self._handle(
            ev.MemberCompiled(peer.peer, message.session, message.executable, message.metadata, message.failure)
        )

    def _read_operation_failed(self, peer: Peer, message: msg.OperationFailed) -> None:
        self._handle(ev.MemberFailed(peer.peer, message.session, message.op_id, message.handles, message.failure))

    def _read_status_request(self, peer: Peer, message: msg.StatusRequest) -> None:
        self._last_request += 1
        request = self._last_request
        asked = {proxy.peer: Asked(proxy.label, None) for proxy in self._peers.proxies()}
        for host, executor in self._peers.executors():
            asked[executor.peer] = Asked(executor.label, host)

        def finish(report: dict[str, Any]) -> None:
            del self._gatherings[request]
            self._peers.send(peer.peer, msg.StatusReply(message.request, report))

        self._gatherings[request] = (
            peer.peer,
            Gathering(self._core.report(time.monotonic_ns()), asked, finish),
        )
        for other in asked:
            self._peers.send(other, msg.StatusRequest(request))

    def _read_status_reply(self, peer: Peer, message: msg.StatusReply) -> None:
        entry = self._gatherings.get(message.request)
        if entry is not None:
            entry[1].add(peer.peer, message.report)

    # What the core wants done

    def _perform_dispatch(self, instruction: ins.Dispatch) -> None:
        self._streams.dispatch(instruction, cast(msg.Submit, instruction.submission).body)
        self._want_flush()

    def _perform_substitute(self, instruction: ins.Substitute) -> None:
        self._streams.substitute(instruction)
        self._want_flush()

    def _perform_report_dispatched(self, instruction: ins.ReportDispatched) -> None:
        _, count = self._dispatched.get(instruction.session, (instruction.peer, 0))
        self._dispatched[instruction.session] = (instruction.peer, count + instruction.count)
        self._want_flush()

    def _want_flush(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_turn)

    def _perform_report_failed(self, instruction: ins.ReportFailed) -> None:
        failed = msg.OperationFailed(instruction.session, instruction.op_id, instruction.handles, instruction.failure)
        self._peers.send(instruction.peer, failed)

    def _perform_start_executor(self, instruction: ins.StartExecutor) -> None:
        self._peers.send(instruction.peer, msg.StartExecutor(instruction.epoch, instruction.relay_address))

    def _perform_start_relay(self, instruction: ins.StartRelay) -> None:
        self._peers.send(instruction.peer, msg.StartRelay())

    def _perform_report_ready(self, instruction: ins.ReportReady) -> None:
        self._peers.send(
            instruction.peer, msg.ReadyOnHosts(instruction.session, instruction.wait_id, instruction.hosts)
        )

    def _perform_stop_executor(self, instruction: ins.StopExecutor) -> None:
        self._peers.send(instruction.peer, msg.StopExecutor(instruction.epoch))

    def _perform_refuse(self, instruction: ins.Refuse) -> None:
        peer = self._peers.by_id.get(instruction.peer)
        if peer is not None:
            self._refuse(peer, instruction.reason)

    def _perform_bind_executors(self, instruction: ins.BindExecutors) -> None:
        addresses = tuple(map(_address_of, instruction.all))
        self._streams.forget_routes()
        for bound in instruction.executors:
            peer = self._peers.by_id.get(bound.peer)
            if peer is not None:
                peer.label = f"executor of host {bound.host} ({bound.name})"
                self._peers.bind(bound.host, peer)
                self._peers.send(bound.peer, msg.Bind(bound.host, self._topology, addresses))

    def _perform_lose_peers(self, instruction: ins.LosePeers) -> None:
        self._peers.send_to_all(instruction.peers, msg.PeersLost(instruction.lost))

    def _perform_replace_peer(self, instruction: ins.ReplacePeer) -> None:
        self._peers.send_to_all(instruction.peers, msg.PeerReplaced(_address_of(instruction.bound)))

    def _perform_change_host(self, instruction: ins.ChangeHost) -> None:
        state = msg.HostState(instruction.host, instruction.worker, instruction.name, instruction.failure)
        message = msg.HostChanged(state, instruction.change, instruction.may_return, instruction.retained)
        for proxy in self._peers.proxies():
            proxy.channel.send(message)

    def _perform_start_coordination(self, instruction: ins.StartCoordination) -> None:
        # Not from within: a failure to start is an event, and the core is still being handled.
        self._loop.call_soon(self._coordinators.start, instruction.world, instruction.num_members)

    def _perform_stop_coordination(self, instruction: ins.StopCoordination) -> None:
        self._loop.call_soon(self._coordinators.stop, instruction.world)

    def _perform_form_member(self, instruction: ins.FormMember) -> None:
        self._peers.send(
            instruction.peer,
            msg.FormWorld(
                instruction.world, instruction.coordinator_address, self._host_key, instruction.rank, instruction.hosts
            ),
        )

    def _perform_leave_world(self, instruction: ins.LeaveWorld) -> None:
        self._peers.send_to_all(instruction.peers, msg.LeaveWorld(instruction.world, instruction.failure))

    def _perform_compile_member(self, instruction: ins.CompileMember) -> None:
        message = msg.Compile(
            instruction.session,
            instruction.executable,
            instruction.world,
            instruction.program,
            instruction.options,
            instruction.devices,
            instruction.wants_metadata,
        )
        self._peers.send_to_all(instruction.peers, message)

    def _perform_report_compiled(self, instruction: ins.ReportCompiled) -> None:
        self._peers.send(
            instruction.peer,
            msg.ProgramCompiled(instruction.session, instruction.executable, instruction.metadata, instruction.failure),
        )

    def _perform_accept_session(self, instruction: ins.AcceptSession) -> None:
        hosts = tuple(msg.HostState(b.host, b.worker, b.name, b.failure) for b in instruction.hosts)
        self._peers.send(
            instruction.peer,
            msg.Attached(
                instruction.session,
                self._topology,
                hosts,
                instruction.platform_version,
                instruction.device_kind,
                instruction.max_undispatched,
            ),
        )

    def _perform_open_session(self, instruction: ins.OpenSession) -> None:
        message = msg.OpenSession(instruction.session, instruction.links_address, instruction.change)
        self._peers.send_to_all(instruction.peers, message)

    def _perform_drop_retained(self, instruction: ins.DropRetained) -> None:
        self._peers.send_to_all(instruction.peers, msg.DropRetained())

    def _perform_close_session(self, instruction: ins.CloseSession) -> None:
        self._dispatched.pop(instruction.session, None)
        self._peers.send_to_all(instruction.peers, msg.CloseSession(instruction.session))

    def _perform_end_session(self, instruction: ins.EndSession) -> None:
        self._peers.send(instruction.peer, msg.SessionEnded(instruction.session, instruction.failure))

    def _perform_announce(self, instruction: ins.Announce) -> None:
        logger.info("event=%s %s", instruction.event, " ".join(f"{k}={v!r}" for k, v in instruction.fields.items()))
        self._announcements.write(instruction.event, **instruction.fields)


def _address_of(bound: ins.BoundExecutor) -> msg.PeerAddress:
    return msg.PeerAddress(bound.host, bound.name, bound.data_address, bound.host_key)


def _folder_beside(listen: Sequence[str]) -> Path:
    """Where coordination services have their sockets."""
    for address in listen:
        parsed = addresses.parse(address)
        if isinstance(parsed, addresses.UnixAddress):
            return Path(parsed.path).parent
    raise addresses.AddressError(
        f"{', '.join(listen)}: a controller must listen at a Unix socket too (unix:/path), beside which coordination "
        "services listen"
    )
