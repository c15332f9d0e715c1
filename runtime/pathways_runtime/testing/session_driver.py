"""A session core with numpy workers behind it: performs its instructions, checks that every request is answered
once."""

import random

import numpy as np

from pathways_runtime.core.ids import Handle, HostIndex, RequestId, SessionId
from pathways_runtime.core.operations import DeleteExecutable
from pathways_runtime.core.session import events, instructions, requests
from pathways_runtime.core.session.core import SessionCore
from pathways_runtime.core.session.responses import Response
from pathways_runtime.core.status import Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.session_workers import Program, Workers


class SessionDriver:
    """Plays client, shell, controller and workers of one session.

    Attributes:
        log: every event with the instructions that it gave, for comparing runs.
        answers: by request, as they came.
        stored: host buffers that the client stored or that were fetched for it.
        compile_answers: what is said of programs, by their bytes; a program that is not there stays unanswered.
    """

    def __init__(self, topology: Topology, seed: int = 0, losses: dict[HostIndex, Status | None] | None = None) -> None:
        self.core = SessionCore(SessionId(1), topology, losses)
        self.workers = Workers(topology, random.Random(seed))
        self.log: list[tuple[events.Event, list[instructions.Instruction]]] = []
        self.answers: dict[RequestId, Response | Status] = {}
        self.open_requests: set[RequestId] = set()
        self.stored: dict[Handle, np.ndarray] = {}
        self.compiling: list[instructions.CompileProgram] = []
        self.programs: dict[bytes, tuple[events.CompiledProgram, Program]] = {}
        self._last_request = 0
        self._fetched: np.ndarray | None = None

    def request(self, request: requests.Request) -> RequestId:
        """Ask; the answer is in ``answers``, now or later."""
        self._last_request += 1
        request_id = RequestId(self._last_request)
        self.open_requests.add(request_id)
        self.feed(events.Requested(request_id, request))
        return request_id

    def ask(self, request: requests.Request) -> Response | Status:
        """Ask what is answered at once."""
        request_id = self.request(request)
        assert request_id in self.answers, f"{request} is not answered at once"
        return self.answers[request_id]

    def feed(self, event: events.Event) -> list[instructions.Instruction]:
        """Give an event to the core and perform what it says."""
        told = self.core.handle(event)
        self.log.append((event, told))
        for instruction in told:
            self._perform(instruction)
        self.core.check_invariants()
        return told

    def _perform(self, instruction: instructions.Instruction) -> None:
        match instruction:
            case instructions.SubmitOperation():
                self.workers.submit(instruction)
            case instructions.CompileProgram():
                self.compiling.append(instruction)
                self.workers.loading.add(instruction.executable)
            case instructions.SendHostBuffer():
                self.workers.send(instruction, self.stored[instruction.host_buffer_handle])
            case instructions.DropHostBuffer():
                del self.stored[instruction.host_buffer_handle]
            case instructions.StoreFetched():
                assert self._fetched is not None
                self.stored[instruction.host_buffer_handle] = self._fetched
            case instructions.Respond(request_id=request_id, response=response):
                self.open_requests.remove(request_id)
                self.answers[request_id] = response
            case instructions.RespondError(request_id=request_id, status=status):
                self.open_requests.remove(request_id)
                self.answers[request_id] = status
            case _:
                raise AssertionError(f"no such instruction: {instruction}")

    def compile_all(self, failure: Status | None = None) -> None:
        """Answer every CompileProgram, with what ``programs`` says or with ``failure``."""
        while self.compiling:
            asked = self.compiling.pop(0)
            self.workers.loading.remove(asked.executable)
            if failure is not None:
                self.workers.unloadable[asked.executable] = failure
                self.feed(events.ProgramCompiled(asked.executable, None, failure))
                continue
            compiled, program = self.programs[asked.program]
            self.workers.programs[asked.executable] = Program(asked.devices, program.run, program.donated)
            self.feed(events.ProgramCompiled(asked.executable, compiled, None))

    def run_workers(self, most: int = 1_000_000) -> None:
        """Dispatch up to ``most`` operations, then report what came of it."""
        self.workers.dispatch_some(most)
        self.report()

    def report(self) -> None:
        """Tell the core what workers have to say so far."""
        workers = self.workers
        while workers.reports:
            op_id, handles, cause = workers.reports.pop(0)
            self.feed(events.OperationFailed(op_id, handles, cause))
        while workers.results:
            wait_id, hosts, value = workers.results.pop(0)
            for host in hosts:
                if host in workers.lost_hosts:
                    continue
                if isinstance(value, np.ndarray):
                    self._fetched = value
                    self.feed(events.ShardFetched(wait_id, host, None))
                    self._fetched = None
                elif (wait_id, host) in workers.fetches:
                    self.feed(events.ShardFetched(wait_id, host, value))
                else:
                    self.feed(events.ArraysReady(wait_id, host, value))

    def lose_host(self, host: HostIndex, cause: Status) -> None:
        """A host goes; what it held is gone, and what is under way with it fails."""
        self.workers.lose(host, cause)
        self.feed(events.HostChanged(host, False, f"host-{host}", cause))

    def lose_executor(self, host: HostIndex, cause: Status) -> None:
        """The same, but what is in the host's memory may return."""
        self.workers.lose(host, cause, keeps_host_memory=True)
        self.feed(events.HostChanged(host, False, f"host-{host}", cause, may_return=True))

    def return_host(self, host: HostIndex, retained: tuple[Handle, ...]) -> None:
        """The next executor is there, with these arrays."""
        self.workers.lost_hosts.discard(host)
        self.workers.forget_but(host, retained)
        self.feed(events.HostChanged(host, True, f"host-{host}", None, retained=retained))

    def bind_host(self, host: HostIndex) -> None:
        """A replacement stands behind a lost host."""
        self.workers.lost_hosts.discard(host)
        self.feed(events.HostChanged(host, True, f"host-{host}", None))


def submitted(told: list[instructions.Instruction]) -> list[instructions.SubmitOperation]:
    """The operations among instructions, ends of executables left out."""
    return [
        i for i in told if isinstance(i, instructions.SubmitOperation) and not isinstance(i.operation, DeleteExecutable)
    ]
