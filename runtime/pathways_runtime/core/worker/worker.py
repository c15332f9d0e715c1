"""The executor's core: which operation may go on, what is there, what has failed.

Every operation is taken in when it is received, and its handles are resolved to ``LocalArray`` objects then, so
everything later refers to objects and the order of receipt decides what a handle means. Launches go through one queue
and are enqueued strictly in order: the head waits until its arguments are present or failed, and nothing overtakes it,
because programs that share devices must be enqueued in one order on all hosts. All other operations wait for the arrays
that they name and hold back nobody.

A launch in which other hosts take part is enqueued whatever happened here: an argument that failed is replaced by a
stand-in and the results are failures, because the other hosts would wait for this one forever.
"""

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, SessionId
from pathways_runtime.core.operations import (
    HOST_MEMORY_KINDS,
    Alias,
    Await,
    CallFunction,
    Delete,
    DeleteExecutable,
    Fetch,
    Launch,
    MakeArrays,
    Move,
    Poison,
    ReadArrays,
    ShardedResult,
    StartTrace,
    StopTrace,
    Transfer,
    WriteArrays,
)
from pathways_runtime.core.sharding import box_shape, num_elements
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.stored import writers
from pathways_runtime.core.topology import Topology
from pathways_runtime.core.worker import figures
from pathways_runtime.core.worker.arrays import LocalArray, ShardRef, first_failure, hold, release
from pathways_runtime.core.worker.calls import Calls
from pathways_runtime.core.worker.events import (
    ArrayCopied,
    ArrayFailed,
    ArrayMade,
    ArraysRetained,
    BufferArrived,
    CallReturned,
    Event,
    LaunchEnqueued,
    LaunchFailed,
    OperationReceived,
    PieceArrived,
    ProgramLoaded,
    ReadTaken,
    SessionClosed,
    SessionOpened,
)
from pathways_runtime.core.worker.instructions import (
    ANY_SIZE,
    AnswerAwait,
    AnswerFetch,
    AssembleArray,
    AwaitReady,
    BeginTrace,
    CountLaunch,
    DropArray,
    EndTrace,
    EnqueueLaunch,
    ExpectPiece,
    ForgetTransfers,
    Instruction,
    LoadArray,
    MakeArray,
    OutgoingPiece,
    Part,
    RecordArray,
    Report,
    RetainArray,
    SendPieces,
    SendValue,
    ShareShards,
    StoreTiles,
    Tile,
)
from pathways_runtime.core.worker.launches import PendingLaunch
from pathways_runtime.core.worker.sessions import (
    AliasSubject,
    BufferAssembly,
    MovedPart,
    Session,
    TransferAssembly,
    WaitingOperation,
)

Instructions = list[Instruction]


class WorkerCore:
    """The state of one executor. Not thread-safe: one caller at a time.

    Args:
        host: the virtual host that this executor stands behind.
        name: the host's name for people, for messages.
    """

    def __init__(self, host: HostIndex, topology: Topology, name: str) -> None:
        self.host = host
        self.topology = topology
        self.name = name
        self.sessions: dict[SessionId, Session] = {}
        self._places_here = functools.lru_cache(maxsize=1024)(self._find_places_here)
        #: Received and not enqueued, in order.
        self.launches: deque[PendingLaunch] = deque()
        #: The one that the shell is enqueuing.
        self.enqueuing: PendingLaunch | None = None
        self._calls = Calls(name, self._fail, self._settled)
        self._on_event: dict[type[Event], Callable[[Any, Instructions], None]] = {
            SessionOpened: self._session_opened,
            SessionClosed: self._session_closed,
            ProgramLoaded: self._program_loaded,
            OperationReceived: self._operation_received,
            BufferArrived: self._buffer_arrived,
            PieceArrived: self._piece_arrived,
            LaunchEnqueued: self._launch_enqueued,
            LaunchFailed: self._launch_failed,
            ArrayMade: self._array_made,
            ArrayFailed: self._array_failed,
            ArrayCopied: self._array_copied,
            ArraysRetained: self._arrays_retained,
            ReadTaken: self._read_taken,
            CallReturned: self._calls.returned,
        }
        self._on_operation: dict[type[Any], Callable[[Session, Any, int, Instructions], None]] = {
            Launch: self._launch,
            MakeArrays: self._make_arrays,
            Alias: self._alias,
            Transfer: self._transfer,
            Delete: self._delete,
            Await: self._await,
            Fetch: self._fetch,
            DeleteExecutable: self._delete_executable,
            Poison: self._poison,
            StartTrace: self._start_trace,
            StopTrace: self._stop_trace,
            WriteArrays: self._write_arrays,
            CallFunction: self._call_function,
            ReadArrays: self._read_arrays,
        }

    def handle(self, event: Event) -> Instructions:
        """Take in an event; what is to be done about it, in order."""
        instructions: Instructions = []
        self._on_event[type(event)](event, instructions)
        # Launches come last: whoever was received before them has taken its view or counts as a reader by now.
        if self.launches:
            self._start_launches(instructions)
        return instructions

    # Sessions and programs

    def _session_opened(self, event: SessionOpened, _: Instructions) -> None:
        if event.session in self.sessions:
            raise ValueError(f"session {event.session} is opened a second time")
        self.sessions[event.session] = Session(event.session)

    def _session_closed(self, event: SessionClosed, out: Instructions) -> None:
        session = self.sessions.pop(event.session, None)
        if session is None:
            return
        session.is_closed = True
        out.append(ForgetTransfers(session.id))
        # Launches that wait for something of the session must not wait forever; what launches give will come.
        cause = Status(Code.CANCELLED, f"session {session.id} was closed")
        launched = {id(result) for launch in self._unfinished_launches() for result in launch.results}
        for launch in self.launches:
            for argument in launch.arguments:
                if argument.is_pending and launch.session == session.id and id(argument) not in launched:
                    self._fail(argument, cause, out)

    def _unfinished_launches(self) -> tuple[PendingLaunch, ...]:
        return (*self.launches, self.enqueuing) if self.enqueuing is not None else tuple(self.launches)

    def _program_loaded(self, event: ProgramLoaded, _: Instructions) -> None:
        session = self.sessions.get(event.session)
        if session is not None:
            session.programs[event.executable] = event.program

    # Operations

    def _operation_received(self, event: OperationReceived, out: Instructions) -> None:
        session = self.sessions.get(event.session)
        if session is None:
            # The session was closed before what was on its way; its launches still count.
            if type(event.operation) is Launch:
                out.append(CountLaunch())
            return
        self._on_operation[type(event.operation)](session, event.operation, event.now_ns, out)

    def _launch(self, session: Session, operation: Launch, now_ns: int, out: Instructions) -> None:
        arrays = session.arrays
        program = session.programs.get(operation.executable)
        arguments = tuple([arrays.get(handle) or self._unknown(handle) for handle in operation.arguments])
        devices = () if program is None else program.devices
        results = tuple([LocalArray(handle, devices) for handle in operation.results])
        for result in results:
            arrays[result.handle] = result
        launch = PendingLaunch(
            session.id, operation.op_id, program, arguments, results, operation.non_donatable, now_ns
        )
        for argument in arguments:
            if argument.value is None and argument.failure is None:
                argument.waiters.append(launch)
                launch.missing += 1
        if program is None:
            launch.failure = Status(
                Code.INTERNAL,
                f"{self.name} was asked to run executable {operation.executable}, which it has not loaded",
            )
        self.launches.append(launch)

    def _start_launches(self, out: Instructions) -> None:
        while self.enqueuing is None and self.launches and not self.launches[0].missing:
            launch = self.launches.popleft()
            failure = launch.failure or first_failure(launch.arguments)
            program = launch.program
            if failure is None:
                self.enqueuing = launch
                out.append(EnqueueLaunch(launch, launch.copied_arguments(), ()))
                continue
            launch.failure = failure
            if program is not None and program.spans_hosts:
                absent = tuple(i for i, argument in enumerate(launch.arguments) if argument.failure is not None)
                copied = tuple(i for i in launch.copied_arguments() if i not in absent)
                self.enqueuing = launch
                out.append(EnqueueLaunch(launch, copied, absent))
                continue
            out.append(CountLaunch())
            self._fail_results(launch, failure, out)

    def _fail_results(self, launch: PendingLaunch, failure: Status, out: Instructions) -> None:
        out.append(Report(launch.session, launch.op_id, tuple(r.handle for r in launch.results), failure))
        for result in launch.results:
            self._fail(result, failure, out)

    def _launch_enqueued(self, event: LaunchEnqueued, out: Instructions) -> None:
        launch = event.launch
        if launch is not self.enqueuing:
            raise ValueError(f"{launch} was enqueued, but {self.enqueuing} was asked for")
        self.enqueuing = None
        launch.failure = launch.failure or event.failure
        if launch.failure is not None:
            self._fail_results(launch, launch.failure, out)
        else:
            for result, value in zip(launch.results, event.values, strict=True):
                # A Poison may have come while it waited.
                if result.failure is None:
                    result.value = value
                    if result.waiters:
                        self._settled(result, out)

    def _launch_failed(self, event: LaunchFailed, out: Instructions) -> None:
        launch = event.launch
        if launch is self.enqueuing:
            self.enqueuing = None
        elif launch.failure is not None:
            # Its results have failed already, and what the execution says of stand-ins means nothing.
            return
        # What a failed argument brings about is told by the argument, the first cause.
        launch.failure = launch.failure or first_failure(launch.arguments) or event.failure
        self._fail_results(launch, launch.failure, out)

    def _make_arrays(self, session: Session, operation: MakeArrays, now_ns: int, out: Instructions) -> None:
        op_id = operation.op_id
        used = set()
        for result, indices in zip(operation.results, operation.buffers, strict=True):
            places = self._places_here(result.devices)
            if not places:
                continue
            array = self._add_array(session, result, places)
            assembly = BufferAssembly(op_id, array, result, tuple([indices[place] for place in places]), now_ns)
            for index in set(assembly.indices):
                key = (op_id, index)
                if key in session.early_buffers:
                    used.add(key)
                    assembly.payloads[index] = session.early_buffers[key]
                    assembly.missing -= 1
                else:
                    session.wanted_buffers.setdefault(key, []).append(assembly)
            if not assembly.missing:
                self._make_array(session, assembly, out)
        for key in used:
            del session.early_buffers[key]

    def _make_array(self, session: Session, assembly: BufferAssembly, out: Instructions) -> None:
        if assembly.array.failure is None:
            payloads = tuple([assembly.payloads[index] for index in assembly.indices])
            out.append(MakeArray(session.id, assembly.op_id, assembly.array, assembly.result, payloads))

    def _buffer_arrived(self, event: BufferArrived, out: Instructions) -> None:
        session = self.sessions.get(event.session)
        if session is None:
            return
        key = (event.op_id, event.index)
        assemblies = session.wanted_buffers.pop(key, None)
        if assemblies is None:
            session.early_buffers[key] = event.payload
            return
        for assembly in assemblies:
            assembly.payloads[event.index] = event.payload
            assembly.missing -= 1
            if not assembly.missing:
                self._make_array(session, assembly, out)

    def _alias(self, session: Session, operation: Alias, now_ns: int, out: Instructions) -> None:
        for result, handles in zip(operation.results, operation.sources, strict=True):
            places = self._places_here(result.devices)
            if not places:
                continue
            array = self._add_array(session, result, places)
            sources = tuple([self._shard(session, handles[place], result.devices[place]) for place in places])
            arrays = tuple([source.array for source in sources])
            hold(arrays)
            waiting = WaitingOperation(session, operation, arrays, now_ns, AliasSubject(array, result, sources))
            self._when_settled(waiting, out)

    def _share(self, waiting: WaitingOperation, out: Instructions) -> None:
        subject: AliasSubject = waiting.subject
        array = subject.array
        op_id = waiting.operation.op_id
        failure = first_failure(waiting.arrays)
        if array.failure is not None or failure is not None:
            release(waiting.arrays)
            if array.failure is None and failure is not None:
                out.append(Report(waiting.session.id, op_id, (array.handle,), failure))
                self._fail(array, failure, out)
            return
        out.append(ShareShards(waiting.session.id, op_id, array, subject.result, subject.sources))

    def _transfer(self, session: Session, operation: Transfer, now_ns: int, out: Instructions) -> None:
        host_of, here = self.topology.host_of, self.host
        incoming: dict[tuple[int, DeviceId], list[MovedPart]] = {}
        outgoing: list[tuple[int, ShardRef]] = []
        for index, move in enumerate(operation.moves):
            is_from_here = host_of(move.source_device) == here
            is_to_here = host_of(move.target_device) == here
            if not is_from_here and not is_to_here:
                continue
            source = self._shard(session, move.source, move.source_device) if is_from_here else None
            if is_to_here:
                part = MovedPart(index, move, source)
                incoming.setdefault((move.result_index, move.target_device), []).append(part)
            elif source is not None:
                outgoing.append((index, source))
        for result_index, result in enumerate(operation.results):
            places = self._places_here(result.devices)
            if places:
                array = self._add_array(session, result, places)
                parts = tuple([incoming.get((result_index, device), []) for device in array.devices])
                assembly = TransferAssembly(session, operation.op_id, array, result, parts, now_ns)
                self._collect(assembly, out)
        if outgoing:
            arrays = tuple([source.array for _, source in outgoing])
            hold(arrays)
            self._when_settled(WaitingOperation(session, operation, arrays, now_ns, tuple(outgoing)), out)

    def _collect(self, assembly: TransferAssembly, out: Instructions) -> None:
        session = assembly.session
        hold(assembly.sources())
        for parts in assembly.parts:
            for part in parts:
                if part.source is None:
                    assembly.missing += 1
                    session.wanted_pieces[(assembly.op_id, part.move_index)] = (assembly, part)
                    sender = self.topology.host_of(part.move.source_device)
                    num_bytes = _num_bytes(part.move, assembly.result)
                    out.append(ExpectPiece(session.id, assembly.op_id, part.move_index, sender, num_bytes))
                elif part.source.array.is_pending:
                    assembly.missing += 1
                    part.source.array.waiters.append(assembly)
        if not assembly.missing:
            self._assemble(assembly, out)

    def _assemble(self, assembly: TransferAssembly, out: Instructions) -> None:
        array = assembly.array
        sources = assembly.sources()
        failure = first_failure(sources)
        if array.failure is None and failure is None:
            parts = tuple([tuple([self._part(part) for part in parts]) for parts in assembly.parts])
            out.append(AssembleArray(assembly.session.id, assembly.op_id, array, assembly.result, parts))
            return
        release(sources)
        if array.failure is None and failure is not None:
            out.append(Report(assembly.session.id, assembly.op_id, (array.handle,), failure))
            self._fail(array, failure, out)

    @staticmethod
    def _part(part: MovedPart) -> Part:
        return Part(part.source, part.payload, part.move.source_box, part.move.target_box)

    def _piece_arrived(self, event: PieceArrived, out: Instructions) -> None:
        session = self.sessions.get(event.session)
        wanted = None if session is None else session.wanted_pieces.pop((event.op_id, event.move_index), None)
        if wanted is None:
            return
        assembly, part = wanted
        part.payload = event.payload
        if event.failure is not None and assembly.array.failure is None:
            out.append(Report(event.session, event.op_id, (assembly.array.handle,), event.failure))
            self._fail(assembly.array, event.failure, out)
        assembly.missing -= 1
        if not assembly.missing:
            self._assemble(assembly, out)

    def _send(self, waiting: WaitingOperation, out: Instructions) -> None:
        operation = waiting.operation
        assert isinstance(operation, Transfer)
        pieces = []
        for index, source in waiting.subject:
            move = operation.moves[index]
            target = self.topology.host_of(move.target_device)
            num_bytes = _num_bytes(move, operation.results[move.result_index])
            failure = source.array.failure
            if failure is None:
                pieces.append(OutgoingPiece(index, target, num_bytes, source, move.source_box, None))
            else:
                release((source.array,))
                pieces.append(OutgoingPiece(index, target, num_bytes, None, None, failure))
        out.append(SendPieces(waiting.session.id, operation.op_id, tuple(pieces)))

    def _delete(self, session: Session, operation: Delete, _: int, out: Instructions) -> None:
        for handle in operation.handles:
            array = session.arrays.pop(handle, None)
            if array is not None and array.is_retained:
                out.append(DropArray(session.id, handle))

    def _await(self, session: Session, operation: Await, now_ns: int, out: Instructions) -> None:
        # An Await goes to all hosts of all its arrays; not every array has shards here.
        arrays = tuple([array for handle in operation.handles if (array := session.arrays.get(handle)) is not None])
        self._when_settled(WaitingOperation(session, operation, arrays, now_ns), out)

    def _await_settled(self, waiting: WaitingOperation, out: Instructions) -> None:
        operation = waiting.operation
        assert isinstance(operation, Await)
        failure = first_failure(waiting.arrays)
        if failure is not None or not waiting.arrays:
            out.append(AnswerAwait(waiting.session.id, operation.wait_id, failure))
            return
        out.append(AwaitReady(waiting.session.id, operation.wait_id, waiting.arrays))

    def _fetch(self, session: Session, operation: Fetch, now_ns: int, out: Instructions) -> None:
        source = self._shard(session, operation.handle, operation.device)
        self._when_settled(WaitingOperation(session, operation, (source.array,), now_ns, source), out)

    def _fetch_settled(self, waiting: WaitingOperation, out: Instructions) -> None:
        operation = waiting.operation
        assert isinstance(operation, Fetch)
        source: ShardRef = waiting.subject
        if source.array.failure is not None:
            out.append(AnswerFetch(waiting.session.id, operation.wait_id, source.array.failure))
            return
        source.array.num_readers += 1
        out.append(SendValue(waiting.session.id, operation.wait_id, source))

    def _delete_executable(self, session: Session, operation: DeleteExecutable, _: int, out: Instructions) -> None:
        program = session.programs.pop(operation.executable, None)
        if program is not None and program.is_function:
            self._calls.forget(session, program, out)

    def _call_function(self, session: Session, operation: CallFunction, now_ns: int, out: Instructions) -> None:
        results = [
            (self._add_array(session, result, places), result)
            for result in operation.results
            if (places := self._places_here(result.devices))
        ]
        self._when_settled(self._calls.receive(session, operation, results, now_ns), out)

    def _poison(self, session: Session, operation: Poison, now_ns: int, out: Instructions) -> None:
        poisoned = set()
        for handle in operation.handles:
            array = session.arrays.get(handle)
            if array is None:
                array = session.arrays[handle] = LocalArray(handle, ())
            poisoned.add(id(array))
            if array.failure is None:
                self._fail(array, operation.status, out)
        dropped = {}
        for key, (assembly, _) in tuple(session.wanted_pieces.items()):
            if id(assembly.array) in poisoned:
                # Its other pieces may never come.
                del session.wanted_pieces[key]
                dropped[id(assembly)] = assembly
        for assembly in dropped.values():
            release(assembly.sources())

    # Traces and files

    def _start_trace(self, session: Session, operation: StartTrace, _: int, out: Instructions) -> None:
        levels = (operation.host_tracer_level, operation.python_tracer_level)
        out.append(BeginTrace(session.id, operation.wait_id, *levels))

    def _stop_trace(self, session: Session, operation: StopTrace, _: int, out: Instructions) -> None:
        out.append(EndTrace(session.id, operation.wait_id, operation.folder, operation.run))

    def _write_arrays(self, session: Session, operation: WriteArrays, now_ns: int, out: Instructions) -> None:
        tiles = []
        for turn, (handle, target) in enumerate(zip(operation.handles, operation.targets, strict=True)):
            chosen = writers(target.sharding, target.shape, turn)
            for place, (device, index) in enumerate(chosen):
                if self.topology.host_of(device) == self.host:
                    tiles.append(Tile(target, index, place == 0, self._shard(session, handle, device)))
            if not chosen and self.topology.host_of(target.sharding.devices[0]) == self.host:
                tiles.append(Tile(target, (), True, None))
        arrays = tuple([tile.source.array for tile in tiles if tile.source is not None])
        hold(arrays)
        self._when_settled(WaitingOperation(session, operation, arrays, now_ns, tuple(tiles)), out)

    def _store(self, waiting: WaitingOperation, out: Instructions) -> None:
        operation = waiting.operation
        assert isinstance(operation, WriteArrays)
        failure = first_failure(waiting.arrays)
        if failure is not None or not waiting.subject:
            release(waiting.arrays)
            out.append(AnswerAwait(waiting.session.id, operation.wait_id, failure))
            return
        arrays = waiting.arrays
        out.append(StoreTiles(waiting.session.id, operation.wait_id, waiting.subject, arrays, operation.timeout_s))

    def _read_arrays(self, session: Session, operation: ReadArrays, _: int, out: Instructions) -> None:
        for result, source in zip(operation.results, operation.sources, strict=True):
            places = self._places_here(result.devices)
            if places:
                array = self._add_array(session, result, places)
                boxes = source.sharding.boxes(source.shape)
                here = tuple([boxes[place] for place in places])
                out.append(LoadArray(session.id, operation.op_id, array, result, source, here, operation.timeout_s))

    # Arrays

    def _find_places_here(self, devices: tuple[DeviceId, ...]) -> tuple[int, ...]:
        """Which shards of a device list are on this host."""
        host_of, here = self.topology.host_of, self.host
        return tuple(place for place, device in enumerate(devices) if host_of(device) == here)

    @staticmethod
    def _add_array(session: Session, result: ShardedResult, places: tuple[int, ...]) -> LocalArray:
        array = LocalArray(result.handle, tuple([result.devices[place] for place in places]))
        array.is_on_host = result.memory_kind in HOST_MEMORY_KINDS and result.dtype is not DType.STRING
        session.arrays[result.handle] = array
        return array

    def _unknown(self, handle: Handle) -> LocalArray:
        """What stands for an array that an operation names and that is not here."""
        array = LocalArray(handle, ())
        array.failure = Status(Code.INTERNAL, f"{self.name} has no array {handle}")
        return array

    def _shard(self, session: Session, handle: Handle, device: DeviceId) -> ShardRef:
        array = session.arrays.get(handle) or self._unknown(handle)
        if device in array.devices:
            return ShardRef(array, array.devices.index(device))
        if array.failure is None:
            array = LocalArray(handle, ())
            array.failure = Status(Code.INTERNAL, f"array {handle} has no shard on device {device} of {self.name}")
        return ShardRef(array, 0)

    def _array_made(self, event: ArrayMade, out: Instructions) -> None:
        array = event.array
        if array.failure is None:
            array.value = event.value
            if array.is_on_host:
                out.append(RetainArray(event.session, array))
            self._settled(array, out)

    def _array_copied(self, event: ArrayCopied, out: Instructions) -> None:
        array = event.array
        session = self.sessions.get(event.session)
        if array.failure is None and session is not None and session.arrays.get(array.handle) is array:
            array.is_retained = True
            if event.value is not None:
                array.value = event.value
            out.append(RecordArray(session.id, array, event.copy))

    def _arrays_retained(self, event: ArraysRetained, _: Instructions) -> None:
        session = self.sessions[event.session]
        for handle, devices, value in event.arrays:
            array = session.arrays[handle] = LocalArray(handle, devices)
            array.value = value
            array.is_on_host = array.is_retained = True

    def _array_failed(self, event: ArrayFailed, out: Instructions) -> None:
        if event.array.failure is None:
            out.append(Report(event.session, event.op_id, (event.array.handle,), event.failure))
            self._fail(event.array, event.failure, out)

    @staticmethod
    def _read_taken(event: ReadTaken, _: Instructions) -> None:
        release(event.arrays)

    def _fail(self, array: LocalArray, failure: Status, out: Instructions) -> None:
        array.failure = failure
        array.value = None
        self._settled(array, out)

    def _when_settled(self, waiting: WaitingOperation, out: Instructions) -> None:
        for array in waiting.arrays:
            if array.is_pending:
                array.waiters.append(waiting)
                waiting.missing += 1
        if waiting.missing:
            waiting.session.waiting.add(waiting)
        else:
            self._resume(waiting, out)

    def _settled(self, array: LocalArray, out: Instructions) -> None:
        """``array`` is not pending any more: those who waited for it go on."""
        waiters, array.waiters = array.waiters, []
        for waiter in waiters:
            waiter.missing -= 1
            if waiter.missing or type(waiter) is PendingLaunch or waiter.session.is_closed:
                continue
            if type(waiter) is WaitingOperation:
                waiter.session.waiting.discard(waiter)
                self._resume(waiter, out)
            else:
                self._assemble(waiter, out)

    def _resume(self, waiting: WaitingOperation, out: Instructions) -> None:
        match waiting.operation:
            case Await():
                self._await_settled(waiting, out)
            case Fetch():
                self._fetch_settled(waiting, out)
            case Alias():
                self._share(waiting, out)
            case Transfer():
                self._send(waiting, out)
            case WriteArrays():
                self._store(waiting, out)
            case CallFunction(stream=stream):
                self._calls.begin(waiting.session, stream, out)

    # Reports

    def counts(self) -> dict[SessionId, int]:
        """Arrays per session."""
        return {session.id: len(session.arrays) for session in self.sessions.values()}

    def waiting(self) -> list[figures.Waiting]:
        """What waits, the oldest first; see ``core.worker.figures``."""
        return figures.waiting(self._unfinished_launches(), self.sessions.values(), self.topology)

    def check_invariants(self) -> None:
        """What holds between events.

        Raises:
            AssertionError: naming what does not hold.
        """
        figures.check_invariants(self.launches, self.enqueuing, self.sessions.values())


def _num_bytes(move: Move, result: ShardedResult) -> int:
    """Size of a move's bytes, dense; ``ANY_SIZE`` of strings, which are moved by whole shards."""
    if result.dtype is DType.STRING:
        return ANY_SIZE
    shape = result.shape if move.target_box is None else box_shape(move.target_box)
    return num_elements(shape) * result.dtype.itemsize_bytes
