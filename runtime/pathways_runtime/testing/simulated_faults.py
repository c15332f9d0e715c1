"""Faults for a simulated cluster: what fails, where and when, chosen by a seed; some at a stage of a recovery."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.ids import WorkerId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.testing.simulated_cluster import SimulatedCluster
from pathways_runtime.testing.simulated_network import Cut
from pathways_runtime.testing.simulated_supervisor import SimulatedSupervisor

_SECOND_NS = 1_000_000_000
#: How long after a stage of a recovery a fault that belongs to it happens.
_LONGEST_AFTER_STAGE_NS = 400_000
#: How often clients that rest begin to work at a stage of a recovery.
_HOW_OFTEN_AWAKE = 0.2
#: Worlds that do not form although nobody was lost. Fewer than what makes the controller stop trying.
_MOST_WORLDS_FAILED = 2


class Faults:
    """``num_faults`` faults between now and ``until_ns``; then everything is mended.

    Args:
        busy_slices: those that clients use, which are struck more often than others.

    Attributes:
        kinds, stages: how many faults of each kind there were, and how many at each stage of a recovery.
    """

    def __init__(
        self,
        cluster: SimulatedCluster,
        rng: random.Random,
        num_faults: int,
        until_ns: int,
        busy_slices: Sequence[int],
    ) -> None:
        self.kinds: Counter[str] = Counter()
        self.stages: Counter[str] = Counter()
        self._cluster = cluster
        self._rng = rng
        self._until_ns = until_ns
        self._busy_slices = busy_slices
        self._num_left = num_faults
        self._num_worlds_failed = 0
        self._cuts: list[Cut] = []
        self._is_over = False
        #: Workers whose machine is down for a while.
        self._down: set[WorkerId] = set()
        #: Called now and then at a stage of a recovery, so that clients work just then.
        self.on_stage: list[Callable[[], None]] = []
        self._everybody = tuple(sorted(cluster.supervisors))
        cluster.observe = self._observe
        # About half of them at any time, the others at a stage of what these bring about.
        begin_ns = cluster.clock.now_ns
        for _ in range(max(1, num_faults // 2)):
            when_ns = begin_ns + rng.randrange(max(1, (until_ns - begin_ns) * 3 // 4))
            cluster.clock.call_at(when_ns, lambda: self._strike(None))

    @property
    def num_faults(self) -> int:
        """How many there were."""
        return self.kinds.total()

    def mend(self) -> None:
        """No more faults: what is cut is healed, who stands still goes on, and workers that ended begin again."""
        self._is_over = True
        for cut in self._cuts:
            self._cluster.network.heal(cut)
        self._cuts = []
        self._down = set()

    def add_worker(self, worker: WorkerId) -> None:
        """One more that may be struck, and is revived."""
        self._everybody += (worker,)

    def revive(self) -> None:
        """Supervisors that have ended begin again, as whatever started them sees to it."""
        for worker in self._everybody:
            if self._cluster.supervisors[worker].is_dead and worker not in self._down:
                self._cluster.start_supervisor(worker)

    def give_another_chance(self) -> None:
        """Workers whose executors are started no more are started anew by hand."""
        for worker, state in self._states().items():
            supervisor = self._cluster.supervisors[worker]
            if state == "lost" and not supervisor.is_dead and supervisor.executor is None:
                supervisor.end()

    def _states(self) -> dict[WorkerId, str]:
        report = self._cluster.core.report(self._cluster.clock.now_ns)
        return {WorkerId(worker["id"]): worker["state"] for worker in report["workers"]}

    def _observe(self, stage: str, instruction: ins.Instruction) -> None:
        if self._rng.random() < _HOW_OFTEN_AWAKE:
            for call in self.on_stage:
                call()
        if self._is_over or not self._num_left or self._cluster.clock.now_ns > self._until_ns:
            return
        if stage == "a world forms" and self._num_worlds_failed < _MOST_WORLDS_FAILED and self._rng.random() < 0.02:
            assert isinstance(instruction, ins.FormMember)
            self._num_worlds_failed += 1
            failure = Status(Code.INTERNAL, "no client today")
            self._cluster.clock.call_later(0, lambda: self._spoil(instruction, failure))
            self._count("a world does not form", stage)
        elif self.kinds and self._rng.random() < 0.15:
            delay_ns = self._rng.randrange(_LONGEST_AFTER_STAGE_NS)
            self._cluster.clock.call_later(delay_ns, lambda: self._strike(stage))

    def _spoil(self, instruction: ins.FormMember, failure: Status) -> None:
        self._cluster.worlds[instruction.world].next_failure = failure

    def _count(self, kind: str, stage: str | None) -> None:
        self._num_left -= 1
        self.kinds[kind] += 1
        if stage is not None:
            self.stages[stage] += 1

    # kinds of faults

    def _strike(self, stage: str | None) -> None:
        if not self._num_left or self._is_over:
            return
        supervisor = self._victim()
        if supervisor.is_dead:
            return
        kinds: list[tuple[str, Callable[[SimulatedSupervisor], None]]] = [
            ("executor killed", self._kill_executor),
            ("executor killed", self._kill_executor),
            ("supervisor killed", lambda s: s.end()),
            ("machine down", self._take_down),
            ("executor stopped", self._stop_executor),
            ("supervisor stopped", self._stop_supervisor),
            ("machine cut off", lambda s: self._cut_off(s, Cut(node=s.node))),
            ("machine hears nothing", lambda s: self._cut_off(s, Cut(node=s.node, outgoing=False))),
            ("machine is not heard", lambda s: self._cut_off(s, Cut(node=s.node, incoming=False))),
            ("proxy hears late of the controller", self._delay_a_proxy),
            ("proxy hears late of the controller", self._delay_a_proxy),
            ("controller cut off", lambda s: self._cut_off(s, Cut(node=s.node, far="controller"))),
            (
                "controller hears nothing",
                lambda s: self._cut_off(s, Cut(node=s.node, incoming=False, far="controller")),
            ),
        ]
        kind, strike = self._rng.choice(kinds)
        self._count(kind, stage)
        strike(supervisor)

    def _victim(self) -> SimulatedSupervisor:
        """Anybody, but mostly somebody who has to do with a recovery, or a relay."""
        supervisors, rng = self._cluster.supervisors, self._rng
        choice = rng.random()
        if choice < 0.1 and (relays := self._cluster.relays()):
            node = rng.choice(relays).node
            return next(s for s in supervisors.values() if s.node == node)
        slice_index = None
        if choice < 0.5:
            down = sorted(self._cluster.down_hosts)
            slice_index = self._cluster.topology.slice_of_host(rng.choice(down)) if down else None
        if choice < 0.8 and slice_index is None:
            slice_index = rng.choice(self._busy_slices)
        if slice_index is not None:
            hosts = self._cluster.topology.hosts_of_slice(slice_index)
            near = [executor.worker for executor in self._cluster.executors() if executor.host in hosts]
            if near:
                return supervisors[rng.choice(near)]
        return supervisors[rng.choice(self._everybody)]

    @staticmethod
    def _kill_executor(supervisor: SimulatedSupervisor) -> None:
        if supervisor.executor is not None:
            supervisor.executor.end()

    def _take_down(self, supervisor: SimulatedSupervisor) -> None:
        worker = supervisor.worker
        supervisor.end(is_silent=True)
        self._down.add(worker)
        back_ns = self._rng.randrange(_SECOND_NS // 10, 8 * _SECOND_NS)
        self._cluster.clock.call_later(back_ns, lambda: self._down.discard(worker))

    def _stop_executor(self, supervisor: SimulatedSupervisor) -> None:
        if supervisor.executor is not None:
            self._cut_off(supervisor, Cut(process=supervisor.executor.name))

    def _stop_supervisor(self, supervisor: SimulatedSupervisor) -> None:
        self._cut_off(supervisor, Cut(process=supervisor.name))
        if supervisor.relay is not None:
            self._cut_off(supervisor, Cut(process=supervisor.relay.name))

    def _delay_a_proxy(self, supervisor: SimulatedSupervisor) -> None:
        """It goes on as it knows things, while an executor is lost, and perhaps replaced."""
        client = self._rng.choice(self._cluster.clients)
        cut = Cut(node=client.node, outgoing=False, far="controller")
        self._cut_off(supervisor, cut, self._rng.choice((_SECOND_NS // 100, _SECOND_NS)))
        self._kill_executor(supervisor)

    def _cut_off(self, _: SimulatedSupervisor, cut: Cut, longest_ns: int = 0) -> None:
        """For a while: too short to be noticed, or long enough to be replaced meanwhile."""
        self._cluster.network.cut(cut)
        self._cuts.append(cut)
        longest_ns = longest_ns or self._rng.choice((_SECOND_NS // 1000, _SECOND_NS, 8 * _SECOND_NS))

        def heal() -> None:
            if cut in self._cuts:
                self._cuts.remove(cut)
                self._cluster.network.heal(cut)

        self._cluster.clock.call_later(self._rng.randrange(longest_ns), heal)
