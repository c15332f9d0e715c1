"""Control messages: typed values that travel as msgpack in frames (see ``transport.frames``).

Control is small, ordered and batched: one stream per connection, read in order. Array bytes never pass through here;
they go over the session links (``wire.links``) and the data plane (``transport.dataplane``). Frames have no payload,
but for ToChildren and FromChild, whose payload is the header of a frame that a relay passes on.

    proxy       -> controller   Attach, NameHosts, Submit, CompileProgram, HostChangesSeen, Detach, StatusReply
    controller  -> proxy        Attached, Dispatched, ProgramCompiled, OperationFailed, ReadyOnHosts, HostChanged,
                                SessionEnded, StatusRequest
    supervisor  -> controller   RegisterWorker, ExecutorExited, Heartbeat;
                                as a relay: RelayListening, FromChild, ChildClosed, ChildrenAcknowledge, RelayBacklog
    controller  -> supervisor   StartExecutor, StopExecutor, Heartbeat, Shutdown;
                                to a relay: StartRelay, ToChildren, CloseChild
    executor    -> controller   RegisterExecutor, RetainsMemory, Acknowledge, WorldFormed, WorldLeft, Compiled,
                                OperationFailed, StatusReply, Heartbeat; if a relay is between: ReadyHere
    controller  -> executor     Bind, PeersLost, PeerReplaced, FormWorld, LeaveWorld, Compile, OpenSession,
                                CloseSession, DropRetained, Batch, StatusRequest, Shutdown
    any client  -> controller   StatusRequest -> StatusReply (the ``status`` command)

Every connection begins with ``Hello`` from the side that connects; a peer of another ``PROTOCOL_VERSION`` is refused
with ``Refused``.
"""

from typing import Any

import msgspec

from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, Seq, SessionId, WaitId, WorkerId, WorldId
from pathways_runtime.core.status import Status
from pathways_runtime.core.topology import Topology

PROTOCOL_VERSION = 3


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all control messages."""


class Hello(Message, frozen=True, tag="Hello"):
    """First message on every connection. ``role`` is proxy, supervisor, executor or status."""

    role: str
    protocol_version: int
    pid: int


class Refused(Message, frozen=True, tag="Refused"):
    """The connection is closed after this; ``reason`` is for the log of the one who connected."""

    reason: str


# proxy <-> controller


class Attach(Message, frozen=True, tag="Attach"):
    """Open a session. ``links_address`` is where executors connect to this proxy (see wire.links)."""

    client_name: str
    client_pid: int
    links_address: str


class HostState(msgspec.Struct, frozen=True, array_like=True):
    """What stands behind a virtual host. ``worker`` is None while nothing does; ``failure`` then says why."""

    host: HostIndex
    worker: WorkerId | None
    name: str
    failure: Status | None = None


class Attached(Message, frozen=True, tag="Attached"):
    """The session is open; operations may be submitted at once, links come up behind."""

    session: SessionId
    topology: Topology
    hosts: tuple[HostState, ...]
    platform_version: str
    device_kind: str
    max_undispatched: int


class Submit(Message, frozen=True, tag="Submit"):
    """One operation to be put in the order.

    Attributes:
        body: the encoded ``core.operations.Operation``; the controller does not look inside.
        is_launch: counts against the credits of its workers.
        hosts: who takes part; ascending. Empty if ``host_set`` says it.
        reads, writes: handles, for the order among operations that are not dispatched yet.
        consumes: handles that nobody may read after this operation (deleted or donated).
        after_transfers: op ids of transfers that must be under way before this one is dispatched.
        senders: of a transfer, the hosts whose bytes another host waits for: each says ``transfers_started`` once.
            Empty when nothing leaves its host; such a transfer is under way as soon as it is dispatched.
        host_set: a number that ``NameHosts`` gave to who takes part; 0 if ``hosts`` says it.
    """

    session: SessionId
    op_id: OpId
    is_launch: bool
    hosts: tuple[HostIndex, ...]
    reads: tuple[Handle, ...]
    writes: tuple[Handle, ...]
    consumes: tuple[Handle, ...]
    after_transfers: tuple[OpId, ...]
    is_transfer: bool
    body: msgspec.Raw
    senders: tuple[HostIndex, ...] = ()
    host_set: int = 0


class NameHosts(Message, frozen=True, tag="NameHosts"):
    """``number`` (1, 2, ...) stands for ``hosts`` in later Submits of this connection: a large set is sent once."""

    number: int
    hosts: tuple[HostIndex, ...]


class SubmitBatch(Message, frozen=True, tag="SubmitBatch"):
    """Submits in session order."""

    submits: tuple[Submit, ...]


class Dispatched(Message, frozen=True, tag="Dispatched"):
    """``count`` more operations of the session have been dispatched since the last such message."""

    session: SessionId
    count: int


class CompileProgram(Message, frozen=True, tag="CompileProgram"):
    """Compile and load a program on all hosts of ``devices``.

    Attributes:
        program: an XlaProgram's bytes (VHLO artifact), as the client sent it.
        options: serialized ``xla.CompileOptionsProto`` as the client sent it; device ids in it are virtual.
        devices: the device assignment, computation-major, flattened in IFRT order.
    """

    session: SessionId
    executable: Handle
    program: bytes
    options: bytes
    devices: tuple[DeviceId, ...]


class ProgramMetadata(msgspec.Struct, frozen=True, array_like=True):
    """What a compiled program says of itself; protobufs stay serialized, the front end passes them on.

    Attributes:
        name: the module's name.
        parameter_shardings, output_shardings: serialized ``xla.OpSharding`` per parameter and output; None where XLA
            gives none.
        parameter_layouts, output_layouts: minor-to-major per parameter and output.
        parameter_memory_kinds, output_memory_kinds: one name per parameter and output.
        output_dtypes: IFRT kinds. output_shapes: global shapes.
        donated_inputs: parameter positions whose buffers the program takes.
        memory_stats: field name of ``xla.CompiledMemoryStatsProto`` to bytes.
        cost_analysis: as PJRT gives it.
        text: optimized HLO as text.
    """

    name: str
    fingerprint: bytes
    parameter_shardings: tuple[bytes, ...] | None
    output_shardings: tuple[bytes, ...] | None
    parameter_layouts: tuple[tuple[int, ...], ...]
    output_layouts: tuple[tuple[int, ...], ...]
    output_memory_kinds: tuple[str, ...]
    output_dtypes: tuple[int, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    donated_inputs: tuple[int, ...]
    memory_stats: dict[str, int]
    generated_code_bytes: int
    cost_analysis: dict[str, float]
    text: str


class ProgramCompiled(Message, frozen=True, tag="ProgramCompiled"):
    """The answer to CompileProgram: loaded everywhere with ``metadata``, or ``failure``."""

    session: SessionId
    executable: Handle
    metadata: ProgramMetadata | None
    failure: Status | None


class OperationFailed(Message, frozen=True, tag="OperationFailed"):
    """An operation failed on a worker; ``handles`` carry ``failure`` from now on. Executor to controller to proxy."""

    session: SessionId
    op_id: OpId
    handles: tuple[Handle, ...]
    failure: Status


class ReadyOnHosts(Message, frozen=True, tag="ReadyOnHosts"):
    """The parts of these hosts of an Await are done, without a failure.

    Stands for ``wire.links.ArraysReady`` of executors behind relays; what failed comes over their links all the same.
    """

    session: SessionId
    wait_id: WaitId
    hosts: tuple[HostIndex, ...]


class HostChanged(Message, frozen=True, tag="HostChanged"):
    """What stands behind a virtual host changed; what it held before is lost. ``change`` numbers these, from 1.

    Attributes:
        may_return: of a loss: arrays in the host's memory may be there again when its next executor is.
        retained: of whoever serves now: which are, by session.
    """

    state: HostState
    change: int
    may_return: bool = False
    retained: tuple[tuple[SessionId, tuple[Handle, ...]], ...] = ()


class HostChangesSeen(Message, frozen=True, tag="HostChangesSeen"):
    """What the proxy sends from now on, it sends knowing of the changes of hosts up to ``change``."""

    change: int


class Detach(Message, frozen=True, tag="Detach"):
    """The client is gone; everything of the session may be freed."""

    session: SessionId


class SessionEnded(Message, frozen=True, tag="SessionEnded"):
    """Everything of the session has been freed (``failure`` is None), or it was ended by the controller."""

    session: SessionId
    failure: Status | None


# supervisor <-> controller


class RegisterWorker(Message, frozen=True, tag="RegisterWorker"):
    """A supervisor is there. ``name`` is the host's name for people (``host-3``, a Slurm node name), ``companion`` what
    people call the job that lends it (``job 123``), empty for the run's own."""

    worker: WorkerId
    name: str
    pid: int
    devices_per_host: int
    companion: str = ""


class WorkerLeaves(Message, frozen=True, tag="WorkerLeaves"):
    """A worker that was lent ends now, and will not be back."""

    reason: str


class StartExecutor(Message, frozen=True, tag="StartExecutor"):
    """Start an executor; ``epoch`` comes back in its RegisterExecutor.

    ``relay_address`` is where it connects, the controller's own address if empty.
    """

    epoch: int
    relay_address: str = ""


class ExecutorExited(Message, frozen=True, tag="ExecutorExited"):
    """The executor of ``epoch`` ended; ``returncode`` is negative for a signal. ``log_tail`` are its last lines."""

    worker: WorkerId
    epoch: int
    returncode: int
    log_tail: str


class StopExecutor(Message, frozen=True, tag="StopExecutor"):
    """Kill the executor of ``epoch`` if it still runs."""

    epoch: int


class Heartbeat(Message, frozen=True, tag="Heartbeat"):
    """Alive. Sent by supervisors and executors every second; the controller sends those of supervisors back."""

    sent_ns: int


class Shutdown(Message, frozen=True, tag="Shutdown"):
    """End in good order."""

    reason: str


# relay <-> controller: a supervisor that passes on what other executors and the controller say to each other


class StartRelay(Message, frozen=True, tag="StartRelay"):
    """Listen for executors. Each that connects is a *child*; the relay numbers them from 0 and reuses no number."""


class RelayListening(Message, frozen=True, tag="RelayListening"):
    """The answer to StartRelay."""

    address: str


class ToChildren(Message, frozen=True, tag="ToChildren"):
    """Pass a frame on to some children. Payload: the frame's header. Children that are gone are passed over.

    ``children`` is a bitmap, see ``core.bitmaps``.
    """

    children: bytes


class FromChild(Message, frozen=True, tag="FromChild"):
    """What a child says, other than Acknowledge and ReadyHere. Payload: the header of its frame.

    A number that was not seen before is a new connection.
    """

    child: int


class ChildClosed(Message, frozen=True, tag="ChildClosed"):
    """A child's connection is gone; what it said and started has been told before."""

    child: int
    reason: str


class CloseChild(Message, frozen=True, tag="CloseChild"):
    """Close a child's connection once it has been sent what was meant for it."""

    child: int


class ChildrenAcknowledge(Message, frozen=True, tag="ChildrenAcknowledge"):
    """Progress of children, added up; see ``core.relay.Aggregate`` for the fields."""

    completed: tuple[tuple[bytes, int], ...]
    transfers_started: tuple[tuple[SessionId, OpId, bytes], ...]
    ready: tuple[tuple[SessionId, WaitId, bytes], ...]


class RelayBacklog(Message, frozen=True, tag="RelayBacklog"):
    """How much the slowest child has not taken yet. Said when it has changed much."""

    unsent_bytes: int


# executor <-> controller


class RegisterExecutor(Message, frozen=True, tag="RegisterExecutor"):
    """An executor is ready for work.

    ``data_address`` is where other executors reach its data plane; ``host_key`` equals that of another executor if and
    only if they can share memory. ``retained`` are the arrays that the executor before it has left whole in host
    memory, by session; ``retained_host`` is the virtual host that it stood behind, None if there are none.
    """

    worker: WorkerId
    epoch: int
    pid: int
    data_address: str
    host_key: str
    platform: str
    platform_version: str
    device_kind: str
    num_devices: int
    retained_host: HostIndex | None = None
    retained: tuple[tuple[SessionId, tuple[Handle, ...]], ...] = ()


class RetainsMemory(Message, frozen=True, tag="RetainsMemory"):
    """Whether arrays are in memory of this worker that outlives its executor; sent when that changes."""

    worker: WorkerId
    is_used: bool


class PeerAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where the executor behind a virtual host is reached."""

    host: HostIndex
    name: str
    data_address: str
    host_key: str


class Bind(Message, frozen=True, tag="Bind"):
    """This executor stands behind ``host`` of ``topology``; ``peers`` are all bound executors, itself too."""

    host: HostIndex
    topology: Topology
    peers: tuple[PeerAddress, ...]


class PeersLost(Message, frozen=True, tag="PeersLost"):
    """The executors behind some hosts are lost, and why: nothing more will come from them, or reach them."""

    lost: tuple[tuple[HostIndex, Status], ...]


class PeerReplaced(Message, frozen=True, tag="PeerReplaced"):
    """Another executor stands behind a host that was lost."""

    peer: PeerAddress


class FormWorld(Message, frozen=True, tag="FormWorld"):
    """Make a PJRT client that is member ``rank`` of a world whose members are ``hosts`` in rank order.

    ``coordinator_address`` is empty in a world of one. ``coordinator_host_key`` is that of the service's host.
    """

    world: WorldId
    coordinator_address: str
    coordinator_host_key: str
    rank: int
    hosts: tuple[HostIndex, ...]


class WorldFormed(Message, frozen=True, tag="WorldFormed"):
    """The answer to FormWorld."""

    worker: WorkerId
    world: WorldId
    failure: Status | None


class LeaveWorld(Message, frozen=True, tag="LeaveWorld"):
    """A world is over for ``failure``. Free whoever waits in it for another member, then say WorldLeft.

    May come while the world is being formed here.
    """

    world: WorldId
    failure: Status


class WorldLeft(Message, frozen=True, tag="WorldLeft"):
    """The answer to LeaveWorld: the world's coordination service is not needed here any more."""

    worker: WorkerId
    world: WorldId


class Compile(Message, frozen=True, tag="Compile"):
    """Compile (or load from the cache) a program in a world, off the dispatch thread.

    ``wants_metadata`` is set for the first host, which compiles and fills the cache; the others are asked once it is
    done.
    """

    session: SessionId
    executable: Handle
    world: WorldId
    program: bytes
    options: bytes
    devices: tuple[DeviceId, ...]
    wants_metadata: bool


class Compiled(Message, frozen=True, tag="Compiled"):
    """The answer to Compile. ``from_cache`` and ``took_s`` are for the log and ``status``."""

    worker: WorkerId
    session: SessionId
    executable: Handle
    metadata: ProgramMetadata | None
    failure: Status | None
    from_cache: bool
    took_s: float


class DropRetained(Message, frozen=True, tag="DropRetained"):
    """What an executor before this one has left in host memory, and no session that is open has, nobody needs."""


class OpenSession(Message, frozen=True, tag="OpenSession"):
    """Connect a link to the session's proxy. Comes before the session's first operation.

    There were ``change`` changes of hosts before that, which LinkHello passes on.
    """

    session: SessionId
    links_address: str
    change: int


class CloseSession(Message, frozen=True, tag="CloseSession"):
    """Drop everything of the session: arrays, executables, waits, link."""

    session: SessionId


class Sequenced(msgspec.Struct, frozen=True, array_like=True):
    """An operation with its place in the order. ``body`` is the encoded operation."""

    seq: Seq
    session: SessionId
    body: msgspec.Raw


class Batch(Message, frozen=True, tag="Batch"):
    """Operations for one worker, by increasing seq."""

    operations: tuple[Sequenced, ...]


class Acknowledge(Message, frozen=True, tag="Acknowledge"):
    """Progress of one executor, batched.

    Attributes:
        launches_completed: launches that have finished (also those that failed) since the last such message.
        transfers_started: (session, op id) of transfers whose bytes this host sends and whose sources are now ready
            here.
    """

    worker: WorkerId
    launches_completed: int
    transfers_started: tuple[tuple[SessionId, OpId], ...]


class ReadyHere(Message, frozen=True, tag="ReadyHere"):
    """This host's part of an Await is done, without a failure. Only to a relay, which tells of many at once."""

    session: SessionId
    wait_id: WaitId


# status


class StatusRequest(Message, frozen=True, tag="StatusRequest"):
    """Ask for a report. ``request`` comes back in the reply."""

    request: int


class StatusReply(Message, frozen=True, tag="StatusReply"):
    """A report as plain JSON-able values; see docs/status.md for its schema."""

    request: int
    report: dict[str, Any]


AnyMessage = (
    Hello
    | Refused
    | Attach
    | Attached
    | NameHosts
    | Submit
    | SubmitBatch
    | Dispatched
    | CompileProgram
    | ProgramCompiled
    | OperationFailed
    | ReadyOnHosts
    | HostChanged
    | HostChangesSeen
    | Detach
    | SessionEnded
    | RegisterWorker
    | WorkerLeaves
    | StartExecutor
    | ExecutorExited
    | StopExecutor
    | Heartbeat
    | Shutdown
    | StartRelay
    | RelayListening
    | ToChildren
    | FromChild
    | ChildClosed
    | CloseChild
    | ChildrenAcknowledge
    | RelayBacklog
    | RegisterExecutor
    | RetainsMemory
    | Bind
    | PeersLost
    | PeerReplaced
    | FormWorld
    | WorldFormed
    | LeaveWorld
    | WorldLeft
    | Compile
    | Compiled
    | DropRetained
    | OpenSession
    | CloseSession
    | Batch
    | Acknowledge
    | ReadyHere
    | StatusRequest
    | StatusReply
)
