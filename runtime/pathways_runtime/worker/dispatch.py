"""The executor's shell around its core: performs instructions on PJRT, links and data plane.

Locking. The core is guarded by one lock, held while it takes in one event and no longer: nothing is performed under it.
A launch may block in PJRT (small programs of one device run inside the call, collectives included), and everything that
other hosts wait for (sends, acknowledgements, arrivals) must go on meanwhile. Whoever brings an event performs what
follows from it, on its own thread, except that only two threads launch: the one that reads the controller's stream
(``feed``) launches programs that return at once; the other one launches those that lately took long to return, so that
what comes next is read and prepared meanwhile, and all that other threads' events (``post``) make possible. The core
has at most one launch outstanding, which keeps launches in order whichever thread performs them.
"""

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import OpId, SessionId, WorldId
from pathways_runtime.core.status import Code, Status, StatusError, error
from pathways_runtime.core.worker.arrays import ShardRef, first_failure
from pathways_runtime.core.worker.events import ArrayFailed, ArrayMade, Event, LaunchEnqueued, LaunchFailed, ReadTaken
from pathways_runtime.core.worker.instructions import (
    AnswerAwait,
    AnswerFetch,
    AssembleArray,
    AwaitReady,
    BeginTrace,
    CountCall,
    CountLaunch,
    DropArray,
    EndTrace,
    EnqueueLaunch,
    ExpectPiece,
    ForgetFunction,
    ForgetTransfers,
    Instruction,
    LoadArray,
    MakeArray,
    MakeCall,
    RecordArray,
    Report,
    RetainArray,
    SendPieces,
    SendValue,
    ShareShards,
    StoreTiles,
)
from pathways_runtime.core.worker.launches import PendingLaunch
from pathways_runtime.core.worker.usage import Usage
from pathways_runtime.core.worker.worker import WorkerCore
from pathways_runtime.transport.dataplane import DataPlane
from pathways_runtime.wire.links import ArraysReady, Fetched
from pathways_runtime.wire.messages import OperationFailed, ReadyHere
from pathways_runtime.worker import pjrt
from pathways_runtime.worker.acknowledgements import Acknowledgements
from pathways_runtime.worker.buffers import HostArray, from_bytes
from pathways_runtime.worker.callbacks import SESSION_IS_OVER, CallbackFailed, Value
from pathways_runtime.worker.colocated.sessions import PythonProcesses
from pathways_runtime.worker.completions import Completions
from pathways_runtime.worker.endings import Endings
from pathways_runtime.worker.links import SessionLink
from pathways_runtime.worker.profiler import Profiler
from pathways_runtime.worker.programs import LoadedProgram
from pathways_runtime.worker.retained.arrays import RetainedArrays
from pathways_runtime.worker.shards import Retaining, Shards, joined, migrate
from pathways_runtime.worker.storage import Storage
from pathways_runtime.worker.strings import Strings, strings_of
from pathways_runtime.worker.threads import Pool, Sequence
from pathways_runtime.worker.transfers import Transfers, newest_world_s, value_of
from pathways_runtime.worker.worlds import World

logger = logging.getLogger(__name__)

Instructions = list[Instruction]

#: A program whose launch took longer than this is launched by the other thread next time: a hop costs some 30 us.
_LONG_LAUNCH_S = 0.0002

#: Threads that wait for arrays to answer the proxy. They are made as needed; each blocks in PJRT.
_MAX_WAITING_THREADS = 64

_UNSET = Status(Code.INTERNAL, "an argument is neither present nor failed")


class LaunchDelay:
    """Delays every launch by a random time, for tests of the order: uniform in ``[0, max_s)``."""

    def __init__(self, seed: int, max_s: float) -> None:
        self._random = random.Random(seed)
        self._max_s = max_s

    def wait(self) -> None:
        """Sleep."""
        time.sleep(self._random.random() * self._max_s)


class Snapshot(NamedTuple):
    """What a dispatcher holds at one time.

    Attributes:
        waiting: see ``WorkerCore.waiting``.
        sessions: ``{"id", "arrays", "bytes"}`` each.
    """

    waiting: list[tuple[SessionId, OpId, str, str, int]]
    sessions: list[dict[str, int]]
    closed_links_bytes: int


class Dispatcher:
    """Feeds the core and performs its instructions.

    Args:
        send: tells the controller.
        home: the world in which arrays are made: that of this host's slice.
        endings: explain failures.
        delay: see LaunchDelay.
        is_behind_relay: readiness is told to the relay, which tells of many hosts at once, not over session links.
        retained: memory that outlives this executor; None: there is none.
    """

    def __init__(
        self,
        core: WorkerCore,
        data_plane: DataPlane,
        acknowledgements: Acknowledgements,
        send: Callable[[OperationFailed | ReadyHere], None],
        home: Callable[[], World],
        endings: Endings,
        delay: LaunchDelay | None = None,
        is_behind_relay: bool = False,
        retained: RetainedArrays | None = None,
    ) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._data_plane = data_plane
        self._acknowledgements = acknowledgements
        self._send = send
        self._is_behind_relay = is_behind_relay
        self._home = home
        self._endings = endings
        self._delay = delay
        self._links: dict[SessionId, SessionLink] = {}
        self._closed_links_bytes = 0
        self._next_launch_id = 0
        #: Per world, the last launch that ``_keep_order`` is about, and the thread that made it.
        self._last_alone: dict[WorldId, tuple[int, pjrt.Token]] = {}
        self._waiting = Pool("waits", _MAX_WAITING_THREADS)
        self._launching = Sequence("launches")
        here = [core.topology.device_at(core.host, place) for place in range(core.topology.devices_per_host)]
        self.completions = Completions(acknowledgements, self._launch_ended_badly, Usage(here, time.monotonic()))
        self.transfers = Transfers(data_plane, acknowledgements, self.post, self._take, home, endings)
        self.storage = Storage(core.name, self.post, self._answer_await, home)
        self._profiler = Profiler(core.name)
        self._retained = retained
        self._python: PythonProcesses | None = None
        self._perform: dict[type[Instruction], Callable[[Any], Instructions | None]] = {
            EnqueueLaunch: self._enqueue_launch,
            CountLaunch: self._count_launch,
            MakeArray: self._make_array,
            ShareShards: self._share_shards,
            AssembleArray: self.transfers.assemble,
            ExpectPiece: self.transfers.expect,
            SendPieces: self.transfers.send,
            ForgetTransfers: self._forget_transfers,
            BeginTrace: self._begin_trace,
            EndTrace: self._end_trace,
            StoreTiles: self.storage.store,
            LoadArray: self.storage.load,
            RetainArray: self._retain_array,
            RecordArray: self._record_array,
            DropArray: self._drop_array,
            AwaitReady: self._await_ready,
            AnswerAwait: self._answer_await,
            SendValue: self._send_value,
            AnswerFetch: self._answer_fetch,
            Report: self._report,
        }

    def serve_functions(self, processes: PythonProcesses) -> None:
        """Have calls of functions made by these."""
        self._python = processes
        self._perform |= {
            MakeCall: processes.make_call,
            CountCall: processes.count,
            ForgetFunction: processes.forget,
        }

    def python_processes(self) -> list[dict[str, Any]]:
        """What they are doing, for a report."""
        return [] if self._python is None else self._python.report()

    def retained_bytes(self) -> dict[str, int]:
        """Of memory that outlives this executor, see ``RetainedArrays.held_bytes``."""
        return {"in_use": 0, "free": 0} if self._retained is None else self._retained.held_bytes()

    def feed(self, event: Event) -> None:
        """Take in an event and perform all that follows, quick launches too. For the controller's stream only."""
        with self._lock:
            instructions = self._core.handle(event)
        if instructions:
            self._perform_all(instructions, self._returns_at_once)

    def post(self, event: Event) -> None:
        """Take in an event and perform what follows, but leave launches to another thread. For any thread."""
        with self._lock:
            instructions = self._core.handle(event)
        if instructions:
            self._perform_all(instructions, _never)

    def _perform_all(self, instructions: Instructions, launches_here: Callable[[EnqueueLaunch], bool]) -> None:
        todo = deque(instructions)
        while todo:
            instruction = todo.popleft()
            if type(instruction) is EnqueueLaunch and not launches_here(instruction):
                self._launching.submit(self._launch_from_elsewhere, instruction)
                continue
            follow_up = self._perform[type(instruction)](instruction)
            if follow_up:
                todo.extend(follow_up)

    def _launch_from_elsewhere(self, instruction: EnqueueLaunch) -> None:
        self._perform_all([instruction], _always)
        self._acknowledgements.flush()

    @staticmethod
    def _returns_at_once(instruction: EnqueueLaunch) -> bool:
        """Whether a launch may be made by the thread that is to hear of lost hosts."""
        program = instruction.launch.program
        if program is None:
            return True
        if program.spans_hosts and len(program.value.devices) == 1:
            # It runs within its launch, and waits for a lost host for as long as nobody hears of that.
            return False
        return bool(program.value.last_launch_s < _LONG_LAUNCH_S)

    def _take(self, event: Event) -> Instructions:
        with self._lock:
            return self._core.handle(event)

    def add_link(self, session: SessionId, link: SessionLink) -> None:
        """Values of the session go there."""
        self._links[session] = link

    def remove_link(self, session: SessionId) -> SessionLink | None:
        """They go nowhere any more."""
        link = self._links.pop(session, None)
        if link is not None:
            self._closed_links_bytes += link.bytes_received + link.bytes_sent
        return link

    def call_client(self, session: SessionId, client: str, number: int, operands: list[Value]) -> list[Value]:
        """Call a client's Python function; see ``callbacks.Calls.call``."""
        link = self._links.get(session)
        if link is None:
            raise CallbackFailed(SESSION_IS_OVER)
        return link.calls.call(client, number, operands)

    def is_busy_in(self, world: World) -> bool:
        """Whether programs of a world run, or are being launched."""
        enqueuing = self._core.enqueuing
        if enqueuing is not None and enqueuing.program is not None and enqueuing.program.value.world is world:
            return True
        return self.completions.is_busy_in(world)

    def forget_world(self, world: World) -> None:
        """Nothing is launched in a world any more."""
        self._last_alone.pop(world.id, None)

    def links(self) -> list[SessionLink]:
        """All of them."""
        return list(self._links.values())

    def snapshot(self) -> "Snapshot":
        """What the core holds, for a report."""
        with self._lock:
            waiting = self._core.waiting()
            held = {
                session.id: [array.value for array in session.arrays.values()]
                for session in self._core.sessions.values()
            }
        sessions = []
        for session, values in held.items():
            present = {value for value in values if value is not None}
            sessions.append({"id": session, "arrays": len(values), "bytes": sum(value.nbytes() for value in present)})
        return Snapshot(waiting, sessions, self._closed_links_bytes)

    def close(self) -> None:
        """End threads and links; nothing more is answered."""
        for link in self.links():
            link.close()
        self._waiting.close()
        self._launching.close()
        self.transfers.close()
        self.storage.close()
        self.completions.close()

    # Launches

    def _enqueue_launch(self, instruction: EnqueueLaunch) -> Instructions | None:
        launch = instruction.launch
        assert launch.program is not None
        program: LoadedProgram = launch.program.value
        if self._delay is not None:
            self._delay.wait()
        is_alone_here = launch.program.spans_hosts and len(program.devices) == 1
        try:
            if launch.program.spans_hosts:
                # Its collectives would wait for a host that is lost. The others learn of that as this one does.
                over = program.world.end.verdict() if is_alone_here else program.world.end.failure()
                if over is not None:
                    raise StatusError(over)
            arguments, late_failure = _arguments(instruction, program)
            self._next_launch_id += 1
            if is_alone_here:
                self._keep_order(program.world.id)
            values, token, launched_s = program.launch(arguments, self._next_launch_id)
            if is_alone_here:
                self._last_alone[program.world.id] = (threading.get_ident(), token)
        except (pjrt.PjrtError, ValueError, StatusError) as failure:
            self._acknowledgements.launches_completed(1)
            status = self._failure_of(launch, failure)
            if self._endings.may_explain(status):
                program.world.end.doubt()
                # Not here: this may be the thread that is to hear of the loss.
                self._waiting.submit(self._explain_launch, launch, status)
                return None
            return self._take(LaunchFailed(launch, status))
        # The core must know that it was enqueued before it may hear that it failed.
        follow_up = self._take(LaunchEnqueued(launch, values, late_failure))
        usage = program.usage
        if usage is None:
            usage = program.usage = self.completions.program(program.name, program.scope)
        probe = values[0].array if values else None
        self.completions.follow(launch, program.devices, token, probe, usage, launched_s)
        if program.last_launch_s >= _LONG_LAUNCH_S:
            # A thread may make one such launch after the other for as long as there is credit. Credit comes back before
            # it is used up only if the controller hears of them meanwhile.
            self._acknowledgements.flush()
        return follow_up

    def _keep_order(self, world: WorldId) -> None:
        """Wait for the last launch of a program that spans hosts and has one device here, if another thread made it.

        PJRT on CPU runs such launches in the order in which *one thread* makes them; those of programs with several
        devices here, in order whoever makes them. Out of order, their collectives meet others on the other hosts, and
        the values are wrong without an error.
        """
        last = self._last_alone.get(world)
        if last is not None and last[0] != threading.get_ident():
            # What it failed with, its own completion tells.
            with contextlib.suppress(pjrt.PjrtError):
                pjrt.wait_token(last[1])

    def _launch_ended_badly(self, launch: PendingLaunch, failure: BaseException) -> None:
        status = self._failure_of(launch, failure)
        if launch.program is not None and self._endings.may_explain(status):
            launch.program.value.world.end.doubt()
        self._explain_launch(launch, status)

    def _explain_launch(self, launch: PendingLaunch, status: Status) -> None:
        formed_s = 0.0 if launch.program is None else launch.program.value.world.end.formed_s
        self.post(LaunchFailed(launch, self._endings.explain(status, formed_s)))
        self._acknowledgements.flush()

    def _failure_of(self, launch: PendingLaunch, failure: BaseException) -> Status:
        if isinstance(failure, StatusError):
            return failure.status
        status = pjrt.status_of(failure)
        name = "" if launch.program is None else f" {launch.program.value.name}"
        return Status(status.code, f"{status.message} (program{name} on {self._core.name})")

    def _count_launch(self, _: CountLaunch) -> None:
        self._acknowledgements.launches_completed(1)

    def _report(self, instruction: Report) -> None:
        self._send(OperationFailed(instruction.session, instruction.op_id, instruction.handles, instruction.failure))

    # Arrays

    def _make_array(self, instruction: MakeArray) -> Instructions:
        result, array = instruction.result, instruction.array
        if result.dtype is DType.STRING:
            contents = [np.frombuffer(payload, np.uint8) for payload in instruction.payloads]
            return self._take(ArrayMade(instruction.session, array, Strings(array.devices, contents)))
        try:
            placement = self._home().placement(array.devices, result.memory_kind)
            # A buffer that several shards share is looked at once.
            views = {id(p): from_bytes(p, result.dtype, result.shape) for p in instruction.payloads}
            made = pjrt.put([views[id(p)] for p in instruction.payloads], placement.sharding, placement.physical)
        except (pjrt.PjrtError, ValueError, StatusError) as failure:
            return self._not_made(instruction, failure)
        return self._take(ArrayMade(instruction.session, array, Shards(made, placement)))

    def _share_shards(self, instruction: ShareShards) -> Instructions:
        array = instruction.array
        try:
            made = self._shared(instruction)
        except (pjrt.PjrtError, ValueError, StatusError) as failure:
            answer = self._not_made(instruction, failure)
        else:
            answer = self._take(ArrayMade(instruction.session, array, made))
        return [*self._take(ReadTaken(tuple(source.array for source in instruction.sources))), *answer]

    def _shared(self, instruction: ShareShards) -> Shards | Strings:
        result, array = instruction.result, instruction.array
        if result.dtype is DType.STRING:
            return Strings(array.devices, [strings_of(s.array).shards[s.position] for s in instruction.sources])
        values = [value_of(source.array) for source in instruction.sources]
        for value in values:
            if value.shape != result.shape or value.dtype != pjrt.dtype_of(result.dtype):
                have = f"{value.dtype}{list(value.shape)}"
                want = f"{result.dtype.name}{list(result.shape)}"
                raise error(Code.INVALID_ARGUMENT, f"a shard of {have} cannot be one of {want}")
        first = values[0]
        world = (
            first.placement.world if all(v.placement.world is first.placement.world for v in values) else self._home()
        )
        placement = world.placement(array.devices, result.memory_kind or first.placement.memory_kind)
        if placement is first.placement and all(value is first for value in values):
            made = Shards(first.array, placement)
        else:
            pieces = [
                value.shard(source.position)
                if value.placement.world is world
                else migrate(value.shard(source.position), placement, position)
                for position, (value, source) in enumerate(zip(values, instruction.sources, strict=True))
            ]
            made = joined(pieces, placement)
        made.share_with(values)
        if not placement.is_default_memory:
            made.origins = tuple((v, s.position) for v, s in zip(values, instruction.sources, strict=True))
        return made

    def _not_made(self, instruction: MakeArray | ShareShards, failure: Exception) -> Instructions:
        status = pjrt.status_of(failure)
        return self._take(ArrayFailed(instruction.session, instruction.op_id, instruction.array, status))

    def _retain_array(self, instruction: RetainArray) -> None:
        if self._retained is not None:
            self._retained.retain(instruction, self._core.host, self.post)

    def _record_array(self, instruction: RecordArray) -> None:
        assert self._retained is not None
        self._retained.record(instruction)

    def _drop_array(self, instruction: DropArray) -> None:
        assert self._retained is not None
        self._retained.drop(instruction)

    def _forget_transfers(self, instruction: ForgetTransfers) -> None:
        self._data_plane.forget(instruction.session)
        if self._retained is not None:
            self._retained.drop_session(instruction.session)
        self._waiting.submit(self._profiler.forget, instruction.session)

    # Traces

    def _begin_trace(self, instruction: BeginTrace) -> None:
        # Here and now, so that what is launched next is in it.
        failure = None
        try:
            self._profiler.start(instruction.session, instruction.host_tracer_level, instruction.python_tracer_level)
        except StatusError as refused:
            failure = refused.status
        self._answer_await(AnswerAwait(instruction.session, instruction.wait_id, failure))

    def _end_trace(self, instruction: EndTrace) -> None:
        self._waiting.submit(self._write_trace, instruction)

    def _write_trace(self, instruction: EndTrace) -> None:
        failure = None
        try:
            self._profiler.stop(instruction.session, instruction.folder, instruction.run)
        except StatusError as refused:
            failure = refused.status
        except OSError as unwritten:
            failure = Status(Code.FAILED_PRECONDITION, f"the trace of {self._core.name} is not written: {unwritten}")
        self._answer_await(AnswerAwait(instruction.session, instruction.wait_id, failure))

    # Answers to the proxy

    def _await_ready(self, instruction: AwaitReady) -> None:
        values = [array.value for array in instruction.arrays if array.value is not None]
        arrays = [value.array for value in values if type(value) is not Strings]
        under_way = [
            value.retaining
            for value in values
            if type(value) is Shards and value.retaining is not None and not value.retaining.is_settled.is_set()
        ]
        is_whole = len(values) == len(instruction.arrays)
        if not (is_whole and (under_way or not all(map(pjrt.is_ready, arrays)))):
            # Why one has failed is not for this thread to wait for: it may be the one that is to hear of that.
            with contextlib.suppress(pjrt.PjrtError):
                pjrt.wait(arrays)
                failure = first_failure(instruction.arrays)
                self._answer_await(AnswerAwait(instruction.session, instruction.wait_id, failure))
                return
        self._waiting.submit(self._answer_when_ready, instruction, arrays, under_way)

    def _answer_when_ready(
        self, instruction: AwaitReady, arrays: list[pjrt.Array], under_way: Iterable[Retaining]
    ) -> None:
        try:
            pjrt.wait(arrays)
            for retaining in under_way:
                # Who has waited for a copy in host memory may count on it.
                retaining.is_settled.wait()
            failure = first_failure(instruction.arrays)
        except pjrt.PjrtError as raised:
            formed_s = newest_world_s(instruction.arrays)
            failure = first_failure(instruction.arrays) or self._endings.explain(pjrt.status_of(raised), formed_s)
        self._answer_await(AnswerAwait(instruction.session, instruction.wait_id, failure))

    def _answer_await(self, instruction: AnswerAwait) -> None:
        if self._is_behind_relay and instruction.failure is None:
            self._send(ReadyHere(instruction.session, instruction.wait_id))
            return
        link = self._links.get(instruction.session)
        if link is not None:
            link.send(ArraysReady(instruction.wait_id, instruction.failure))

    def _send_value(self, instruction: SendValue) -> Instructions | None:
        value = instruction.source.array.value
        if value is None or type(value) is Strings or pjrt.is_ready(value.array):
            # As in _await_ready.
            with contextlib.suppress(pjrt.PjrtError):
                self._answer_with(instruction, *_contents_of(instruction.source))
                return self._take(ReadTaken((instruction.source.array,)))
        self._waiting.submit(self._send_value_when_ready, instruction)
        return None

    def _send_value_when_ready(self, instruction: SendValue) -> None:
        array = instruction.source.array
        contents: HostArray | None = None
        try:
            contents, failure = _contents_of(instruction.source)
        except pjrt.PjrtError as raised:
            failure = array.failure or self._endings.explain(pjrt.status_of(raised), newest_world_s((array,)))
        self._answer_with(instruction, contents, failure)
        self.post(ReadTaken((array,)))

    def _answer_with(self, instruction: SendValue, contents: HostArray | None, failure: Status | None) -> None:
        link = self._links.get(instruction.session)
        if link is not None:
            link.send(Fetched(instruction.wait_id, failure), contents)

    def _answer_fetch(self, instruction: AnswerFetch) -> None:
        link = self._links.get(instruction.session)
        if link is not None:
            link.send(Fetched(instruction.wait_id, instruction.failure))


def _contents_of(source: ShardRef) -> tuple[HostArray | None, Status | None]:
    """A shard's contents, once it is ready, or the failure of its array.

    Raises:
        PjrtError: what it failed with, where the array does not say so yet.
    """
    array = source.array
    if type(array.value) is Strings:
        return array.value.shards[source.position], None
    try:
        return pjrt.view(value_of(array).shard(source.position)), None
    except StatusError as raised:
        return None, raised.status


def _always(_: EnqueueLaunch) -> bool:
    return True


def _never(_: EnqueueLaunch) -> bool:
    return False


def _arguments(instruction: EnqueueLaunch, program: LoadedProgram) -> tuple[list[pjrt.Array], Status | None]:
    """What PJRT is given, and the failure of an argument that failed after the core had looked.

    Raises:
        StatusError: such a failure, where no other host takes part. PjrtError: an argument was donated.
        ValueError: it lies on other devices.
    """
    launch = instruction.launch
    assert launch.program is not None
    world, devices = program.world, program.devices
    arguments: list[pjrt.Array] = []
    late_failure = None
    for array in launch.arguments:
        value = array.value
        if value is None:
            if not launch.program.spans_hosts:
                raise StatusError(array.failure or _UNSET)
            if len(arguments) not in instruction.absent:
                late_failure = array.failure
            arguments.append(program.stand_in(len(arguments)))
        else:
            arguments.append(value.for_program(world, devices))
    for position in launch.program.donated:
        value = launch.arguments[position].value
        if value is not None and (position in instruction.copied or value.is_shared):
            arguments[position] = program.copied(arguments[position], value.placement)
    return arguments, late_failure
