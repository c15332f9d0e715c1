"""A launch between its receipt and its end on this host."""

from pathways_runtime.core.ids import OpId, SessionId
from pathways_runtime.core.status import Status
from pathways_runtime.core.worker.arrays import LocalArray, Program


class PendingLaunch:
    """A launch with what it needs, in the queue of launches or under way.

    Attributes:
        program: None if the executable is not known here.
        non_donatable: argument positions that the client wants to keep.
        missing: arguments that are still pending; while there are any, it holds back all later launches.
        failure: why its results are failures whatever the execution gives; set when it is about to be enqueued.
    """

    __slots__ = (
        "arguments",
        "failure",
        "missing",
        "non_donatable",
        "op_id",
        "program",
        "received_ns",
        "results",
        "session",
    )

    def __init__(
        self,
        session: SessionId,
        op_id: OpId,
        program: Program | None,
        arguments: tuple[LocalArray, ...],
        results: tuple[LocalArray, ...],
        non_donatable: tuple[int, ...],
        received_ns: int,
    ) -> None:
        self.session = session
        self.op_id = op_id
        self.program = program
        self.arguments = arguments
        self.results = results
        self.non_donatable = non_donatable
        self.received_ns = received_ns
        self.missing = 0
        self.failure: Status | None = None

    def __repr__(self) -> str:
        return f"<launch {self.op_id} of session {self.session}: {self.missing} arguments missing>"

    def copied_arguments(self) -> tuple[int, ...]:
        """Positions that the program would overwrite and that somebody still needs: it gets copies of these."""
        program = self.program
        if program is None or not program.donated:
            return ()
        return tuple(
            position
            for position in program.donated
            if position in self.non_donatable
            or self.arguments[position].num_readers
            # An array that is passed twice can be overwritten only where nobody else reads it.
            or self.arguments.count(self.arguments[position]) > 1
        )
