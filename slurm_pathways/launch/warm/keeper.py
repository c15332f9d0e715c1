"""The keeper: the launcher of a runtime that outlives programs, and who lets them in.

One loop on the main thread handles everything in the order of its arrival. Every program has a proxy of its own; one
more is always there, so that a program that comes need not wait for the start of a process.
"""

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_pathways.launch import caretaker
from slurm_pathways.launch.client_environment import JAX_BACKEND_TARGET, backend_target
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, RuntimeEvent, describe_end, quote_log
from slurm_pathways.launch.growth.companions import Companions
from slurm_pathways.launch.growth.door import Came, Went
from slurm_pathways.launch.local import Client, LocalRuntime, StartupFailed
from slurm_pathways.launch.news import LISTENING_EVENT, TERMINATING_EVENT, describe_news
from slurm_pathways.launch.program import SignalReceived, Signals
from slurm_pathways.launch.progress import Progress
from slurm_pathways.launch.recorder import RunRecorder
from slurm_pathways.launch.restarts import describe_restart
from slurm_pathways.launch.run import RUN_FAILED, is_vital
from slurm_pathways.launch.run_folder import STEP, Process, Warm, identify, is_running
from slurm_pathways.launch.runtime import settings_of
from slurm_pathways.launch.startup import start_up
from slurm_pathways.launch.warm.messages import (
    Answer,
    Attach,
    Attached,
    Down,
    Ended,
    Lines,
    Refused,
    Request,
    Said,
    Signal,
)
from slurm_pathways.launch.warm.messages import Started as ProgramStarted

SOCKET_NAME = "keeper"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_POLL_INTERVAL_S = 0.05
_TERMINATING = "Slurm is about to end the job that this runtime is in"


class _Visitor:
    """A connection: a program's launcher, or somebody who wants the runtime's end."""

    def __init__(self, sock: socket.socket) -> None:
        self.lines: Lines[Request] = Lines(sock, Request)
        self.request: Attach | None = None
        self.client: Client | None = None
        self.program: Process | None = None

    def send(self, answer: Answer) -> None:
        """Whoever cannot be told is taken for gone: its connection ends."""
        try:
            self.lines.send(answer)
        except OSError:
            self.lines.close()


@dataclass(frozen=True, slots=True)
class _Came:
    visitor: _Visitor
    request: Request


@dataclass(frozen=True, slots=True)
class _Left:
    visitor: _Visitor


_Event = RuntimeEvent | SignalReceived | _Came | _Left | Came | Went


def keep(
    make_runtime: Callable[[Callable[[RuntimeEvent], None]], LocalRuntime],
    job_id: int | None,
    environ: Mapping[str, str],
    progress: Progress,
    on_ready: Callable[[Path], None],
) -> int:
    """Start a runtime and let programs in until somebody ends it. To be called from the main thread.

    Args:
        make_runtime: gets what is to be told of the runtime's events.
        job_id: the Slurm job that it runs in; None for one on this machine alone.
        environ: says where records are kept, and of which job.
        on_ready: told the run folder when the runtime is ready and programs are let in.

    Returns:
        0 when it was ended as asked, 128+n by signal n, ``RUN_FAILED`` when it did not start, 1 when it failed later.
    """
    inbox: queue.SimpleQueue[_Event] = queue.SimpleQueue()

    def tell(event: RuntimeEvent) -> None:
        recorder.note(event)
        inbox.put(event)

    runtime = make_runtime(tell)
    recorder = RunRecorder(environ, runtime.spec, (), warn=progress.line)
    with Signals(inbox.put):
        return _Keeper(runtime, job_id, progress, inbox, recorder, on_ready).execute()


class _Keeper:
    def __init__(
        self,
        runtime: LocalRuntime,
        job_id: int | None,
        progress: Progress,
        inbox: "queue.SimpleQueue[_Event]",
        recorder: RunRecorder,
        on_ready: Callable[[Path], None],
    ) -> None:
        self._runtime = runtime
        self._job_id = job_id
        self._progress = progress
        self._inbox = inbox
        self._recorder = recorder
        self._on_ready = on_ready
        self._visitors: set[_Visitor] = set()
        #: Those that wait for a proxy.
        self._waiting: deque[_Visitor] = deque()
        #: Proxies that have no program.
        self._free: list[Client] = []
        self._clearing: set[threading.Thread] = set()
        #: Slurm ends the job: programs that are inside may save.
        self._is_terminating = False
        self._companions = Companions(runtime, progress.line)

    def execute(self) -> int:
        exit_code, problem = RUN_FAILED, None
        started_s = time.monotonic()
        try:
            self._progress.starting()
            self._runtime.start()
            self._recorder.begin(self._runtime.folder.path.name, self._runtime.status)
            interruption = start_up(self._runtime, self._inbox, self._progress, started_s)
            if interruption is not None:
                exit_code = 128 + interruption
            else:
                self._recorder.ready()
                exit_code = self._serve(time.monotonic() - started_s)
                self._recorder.program_ended(exit_code)
        except StartupFailed as failure:
            problem = str(failure)
            self._progress.line(problem)
        finally:
            self._runtime.close()
            self._companions.close()
            for visitor in self._visitors:
                visitor.lines.close()
            for thread in self._clearing:
                thread.join()
            if self._runtime.kept_logs is not None:
                self._progress.line(f"the logs are in {self._runtime.kept_logs}")
            self._recorder.close(exit_code, problem)
        return exit_code

    def _serve(self, elapsed_s: float) -> int:
        runtime = self._runtime
        self._free = list(runtime.clients)
        path = runtime.run_dir / f"{SOCKET_NAME}.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(os.fspath(path))
            listener.listen()
            threading.Thread(target=self._accept, args=(listener,), name="keeper-accept", daemon=True).start()
            self._companions.open(self._inbox.put)
            runtime.record(warm=Warm(str(path), self._job_id, settings_of(runtime.spec)))
            self._progress.ready(elapsed_s, str(runtime.spec.log_dir or runtime.folder.logs))
            self._on_ready(runtime.run_dir)
            try:
                while (code := self._handle(self._inbox.get())) is None:
                    pass
                return code
            finally:
                # Wakes the thread that accepts.
                listener.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._receive, args=(_Visitor(sock),), name="keeper-visitor", daemon=True).start()

    def _receive(self, visitor: _Visitor) -> None:
        try:
            for request in visitor.lines.receive():
                self._inbox.put(_Came(visitor, request))
        finally:
            self._inbox.put(_Left(visitor))

    def _handle(self, event: _Event) -> int | None:
        """Returns the exit code when it is over."""
        exit_code = self._react(event)
        if exit_code is None and self._is_terminating and all(visitor.client is None for visitor in self._visitors):
            self._progress.line("ended: the job is about to end, and no program is inside")
            exit_code = 128 + signal.SIGTERM
        return exit_code

    def _react(self, event: _Event) -> int | None:
        match event:
            case SignalReceived(number) if number in _ENDING:
                self._progress.line(f"ended by {signal.Signals(number).name}")
                return 128 + number
            case _Came(visitor, Attach()) if self._is_terminating:
                self._visitors.add(visitor)
                visitor.send(Refused(_TERMINATING))
            case _Came(visitor, Attach() as request):
                self._visitors.add(visitor)
                visitor.request = request
                self._waiting.append(visitor)
                self._let_in()
            case _Came(visitor, ProgramStarted(program)):
                visitor.program = program
                self._record_programs()
            case _Came(visitor, Signal(number)) if visitor.client is not None:
                self._runtime.signal_client(visitor.client, number)
            case _Came(visitor, Down(is_forced)):
                self._visitors.add(visitor)
                inside = [other for other in self._visitors if other.client is not None]
                if not inside or is_forced:
                    self._progress.line("ended by slurm-pathways down")
                    return 0
                listed = "\n".join(f"  {' '.join(other.request.argv)}" for other in inside if other.request)
                visitor.send(Refused(f"{len(inside)} of its programs still run; --force ends them too:\n{listed}"))
            case _Left(visitor):
                self._leave(visitor)
            case Came() | Went():
                self._companions.handle(event)
            case ComponentEvent() | ComponentEnded():
                self._companions.note(event)
                return self._runtime_event(event)
            case _:
                pass
        return None

    # Programs

    def _let_in(self) -> None:
        while self._waiting:
            ready = next((client for client in self._free if self._runtime.is_listening(client)), None)
            if ready is None:
                break
            self._free.remove(ready)
            visitor = self._waiting.popleft()
            visitor.client = ready
            assert visitor.request is not None
            prefix = self._runtime.program_prefix(ready, has_terminal=visitor.request.has_terminal)
            visitor.send(Attached(ready.proxy, ready.address, tuple(prefix), self._runtime.host_names))
        while len(self._free) <= len(self._waiting):
            self._free.append(self._runtime.add_proxy())

    def _leave(self, visitor: _Visitor) -> None:
        visitor.lines.close()
        self._visitors.discard(visitor)
        if visitor in self._waiting:
            self._waiting.remove(visitor)
        if visitor.client is not None:
            self._clearing = {thread for thread in self._clearing if thread.is_alive()}
            thread = threading.Thread(target=self._clear_up, args=(visitor.client, visitor.program), name="clear-up")
            self._clearing.add(thread)
            thread.start()
        self._record_programs()

    def _clear_up(self, client: Client, program: Process | None) -> None:
        """After a program, or after its launcher, which may have been killed before it."""
        programs = [program] if program is not None else self._programs_at(client.address)
        for one in programs:
            if is_running(one):
                self._end(client, one)
        if client in self._runtime.clients:
            self._runtime.close_proxy(client)

    def _programs_at(self, address: str) -> list[Process]:
        """Those of a launcher that was killed between its program's start and the word of it."""
        name = "program" if self._job_id is None else STEP
        setting = f"{JAX_BACKEND_TARGET}={backend_target(address)}"
        return [identify(name, pid) for pid in caretaker.with_variable(setting)]

    def _end(self, client: Client, program: Process) -> None:
        if not self._runtime.signal_client(client, signal.SIGTERM):
            _signal(program, signal.SIGTERM)
        _signal(program, signal.SIGCONT)
        _wait(program, self._runtime.spec.kill_after_s)
        _signal(program, signal.SIGTERM if program.name == STEP else signal.SIGKILL)
        _wait(program, self._runtime.spec.kill_after_s)

    def _record_programs(self) -> None:
        self._runtime.record(programs=tuple(visitor.program for visitor in self._visitors if visitor.program))

    # The runtime

    def _runtime_event(self, event: RuntimeEvent) -> int | None:
        self._progress.event(event, 0.0)
        of_proxy = next((visitor for visitor in self._visitors if _is_of(visitor.client, event)), None)
        is_of_some_proxy = event.component.startswith("proxy-")
        for visitor in self._visitors if not is_of_some_proxy else [of_proxy] if of_proxy else []:
            if visitor.client is not None:
                visitor.send(_as_answer(event))
        match event:
            case ComponentEvent(name=name) if name == LISTENING_EVENT and not self._is_terminating:
                self._let_in()
            case ComponentEvent(name=name) if (news := describe_news(event)) is not None:
                self._progress.line(news)
                if name == TERMINATING_EVENT:
                    self._is_terminating = True
                    while self._waiting:
                        self._waiting.popleft().send(Refused(_TERMINATING))
            case ComponentEnded(component, returncode, was_asked=False, will_restart=will_restart):
                log = quote_log(self._runtime.folder.log_of(component))
                end = describe_end(returncode) + describe_restart(will_restart)
                words = f"{self._runtime.describe_component(component)} {end}\n{log}"
                self._progress.line(words)
                if is_of_some_proxy:
                    self._proxy_lost(component, words)
                elif is_vital(component):
                    return 1
            case _:
                pass
        return None

    def _proxy_lost(self, proxy: str, words: str) -> None:
        lost = next((client for client in self._free if client.proxy == proxy), None)
        if lost is not None:
            # Not started again at once: it would end again. The next program that comes has another try.
            self._free.remove(lost)
            if self._waiting:
                self._waiting.popleft().send(Refused(f"no proxy could be started for it: {words}"))


def _is_of(client: Client | None, event: RuntimeEvent) -> bool:
    return client is not None and client.proxy == event.component


def _as_answer(event: RuntimeEvent) -> Answer:
    match event:
        case ComponentEvent(component, name, fields):
            return Said(component, name, dict(fields))
        case ComponentEnded(component, returncode, was_asked, will_restart):
            return Ended(component, returncode, was_asked, will_restart)


def _wait(program: Process, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while is_running(program) and time.monotonic() < deadline_s:
        time.sleep(_POLL_INTERVAL_S)


def _signal(program: Process, number: int) -> None:
    if is_running(program):
        with contextlib.suppress(ProcessLookupError):
            os.kill(program.pid, number)
