"""Workers of the allocation, the virtual hosts that they stand behind, and what was lost."""

import enum

import msgspec

from pathways_runtime.core.controller.events import ExecutorRegistered, PeerId, WorkerRegistered
from pathways_runtime.core.ids import Handle, HostIndex, SessionId, WorkerId
from pathways_runtime.core.status import Status

#: A worker whose executors end this often in a row, before they have served for a host or lived long, is given up.
MAX_SHORT_LIVES = 5
#: What counts as long.
LONG_LIFE_NS = 10_000_000_000


class WorkerState(enum.Enum):
    """Legal changes: STARTING -> READY -> BOUND | SPARE; SPARE -> BOUND; from each of these -> LOST, by way of CLOSING
    or at once; LOST -> STARTING, with the next epoch, when it is given another executor or registers anew."""

    #: The supervisor is there and has been told to start an executor.
    STARTING = "starting"
    #: The executor is there; hosts are not bound yet.
    READY = "ready"
    #: It stands behind a host, or is about to take the place of one that was lost.
    BOUND = "bound"
    SPARE = "spare"
    #: The executor's connection is closed; why is not known yet.
    CLOSING = "closing"
    LOST = "lost"


class Worker:
    """One worker: a supervisor and its executors, of which the newest counts.

    Attributes:
        supervisor: its supervisor's connection, None once that is closed.
        epoch: of its executor; each one gets a higher number than those before.
        begun_ns: when that was to be started.
        executor: what its executor said of itself, None until it is there. Kept after a loss.
        host: the virtual host that it stands behind, or stood behind when it was lost.
        failure: why it is lost; None while it is not.
        verdict_due_ns: when CLOSING ends without word from the supervisor; ``closing_cause`` is then the cause.
        companion: what people call the job that lends it, ``job 123``; empty for the run's own workers.
        is_leaving: it has said that it will not be back.
        last_heard_ns: when what was lost of it had last shown that it lives; None until something is lost, and where
            that is not known.
        retains_memory: whether arrays are in memory that outlives its executor; it goes with the supervisor.
        num_short_lives: executors that ended one after another before they had served, or lived for ``LONG_LIFE_NS``.
    """

    def __init__(self, registered: WorkerRegistered) -> None:
        self.worker = registered.worker
        self.epoch = 0
        self.num_short_lives = 0
        self.register(registered)
        self.begin(registered.now_ns)

    def register(self, registered: WorkerRegistered) -> None:
        """A supervisor has introduced itself as this worker."""
        self.name = registered.name
        self.supervisor: PeerId | None = registered.peer
        self.retains_memory = False
        self.supervisor_pid = registered.pid
        self.companion = registered.companion
        self.is_leaving = False

    def begin(self, now_ns: int) -> None:
        """The next executor is to be started."""
        self.epoch += 1
        self.begun_ns = now_ns
        self.executor: ExecutorRegistered | None = None
        self.host: HostIndex | None = None
        self.state = WorkerState.STARTING
        self.failure: Status | None = None
        self.last_heard_ns: int | None = None
        self.closing_cause = ""
        self.verdict_due_ns = 0

    def label(self) -> str:
        """How messages to people call it."""
        place = self.place()
        return f"worker {self.worker} ({place})" if self.host is None else f"host {self.host} ({place})"

    def whose(self) -> dict[str, str]:
        """The field of announcements that names who lends it; none for the run's own."""
        return {"companion": self.companion} if self.companion else {}

    def place(self) -> str:
        """Its node, and whose it is if that is not the run's."""
        return f"{self.name} of {self.companion}" if self.companion else self.name

    def count_life(self, had_served: bool, now_ns: int) -> bool:
        """Its executor is lost now. Whether another one is worth a try.

        One that had served for a host could be started, whatever a program or an accident did to it then.
        """
        lived_ns = now_ns - self.executor.now_ns if self.executor is not None else 0
        self.num_short_lives = 0 if had_served or lived_ns >= LONG_LIFE_NS else self.num_short_lives + 1
        return self.num_short_lives < MAX_SHORT_LIVES


class Host:
    """A virtual host. Its index never changes; who stands behind it does.

    Attributes:
        worker: who stands behind it, is about to, or did so last; None for a host of an absent slice until then.
        failure: why nobody serves for it; None while ``worker`` does. What was there before it was set is lost.
        is_joining: ``worker`` is about to serve: it becomes a member of its slice's world.
        loss: the record of the latest loss; None as long as there was none.
    """

    __slots__ = ("failure", "index", "is_joining", "loss", "worker")

    def __init__(self, index: HostIndex, worker: Worker | None) -> None:
        self.index = index
        self.worker = worker
        self.failure: Status | None = None
        self.is_joining = False
        self.loss: Loss | None = None

    @property
    def member(self) -> Worker | None:
        """The live worker that serves for it, or is about to: ``worker``, unless that is lost or elsewhere by now."""
        worker = self.worker
        is_here = worker is not None and worker.state is WorkerState.BOUND and worker.host == self.index
        return worker if is_here else None

    @property
    def retained(self) -> tuple[tuple[SessionId, tuple[Handle, ...]], ...]:
        """By session, what is in memory there since before the worker's executor was started."""
        executor = None if self.worker is None else self.worker.executor
        return executor.retained if executor is not None and executor.retained_host == self.index else ()


class Loss(msgspec.Struct):
    """One loss of a worker, for people.

    Attributes:
        host: the virtual host that it stood behind; None if it stood behind none.
        companion: see ``Worker``.
        at_ns: when it was found.
        silent_ns: from its last word until then; it was lost in between. None where that is not known.
        served_again_ns: when somebody served for the host again; None until then.
        served_again_by: that worker's name.
    """

    worker: WorkerId
    name: str
    host: HostIndex | None
    cause: str
    at_ns: int
    silent_ns: int | None = None
    served_again_ns: int | None = None
    served_again_by: str = ""
    companion: str = ""

    @property
    def found_after_s(self) -> float | None:
        """``silent_ns`` for people."""
        return None if self.silent_ns is None else round(self.silent_ns / 1e9, 3)
