"""What a session waits for workers to say: that arrays are ready, or a fetched value."""

import msgspec

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import Handle, HostIndex, OpId, RequestId, WaitId
from pathways_runtime.core.sharding import Shape


class FetchTarget(msgspec.Struct, frozen=True, gc=False):
    """Where a fetched shard goes."""

    host_buffer_handle: Handle
    dtype: DType
    shape: Shape
    byte_strides: tuple[int, ...] | None


class Wait(msgspec.Struct):
    """One Await or Fetch that is not over.

    A wait *concludes* (its request is answered) with the first failure or the last success; it is *over* when every
    host has reported or is lost. So a late report of a wait that has concluded is no surprise.

    Attributes:
        hosts: who reports. handles: what is waited for.
        request_id: the request to answer, if one waits.
        status_handle: the execution whose outcome this is, 0 if none.
        target: set for a Fetch.
        unreported: hosts that have neither reported nor been lost.
    """

    wait_id: WaitId
    op_id: OpId
    hosts: tuple[HostIndex, ...]
    handles: tuple[Handle, ...]
    request_id: RequestId | None = None
    status_handle: Handle = Handle(0)
    target: FetchTarget | None = None
    unreported: set[HostIndex] = msgspec.field(default_factory=set)
    has_concluded: bool = False

    def __post_init__(self) -> None:
        self.unreported = set(self.hosts)

    def is_over(self) -> bool:
        """Whether nobody is left to report."""
        return not self.unreported

    def missing(self) -> tuple[HostIndex, ...]:
        """Who has not reported, for people."""
        return tuple(host for host in self.hosts if host in self.unreported)


class WaitTable:
    """Waits that are not over."""

    def __init__(self) -> None:
        self.open: dict[WaitId, Wait] = {}
        self._last = 0
        # Reports that a host may have sent before it was lost: links and control are not ordered against each other.
        self._orphans: set[tuple[WaitId, HostIndex]] = set()

    def mint(self) -> WaitId:
        """The next wait's id."""
        self._last += 1
        return WaitId(self._last)

    def add(self, wait: Wait) -> None:
        """Begin to wait."""
        self.open[wait.wait_id] = wait

    def report(self, wait_id: WaitId, host: HostIndex) -> Wait | None:
        """Note that a host has reported.

        Returns:
            The wait, or None if the report comes from a host that was lost meanwhile.

        Raises:
            LookupError: this host had nothing to report.
        """
        wait = self.open.get(wait_id)
        if (wait_id, host) in self._orphans:
            self._orphans.discard((wait_id, host))
            return None
        if wait is None or host not in wait.unreported:
            raise LookupError(f"host {host} reports on wait {wait_id}, which does not wait for it: {wait}")
        self._note(wait, host)
        return wait

    def report_all(self, wait_id: WaitId, hosts: tuple[HostIndex, ...]) -> Wait | None:
        """Like ``report``, for several hosts. Returns None if all of them were lost meanwhile, or there are none."""
        wait = self.open.get(wait_id)
        if wait is not None and wait.unreported.issuperset(hosts):
            wait.unreported.difference_update(hosts)
            if wait.is_over():
                del self.open[wait_id]
            return wait if hosts else None
        wait = None
        for host in hosts:
            wait = self.report(wait_id, host) or wait
        return wait

    def lose(self, host: HostIndex) -> list[Wait]:
        """A host is lost and reports nothing more.

        Returns:
            The waits that still waited for it and have not concluded, oldest first.
        """
        affected = []
        for wait in list(self.open.values()):
            if host in wait.unreported:
                self._orphans.add((wait.wait_id, host))
                self._note(wait, host)
                if not wait.has_concluded:
                    affected.append(wait)
        return affected

    def clear(self) -> None:
        """Forget all waits."""
        self.open.clear()
        self._orphans.clear()

    def _note(self, wait: Wait, host: HostIndex) -> None:
        wait.unreported.discard(host)
        if wait.is_over():
            del self.open[wait.wait_id]
