"""An operation that is submitted and not yet in the order, with everything that it waits for."""

from pathways_runtime.core.controller.events import Submission
from pathways_runtime.core.controller.host_groups import HostGroup
from pathways_runtime.core.ids import Handle, HostIndex, OpId
from pathways_runtime.core.status import Status


class HeldOperation:
    """Compared by identity. Waits for operations, transfers and programs; then for its hosts' fate, or for credit.

    Attributes:
        since_ns: when it was submitted.
        waits_for: op ids of operations of the same session that must be in the order first.
        transfers: op ids of transfers of the same session that must be under way first.
        programs: names of programs of the same session that must be loaded first.
        dependents: operations that have this one in ``waits_for``.
        tag, arrival: its place in the FairQueue, once it is there.
        lost: hosts of it that nobody served for when it was submitted, or that were lost since, as far as its session
            knew. What it names is not there, even if somebody serves for them again.
        failure: why a program that it names could not be loaded.
    """

    __slots__ = (
        "arrival",
        "dependents",
        "failure",
        "group",
        "lost",
        "programs",
        "since_ns",
        "submission",
        "tag",
        "transfers",
        "waits_for",
    )

    def __init__(self, submission: Submission, group: HostGroup, since_ns: int) -> None:
        self.submission = submission
        self.group = group
        self.since_ns = since_ns
        self.waits_for: set[OpId] = set()
        self.transfers: set[OpId] = set()
        self.programs: set[Handle] = set()
        self.dependents: list[HeldOperation] = []
        self.lost: dict[HostIndex, Status] = {}
        self.failure: Status | None = None
        self.tag = -1
        self.arrival = -1

    @property
    def is_free(self) -> bool:
        """Whether nothing of its session has to come first any more."""
        return not (self.waits_for or self.transfers or self.programs)

    def __repr__(self) -> str:
        return f"HeldOperation(session {self.submission.session}, op {self.submission.op_id}, {self.group})"
