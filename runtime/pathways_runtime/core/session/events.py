"""What the proxy's shell feeds to SessionCore: what has happened, in the past tense."""

from typing import Any

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import Handle, HostIndex, OpId, RequestId, WaitId
from pathways_runtime.core.session.requests import Request
from pathways_runtime.core.sharding import Shape, TileAssignment
from pathways_runtime.core.status import Status


class Event(msgspec.Struct, frozen=True, gc=False):
    """Base of all events."""


class Requested(Event, frozen=True):
    """The client asks for something. Requests are fed in the order of arrival.

    A request that names host buffers is fed once their bytes are complete in the shell; those behind it wait.
    """

    request_id: RequestId
    request: Request


class RequestRefused(Event, frozen=True):
    """The shell cannot hand a request over: it does not decode, or it is of a kind that has no value here.

    The core answers it with ``failure`` (RespondError), and the handles that the client has minted for its results
    carry ``failure`` from now on.
    """

    request_id: RequestId
    result_handles: tuple[Handle, ...]
    failure: Status


class ProgramOutput(msgspec.Struct, frozen=True, gc=False):
    """One output of a program: global shape, tiling over the executable's devices (in their order), memory."""

    dtype: DType
    shape: Shape
    tiles: TileAssignment
    memory_kind: str | None


class CompiledProgram(msgspec.Struct, frozen=True):
    """What the core needs to know of a compiled program.

    Attributes:
        num_parameters: None if unknown; executions with another number of arguments are refused.
        donated_inputs: parameter positions whose buffers the program takes.
        metadata: for the front end; the core hands it back in ``responses.ExecutableMetadata``.
    """

    name: str
    fingerprint: bytes
    outputs: tuple[ProgramOutput, ...]
    donated_inputs: tuple[int, ...] = ()
    num_parameters: int | None = None
    cost_analysis: dict[str, float] = {}
    text: str = ""
    metadata: Any = None


class ProgramCompiled(Event, frozen=True):
    """The answer to instructions.CompileProgram.

    ``program`` with no ``failure``: loaded on all its hosts. ``failure`` alone: it cannot be compiled. Both: what the
    program is like is known, but it is not loaded (a host is lost), and executions poison their outputs with it.
    """

    executable: Handle
    program: CompiledProgram | None
    failure: Status | None


class OperationFailed(Event, frozen=True):
    """An operation failed on a worker; ``handles`` carry ``failure`` from now on. Handles that are gone are ignored."""

    op_id: OpId
    handles: tuple[Handle, ...]
    failure: Status


class ArraysReady(Event, frozen=True):
    """One host's part of an Await is done; ``failure`` is the first among its arrays."""

    wait_id: WaitId
    host: HostIndex
    failure: Status | None


class ReadyOnHosts(Event, frozen=True):
    """The parts of several hosts of an Await are done, without a failure."""

    wait_id: WaitId
    hosts: tuple[HostIndex, ...]


class ShardFetched(Event, frozen=True):
    """The answer to a Fetch. The bytes stay in the shell; it keeps them if it is told to at once (StoreFetched)."""

    wait_id: WaitId
    host: HostIndex
    failure: Status | None


class HostChanged(Event, frozen=True):
    """What stands behind a virtual host changed; what it held before is lost.

    Attributes:
        is_bound: whether a worker stands behind it now.
        name: the host's name for people.
        failure: why the former worker is gone.
        may_return: of a loss: arrays in the host's memory may be there again once somebody stands behind it.
        retained: of whoever does now: which of this session's are.
    """

    host: HostIndex
    is_bound: bool
    name: str
    failure: Status | None
    may_return: bool = False
    retained: tuple[Handle, ...] = ()


class ClientDisconnected(Event, frozen=True):
    """The client is gone. Nothing is answered any more; the controller frees what is on the workers (Detach)."""
