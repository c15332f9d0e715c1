"""The jobs that lend nodes to a run, as its launcher sees them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, RuntimeEvent, describe_end
from slurm_pathways.launch.growth.door import Came, Door, Visitor, Went
from slurm_pathways.launch.growth.messages import (
    SOCKET_NAME,
    Await,
    Facts,
    Inquire,
    Joined,
    Lend,
    News,
    Over,
    Refused,
    Taken,
)
from slurm_pathways.launch.local import CONTROLLER
from slurm_pathways.launch.news import AGENT_FAILED_EVENT, GIVEN_UP_EVENT, HOST_READY_EVENT, REFUSED_EVENT
from slurm_pathways.slurm.quantities import Gres

#: What ends a worker's part in a run, with the field that says why.
_FAILURES = {REFUSED_EVENT: "reason", AGENT_FAILED_EVENT: "reason", GIVEN_UP_EVENT: None}


class GrowingRuntime(Protocol):
    """What is needed of a runtime that takes more workers. All on the main thread."""

    @property
    def spec(self) -> RuntimeSpec: ...
    @property
    def run_dir(self) -> Path: ...
    @property
    def job_id(self) -> int | None:
        """The Slurm job that it runs in."""

    @property
    def gres_per_node(self) -> tuple[Gres, ...]:
        """Of its own nodes."""

    def take(self, lend: Lend) -> tuple[str, ...]:
        """Start a worker on each node; their names among the components. Raises OSError."""

    def give_back(self, names: Sequence[str]) -> None:
        """End workers that were lent; returns at once."""

    def describe_component(self, name: str) -> str: ...
    def record(self, **changes: object) -> None: ...


@dataclass(slots=True)
class _Companion:
    """
    Attributes:
        names: of its workers that have not ended.
        ready: of those that have joined; executors that are started again join again.
        problem: what was said of the last one that had one.
    """

    lend: Lend
    names: set[str]
    ready: set[str] = field(default_factory=set)
    problem: str | None = None

    @property
    def num_ready(self) -> int:
        """How many have joined the run so far."""
        return len(self.ready)


@dataclass(slots=True)
class Companions:
    """All but ``__init__`` and ``Door``'s threads is on the main thread, as processes are started there.

    Args:
        say: gets lines for the user.
    """

    runtime: GrowingRuntime
    say: Callable[[str], None]
    _door: Door | None = None
    _companions: dict[Visitor, _Companion] = field(default_factory=dict)
    _visitors: set[Visitor] = field(default_factory=set)
    #: For whom each of them waits.
    _awaiting: dict[Visitor, str] = field(default_factory=dict)

    def open(self, tell: Callable[[Came | Went], None]) -> None:
        """The run is ready: from now on it can grow.

        Args:
            tell: gets what visitors say, to be handed to ``handle`` on the main thread.
        """
        path = self.runtime.run_dir / f"{SOCKET_NAME}.sock"
        self._door = Door(path, tell)
        self.runtime.record(growth=str(path))

    def close(self) -> None:
        """The run is over, and so are all companions. When the runtime has ended, so that nothing of it is cut off."""
        if self._door is not None:
            self._door.close()
        for visitor in self._visitors:
            visitor.send(Over("the run has ended"))
            visitor.close()
        self._visitors.clear()
        self._companions.clear()

    def handle(self, event: Came | Went) -> None:
        """Somebody came, said something, or went."""
        match event:
            case Came(visitor, Inquire()):
                self._visitors.add(visitor)
                spec = self.runtime.spec
                visitor.send(
                    Facts(self.runtime.job_id, spec.devices_per_host, spec.platform, self.runtime.gres_per_node)
                )
            case Came(visitor, Await(companion=name)):
                self._visitors.add(visitor)
                self._awaiting[visitor] = name
                self._tell_joined()
            case Came(visitor, Lend() as lend):
                self._visitors.add(visitor)
                self._take(visitor, lend)
            case Went(visitor):
                self._visitors.discard(visitor)
                self._awaiting.pop(visitor, None)
                visitor.close()
                companion = self._companions.pop(visitor, None)
                if companion is not None:
                    self.say(f"{companion.lend.companion} takes its {_nodes(companion.lend)} back")
                    self.runtime.give_back(sorted(companion.names))

    def _take(self, visitor: Visitor, lend: Lend) -> None:
        if lend.job_id is not None and lend.job_id == self.runtime.job_id:
            visitor.send(Refused(f"job {lend.job_id} is the run's own: its nodes take part from the start"))
            return
        if visitor in self._companions or not lend.nodes:
            visitor.send(Refused("a companion lends its nodes once, and at least one"))
            return
        if (lend.job_id is None) != (self.runtime.job_id is None):
            visitor.send(Refused("a run in a job takes nodes of jobs, and one on a single machine workers there"))
            return
        try:
            names = self.runtime.take(lend)
        except OSError as failure:
            visitor.send(Refused(f"no worker could be started: {failure}"))
            return
        self._companions[visitor] = _Companion(lend, set(names))
        self.say(f"starting {', '.join(map(self.runtime.describe_component, names))}")
        visitor.send(Taken(names))

    def _tell_joined(self) -> None:
        whole = {c.lend.companion for c in self._companions.values() if c.num_ready >= len(c.lend.nodes)}
        for visitor in [visitor for visitor, name in self._awaiting.items() if name in whole]:
            del self._awaiting[visitor]
            visitor.send(Joined())

    def note(self, event: RuntimeEvent) -> None:
        """Something happened to the runtime; most of it has to do with no companion."""
        if isinstance(event, ComponentEvent) and event.component == CONTROLLER and "worker" in event.fields:
            name = f"worker-{event.fields['worker']}"
        else:
            name = event.component
        found = next(((v, c) for v, c in self._companions.items() if name in c.names), None)
        if found is None:
            return
        visitor, companion = found
        match event:
            case ComponentEvent(name=what) if what == HOST_READY_EVENT:
                companion.ready.add(name)
                visitor.send(News(f"{self.runtime.describe_component(name)} has joined the run", companion.num_ready))
                self._tell_joined()
            case ComponentEvent(name=what, fields=fields) if what in _FAILURES:
                key = _FAILURES[what]
                reason = fields[key] if key is not None else "its executors end before they serve; its log says why"
                companion.problem = f"{self.runtime.describe_component(name)}: {reason}"
                visitor.send(News(companion.problem, companion.num_ready))
                self.runtime.give_back([name])
            case ComponentEnded(returncode=returncode, will_restart=will_restart) if not will_restart:
                companion.names.discard(name)
                words = f"{self.runtime.describe_component(name)} {describe_end(returncode)}"
                visitor.send(News(words, companion.num_ready))
                if not companion.names:
                    del self._companions[visitor]
                    problem = companion.problem or "all its workers have ended"
                    visitor.send(Over(problem, has_failed=True))
                    visitor.close()


def _nodes(lend: Lend) -> str:
    return "1 node" if len(lend.nodes) == 1 else f"{len(lend.nodes)} nodes"
