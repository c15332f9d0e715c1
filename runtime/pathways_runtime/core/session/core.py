"""SessionCore: events in, instructions out."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

from pathways_runtime.core.ids import Handle, HostIndex, RequestId, SessionId
from pathways_runtime.core.operations import HOST_MEMORY_KINDS
from pathways_runtime.core.session import (
    events,
    executions,
    figures,
    functions,
    hostbuffers,
    launches,
    lifetime,
    plugin_programs,
    plugins,
    programs,
    readback,
    rearrange,
    requests,
    responses,
)
from pathways_runtime.core.session.arrays import ArrayRecord, poisoned_handle
from pathways_runtime.core.session.dataflow import SessionState
from pathways_runtime.core.session.instructions import Instruction, Respond
from pathways_runtime.core.status import Code, Status, StatusError
from pathways_runtime.core.topology import Topology

#: A handler answers a request, says that the answer comes later (None), or refuses by raising StatusError before it has
#: changed anything.
Handler = Callable[[SessionState, RequestId, Any], responses.Response | None]

HANDLERS: dict[type[requests.Request], Handler] = {
    requests.LoadedExecutableExecute: launches.execute,
    requests.DestructArray: lifetime.destruct_array,
    requests.MakeArrayFromHostBuffer: hostbuffers.make_array_from_host_buffer,
    requests.MakeArraysFromHostBufferShards: hostbuffers.make_arrays_from_host_buffer_shards,
    requests.MakeErrorArrays: hostbuffers.make_error_arrays,
    requests.AssembleArrayFromSingleDeviceArrays: rearrange.assemble,
    requests.DisassembleIntoSingleDeviceArrays: rearrange.disassemble,
    requests.FullyReplicatedShard: rearrange.fully_replicated_shard,
    requests.CopyArrays: rearrange.copy_arrays,
    requests.ReshardArrays: rearrange.reshard_arrays,
    requests.RemapArrays: rearrange.remap_arrays,
    requests.BitcastArrays: rearrange.bitcast_arrays,
    requests.DeleteArray: lifetime.delete_array,
    requests.IsArrayDeleted: lifetime.is_array_deleted,
    requests.CheckFuture: lifetime.check_future,
    requests.CheckValueReady: readback.check_value_ready,
    requests.CopyToHostBuffer: readback.copy_to_host_buffer,
    requests.LoadedExecutableFetchExecuteResult: readback.fetch_execute_result,
    requests.Compile: programs.compile_program,
    plugin_programs.CompilePlugin: plugins.compile_plugin,
    functions.CompileFunction: functions.compile_function,
    requests.LoadedExecutableMetadata: programs.metadata,
    requests.LoadedExecutableCostAnalysis: programs.cost_analysis,
    requests.LoadedExecutableHumanReadableProgramText: programs.program_text,
    requests.LoadedExecutableDelete: programs.delete,
    requests.LoadedExecutableIsDeleted: programs.is_deleted,
    requests.LoadedExecutableDestruct: programs.destruct,
    requests.GetDefaultDeviceAssignment: programs.default_device_assignment,
    requests.GetDefaultLayout: programs.default_layout,
}

_STORY_LENGTH = 200


class ImpossibleEvent(Exception):
    """An event that cannot happen; the text tells what led to it."""


class SessionCore:
    """The thinking of one client's session. Deterministic: the same events give the same instructions.

    Args:
        session: from Attached.
        topology: what the client sees; fixed.
        losses: hosts behind which nothing stands when the session opens, and why if that is known.
    """

    def __init__(
        self, session: SessionId, topology: Topology, losses: Mapping[HostIndex, Status | None] | None = None
    ) -> None:
        known = {host: loss or _unbound(host) for host, loss in (losses or {}).items()}
        self._state = SessionState(session, topology, known)
        self._story: collections.deque[events.Event] = collections.deque(maxlen=_STORY_LENGTH)
        self._is_disconnected = False

    def handle(self, event: events.Event) -> list[Instruction]:
        """Take in what has happened.

        Returns:
            What to do now, in order.

        Raises:
            ImpossibleEvent: the event contradicts what was before; the session is not to be trusted any more.
        """
        self._story.append(event)
        if self._is_disconnected:
            return self._after_the_end(event)
        state = self._state
        out: list[Instruction] = []
        state.out = out
        if type(event) is events.Requested:
            request = event.request
            handler = HANDLERS.get(type(request))
            if handler is None:
                raise ImpossibleEvent(f"no handler for {type(request).__name__}")
            try:
                response = handler(state, event.request_id, request)
            except StatusError as refusal:
                self._refuse(event.request_id, request, refusal.status)
            else:
                if response is not None:
                    out.append(Respond(event.request_id, response))
            return out
        try:
            self._note(event)
        except LookupError as contradiction:
            raise ImpossibleEvent(f"{contradiction}\n{self.story()}") from contradiction
        return out

    def _note(self, event: events.Event) -> None:
        state = self._state
        match event:
            case events.ArraysReady():
                readback.arrays_ready(state, event)
            case events.ReadyOnHosts():
                readback.ready_on_hosts(state, event)
            case events.ShardFetched():
                readback.shard_fetched(state, event)
            case events.ProgramCompiled():
                programs.program_compiled(state, event)
            case events.OperationFailed():
                self._operation_failed(event)
            case events.HostChanged():
                self._host_changed(event)
            case events.RequestRefused():
                self._poison_results(event.result_handles, event.failure)
                state.respond_error(event.request_id, event.failure)
            case events.ClientDisconnected():
                self._is_disconnected = True
                state.waits.clear()
            case _:
                raise LookupError(f"no such event: {event}")

    def _after_the_end(self, event: events.Event) -> list[Instruction]:
        if isinstance(event, events.Requested | events.RequestRefused | events.ClientDisconnected):
            raise ImpossibleEvent(f"{event} after the client had gone\n{self.story()}")
        return []

    def _refuse(self, request_id: RequestId, request: requests.Request, status: Status) -> None:
        """Answer a request that is wrong, or that asks for the value of what has failed."""
        state = self._state
        if isinstance(request, requests.MakeArrayFromHostBuffer | requests.MakeArraysFromHostBufferShards):
            hostbuffers.drop_host_buffers(state, request)
        self._poison_results(_result_handles(request), status)
        if isinstance(request, requests.LoadedExecutableExecute) and request.result_status_handle:
            executions.keep_refusal(state, request.result_status_handle, status)
        state.respond_error(request_id, status)

    def _poison_results(self, handles: tuple[Handle, ...], status: Status) -> None:
        records = self._state.arrays.records
        for handle in handles:
            if handle and handle not in records:
                records[handle] = poisoned_handle(status)

    def _operation_failed(self, event: events.OperationFailed) -> None:
        state = self._state
        if not 0 < event.op_id <= state.last_op:
            raise LookupError(f"operation {event.op_id} failed, but there were only {state.last_op}")
        for handle in event.handles:
            record = state.arrays.records.get(handle)
            if handle in state.away:
                state.give_up(handle)
            elif record is not None and record.poison is None:
                record.poison = event.failure
                record.is_ready = False
        executions.fail_outcomes(state, event.op_id, event.failure)

    def _host_changed(self, event: events.HostChanged) -> None:
        state = self._state
        host = event.host
        if not 0 <= host < state.topology.num_hosts:
            raise LookupError(f"host {host} changed, but there are only {state.topology.num_hosts}")
        if host not in state.placements.losses:
            loss = event.failure or Status(
                Code.DATA_LOSS, f"host {event.name} (host {host} of the topology) was replaced; what it held is lost"
            )
            state.placements.set_loss(host, loss)
            self._lose_arrays(host, loss, event.may_return)
            programs.lose_host(state, host, loss)
            readback.lose_host(state, host, loss)
        if event.is_bound:
            state.placements.set_loss(host, None)
            self._take_again(host, event.retained)
            programs.load_again(state, host)

    def _lose_arrays(self, host: HostIndex, loss: Status, may_return: bool) -> None:
        """Poison what had a shard on a host, and free the other shards: nobody can use them any more.

        But for arrays in the host's memory, if they ``may_return``: of these, the other shards stay.
        """
        state = self._state
        affected = set(map(id, state.placements.touching(host)))
        groups: dict[tuple[HostIndex, ...], list[Handle]] = {}
        given_up: list[Handle] = []
        for handle, record in state.arrays.records.items():
            if record.hosts and id(record.placement) in affected:
                is_whole = record.poison is None or handle in state.away
                if record.poison is None:
                    record.poison = loss
                record.is_ready = False
                if may_return and is_whole and _is_in_host_memory(record):
                    state.away.setdefault(handle, set()).add(host)
                    continue
                if handle in state.away:
                    given_up.append(handle)
                    continue
                groups.setdefault(record.hosts, []).append(handle)
                record.leave_workers()
        for hosts, handles in groups.items():
            present = tuple(h for h in hosts if h not in state.placements.losses)
            if present:
                state.submit_delete(tuple(handles), present)
        for handle in given_up:
            state.give_up(handle)

    def _take_again(self, host: HostIndex, retained: tuple[Handle, ...]) -> None:
        """Somebody serves for a host again and has these arrays of before."""
        state = self._state
        records = state.arrays.records
        there = frozenset(retained)
        unwanted = tuple([handle for handle in retained if handle not in state.away])
        for handle in [handle for handle, hosts in state.away.items() if host in hosts]:
            if handle not in there:
                state.give_up(handle)
                continue
            awaited = state.away[handle]
            awaited.discard(host)
            if not awaited:
                del state.away[handle]
                records[handle].poison = None
        if unwanted:
            state.submit_delete(unwanted, (host,))

    def story(self) -> str:
        """The latest events, oldest first, for whoever has to find out what went wrong."""
        return "\n".join(f"  {event!r:.400}" for event in self._story)

    def figures(self) -> dict[str, Any]:
        """The session in numbers, for ``status``: JSON-able. See ``core.session.figures``."""
        return figures.figures(self._state)

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        figures.check_invariants(self._state)


def _is_in_host_memory(record: ArrayRecord) -> bool:
    return record.placement is not None and record.placement.memory_kind in HOST_MEMORY_KINDS


def _unbound(host: HostIndex) -> Status:
    return Status(Code.DATA_LOSS, f"no worker stands behind host {host}")


def _result_handles(request: requests.Request) -> tuple[Handle, ...]:
    """The handles that the client has given to what a request makes."""
    match request:
        case requests.LoadedExecutableExecute():
            return request.result_array_handles
        case requests.MakeArraysFromHostBufferShards() | requests.MakeErrorArrays():
            return request.array_handles
        case requests.MakeArrayFromHostBuffer():
            return (request.array_handle,)
        case requests.AssembleArrayFromSingleDeviceArrays() | requests.FullyReplicatedShard():
            return (request.result_handle,)
        case (
            requests.CopyArrays()
            | requests.ReshardArrays()
            | requests.RemapArrays()
            | requests.BitcastArrays()
            | requests.DisassembleIntoSingleDeviceArrays()
        ):
            return request.result_handles
        case _:
            return ()
