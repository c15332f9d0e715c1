"""What happens to the controller. ``now_ns`` is read from one monotonic clock for all events of a core."""

from collections.abc import Sequence
from typing import Any, NewType, Protocol

import msgspec

from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, SessionId, WaitId, WorkerId, WorldId
from pathways_runtime.core.status import Status

#: One connection to the controller, numbered by the shell and never reused.
PeerId = NewType("PeerId", int)


class Submission(Protocol):
    """An operation as a session submits it; ``wire.messages.Submit`` is one, and says what the fields mean.

    The order passes submissions on as they are and looks only at these fields.
    """

    @property
    def session(self) -> SessionId: ...
    @property
    def op_id(self) -> OpId: ...
    @property
    def is_launch(self) -> bool: ...
    @property
    def is_transfer(self) -> bool: ...
    @property
    def hosts(self) -> tuple[HostIndex, ...]: ...
    @property
    def host_set(self) -> int: ...
    @property
    def senders(self) -> tuple[HostIndex, ...]: ...
    @property
    def reads(self) -> tuple[Handle, ...]: ...
    @property
    def writes(self) -> tuple[Handle, ...]: ...
    @property
    def consumes(self) -> tuple[Handle, ...]: ...
    @property
    def after_transfers(self) -> tuple[OpId, ...]: ...


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""


class PeerEvent(Event, frozen=True):
    """Base of what comes over the connection ``peer``."""

    peer: PeerId


class Started(Event, frozen=True):
    """First of all. ``wall_clock_s`` (since the epoch) is the time of day at ``now_ns``, for messages to people."""

    now_ns: int
    wall_clock_s: float


class TimePassed(Event, frozen=True):
    """Comes regularly, at least ten times per heartbeat timeout."""

    now_ns: int


# workers


class WorkerRegistered(PeerEvent, frozen=True):
    """A supervisor has introduced itself on connection ``peer``; see ``wire.messages.RegisterWorker``."""

    worker: WorkerId
    name: str
    pid: int
    devices_per_host: int
    now_ns: int
    companion: str = ""


class WorkerLeaving(PeerEvent, frozen=True):
    """The supervisor on ``peer`` says that its worker, which was lent, ends and will not be back."""

    reason: str
    now_ns: int


class ExecutorRegistered(PeerEvent, frozen=True):
    """An executor has introduced itself on connection ``peer``; see ``wire.messages.RegisterExecutor``.

    If ``relay`` is set, the connection is one that the supervisor there, a relay, has accepted as its ``child``.
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
    now_ns: int
    relay: PeerId | None = None
    child: int = 0
    retained_host: HostIndex | None = None
    retained: tuple[tuple[SessionId, tuple[Handle, ...]], ...] = ()


class MemoryRetained(PeerEvent, frozen=True):
    """Whether arrays are in memory of the executor's worker that outlives the executor has changed."""

    is_used: bool


class RelayListening(PeerEvent, frozen=True):
    """The supervisor on ``peer``, which was told to be a relay, listens at ``address``."""

    address: str


class HeartbeatsReceived(Event, frozen=True):
    """The supervisors and executors on these connections live."""

    peers: Sequence[PeerId]
    now_ns: int


class ExecutorExited(Event, frozen=True):
    """A supervisor saw its executor end; ``returncode`` is negative for a signal."""

    worker: WorkerId
    epoch: int
    returncode: int
    log_tail: str
    now_ns: int


class PeerClosed(PeerEvent, frozen=True):
    """A connection is gone, whoever's it was; ``reason`` says how."""

    reason: str
    now_ns: int


# worlds and programs


class CoordinationStarted(Event, frozen=True):
    """The coordination service of a world listens."""

    world: WorldId
    address: str


class CoordinationFailed(Event, frozen=True):
    """The coordination service of a world could not start, or ended by itself."""

    world: WorldId
    reason: str


class MemberFormed(PeerEvent, frozen=True):
    """The executor on ``peer`` has made its PJRT client of a world, or failed to."""

    world: WorldId
    failure: Status | None
    now_ns: int


class MemberLeft(PeerEvent, frozen=True):
    """The executor on ``peer`` needs the coordination service of a world no more."""

    world: WorldId


class ProgramRequested(PeerEvent, frozen=True):
    """A session wants a program compiled; see ``wire.messages.CompileProgram``."""

    session: SessionId
    executable: Handle
    program: bytes
    options: bytes
    devices: tuple[DeviceId, ...]
    now_ns: int


class MemberCompiled(PeerEvent, frozen=True):
    """The executor on ``peer`` has compiled and loaded a program, or failed to. ``metadata`` is passed on unread."""

    session: SessionId
    executable: Handle
    metadata: Any
    failure: Status | None


# sessions and operations


class SessionRequested(PeerEvent, frozen=True):
    """A proxy wants a session."""

    client_name: str
    client_pid: int
    links_address: str
    now_ns: int


class SessionDetached(PeerEvent, frozen=True):
    """A proxy says that a session's client is gone."""

    session: SessionId


class HostChangesSeen(PeerEvent, frozen=True):
    """What the proxy on ``peer`` sends from now on, it sends knowing of the changes of hosts up to ``change``."""

    change: int


class HostsNamed(PeerEvent, frozen=True):
    """``number`` stands for ``hosts`` in later submissions of this proxy (``Submission.host_set``)."""

    number: int
    hosts: tuple[HostIndex, ...]


class OperationsSubmitted(PeerEvent, frozen=True, gc=False):
    """Operations of the proxy on ``peer``, each session's in its order."""

    submissions: Sequence[Submission]
    now_ns: int


class Acknowledged(PeerEvent, frozen=True, gc=False):
    """Progress of the executor on ``peer``; see ``wire.messages.Acknowledge``."""

    launches_completed: int
    transfers_started: tuple[tuple[SessionId, OpId], ...]


class ChildrenAcknowledged(PeerEvent, frozen=True, gc=False):
    """Progress of executors behind the relay on ``peer``; see ``core.relay.Aggregate``. Bitmaps are of its children."""

    completed: tuple[tuple[bytes, int], ...]
    transfers_started: tuple[tuple[SessionId, OpId, bytes], ...]
    ready: tuple[tuple[SessionId, WaitId, bytes], ...]


class MemberFailed(PeerEvent, frozen=True):
    """An operation failed on the executor on ``peer``; ``handles`` carry ``failure`` from now on."""

    session: SessionId
    op_id: OpId
    handles: tuple[Handle, ...]
    failure: Status


class ProtocolViolation(Exception):
    """A peer sent what it must not; the shell closes its connection, and the core goes on as if nothing had come."""
