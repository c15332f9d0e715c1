"""A client, its proxy's session core, and what it expects of every value."""

import functools
import random
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from pathways_runtime.core.controller.instructions import ChangeHost
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, RequestId, SessionId, WaitId
from pathways_runtime.core.operations import Operation
from pathways_runtime.core.session import events as sev
from pathways_runtime.core.session import instructions as sins
from pathways_runtime.core.session import requests, responses
from pathways_runtime.core.session.core import SessionCore
from pathways_runtime.core.sharding import Sharding, TileAssignment, TileKind
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.simulated_executor import PROGRAM_FACTORS, WITHOUT_RESULT, SimulatedExecutor
from pathways_runtime.testing.simulated_network import Process
from pathways_runtime.testing.simulated_worlds import MODULUS

Mesh = tuple[DeviceId, ...]

#: Failures that a client may see, and only of what had a part on a lost host.
_LOSS_CODES = (Code.DATA_LOSS, Code.INTERNAL)


class SimulatedSubmit(msgspec.Struct, frozen=True):
    """``wire.messages.Submit`` with the operation itself in place of its bytes."""

    session: SessionId
    op_id: OpId
    is_launch: bool
    is_transfer: bool
    hosts: tuple[HostIndex, ...]
    senders: tuple[HostIndex, ...]
    reads: tuple[Handle, ...]
    writes: tuple[Handle, ...]
    consumes: tuple[Handle, ...]
    after_transfers: tuple[OpId, ...]
    operation: Operation
    host_set: int = 0

    @classmethod
    def of(cls, session: SessionId, told: sins.SubmitOperation) -> "SimulatedSubmit":
        """What a proxy makes of its session core's instruction."""
        return cls(
            session,
            told.operation.op_id,
            told.is_launch,
            told.is_transfer,
            told.hosts,
            told.senders,
            told.reads,
            told.writes,
            told.consumes,
            told.after_transfers,
            told.operation,
        )


class WrongValue(AssertionError):
    """A value is not what the client's program means."""


class ControllerSide(Protocol):
    """What a proxy can do to the rest of the cluster."""

    def submit(self, client: "SimulatedClient", submit: SimulatedSubmit) -> None: ...
    def compile(self, client: "SimulatedClient", told: sins.CompileProgram) -> None: ...
    def see_changes(self, client: "SimulatedClient", change: int) -> None: ...
    def detach(self, client: "SimulatedClient") -> None: ...
    def send_host_buffer(
        self, client: "SimulatedClient", executor: SimulatedExecutor, op_id: OpId, index: int, value: int
    ) -> None: ...


class ClientArray(msgspec.Struct):
    """An array of one integer per device of ``mesh``, and what these must be."""

    handle: Handle
    mesh: Mesh
    values: list[int]


class _Links:
    """The session links of executors, by host, as ``proxy.link_server`` keeps them."""

    def __init__(self) -> None:
        self._links: dict[HostIndex, tuple[SimulatedExecutor, int]] = {}
        self._lost_at: dict[HostIndex, int] = {}
        self._waiting: dict[HostIndex, list[Callable[[SimulatedExecutor], None]]] = {}

    def open(self, executor: SimulatedExecutor, change: int) -> None:
        host = executor.host
        if change >= self._lost_at.get(host, 0):
            self._links[host] = (executor, change)
            for send in self._waiting.pop(host, ()):
                send(executor)

    def forget_host(self, host: HostIndex, change: int) -> None:
        self._lost_at[host] = change
        self._waiting.pop(host, None)
        if host in self._links and self._links[host][1] < change:
            del self._links[host]

    def is_open(self, executor: SimulatedExecutor) -> bool:
        link = self._links.get(executor.host)
        return link is not None and link[0] is executor

    def send(self, host: HostIndex, send: Callable[[SimulatedExecutor], None]) -> None:
        link = self._links.get(host)
        if link is None:
            self._waiting.setdefault(host, []).append(send)
        else:
            send(link[0])

    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))


class SimulatedClient(Process):
    """Runs F and G on arrays, copies them between meshes, deletes them, and fetches shards to compare them.

    Attributes:
        num_checked: shards that were fetched and were right.
        failures: what was answered in place of values, after a host was lost.
    """

    def __init__(self, name: str, topology: Topology, rng: random.Random, controller: ControllerSide) -> None:
        super().__init__(name, f"node-of-{name}")
        self.session = SessionId(0)
        self.is_detached = False
        self.num_undispatched = 0
        self.max_undispatched = 0
        self.num_checked = 0
        self.failures: list[Status] = []
        self.open_requests: dict[RequestId, tuple[str, Callable[[responses.Response | Status], None]]] = {}
        self._topology = topology
        self._rng = rng
        self._controller = controller
        self._core: SessionCore | None = None
        self._links = _Links()
        self._last_request = 0
        self._last_handle = 0
        self._stored: dict[Handle, int] = {}
        self._fetched: int | None = None
        self._programs: dict[tuple[bytes, Mesh], Handle] = {}
        self._compiling: dict[Handle, bytes] = {}
        self._failed: set[Handle] = set()

    def attached(
        self, session: SessionId, max_undispatched: int, losses: Mapping[HostIndex, Status | None] | None = None
    ) -> None:
        """The controller has opened the session."""
        self.session, self.max_undispatched = session, max_undispatched
        self._core = SessionCore(session, self._topology, losses)

    # what a program does

    def compile(self, program: bytes, mesh: Mesh, on_done: Callable[[], None]) -> None:
        """Compile a program for a mesh."""

        def answered(response: responses.Response | Status) -> None:
            if isinstance(response, responses.Compiled):
                self._programs[program, mesh] = response.loaded_executable_handle
            else:
                self._note_failure(response)
            on_done()

        self._ask(f"compile {program!r}", requests.Compile(program, b"", mesh), answered)

    def has_program(self, program: bytes, mesh: Mesh) -> bool:
        """Whether it was compiled for a mesh."""
        return (program, mesh) in self._programs

    def make_array(self, mesh: Mesh) -> ClientArray:
        """An array of random integers."""
        array = ClientArray(self._new_handle(), mesh, [self._rng.randrange(MODULUS) for _ in mesh])
        buffers = []
        for value in array.values:
            buffer = self._new_handle()
            self._stored[buffer] = value
            buffers.append(requests.HostBuffer(DType.S32, (1,), buffer))
        spec = requests.ArraySpec(DType.S32, (len(mesh),), _over(mesh))
        shards = requests.HostBufferShards(spec, tuple(buffers), tuple((place,) for place in range(len(mesh))))
        self._ask_at_once(requests.MakeArraysFromHostBufferShards((shards,), (array.handle,)))
        return array

    def run_program(self, program: bytes, array: ClientArray) -> ClientArray:
        """Run a program on an array; the result is on the same mesh."""
        executable = self._programs[program, array.mesh]
        result = PROGRAM_FACTORS[program] * sum(array.values) % MODULUS
        output = ClientArray(self._new_handle(), array.mesh, [result] * len(array.mesh))
        self._ask_at_once(requests.LoadedExecutableExecute(executable, (array.handle,), (output.handle,)))
        return output

    def run_for_effect(self, array: ClientArray) -> None:
        """Run the program without a result on an array."""
        self._ask_at_once(requests.LoadedExecutableExecute(self._programs[WITHOUT_RESULT, array.mesh], (array.handle,)))

    def copy(self, array: ClientArray, mesh: Mesh) -> ClientArray:
        """A copy of an array on another mesh of the same size."""
        copied = ClientArray(self._new_handle(), mesh, list(array.values))
        copies = requests.ArrayCopySemantics.ALWAYS_COPY
        self._ask_at_once(requests.CopyArrays((array.handle,), mesh, None, copies, (copied.handle,)))
        return copied

    def delete(self, array: ClientArray) -> None:
        """Give an array up; what uses it already still does."""
        self._ask_at_once(requests.DestructArray((array.handle,)))

    def check(self, array: ClientArray, num_shards: int = 2) -> None:
        """Fetch some shards; a value that is wrong raises WrongValue when it comes."""
        pieces = tuple(self._new_handle() for _ in array.mesh)
        copies = requests.ArrayCopySemantics.ALWAYS_COPY
        self._ask_at_once(requests.DisassembleIntoSingleDeviceArrays(array.handle, copies, pieces))
        for place in self._rng.sample(range(len(pieces)), min(num_shards, len(pieces))):
            self._fetch(pieces[place], array, place)
        self._ask_at_once(requests.DestructArray(pieces))

    def _fetch(self, piece: Handle, array: ClientArray, place: int) -> None:
        buffer = self._new_handle()

        def answered(response: responses.Response | Status) -> None:
            if isinstance(response, Status):
                self._note_failure(response, array)
                return
            value = self._stored.pop(buffer)
            if value != array.values[place]:
                raise WrongValue(
                    f"{self.name}: shard {place} of array {array.handle} is {value}, not {array.values[place]}"
                )
            self.num_checked += 1

        self._ask(f"shard {place} of array {array.handle}", requests.CopyToHostBuffer(piece, buffer), answered)

    def _note_failure(self, response: responses.Response | Status, array: ClientArray | None = None) -> None:
        assert isinstance(response, Status) and response.code in _LOSS_CODES, f"{self.name} was answered {response}"
        self.failures.append(response)
        if array is not None:
            self._failed.add(array.handle)

    def has_failed(self, array: ClientArray) -> bool:
        """Whether it was answered a failure in place of this array's values."""
        return array.handle in self._failed

    def forget_program(self, program: bytes, mesh: Mesh) -> None:
        """Give a compiled program up; what runs still does."""
        self._ask_at_once(requests.LoadedExecutableDestruct(self._programs.pop((program, mesh))))

    def wait_for(self, array: ClientArray) -> None:
        """Ask to be told when an array is ready, or that it failed."""

        def answered(response: responses.Response | Status) -> None:
            if isinstance(response, Status):
                self._note_failure(response, array)

        self._ask(f"array {array.handle} to be ready", requests.CheckValueReady((array.handle,)), answered)

    def detach(self) -> None:
        """The client is gone: whatever it has asked is nobody's any more."""
        self.is_detached = True
        self.open_requests.clear()
        self.feed(sev.ClientDisconnected())
        self._controller.detach(self)

    # what comes to the proxy

    def feed(self, event: sev.Event) -> None:
        """Something for the session core."""
        assert self._core is not None, f"{self.name} is not attached"
        for told in self._core.handle(event):
            self._perform(told)

    def host_changed(self, told: ChangeHost) -> None:
        """What stands behind a host has changed."""
        if self._core is None or self.is_dead:
            return
        if told.worker is None:
            self._links.forget_host(told.host, told.change)
        self.feed(sev.HostChanged(told.host, told.worker is not None, told.name, told.failure))
        self._controller.see_changes(self, told.change)

    def ended(self) -> None:
        """The controller says that the session is no more."""
        assert self.is_detached, f"{self.name}: the session was ended"
        self.num_undispatched = 0

    def link_opened(self, executor: SimulatedExecutor, change: int) -> None:
        """An executor connects; it was told to when there had been so many changes of hosts."""
        self._links.open(executor, change)

    def from_link(self, executor: SimulatedExecutor, deliver: Callable[[], None]) -> None:
        """Something comes over an executor's link, if that is still open."""
        if self._links.is_open(executor):
            deliver()

    def check_invariants(self) -> None:
        """What must hold between events."""
        if self._core is not None:
            self._core.check_invariants()

    def check_at_rest(self) -> None:
        """What must hold when nothing is under way and all hosts are there."""
        assert self._core is not None
        figures = self._core.figures()
        assert not figures["lost_hosts"] and not figures["waits"] and not figures["compiling"], (
            f"{self.name}: {figures}"
        )
        assert not self._links.num_waiting(), f"{self.name}: host buffers wait for links"

    def dispatched(self, count: int) -> None:
        """The controller says how many operations went out."""
        self.num_undispatched -= count
        assert self.num_undispatched >= 0, f"{self.name}: more operations went out than were submitted"

    def fetched(self, wait_id: WaitId, host: HostIndex, value: int | None, failure: Status | None) -> None:
        """A shard comes over the session link."""
        self._fetched = value
        self.feed(sev.ShardFetched(wait_id, host, failure))
        self._fetched = None

    def compiled(self, executable: Handle, mesh: Mesh, failure: Status | None) -> None:
        """The controller says how a compilation ended; ``mesh`` is known when it went well."""
        program = self._compiling.pop(executable, None)
        if failure is not None:
            self.feed(sev.ProgramCompiled(executable, None, failure))
            return
        outputs: tuple[sev.ProgramOutput, ...] = ()
        if program != WITHOUT_RESULT:
            outputs = (sev.ProgramOutput(DType.S32, (len(mesh),), _over(mesh).tiles, None),)
        self.feed(sev.ProgramCompiled(executable, sev.CompiledProgram("psum", b"", outputs, num_parameters=1), None))

    def _perform(self, told: sins.Instruction) -> None:
        match told:
            case sins.SubmitOperation():
                self.num_undispatched += 1
                self._controller.submit(self, SimulatedSubmit.of(self.session, told))
            case sins.CompileProgram():
                self._compiling[told.executable] = told.program
                self._controller.compile(self, told)
            case sins.SendHostBuffer():
                value = self._stored[told.host_buffer_handle]
                for host in told.hosts:
                    self._links.send(host, functools.partial(self._send_buffer, told.op_id, told.index, value))
            case sins.DropHostBuffer():
                del self._stored[told.host_buffer_handle]
            case sins.StoreFetched():
                assert self._fetched is not None
                self._stored[told.host_buffer_handle] = self._fetched
            case sins.Respond():
                self.open_requests.pop(told.request_id)[1](told.response)
            case sins.RespondError():
                self.open_requests.pop(told.request_id)[1](told.status)
            case _:
                raise TypeError(f"no such instruction: {told!r}")

    def _send_buffer(self, op_id: OpId, index: int, value: int, executor: SimulatedExecutor) -> None:
        self._controller.send_host_buffer(self, executor, op_id, index, value)

    def _ask(
        self, what: str, request: requests.Request, on_answer: Callable[[responses.Response | Status], None]
    ) -> None:
        self._last_request += 1
        request_id = RequestId(self._last_request)
        self.open_requests[request_id] = (what, on_answer)
        self.feed(sev.Requested(request_id, request))

    def _ask_at_once(self, request: requests.Request) -> None:
        answers: list[responses.Response | Status] = []
        self._ask(type(request).__name__, request, answers.append)
        assert answers, f"{self.name}: {request} is not answered at once"
        assert not isinstance(answers[0], Status), f"{self.name}: {request} is refused: {answers[0]}"

    def _new_handle(self) -> Handle:
        self._last_handle += 1
        return Handle(self._last_handle)


def _over(mesh: Mesh) -> Sharding:
    """One element per device."""
    size = len(mesh)
    return Sharding(mesh, TileAssignment(TileKind.TILED, (size,), (size,), (0,)))
