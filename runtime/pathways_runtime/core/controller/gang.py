"""The one order: when an operation may go out, and that it goes out to all its hosts at one place of their streams."""

from collections import deque
from collections.abc import Collection, Mapping

import msgspec

from pathways_runtime.core.controller.credits import Credits
from pathways_runtime.core.controller.events import ProtocolViolation, Submission
from pathways_runtime.core.controller.fair_queue import FairQueue
from pathways_runtime.core.controller.held import HeldOperation
from pathways_runtime.core.controller.host_groups import HostGroup, HostGroups, HostSelection
from pathways_runtime.core.controller.instructions import Dispatch, Instruction, Substitute
from pathways_runtime.core.ids import Handle, HostIndex, OpId, Seq, SessionId
from pathways_runtime.core.operations import Delete, Poison
from pathways_runtime.core.status import Status

_NO_PROGRESS: list[tuple[SessionId, int]] = []
_NOTHING_LOST: dict[HostIndex, Status] = {}


class Waiting(msgspec.Struct, frozen=True):
    """Why an operation is not in the order yet."""

    session: SessionId
    op_id: OpId
    what: str
    waits_for: str
    since_ns: int


class Abandoned(msgspec.Struct, frozen=True):
    """An operation that could not run, or not to its end, because a host is lost; its results are poisoned."""

    session: SessionId
    op_id: OpId
    handles: tuple[Handle, ...]
    failure: Status


class _StartingTransfer:
    """A transfer in the order whose senders have not all said that they started."""

    __slots__ = ("group", "senders", "submission")

    def __init__(self, submission: Submission, group: HostGroup, senders: set[HostIndex]) -> None:
        self.submission = submission
        self.group = group
        self.senders = senders


class _Load:
    """A program that is being loaded, with who waits for that; or that could not be, with the failure."""

    __slots__ = ("failure", "waiting")

    def __init__(self) -> None:
        self.waiting: list[HeldOperation] = []
        self.failure: Status | None = None


class _SessionOrder:
    """What the order knows of one session.

    Attributes:
        held: operations that are not in the order, by op id, in the order of submission. The three indices below are
            about these only, so that a session that holds nothing costs nothing.
        last_writers: per handle, the last held operation that makes or consumes it.
        readers: per handle, the held operations that read it since.
        starting: transfers in the order whose senders have not all started.
        after_starting: per transfer that is held or starting, who waits for it to be under way.
        loads: programs that are not loaded: they are being, or could not be and the session has not deleted them.
        num_submitted, num_dispatched: in the life of the session.
        session: whose order this is.
        num_reported: how many of ``num_dispatched`` the session was told.
        unaware: hosts that were lost, each with the number of the change and the failure, until the session has said
            that it knows.
    """

    __slots__ = (
        "after_starting",
        "held",
        "last_op_id",
        "last_writers",
        "loads",
        "num_dispatched",
        "num_reported",
        "num_submitted",
        "readers",
        "session",
        "starting",
        "unaware",
    )

    def __init__(self, session: SessionId) -> None:
        self.session = session
        self.last_op_id = OpId(0)
        self.held: dict[OpId, HeldOperation] = {}
        self.last_writers: dict[Handle, HeldOperation] = {}
        self.readers: dict[Handle, list[HeldOperation]] = {}
        self.starting: dict[OpId, _StartingTransfer] = {}
        self.after_starting: dict[OpId, list[HeldOperation]] = {}
        self.loads: dict[Handle, _Load] = {}
        self.num_submitted = 0
        self.num_dispatched = 0
        self.num_reported = 0
        self.unaware: dict[HostIndex, tuple[int, Status]] = {}


class Order:
    """Decides the order of all operations of all sessions; ``core.operations`` states the contract.

    One counter numbers all operations, and an operation is appended to the streams of all its hosts at once: so two
    that share hosts come in the same order on each. An operation whose session holds nothing back goes out at once, in
    O(1) whatever its hosts; what depends on what is looked at only among operations that are held.

    Methods append to ``out`` what goes out. What sessions are to be told is collected, see ``take_progress`` and
    ``take_abandoned``.
    """

    def __init__(self, num_hosts: int, max_launches_in_flight: int) -> None:
        self._groups = HostGroups(num_hosts)
        self._credits = Credits(self._groups, num_hosts, max_launches_in_flight)
        self._queue = FairQueue()
        self._sessions: dict[SessionId, _SessionOrder] = {}
        self._last_seq = Seq(0)
        #: Hosts whose loss is certain and whose cause is not known yet; operations on them wait for the verdict.
        self._closing: set[HostIndex] = set()
        self._awaiting_verdict: list[HeldOperation] = []
        self._lost: dict[HostIndex, Status] = {}
        #: Held operations that have just become free of dependencies; empty between calls.
        self._ready: deque[HeldOperation] = deque()
        #: Whether a launch in the queue may be able to go out; False between calls.
        self._may_queue_move = False
        self._progressed: list[_SessionOrder] = []
        self._abandoned: list[Abandoned] = []

    # sessions

    def open_session(self, session: SessionId) -> None:
        """Operations of this session may come."""
        self._sessions[session] = _SessionOrder(session)

    def close_session(self, session: SessionId, out: list[Instruction]) -> None:
        """Drop what the session has not got into the order. Its launches in flight keep credit until completed."""
        del self._sessions[session]
        self._queue.forget_session(session)
        self._awaiting_verdict = [o for o in self._awaiting_verdict if o.submission.session != session]
        self._serve_queue(out)

    def take_progress(self) -> list[tuple[SessionId, int]]:
        """Per session of which operations went out since the last such call: how many."""
        if not self._progressed:
            return _NO_PROGRESS
        progress = []
        for state in self._progressed:
            if state.session in self._sessions:
                progress.append((state.session, state.num_dispatched - state.num_reported))
                state.num_reported = state.num_dispatched
        self._progressed = []
        return progress

    def take_abandoned(self) -> list[Abandoned]:
        """Operations that ended in a Substitute since the last such call."""
        if not self._abandoned:
            return self._abandoned
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    # operations

    def group_of(self, hosts: tuple[HostIndex, ...]) -> HostGroup:
        """These hosts, for ``submit``.

        Raises:
            ProtocolViolation: they do not exist, or are not in order.
        """
        try:
            return self._groups.intern(hosts)
        except ValueError as failure:
            raise ProtocolViolation(str(failure)) from failure

    def submit(self, submission: Submission, group: HostGroup, now_ns: int, out: list[Instruction]) -> None:
        """The next operation of a session, for the hosts of ``group``.

        Raises:
            ProtocolViolation: the session does not exist, or op ids do not grow.
        """
        state = self._sessions.get(submission.session)
        if state is None:
            raise ProtocolViolation(
                f"operation {submission.op_id} is of session {submission.session}, which is not open"
            )
        if submission.op_id <= state.last_op_id:
            raise ProtocolViolation(f"operation {submission.op_id} comes after operation {state.last_op_id}")
        state.last_op_id = submission.op_id
        state.num_submitted += 1
        if submission.is_launch and not group.overlapping:
            self._groups.let_launch(group)
        if not (
            state.held
            or submission.after_transfers
            or group.missing
            or state.unaware
            or not state.loads.keys().isdisjoint(submission.reads)
        ) and (
            not submission.is_launch or (not (self._queue and self._queue.blocks(group)) and self._credits.take(group))
        ):
            self._append(state, submission, group, out)
        else:
            operation = HeldOperation(submission, group, now_ns)
            for host in group.missing:
                if host in self._lost:
                    operation.lost[host] = self._lost[host]
            for host, (_, failure) in state.unaware.items():
                if host in group:
                    operation.lost[host] = failure
            self._hold(state, operation, out)

    def note_awareness(self, session: SessionId, change: int) -> None:
        """What the session submits from now on, it submits knowing of all changes of hosts up to this one."""
        state = self._sessions[session]
        state.unaware = {host: entry for host, entry in state.unaware.items() if entry[0] > change}

    def complete_launches(self, host: HostIndex, count: int, out: list[Instruction]) -> None:
        """``count`` more launches have finished on a host.

        Raises:
            ProtocolViolation: more than were in flight there.
        """
        try:
            may_launch = self._credits.complete(host, count)
        except ValueError as failure:
            raise ProtocolViolation(str(failure)) from failure
        if may_launch:
            self._serve_queue(out)

    def complete_launches_on(self, selection: HostSelection, count: int, out: list[Instruction]) -> None:
        """``count`` more launches, above 0, have finished on each of these hosts; see ``Credits.complete_on``."""
        if self._credits.complete_on(selection, count):
            self._serve_queue(out)

    def take_overdrawn(self) -> list[HostIndex]:
        """Hosts of which relays have said that they completed more than they were sent; each once."""
        return self._credits.take_overdrawn()

    def start_transfer(self, host: HostIndex, session: SessionId, op_id: OpId, out: list[Instruction]) -> None:
        """A host has its part of a transfer under way, or has failed to and its receivers are poisoned by that."""
        self.start_transfer_on((host,), session, op_id, out)

    def start_transfer_on(
        self, hosts: Collection[HostIndex], session: SessionId, op_id: OpId, out: list[Instruction]
    ) -> None:
        """Like ``start_transfer``, for several hosts at once."""
        state = self._sessions.get(session)
        if state is not None and op_id in state.starting:
            self._senders_started(state, op_id, hosts)
            self._advance(out)

    # programs

    def begin_load(self, session: SessionId, program: Handle) -> None:
        """A program is being loaded: what reads it is held until ``end_load``."""
        self._sessions[session].loads[program] = _Load()

    def end_load(self, session: SessionId, program: Handle, failure: Status | None, out: list[Instruction]) -> None:
        """It is loaded on all its hosts, or what reads it makes nothing, for ``failure``."""
        state = self._sessions[session]
        load = state.loads[program]
        if failure is None:
            del state.loads[program]
        load.failure = failure
        waiting, load.waiting = load.waiting, []
        for operation in waiting:
            operation.programs.remove(program)
            operation.failure = operation.failure or failure
            if operation.is_free:
                self._ready.append(operation)
        self._advance(out)

    # hosts

    def close_hosts(self, hosts: Collection[HostIndex], out: list[Instruction]) -> None:
        """Hosts are lost; why will be known soon (``lose_host``). Operations that address them wait for that."""
        for host in hosts:
            self._closing.add(host)
            self._groups.mark_missing(host)
        self._awaiting_verdict += self._queue.remove(lambda session, group: bool(group.missing))
        self._serve_queue(out)

    def lose_host(self, host: HostIndex, failure: Status, change: int, out: list[Instruction]) -> None:
        """A host is lost for ``failure``: what needs it, or waits for bytes from it, is poisoned on the others.

        Sessions are told by the change of that number. What they submit before they know of it stays without effect,
        even when somebody serves for the host again.
        """
        if host not in self._closing:
            self.close_hosts((host,), out)
        self._closing.discard(host)
        self._lost[host] = failure
        for state in self._sessions.values():
            state.unaware[host] = (change, failure)
            for operation in state.held.values():
                if host in operation.group:
                    operation.lost[host] = failure
            for transfer in [t for t in state.starting.values() if host in t.senders]:
                self._poison_transfer(state, transfer, failure, out)
        self._ready.extend(self._awaiting_verdict)
        self._awaiting_verdict = []
        self._serve_queue(out)

    def restore_host(self, host: HostIndex, out: list[Instruction]) -> None:
        """Somebody serves for a host that was lost."""
        del self._lost[host]
        self._groups.mark_present(host)
        self._credits.reset(host)
        self._serve_queue(out)

    # reports

    def in_flight(self) -> list[int]:
        """Launches in flight on each host."""
        in_flight: list[int] = self._credits.in_flight_everywhere().tolist()
        return in_flight

    def counts(self, session: SessionId) -> dict[str, int]:
        """How many operations of a session were submitted, are in the order, and are held."""
        state = self._sessions[session]
        return {"submitted": state.num_submitted, "dispatched": state.num_dispatched, "held": len(state.held)}

    def waiting(self) -> list[Waiting]:
        """Everything that is held, with its reason."""
        queued, verdict = {id(o) for o in self._queue}, {id(o) for o in self._awaiting_verdict}
        found = []
        for session, state in self._sessions.items():
            for op_id, operation in state.held.items():
                reason = self._reason(operation, state, queued, verdict)
                assert reason is not None, f"{operation} is held for no reason"
                what = f"{_kind(operation.submission)} {op_id} of session {session}"
                found.append(Waiting(session, op_id, what, reason, operation.since_ns))
        return found

    def check_invariants(self) -> None:
        """What must hold between events."""
        assert not self._ready and not self._may_queue_move
        self._credits.check_invariants()
        self._queue.check_invariants(self._credits)
        self.waiting()
        assert all(self._closing.intersection(o.group.missing) for o in self._awaiting_verdict)
        assert not any(o.group.missing for o in self._queue)
        for state in self._sessions.values():
            assert state.num_submitted == state.num_dispatched + len(state.held)
            for op_id, operation in state.held.items():
                assert operation.submission.op_id == op_id
                assert operation.waits_for <= state.held.keys(), f"{operation} waits for what is not held"
                assert all(other < op_id for other in operation.waits_for), f"{operation} waits for a later operation"
                for other in operation.waits_for:
                    assert operation in state.held[other].dependents
                for transfer in operation.transfers:
                    assert transfer in state.held or transfer in state.starting
                    assert operation in state.after_starting[transfer]
                for program in operation.programs:
                    assert operation in state.loads[program].waiting
            for writer in state.last_writers.values():
                assert state.held.get(writer.submission.op_id) is writer
            for readers in state.readers.values():
                assert readers and all(state.held.get(r.submission.op_id) is r for r in readers)
            for starting in state.starting.values():
                assert starting.senders and not starting.senders & self._lost.keys()
            if not state.held:
                assert not state.after_starting and not state.readers and not state.last_writers

    def check_at_rest(self) -> None:
        """What must hold when nothing is under way and somebody serves for every host."""
        assert not self._closing and not self._lost and not self._queue and not self._awaiting_verdict
        assert not any(group.missing for group in self._groups.all)
        assert not any(self.in_flight())
        for state in self._sessions.values():
            assert not state.held and not state.starting and not state.after_starting and not state.unaware
            assert all(load.failure is not None for load in state.loads.values())
            assert state.num_submitted == state.num_dispatched == state.num_reported

    # The way of a held operation: held, ready once it waits for no other, offered; then appended, or queued, or
    # awaiting a verdict.

    def _hold(self, state: _SessionOrder, operation: HeldOperation, out: list[Instruction]) -> None:
        submission = operation.submission
        op_id = submission.op_id
        if state.held:
            last_writers, readers = state.last_writers, state.readers
            before: dict[OpId, HeldOperation] = {}
            for handle in submission.reads:
                if writer := last_writers.get(handle):
                    before[writer.submission.op_id] = writer
            for handle in (*submission.writes, *submission.consumes):
                if writer := last_writers.get(handle):
                    before[writer.submission.op_id] = writer
                for reader in readers.get(handle, ()):
                    before[reader.submission.op_id] = reader
            for other_id, other in before.items():
                operation.waits_for.add(other_id)
                other.dependents.append(operation)
        for transfer in submission.after_transfers:
            if transfer in state.starting or transfer in state.held:
                operation.transfers.add(transfer)
                state.after_starting.setdefault(transfer, []).append(operation)
        if state.loads:
            for handle in submission.reads:
                if (load := state.loads.get(handle)) is not None:
                    if load.failure is None:
                        operation.programs.add(handle)
                        load.waiting.append(operation)
                    else:
                        operation.failure = load.failure
        state.held[op_id] = operation
        for handle in submission.reads:
            state.readers.setdefault(handle, []).append(operation)
        for handle in (*submission.writes, *submission.consumes):
            state.last_writers[handle] = operation
            # Whoever touches the handle from now on waits for this operation, which waits for these readers.
            state.readers.pop(handle, None)
        if operation.is_free:
            self._ready.append(operation)
            self._advance(out)

    def _advance(self, out: list[Instruction]) -> None:
        """Let out all that can go now. One loop, not recursion: what goes frees others, in chains of any length."""
        while True:
            while self._ready:
                self._offer(self._ready.popleft(), out)
            if not self._may_queue_move:
                return
            operation = self._queue.pop(self._credits)
            if operation is None:
                self._may_queue_move = False
            else:
                self._let_go(operation, out)

    def _offer(self, operation: HeldOperation, out: list[Instruction]) -> None:
        """An operation waits for no other: it goes out unless its hosts keep it."""
        submission, group = operation.submission, operation.group
        if group.missing and self._closing.intersection(group.missing):
            self._awaiting_verdict.append(operation)
        elif submission.is_launch and not (group.missing or operation.lost or operation.failure):
            if self._queue.blocks(group):
                # It may be its session's turn before those that wait.
                self._queue.add(operation)
                self._may_queue_move = True
            elif self._credits.take(group):
                self._let_go(operation, out)
            else:
                self._queue.add(operation)
        else:
            self._let_go(operation, out)

    def _serve_queue(self, out: list[Instruction]) -> None:
        self._may_queue_move = True
        self._advance(out)

    def _let_go(self, operation: HeldOperation, out: list[Instruction]) -> None:
        """Append a held operation to the order, and find what that frees."""
        submission = operation.submission
        state = self._sessions[submission.session]
        del state.held[submission.op_id]
        for handle in submission.reads:
            if readers := state.readers.get(handle):
                if operation in readers:
                    readers.remove(operation)
                if not readers:
                    del state.readers[handle]
        for handle in (*submission.writes, *submission.consumes):
            if state.last_writers.get(handle) is operation:
                del state.last_writers[handle]
        self._append(state, submission, operation.group, out, operation.lost, operation.failure)
        if submission.op_id in state.after_starting and submission.op_id not in state.starting:
            self._under_way(state, submission.op_id)
        for dependent in operation.dependents:
            dependent.waits_for.remove(submission.op_id)
            if dependent.is_free:
                self._ready.append(dependent)

    def _append(
        self,
        state: _SessionOrder,
        submission: Submission,
        group: HostGroup,
        out: list[Instruction],
        lost: Mapping[HostIndex, Status] = _NOTHING_LOST,
        failure: Status | None = None,
    ) -> None:
        """Give an operation its place in the order."""
        if state.num_dispatched == state.num_reported:
            self._progressed.append(state)
        state.num_dispatched += 1
        if state.loads:
            for handle in submission.consumes:
                state.loads.pop(handle, None)
        if group.missing or lost or failure:
            self._append_without_missing(submission, group, lost, failure, out)
            if _makes_something(submission):
                return
        else:
            self._last_seq = seq = Seq(self._last_seq + 1)
            out.append(Dispatch(seq, group, submission))
        if submission.senders:
            senders = {host for host in submission.senders if host not in self._lost and host not in lost}
            if senders:
                state.starting[submission.op_id] = _StartingTransfer(submission, group, senders)

    def _append_without_missing(
        self,
        submission: Submission,
        group: HostGroup,
        lost: Mapping[HostIndex, Status],
        not_loaded: Status | None,
        out: list[Instruction],
    ) -> None:
        """All or nothing: what a lost host has a part in, or a program that is not loaded everywhere, makes nothing,
        anywhere. Deletions and answers go on."""
        present = self._groups.present(group, lost)
        if not _makes_something(submission):
            self._last_seq = Seq(self._last_seq + 1)
            out.append(Dispatch(self._last_seq, present, submission))
            return
        failure = next(iter(lost.values())) if lost else not_loaded or self._lost[group.missing[0]]
        session, op_id = submission.session, submission.op_id
        self._last_seq = Seq(self._last_seq + 1)
        out.append(Substitute(self._last_seq, present, session, Poison(op_id, submission.writes, failure)))
        if submission.consumes:
            self._last_seq = Seq(self._last_seq + 1)
            out.append(Substitute(self._last_seq, present, session, Delete(op_id, submission.consumes)))
        self._abandoned.append(Abandoned(session, op_id, submission.writes, failure))

    def _senders_started(self, state: _SessionOrder, op_id: OpId, hosts: Collection[HostIndex]) -> None:
        senders = state.starting[op_id].senders
        senders.difference_update(hosts)
        if not senders:
            del state.starting[op_id]
            self._under_way(state, op_id)

    def _poison_transfer(
        self, state: _SessionOrder, transfer: _StartingTransfer, failure: Status, out: list[Instruction]
    ) -> None:
        """Some of a transfer's bytes will not come. All its hosts learn it, and before whatever waits for it: a gang of
        which some members have their argument and some do not would compute nonsense."""
        submission = transfer.submission
        present = self._groups.present(transfer.group)
        self._last_seq = Seq(self._last_seq + 1)
        poison = Poison(submission.op_id, submission.writes, failure)
        out.append(Substitute(self._last_seq, present, state.session, poison))
        self._abandoned.append(Abandoned(state.session, submission.op_id, submission.writes, failure))
        del state.starting[submission.op_id]
        self._under_way(state, submission.op_id)

    def _under_way(self, state: _SessionOrder, op_id: OpId) -> None:
        for operation in state.after_starting.pop(op_id, ()):
            operation.transfers.remove(op_id)
            if operation.is_free:
                self._ready.append(operation)

    def _reason(
        self, operation: HeldOperation, state: _SessionOrder, queued: set[int], verdict: set[int]
    ) -> str | None:
        if operation.waits_for:
            return "operations " + ", ".join(map(str, sorted(operation.waits_for)))
        if operation.transfers:
            parts = []
            for transfer in sorted(operation.transfers):
                starting = state.starting.get(transfer)
                where = f" on hosts {', '.join(map(str, sorted(starting.senders)))}" if starting else ""
                parts.append(f"transfer {transfer} to be under way{where}")
            return "; ".join(parts)
        if operation.programs:
            return f"programs {', '.join(map(str, sorted(operation.programs)))} to be loaded"
        if id(operation) in verdict:
            closing = sorted(self._closing.intersection(operation.group.missing))
            return f"word of why hosts {', '.join(map(str, closing))} are lost"
        if id(operation) in queued:
            full = self._credits.full_hosts(operation.group)
            if full:
                return f"launches in flight on hosts {', '.join(map(str, full))}"
            return "its turn among launches that share its hosts"
        return None


def _makes_something(submission: Submission) -> bool:
    """Whether it is done by all its hosts or by none; else each does its part for itself."""
    return bool(submission.writes) or submission.is_launch or submission.is_transfer


def _kind(submission: Submission) -> str:
    return "launch" if submission.is_launch else "transfer" if submission.is_transfer else "operation"
