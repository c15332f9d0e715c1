"""Supervisors of a simulated cluster: they start executors, see them end, and take them along when they end."""

import random
from typing import Protocol

from pathways_runtime.core.controller.events import Event, ExecutorExited, PeerId
from pathways_runtime.core.ids import WorkerId
from pathways_runtime.testing.manual_clock import ManualClock
from pathways_runtime.testing.simulated_executor import SimulatedExecutor
from pathways_runtime.testing.simulated_network import Process
from pathways_runtime.testing.simulated_relay import SimulatedRelay

_KILLED = -9
#: How long an executor needs to begin.
_LONGEST_START_NS = 300_000_000
#: How long executors go on after their supervisor, or their relay, is gone.
LONGEST_ENDING_NS = 200_000


class Surroundings(Protocol):
    """What a supervisor can do to the rest of the cluster."""

    def new_executor(self, worker: WorkerId, epoch: int, relay: SimulatedRelay | None) -> SimulatedExecutor: ...
    def tell_of_supervisor(self, supervisor: "SimulatedSupervisor", event: Event) -> None: ...
    def supervisor_ended(self, supervisor: "SimulatedSupervisor", is_silent: bool) -> None: ...


class SimulatedSupervisor(Process):
    """One process on a worker's machine.

    Attributes:
        executor: the one that runs.
        relay: what it is besides, if it was told to.
    """

    def __init__(
        self, worker: WorkerId, peer: PeerId, clock: ManualClock, rng: random.Random, surroundings: Surroundings
    ) -> None:
        super().__init__(f"supervisor-{worker}-{peer}", f"node-{worker}")
        self.worker = worker
        self.peer = peer
        self.executor: SimulatedExecutor | None = None
        self.relay: SimulatedRelay | None = None
        self._clock = clock
        self._rng = rng
        self._surroundings = surroundings
        self._wanted_epoch: int | None = None

    def start_executor(self, epoch: int, relay: SimulatedRelay | None) -> None:
        """The controller wants an executor, and none of an earlier epoch."""
        self._wanted_epoch = epoch
        self._kill_unwanted()
        self._clock.call_later(self._rng.randrange(_LONGEST_START_NS), lambda: self._spawn(epoch, relay))

    def stop_executor(self, epoch: int) -> None:
        """The controller has given an executor up."""
        if epoch == self._wanted_epoch:
            self._wanted_epoch = None
        self._kill_unwanted()

    def executor_ended(self, executor: SimulatedExecutor) -> None:
        """The kernel says that the executor has ended."""
        if executor is self.executor and not self.is_dead:
            self.executor = None
            self._report(executor.epoch)

    def end(self, *, is_silent: bool = False) -> None:
        """The process ends, now, and its executor soon; ``is_silent``: the whole machine is gone, and nothing tells."""
        if self.is_dead:
            return
        self.is_dead = True
        executor, relay = self.executor, self.relay
        if executor is not None and is_silent:
            executor.end(is_silent=True)
        elif executor is not None:
            self._clock.call_later(self._rng.randrange(LONGEST_ENDING_NS), executor.end)
        if relay is not None:
            relay.is_dead = True
            for child in relay.children if not is_silent else ():
                self._clock.call_later(self._rng.randrange(LONGEST_ENDING_NS), child.end)
        self._surroundings.supervisor_ended(self, is_silent)

    def _spawn(self, epoch: int, relay: SimulatedRelay | None) -> None:
        if self.is_dead:
            return
        if epoch != self._wanted_epoch or (relay is not None and relay.is_dead):
            self._report(epoch)
        else:
            self.executor = self._surroundings.new_executor(self.worker, epoch, relay)

    def _kill_unwanted(self) -> None:
        if self.executor is not None and self.executor.epoch != self._wanted_epoch:
            self.executor.end()

    def _report(self, epoch: int) -> None:
        exited = ExecutorExited(self.worker, epoch, _KILLED, "", self._clock.now_ns)
        self._surroundings.tell_of_supervisor(self, exited)
