"""What waits on an executor, and what must hold between events."""

from collections.abc import Iterable, Sequence

from pathways_runtime.core.ids import OpId, SessionId
from pathways_runtime.core.topology import Topology
from pathways_runtime.core.worker.launches import PendingLaunch
from pathways_runtime.core.worker.sessions import Session

#: (session, op id, what, for what, since when on the shell's clock).
Waiting = tuple[SessionId, OpId, str, str, int]


def waiting(launches: Iterable[PendingLaunch], sessions: Iterable[Session], topology: Topology) -> list[Waiting]:
    """What waits, the oldest first: of launches, and in sessions."""
    found: list[Waiting] = []
    for launch in launches:
        pending = [str(argument.handle) for argument in launch.arguments if argument.is_pending]
        reason = f"arrays {', '.join(pending)}" if pending else "its turn"
        found.append((launch.session, launch.op_id, "launch", reason, launch.received_ns))
    for session in sessions:
        for operation in session.waiting:
            pending = [str(array.handle) for array in operation.arrays if array.is_pending]
            what = type(operation.operation).__name__.lower()
            reason = f"arrays {', '.join(pending)}"
            found.append((session.id, operation.operation.op_id, what, reason, operation.received_ns))
        buffers = {id(a): a for assemblies in session.wanted_buffers.values() for a in assemblies}
        for buffer_assembly in buffers.values():
            reason = f"{buffer_assembly.missing} host buffers from the proxy"
            found.append((session.id, buffer_assembly.op_id, "makearrays", reason, buffer_assembly.received_ns))
        for assembly in {id(a): a for a, _ in session.wanted_pieces.values()}.values():
            hosts = {
                topology.host_of(part.move.source_device)
                for parts in assembly.parts
                for part in parts
                if part.source is None and part.payload is None
            }
            reason = f"bytes from hosts {', '.join(map(str, sorted(hosts)))}"
            found.append((session.id, assembly.op_id, "transfer", reason, assembly.received_ns))
    return sorted(found, key=lambda entry: entry[4])


def check_invariants(
    launches: Sequence[PendingLaunch], enqueuing: PendingLaunch | None, sessions: Iterable[Session]
) -> None:
    """Raise AssertionError if something contradicts itself."""
    if enqueuing is None and launches:
        head = launches[0]
        assert head.missing, f"{head} could be enqueued and is not"
    for launch in launches:
        pending = sum(argument.is_pending for argument in launch.arguments)
        assert launch.missing == pending, f"{launch} counts {launch.missing} missing arguments of {pending}"
    for session in sessions:
        for handle, array in session.arrays.items():
            assert array.handle == handle, f"{array} is stored as {handle}"
            assert array.is_pending or not array.waiters, f"{array} is settled and has waiters"
            assert array.num_readers >= 0, f"{array} has {array.num_readers} readers"
            assert array.value is None or array.failure is None, f"{array} is both present and failed"
        for operation in session.waiting:
            assert operation.missing, f"{operation.operation} waits for nothing"
            assert any(array.is_pending for array in operation.arrays), (
                f"{operation.operation} waits for settled arrays"
            )
        assert not session.wanted_buffers.keys() & session.early_buffers.keys(), "a wanted buffer lies unused"
        for stream, calls in session.calls.items():
            assert calls and calls[0].missing, f"the first call of stream {stream} could begin and has not"
