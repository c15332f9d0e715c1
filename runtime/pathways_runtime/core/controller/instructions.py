"""What the controller wants done. The shell performs instructions in order."""

from typing import Any

import msgspec

from pathways_runtime.core.controller.events import PeerId, Submission
from pathways_runtime.core.controller.host_groups import HostGroup
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, Seq, SessionId, WaitId, WorkerId, WorldId
from pathways_runtime.core.operations import Operation
from pathways_runtime.core.status import Status


class Instruction(msgspec.Struct, frozen=True):
    """Base of all instructions."""


# operations


class Dispatch(Instruction, frozen=True, gc=False):
    """Append an operation to the stream of every host of ``group``. ``seq`` grows with each Dispatch and Substitute."""

    seq: Seq
    group: HostGroup
    submission: Submission


class Substitute(Instruction, frozen=True):
    """Like Dispatch, for an operation that the controller makes itself in place of one that cannot run."""

    seq: Seq
    group: HostGroup
    session: SessionId
    operation: Operation


class ReportDispatched(Instruction, frozen=True, gc=False):
    """Tell the proxy on ``peer`` that ``count`` more operations of the session are in the order."""

    peer: PeerId
    session: SessionId
    count: int


class ReportFailed(Instruction, frozen=True):
    """Tell the proxy on ``peer`` that an operation failed."""

    peer: PeerId
    session: SessionId
    op_id: OpId
    handles: tuple[Handle, ...]
    failure: Status


# workers


class StartExecutor(Instruction, frozen=True):
    """Tell the supervisor on ``peer`` to start an executor, which connects to the relay if its address is given."""

    peer: PeerId
    epoch: int
    relay_address: str = ""


class StartRelay(Instruction, frozen=True):
    """Tell the supervisor on ``peer`` to be a relay; RelayListening comes back."""

    peer: PeerId


class StopExecutor(Instruction, frozen=True):
    """Tell the supervisor on ``peer`` to kill an executor if it still runs."""

    peer: PeerId
    epoch: int


class Refuse(Instruction, frozen=True):
    """Send a refusal to ``peer`` and close the connection."""

    peer: PeerId
    reason: str


class BoundExecutor(msgspec.Struct, frozen=True):
    """Which executor stands behind a virtual host, and how others reach it."""

    host: HostIndex
    peer: PeerId
    worker: WorkerId
    name: str
    data_address: str
    host_key: str


class BindExecutors(Instruction, frozen=True):
    """Tell each of these executors its virtual host, and who ``all`` are, itself too."""

    executors: tuple[BoundExecutor, ...]
    all: tuple[BoundExecutor, ...]


class LosePeers(Instruction, frozen=True):
    """Tell these executors that those behind some hosts are lost: nothing more will come from them, or reach them."""

    peers: tuple[PeerId, ...]
    lost: tuple[tuple[HostIndex, Status], ...]


class ReplacePeer(Instruction, frozen=True):
    """Tell these executors that another one stands behind a host that was lost."""

    peers: tuple[PeerId, ...]
    bound: BoundExecutor


class ChangeHost(Instruction, frozen=True):
    """Tell every proxy what now stands behind a virtual host. ``change`` numbers these, from 1.

    Attributes:
        may_return: of a loss: arrays in the host's memory may be there again with its next executor.
        retained: of whoever serves now: which are, by session.
    """

    host: HostIndex
    worker: WorkerId | None
    name: str
    failure: Status | None
    change: int
    may_return: bool = False
    retained: tuple[tuple[SessionId, tuple[Handle, ...]], ...] = ()


class DropRetained(Instruction, frozen=True):
    """Tell executors that what those before them have left in memory, and no open session has, nobody needs."""

    peers: tuple[PeerId, ...]


# worlds and programs


class StartCoordination(Instruction, frozen=True):
    """Start a world's coordination service; CoordinationStarted or CoordinationFailed comes back."""

    world: WorldId
    num_members: int


class LeaveWorld(Instruction, frozen=True):
    """Tell the executors on ``peers`` that a world is over for ``failure``; a MemberLeft comes back from each.

    What they wait for in it ends.
    """

    peers: tuple[PeerId, ...]
    world: WorldId
    failure: Status


class StopCoordination(Instruction, frozen=True):
    """Nobody is left who needs this world's service."""

    world: WorldId


class FormMember(Instruction, frozen=True):
    """Tell the executor on ``peer`` to make its PJRT client of a world; MemberFormed comes back."""

    peer: PeerId
    world: WorldId
    coordinator_address: str
    rank: int
    hosts: tuple[HostIndex, ...]


class CompileMember(Instruction, frozen=True):
    """Tell the executors on ``peers`` to compile and load a program; a MemberCompiled comes back from each."""

    peers: tuple[PeerId, ...]
    session: SessionId
    executable: Handle
    world: WorldId
    program: bytes
    options: bytes
    devices: tuple[DeviceId, ...]
    wants_metadata: bool


class ReportCompiled(Instruction, frozen=True):
    """Tell the proxy on ``peer`` how a compilation ended."""

    peer: PeerId
    session: SessionId
    executable: Handle
    metadata: Any
    failure: Status | None


# sessions


class HostBinding(msgspec.Struct, frozen=True):
    """What stands behind a virtual host at attach; see ``wire.messages.HostState``."""

    host: HostIndex
    worker: WorkerId | None
    name: str
    failure: Status | None


class ReportReady(Instruction, frozen=True):
    """Tell the proxy on ``peer`` on which hosts a wait's arrays are ready."""

    peer: PeerId
    session: SessionId
    wait_id: WaitId
    hosts: tuple[HostIndex, ...]


class AcceptSession(Instruction, frozen=True):
    """Tell the proxy on ``peer`` that its session is open."""

    peer: PeerId
    session: SessionId
    hosts: tuple[HostBinding, ...]
    platform_version: str
    device_kind: str
    max_undispatched: int


class OpenSession(Instruction, frozen=True):
    """Tell the executors on ``peers`` to connect to a session's proxy, before its first operation.

    There were ``change`` changes of hosts before that.
    """

    peers: tuple[PeerId, ...]
    session: SessionId
    links_address: str
    change: int


class CloseSession(Instruction, frozen=True):
    """Tell the executors on ``peers`` to drop everything of a session."""

    peers: tuple[PeerId, ...]
    session: SessionId


class EndSession(Instruction, frozen=True):
    """Tell the proxy on ``peer`` that a session has ended."""

    peer: PeerId
    session: SessionId
    failure: Status | None


class Announce(Instruction, frozen=True):
    """Tell the launcher: one JSON line of ``{"event": event, **fields}``."""

    event: str
    fields: dict[str, Any]
