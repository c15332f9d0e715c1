"""One IFRT session: requests in, answers out, with the session core in between.

``SessionServer`` decodes what the front end brings, keeps the order, feeds the core, and performs its instructions. It
does no I/O of its own: what it is composed with sends.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from google.protobuf.unknown_fields import UnknownFieldSet

from pathways_runtime.core.ids import Handle, HostIndex, RequestId, SessionId
from pathways_runtime.core.session import events, instructions, plugin_programs, requests
from pathways_runtime.core.session.core import SessionCore
from pathways_runtime.core.status import Code, Status, StatusError
from pathways_runtime.proxy import host_buffers
from pathways_runtime.proxy.callback_server import CallbackServer
from pathways_runtime.proxy.controller_link import ControllerLink
from pathways_runtime.proxy.devices import init_response
from pathways_runtime.proxy.folders import Folders
from pathways_runtime.proxy.frontend import Buffer, Connection
from pathways_runtime.proxy.host_buffers import HostBufferStore
from pathways_runtime.proxy.link_server import LinkServer
from pathways_runtime.proxy.session_report import MAX_REPORTED_REQUESTS, OpenRequest, SessionReport, session_report
from pathways_runtime.proxy.upload_gate import UploadGate
from pathways_runtime.wire import links, messages
from pathways_runtime.wire.callbacks import find_functions
from pathways_runtime.wire.ifrt import schema
from pathways_runtime.wire.ifrt.programs import compiled_program
from pathways_runtime.wire.ifrt.requests import decode_request, result_handles, sent_host_buffers
from pathways_runtime.wire.ifrt.responses import encode_error, encode_init, encode_response

logger = logging.getLogger(__name__)

_INIT = "init_request"
#: The client frees user contexts along an unbroken run of sequence numbers, and it does not count the answers to these
#: kinds: it sends some of them in the background and ignores what their answers' metadata say, and the answer to Init
#: comes before it counts. Were they numbered like the others, the run would end at the first of them and the client
#: would keep every context for good, half a kilobyte for each call (seen with jaxlib 0.10.2). So they get a number that
#: the run never reaches, and carry no contexts.
_UNCOUNTED = frozenset({_INIT, "check_future_request", "delete_array_request", "destruct_array_request"})
_NEVER_REACHED = 1 << 62

#: So many requests may queue (behind one that waits for its bytes) before the client's stream is not read on.
_MAX_QUEUED = 4096

# Iterable, whatever its type annotations say.
_unknown_fields: Callable[[Any], Any] = UnknownFieldSet
_encode_operation = msgspec.msgpack.Encoder().encode
_now_s = time.monotonic


class _Open(NamedTuple):
    """A request that is not answered yet."""

    kind: str
    user_context_id: int
    since_s: float


class _Init(NamedTuple):
    """An InitRequest in the queue: the one kind that the core has no part in."""

    request_id: RequestId


#: What says where the bytes of an array are: the request itself, or a part of it.
_Buffer = requests.HostBuffer | requests.MakeArrayFromHostBuffer
_Queued = events.Requested | events.RequestRefused | _Init


class SessionServer:
    """See the module. All methods are called on the event loop.

    Args:
        connection: the client's stream.
        controller, links: where operations and host buffers go.
        callbacks: told which programs have them.
        on_over: called once when the session is over, whoever ended it.
        peer: the client's name in the log.
        folders: where what the client names lies.
    """

    def __init__(
        self,
        connection: Connection,
        controller: ControllerLink,
        session_links: LinkServer,
        callbacks: CallbackServer,
        on_over: "Callable[[SessionServer], None]",
        peer: str,
        folders: Folders,
    ) -> None:
        self._folders = folders
        self._connection = connection
        self._controller = controller
        self._links = session_links
        self._callbacks = callbacks
        self._on_over = on_over
        self.peer = peer
        self.session_id: SessionId | None = None
        self.is_over = False
        self.host_buffers = HostBufferStore()
        self.memory = session_links.memory
        #: The client's streams that bring host buffers.
        self.uploads = UploadGate(self.memory, self._frees_memory, self._missing_buffers)
        self._began_s = _now_s()

        self._attached: messages.Attached | None = None
        self._core: SessionCore | None = None
        # Requests not fed yet, in order: the session is not attached, one before waits for its bytes, or too many
        # operations wait at the controller.
        self._queue: deque[_Queued] = deque()
        # Every request that has arrived and is not answered, queued ones too.
        self._open: dict[RequestId, _Open] = {}
        self._next_seq_num = 0
        self._destroyed_user_contexts: list[int] = []
        # Host buffers of requests that were refused before their bytes came.
        self._unwanted_buffers: set[Handle] = set()
        # The payload of the Fetched that the core is told about.
        self._fetched: Buffer | None = None
        # Why what was fetched could not be stored; the next answer is about it.
        self._unstored: Status | None = None
        self._compiling: dict[Handle, int] = {}
        self._num_undispatched = 0
        # Too many operations wait at the controller: nothing is fed.
        self._is_held_back = False
        # The client's stream is not read.
        self._is_paused = False
        self._num_requests = 0
        self._perform: Mapping[type[instructions.Instruction], Callable[[Any], None]] = {
            instructions.SubmitOperation: self._submit,
            instructions.CompileProgram: self._compile,
            instructions.SendHostBuffer: self._send_host_buffer,
            instructions.DropHostBuffer: self._drop_host_buffer,
            instructions.StoreFetched: self._store_fetched,
            instructions.Respond: self._respond,
            instructions.RespondError: self._respond_error,
        }

    # From the front end

    def request(self, message: bytes) -> None:
        """One IfrtRequest. Bytes that are none end the session."""
        if self.is_over:
            return
        try:
            proto = schema.IfrtRequest.FromString(message)
        except schema.DecodeError:
            self.end(
                Status(Code.INVALID_ARGUMENT, f"{len(message)} bytes that are no IfrtRequest came from the client")
            )
            return
        metadata = proto.request_metadata
        request_id = RequestId(metadata.op_id)
        if request_id in self._open:
            self.end(Status(Code.INVALID_ARGUMENT, f"op id {request_id} came twice"))
            return
        kind = proto.WhichOneof("request") or "unknown"
        self._open[request_id] = _Open(kind, metadata.user_context_id, _now_s())
        self._num_requests += 1
        queued = self._decode(request_id, kind, proto)
        if self._queue or self._core is None or self._is_held_back or not self._take(queued):
            self._queue.append(queued)
            if len(self._queue) > _MAX_QUEUED:
                # Not a deadlock: what the first waits for comes over other streams.
                self._pause_reading()

    def disconnected(self) -> None:
        """The client is gone."""
        if not self.is_over:
            if self._core is not None:
                # Nothing can be answered any more, and the controller frees what the workers hold.
                self._core.handle(events.ClientDisconnected())
            self._finish()

    def store_host_buffer(self, handle: Handle, content: Buffer) -> None:
        """A host buffer has arrived whole.

        Raises:
            StatusError: there is one of this handle.
        """
        if handle in self._unwanted_buffers:
            self._unwanted_buffers.discard(handle)
            return
        self.host_buffers.store(handle, content)
        self._pump()

    # From the controller and the executors

    def attached(self, attached: messages.Attached) -> None:
        """The session is open: requests may be fed."""
        self.session_id = attached.session
        self._attached = attached
        self._core = SessionCore(
            attached.session,
            attached.topology,
            {
                state.host: state.failure or Status(Code.DATA_LOSS, f"no worker stands behind host {state.host}")
                for state in attached.hosts
                if state.worker is None
            },
        )
        self._links.open(attached.session, self._link_message)
        self._pump()

    def control_message(self, message: messages.Message) -> None:
        """A message of the controller about this session, or about a host."""
        if self.is_over:
            return
        match message:
            case messages.Dispatched(count=count):
                self._dispatched(count)
            case messages.ProgramCompiled():
                self._program_compiled(message)
            case messages.OperationFailed(op_id=op_id, handles=handles, failure=failure):
                self._feed(events.OperationFailed(op_id, handles, failure))
            case messages.ReadyOnHosts(wait_id=wait_id, hosts=hosts):
                self._feed(events.ReadyOnHosts(wait_id, hosts))
            case messages.HostChanged(state=state, may_return=may_return, retained=retained):
                mine = next((handles for session, handles in retained if session == self.session_id), ())
                changed = (state.host, state.worker is not None, state.name, state.failure)
                self._feed(events.HostChanged(*changed, may_return, mine))
            case messages.SessionEnded(failure=failure):
                self.end(failure or Status(Code.ABORTED, "the controller ended the session"))
            case _:
                raise TypeError(f"{type(message).__name__} is no message about a session")

    def end(self, status: Status) -> None:
        """End the session from this side: every open request is answered with ``status``, then the stream ends."""
        if self.is_over:
            return
        logger.warning("session_id=%s peer=%s: session ends: %s", self.session_id, self.peer, status)
        for request_id in self._open:
            self._connection.send(encode_error(request_id, status))
        self._finish()
        self._connection.close(status)

    def report(self) -> "SessionReport":
        """What the session is doing, for ``status``."""
        return session_report(
            session_id=self.session_id,
            client=self.peer,
            age_s=_now_s() - self._began_s,
            open_requests=[
                OpenRequest(request_id, opened.kind, _now_s() - opened.since_s)
                for request_id, opened in itertools.islice(self._open.items(), MAX_REPORTED_REQUESTS)
            ],
            queued=[queued.request_id for queued in self._queue],
            missing_buffers=self._missing_buffers(),
            figures={} if self._core is None else self._core.figures(),
            counts={
                "requests": self._num_requests,
                "open_requests": len(self._open),
                "queued_requests": len(self._queue),
                "undispatched_operations": self._num_undispatched,
                "is_held_back": self._is_held_back,
                "host_buffers": len(self.host_buffers),
                "host_buffer_bytes": self.host_buffers.num_bytes,
                "are_uploads_held_back": self.uploads.is_choosing,
            },
        )

    # Requests

    def _decode(self, request_id: RequestId, kind: str, proto: Any) -> _Queued:
        if kind == _INIT:
            return _Init(request_id)
        if kind == "unknown":
            numbers = ", ".join(str(field.field_number) for field in _unknown_fields(proto)) or "none"
            failure = Status(Code.UNIMPLEMENTED, f"an IFRT request of unknown kind (field {numbers}) is not supported")
            return events.RequestRefused(request_id, (), failure)
        body = getattr(proto, kind)
        try:
            request = decode_request(kind, body)
            if type(request) is plugin_programs.CompilePlugin:
                request = self._folders.found(request)
            return events.Requested(request_id, request)
        except StatusError as failure:
            self._unwanted(sent_host_buffers(kind, body))
            return events.RequestRefused(request_id, result_handles(kind, body), failure.status)

    def _pump(self) -> None:
        """Feed what is queued, as far as it goes."""
        while self._queue and self._core is not None and not self._is_held_back and self._take(self._queue[0]):
            # A session that ended meanwhile has cleared it.
            if self._queue:
                self._queue.popleft()
        if self._is_paused and not self._is_held_back and len(self._queue) <= _MAX_QUEUED // 2:
            self._is_paused = False
            self._connection.resume_reading()

    def _frees_memory(self) -> bool:
        return not self.is_over and (
            self._is_held_back or (self.session_id is not None and self._links.unsent_bytes(self.session_id) > 0)
        )

    def _pause_reading(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._connection.pause_reading()

    def _take(self, queued: _Queued) -> bool:
        """Feed one request; False if it must wait for its bytes."""
        if isinstance(queued, _Init):
            self._respond_init(queued.request_id)
            return True
        if type(queued) is events.Requested:
            request = queued.request
            if type(request) is requests.MakeArrayFromHostBuffer:
                if request.host_buffer_handle not in self.host_buffers:
                    return False
                queued = self._checked(queued, (request,), (request.array_handle,))
            elif type(request) is requests.MakeArraysFromHostBufferShards:
                buffers = _buffers_of(request)
                if any(buffer.host_buffer_handle not in self.host_buffers for buffer in buffers):
                    return False
                queued = self._checked(queued, buffers, request.array_handles)
            elif type(request) is requests.LoadedExecutableDestruct and self.session_id is not None:
                self._callbacks.deleted(self.session_id, request.loaded_executable_handle)
        self._feed(queued)
        return True

    def _missing_buffers(self) -> list[Handle]:
        """What the request at the head of the queue waits for."""
        head = self._queue[0] if self._queue else None
        if not isinstance(head, events.Requested):
            return []
        return [
            b.host_buffer_handle for b in _buffers_of(head.request) if b.host_buffer_handle not in self.host_buffers
        ]

    def _checked(
        self,
        requested: events.Requested,
        buffers: tuple[_Buffer, ...],
        handles: tuple[Handle, ...],
    ) -> events.Requested | events.RequestRefused:
        """Refuse a request whose bytes do not hold what it says."""
        try:
            for buffer in buffers:
                content = self.host_buffers.get(buffer.host_buffer_handle)
                host_buffers.check_size(content, buffer.dtype, buffer.shape, buffer.byte_strides)
        except StatusError as failure:
            self._unwanted(tuple(buffer.host_buffer_handle for buffer in buffers))
            return events.RequestRefused(
                requested.request_id, tuple(handle for handle in handles if handle), failure.status
            )
        return requested

    def _unwanted(self, handles: tuple[Handle, ...]) -> None:
        for handle in handles:
            if not self.host_buffers.drop(handle):
                self._unwanted_buffers.add(handle)

    # The core

    def _feed(self, event: events.Event) -> None:
        """Tell the core, and do what it says. A failure in here is a fault of ours and ends this session only."""
        assert self._core is not None, "nothing is fed before the session is attached"
        perform = self._perform
        try:
            for instruction in self._core.handle(event):
                perform[type(instruction)](instruction)
        except Exception as failure:
            logger.exception("session_id=%s: %s could not be handled", self.session_id, type(event).__name__)
            self.end(Status(Code.INTERNAL, f"the proxy failed at {type(event).__name__}: {failure!r}; see its log"))

    def _link_message(self, host: HostIndex, message: links.ArraysReady | links.Fetched, payload: bytearray) -> None:
        if self.is_over:
            return
        if type(message) is links.ArraysReady:
            self._feed(events.ArraysReady(message.wait_id, host, message.failure))
        else:
            self._fetched = payload
            self._feed(events.ShardFetched(message.wait_id, host, message.failure))
            self._fetched = None

    def _program_compiled(self, message: messages.ProgramCompiled) -> None:
        num_devices = self._compiling.pop(message.executable)
        program, failure = None, message.failure
        if message.metadata is not None:
            try:
                program = compiled_program(message.metadata, num_devices)
            except StatusError as refused:
                failure = refused.status
        self._feed(events.ProgramCompiled(message.executable, program, failure))

    def _dispatched(self, count: int) -> None:
        assert self._attached is not None
        self._num_undispatched -= count
        if self._is_held_back and self._num_undispatched <= self._attached.max_undispatched // 2:
            self._is_held_back = False
            self._pump()

    # Instructions

    def _submit(self, instruction: instructions.SubmitOperation) -> None:
        assert self._attached is not None
        operation = instruction.operation
        hosts = instruction.hosts
        host_set = self._controller.name_hosts(hosts)
        self._controller.submit(
            messages.Submit(
                self._attached.session,
                operation.op_id,
                instruction.is_launch,
                () if host_set else hosts,
                instruction.reads,
                instruction.writes,
                instruction.consumes,
                instruction.after_transfers,
                instruction.is_transfer,
                msgspec.Raw(_encode_operation(operation)),
                instruction.senders,
                host_set,
            )
        )
        self._num_undispatched += 1
        if self._num_undispatched > self._attached.max_undispatched and not self._is_held_back:
            self._is_held_back = True
            self._pause_reading()

    def _compile(self, instruction: instructions.CompileProgram) -> None:
        assert self._attached is not None
        self._compiling[instruction.executable] = len(instruction.devices)
        if (functions := find_functions(instruction.program)) is not None:
            self._callbacks.compiles(self._attached.session, instruction.executable, functions)
        self._controller.send(
            messages.CompileProgram(
                self._attached.session,
                instruction.executable,
                instruction.program,
                instruction.options,
                instruction.devices,
            )
        )

    def _send_host_buffer(self, instruction: instructions.SendHostBuffer) -> None:
        assert self._attached is not None
        payload = host_buffers.read_part(
            self.host_buffers.get(instruction.host_buffer_handle),
            instruction.dtype,
            instruction.shape,
            instruction.byte_strides,
            instruction.box,
            instruction.sent_shape,
        )
        header = links.HostBuffer(instruction.op_id, instruction.index)
        for host in instruction.hosts:
            self._links.send(self._attached.session, host, header, payload)

    def _drop_host_buffer(self, instruction: instructions.DropHostBuffer) -> None:
        self.host_buffers.drop(instruction.host_buffer_handle)

    def _store_fetched(self, instruction: instructions.StoreFetched) -> None:
        assert self._fetched is not None, "StoreFetched is an answer to ShardFetched"
        try:
            content = host_buffers.lay_out(
                self._fetched, instruction.dtype, instruction.shape, instruction.byte_strides
            )
            self.host_buffers.store(instruction.host_buffer_handle, content)
        except StatusError as failure:
            # The client's mistake (a handle or strides that cannot be); the answer comes next and must say so.
            self._unstored = failure.status

    def _respond(self, instruction: instructions.Respond) -> None:
        if self._unstored is not None:
            failure, self._unstored = self._unstored, None
            self._respond_error(instructions.RespondError(instruction.request_id, failure))
            return
        request_id = instruction.request_id
        opened = self._open.pop(request_id)
        if opened.user_context_id:
            self._destroyed_user_contexts.append(opened.user_context_id)
        if opened.kind in _UNCOUNTED:
            message = encode_response(opened.kind, request_id, instruction.response, _NEVER_REACHED)
        else:
            message = encode_response(
                opened.kind, request_id, instruction.response, self._next_seq_num, self._destroyed_user_contexts
            )
            self._next_seq_num += 1
            self._destroyed_user_contexts.clear()
        self._connection.send(message)

    def _respond_error(self, instruction: instructions.RespondError) -> None:
        opened = self._open.pop(instruction.request_id)
        # Error answers have no place for it: the next one that is counted tells.
        if opened.user_context_id:
            self._destroyed_user_contexts.append(opened.user_context_id)
        self._connection.send(encode_error(instruction.request_id, instruction.status))

    def _respond_init(self, request_id: RequestId) -> None:
        assert self._attached is not None
        opened = self._open.pop(request_id)
        if opened.user_context_id:
            self._destroyed_user_contexts.append(opened.user_context_id)
        self._connection.send(encode_init(request_id, init_response(self._attached), _NEVER_REACHED))

    def _finish(self) -> None:
        self.is_over = True
        self._queue.clear()
        self._open.clear()
        if self.session_id is not None:
            self._links.close(self.session_id)
        self._on_over(self)


def _buffers_of(request: requests.Request) -> tuple[_Buffer, ...]:
    match request:
        case requests.MakeArrayFromHostBuffer():
            return (request,)
        case requests.MakeArraysFromHostBufferShards(specs=specs):
            return tuple(buffer for spec in specs for buffer in spec.host_buffers)
        case _:
            return ()
