"""The Python processes of an executor, one for each session that has functions here.

It is started for the first function, and again for the first one after it has ended by itself. The executor owns it:
it lives no longer than the executor, whose sessions and shared memory it knows, and than its session. What it imports,
holds and breaks is its own.
"""

import functools
import itertools
import logging
import platform
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, SessionId
from pathways_runtime.core.status import Code, Status, StatusError, error
from pathways_runtime.core.worker.arrays import LocalArray, Program, first_failure
from pathways_runtime.core.worker.events import CallReturned, Event, ReadTaken
from pathways_runtime.core.worker.instructions import CountCall, ForgetFunction, MakeCall
from pathways_runtime.transport.dataplane.memory import Bytes
from pathways_runtime.wire.colocated import FunctionProgram, Origin, decode_program
from pathways_runtime.worker import pjrt
from pathways_runtime.worker.acknowledgements import Acknowledgements
from pathways_runtime.worker.buffers import HostArray, from_bytes
from pathways_runtime.worker.colocated.process import OnLoaded, Place, Process, ProcessEnded
from pathways_runtime.worker.shards import Shards
from pathways_runtime.worker.strings import Strings
from pathways_runtime.worker.threads import Sequence as Thread
from pathways_runtime.worker.transfers import value_of
from pathways_runtime.worker.worlds import World

logger = logging.getLogger(__name__)


class Function:
    """A function as this host knows it; kept, so that another process can load it. Compared by identity."""

    __slots__ = ("number", "program")

    def __init__(self, number: int, program: FunctionProgram) -> None:
        self.number = number
        self.program = program


class _Session:
    """One session's calls, made in order on a thread of their own, and the process that runs them at present."""

    def __init__(self, name: str) -> None:
        self.thread = Thread(name)
        self.process: Process | None = None
        self.is_over = False


class PythonProcesses:
    """Loads functions and performs the core's instructions about calls. For any thread.

    Args:
        post: takes an event and performs what follows.
        home: the world in which results are made.
    """

    def __init__(
        self, place: Place, acknowledgements: Acknowledgements, post: Callable[[Event], None], home: Callable[[], World]
    ) -> None:
        self._place = place
        self._acknowledgements = acknowledgements
        self._post = post
        self._home = home
        self._lock = threading.Lock()
        self._sessions: dict[SessionId, _Session] = {}
        self._function_numbers = itertools.count(1)
        self._process_numbers = itertools.count(1)

    # Functions

    def load(self, session: SessionId, content: bytes, done: Callable[[Program | None, Status | None], None]) -> None:
        """Load a function in the session's process, which is started if there is none; ``done`` is called once.

        Args:
            content: see ``wire.colocated.encode_program``.
        """
        try:
            program = decode_program(content)
            _check_origin(program, self._place.name)
        except ValueError as failure:
            done(None, Status(Code.INVALID_ARGUMENT, str(failure)))
            return
        except StatusError as refused:
            done(None, refused.status)
            return
        function = Function(next(self._function_numbers), program)

        def on_loaded(failure: Status | None) -> None:
            if failure is None:
                done(self._as_program(function), None)
            else:
                done(None, failure)

        with self._lock:
            state = self._sessions.get(session)
            if state is None:
                state = self._sessions[session] = _Session(f"functions of session {session}")
        state.thread.submit(self._load, state, session, function, on_loaded)

    def _as_program(self, function: Function) -> Program:
        topology, host = self._place.topology, self._place.host
        here = tuple(topology.device_at(host, place) for place in range(topology.devices_per_host))
        return Program(here, (), False, function, is_function=True)

    def _load(self, state: _Session, session: SessionId, function: Function, on_loaded: OnLoaded) -> None:
        try:
            self._with_process(state, session, lambda process: self._send(process, function, on_loaded))
        except StatusError as failure:
            on_loaded(failure.status)

    def _send(self, process: Process, function: Function, on_loaded: OnLoaded) -> None:
        program = function.program
        origin = program.origin
        process.load(
            function.number,
            program.name,
            program.pickled,
            () if origin is None else origin.module_path,
            origin is not None and origin.enable_x64,
            on_loaded,
        )

    def _with_process(self, state: _Session, session: SessionId, use: Callable[[Process], None]) -> None:
        """Use the session's process, or another one if it has ended.

        Raises:
            StatusError: none can be started, or the session is over.
        """
        while True:
            with self._lock:
                if state.is_over:
                    raise error(Code.CANCELLED, f"session {session} is over")
                process = state.process
            if process is None:
                process = self._start(session)
                with self._lock:
                    is_late = state.is_over
                    if not is_late:
                        state.process = process
                if is_late:
                    process.stop()
                    continue
            try:
                use(process)
                return
            except ProcessEnded:
                with self._lock:
                    if state.process is process:
                        state.process = None

    def _start(self, session: SessionId) -> Process:
        try:
            return Process(self._place, session, next(self._process_numbers))
        except OSError as failure:
            raise error(
                Code.INTERNAL, f"no Python process can be started on {self._place.name}: {failure}"
            ) from failure

    def forget(self, instruction: ForgetFunction) -> None:
        """Perform ForgetFunction."""
        state = self._sessions.get(instruction.session)
        if state is not None:
            state.thread.submit(self._unload, state, instruction.program.value)

    def _unload(self, state: _Session, function: Function) -> None:
        process = state.process
        if process is not None and function.number in process.functions:
            process.unload(function.number)

    # Calls

    def make_call(self, instruction: MakeCall) -> None:
        """Perform MakeCall, on the session's thread: its arguments may have to be waited for and copied."""
        state = self._sessions.get(instruction.session)
        if state is None:
            self._fail(instruction, Status(Code.CANCELLED, f"session {instruction.session} is over"))
        else:
            state.thread.submit(self._call, state, instruction)

    def _call(self, state: _Session, instruction: MakeCall) -> None:
        read = tuple(array for array in instruction.arguments if array is not None)
        try:
            arguments = [_shards_of(array) for array in instruction.arguments]
            call = functools.partial(self._call_in, instruction=instruction, arguments=arguments)
            self._with_process(state, instruction.session, call)
            del arguments, call
        except StatusError as failure:
            self._fail(instruction, failure.status)
        except pjrt.PjrtError as failure:
            self._fail(instruction, first_failure(read) or pjrt.status_of(failure))
        except MemoryError as failure:
            self._fail(instruction, Status(Code.RESOURCE_EXHAUSTED, f"{failure} (on {self._place.name})"))
        self._post(ReadTaken(read))

    def _call_in(
        self, process: Process, *, instruction: MakeCall, arguments: Sequence[Sequence[tuple[DeviceId, HostArray]]]
    ) -> None:
        function: Function = instruction.program.value
        if function.number not in process.functions:
            # Another process than the one that it was compiled in. If it cannot be loaded, the call says so.
            self._send(process, function, _nobody_waits)
        wanted = {array.handle: array.devices for array, _ in instruction.results}
        process.call(
            function.number,
            function.program.name,
            instruction.stream,
            arguments,
            tuple(wanted.get(handle, ()) for handle in instruction.handles),
            functools.partial(self._returned, instruction),
        )

    def _returned(self, instruction: MakeCall, shards: Sequence[Sequence[Bytes]], failure: Status | None) -> None:
        if failure is None:
            try:
                by_handle = dict(zip(instruction.handles, shards, strict=True))
                values = tuple(
                    self._value(array, result, by_handle[array.handle]) for array, result in instruction.results
                )
            except (pjrt.PjrtError, ValueError, StatusError) as raised:
                failure = pjrt.status_of(raised)
        if failure is not None:
            self._fail(instruction, failure)
            return
        arrays = tuple(array for array, _ in instruction.results)
        self._post(CallReturned(instruction.session, instruction.op_id, arrays, values, None))

    def _value(self, array: LocalArray, result: Any, shards: Sequence[Bytes]) -> Shards | Strings:
        if result.dtype is DType.STRING:
            # Copied: they are small, and would keep a whole block.
            return Strings(array.devices, [shard.copy() for shard in shards])
        placement = self._home().placement(array.devices, result.memory_kind)
        views = [from_bytes(shard, result.dtype, result.shape) for shard in shards]
        return Shards(pjrt.put(views, placement.sharding, placement.physical), placement)

    def _fail(self, instruction: MakeCall, failure: Status) -> None:
        arrays = tuple(array for array, _ in instruction.results)
        self._post(CallReturned(instruction.session, instruction.op_id, arrays, (), failure))

    def count(self, instruction: CountCall) -> None:
        """Perform CountCall."""
        self._acknowledgements.transfer_started(instruction.session, instruction.op_id)
        self._acknowledgements.flush()

    # Life

    def end_session(self, session: SessionId) -> None:
        """End a session's process; does not wait."""
        with self._lock:
            state = self._sessions.pop(session, None)
            if state is None:
                return
            state.is_over = True
            process = state.process
        if process is not None:
            # Not on the session's thread, which may be sending to a process that takes nothing.
            process.kill()
        state.thread.close()

    def close(self) -> None:
        """End all processes; does not wait. Whoever is not gone when the executor ends, its guard ends."""
        with self._lock:
            states, self._sessions = list(self._sessions.values()), {}
            for state in states:
                state.is_over = True
        for state in states:
            if state.process is not None:
                state.process.kill()
            state.thread.close()

    def report(self) -> list[dict[str, Any]]:
        """For ``status``."""
        with self._lock:
            processes = [state.process for state in self._sessions.values() if state.process is not None]
        return [process.report() for process in processes]


def _nobody_waits(_: Status | None) -> None:
    return


def _shards_of(array: LocalArray | None) -> list[tuple[DeviceId, HostArray]]:
    """An argument's shards here. Blocks until they are ready.

    Raises:
        PjrtError, StatusError: what it failed with.
    """
    if array is None:
        return []
    if isinstance(array.value, Strings):
        return list(zip(array.devices, array.value.shards, strict=True))
    value = value_of(array)
    return [(device, pjrt.view(value.shard(position))) for position, device in enumerate(array.devices)]


def _check_origin(program: FunctionProgram, host_name: str) -> None:
    """Refuse what was pickled by other versions.

    Raises:
        StatusError: naming both.
    """
    origin = program.origin
    here = Origin(platform.python_version(), jax.__version__, (), False)
    if origin is None or (_minor(origin.python), origin.jax) == (_minor(here.python), here.jax):
        return
    raise error(
        Code.FAILED_PRECONDITION,
        f"colocated Python cannot run {program.name}: the client has Python {origin.python} and jax {origin.jax}, "
        f"but host {host_name} has Python {here.python} and jax {here.jax}. Both ends need the same Python "
        "(x.y) and the same jax: start the client, or the runtime, from the other's environment",
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
