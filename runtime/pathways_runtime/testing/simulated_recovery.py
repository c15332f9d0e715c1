"""A simulated cluster that loses workers while clients work, and must work again in the end."""

import contextlib
import gc
import random
from collections import Counter
from collections.abc import Iterator

import msgspec

from pathways_runtime.core.ids import DeviceId, WorkerId
from pathways_runtime.testing.recovering_program import RecoveringProgram
from pathways_runtime.testing.simulated_client import Mesh
from pathways_runtime.testing.simulated_cluster import SimulatedCluster, Stuck
from pathways_runtime.testing.simulated_faults import Faults

_SECOND_NS = 1_000_000_000
_HEARTBEAT_TIMEOUT_NS = 3 * _SECOND_NS
_TICK_NS = _HEARTBEAT_TIMEOUT_NS // 10
#: How long it may take, after the last fault, until all hosts are there again. An executor whose registration was lost
#: with its relay is given up after two minutes.
_LONGEST_MENDING_NS = 180 * _SECOND_NS


class Shape(msgspec.Struct, frozen=True):
    """How large a cluster is, and how much happens in it.

    Attributes:
        num_absent_slices: of ``num_slices``: workers for them come while there are faults, and stay.
        num_lent: workers that come while there are faults, and are taken back before these end.
        faulty_ns: how long there may be faults.
        check_every: see SimulatedCluster.
    """

    num_slices: int
    hosts_per_slice: int
    num_spares: int
    relay_fanout: int
    num_faults: int
    num_clients: int = 3
    num_lent: int = 0
    num_absent_slices: int = 0
    faulty_ns: int = 12 * _SECOND_NS
    check_every: int = 50

    @property
    def num_hosts(self) -> int:
        """Virtual hosts, spares not counted."""
        return self.num_slices * self.hosts_per_slice


class Played(msgspec.Struct):
    """What happened in one run, all of it right.

    Attributes:
        num_losses: workers that were lost, and num_recoveries: hosts that somebody served for again.
        num_lent_served: of these recoveries, those by a worker that was lent.
        num_checks: how often all invariants were checked. num_values: values that were compared and were right.
        num_failures: answers that were a loss in place of a value.
        kinds, stages: of faults.
    """

    num_faults: int
    num_losses: int
    num_recoveries: int
    num_lent_served: int
    num_checks: int
    num_values: int
    num_failures: int
    num_dispatched: int
    kinds: Counter[str]
    stages: Counter[str]


def play(seed: int, shape: Shape) -> Played:
    """One run; the same seed gives the same one.

    Raises:
        WrongValue, Stuck, AssertionError: what must hold does not.
    """
    rng = random.Random(seed)
    with _nothing_collected():
        cluster = SimulatedCluster(
            seed,
            shape.num_slices,
            shape.hosts_per_slice,
            num_spares=shape.num_spares,
            num_absent_slices=shape.num_absent_slices,
            check_every=shape.check_every,
            relay_fanout=shape.relay_fanout,
            heartbeat_timeout_ns=_HEARTBEAT_TIMEOUT_NS,
            max_launches_in_flight=6,
            how_often_stuck=0.1,
        )
        return _Run(cluster, rng, shape).play()


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Nearly everything lives until the end of a run: looking for garbage before costs a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Run:
    def __init__(self, cluster: SimulatedCluster, rng: random.Random, shape: Shape) -> None:
        self._cluster = cluster
        self._rng = rng
        self._shape = shape
        self._meshes = _meshes(cluster, rng)
        self._num_clients = 0
        self._programs: list[RecoveringProgram] = []
        end_ns = cluster.clock.now_ns + shape.faulty_ns
        busy = sorted({s for mesh in self._meshes for s in cluster.topology.slices_of(mesh)})
        self._faults = Faults(cluster, rng, shape.num_faults, end_ns, busy)
        self._is_ticking = True

    def play(self) -> Played:
        cluster, clock = self._cluster, self._cluster.clock
        for number in range(self._shape.num_clients):
            # The first of them uses one slice alone.
            self._add_program(self._meshes[:1] if number == 0 else self._meshes)
        self._tick()
        end_ns = clock.now_ns + self._shape.faulty_ns
        # One client comes while there are faults, and one goes.
        clock.call_at(self._some_time(end_ns), lambda: self._add_program(self._meshes))
        clock.call_at(self._some_time(end_ns), self._programs[-1].detach)
        num_staying = self._shape.num_absent_slices * self._shape.hosts_per_slice
        first = self._shape.num_hosts - num_staying + self._shape.num_spares
        for number in range(num_staying + self._shape.num_lent):
            self._lend(WorkerId(first + number), end_ns, stays=number < num_staying)
        clock.run(end_ns)
        self._faults.mend()
        self._wait_until_mended()
        alive = [program for program in self._programs if not program.client.is_detached]
        for program in alive:
            program.stop()
        clock.run(clock.now_ns + _SECOND_NS)
        cluster.check_nothing_waits()
        self._check_disturbed(alive)
        self._check_everything_works(alive)
        self._is_ticking = False
        clock.run()
        self._check_at_rest(alive)
        return self._played()

    def _lend(self, worker: WorkerId, end_ns: int, *, stays: bool) -> None:
        come_ns, go_ns = sorted((self._some_time(end_ns), self._some_time(end_ns)))

        def come() -> None:
            self._cluster.start_supervisor(worker, "job 77")
            if stays:
                self._faults.add_worker(worker)

        self._cluster.clock.call_at(come_ns, come)
        if not stays:
            self._cluster.clock.call_at(go_ns + 1, lambda: self._cluster.take_back(worker))

    def _some_time(self, end_ns: int) -> int:
        return self._rng.randrange(self._cluster.clock.now_ns, end_ns)

    def _add_program(self, meshes: list[Mesh]) -> None:
        self._num_clients += 1
        client = self._cluster.add_client(f"client-{self._num_clients}")
        rng = random.Random(self._rng.random())
        program = RecoveringProgram(client, self._cluster.clock, rng, meshes)
        self._programs.append(program)
        self._faults.on_stage.append(program.nudge)

    def _tick(self) -> None:
        if self._is_ticking:
            self._cluster.beat()
            self._faults.revive()
            self._cluster.clock.call_later(_TICK_NS, self._tick)

    def _wait_until_mended(self) -> None:
        cluster, clock = self._cluster, self._cluster.clock
        deadline_ns = clock.now_ns + _LONGEST_MENDING_NS
        # Who went silent last is found by then.
        clock.run(clock.now_ns + _HEARTBEAT_TIMEOUT_NS + 2 * _TICK_NS)
        while True:
            clock.run(clock.now_ns + _SECOND_NS)
            states = {device["state"] for device in cluster.core.report(clock.now_ns)["devices"]}
            if states <= {"idle", "running"}:
                return
            self._faults.give_another_chance()
            if clock.now_ns > deadline_ns:
                report = cluster.core.report(clock.now_ns)
                lost = {d["host"]: d["state"] for d in report["devices"] if d["state"] not in ("idle", "running")}
                workers = {w["id"]: w["state"] for w in report["workers"] if w["state"] != "bound"}
                worlds = [w for w in report["worlds"] if w["state"] in ("coordinating", "forming")]
                raise Stuck(f"hosts {lost} do not come back; workers: {workers}; worlds: {worlds}")

    def _check_disturbed(self, programs: list[RecoveringProgram]) -> None:
        """Only who uses a slice that lost a host was answered with a loss."""
        topology = self._cluster.topology
        lost_slices = {topology.slice_of_host(host) for host in self._cluster.lost_hosts}
        lost_slices.update(range(topology.num_slices - self._shape.num_absent_slices, topology.num_slices))
        for program in programs:
            used = set().union(*(topology.slices_of(mesh) for mesh in program.meshes))
            failures = program.client.failures
            assert not failures or used & lost_slices, f"{program.client.name} lost nothing and was told {failures[0]}"

    def _check_everything_works(self, programs: list[RecoveringProgram]) -> None:
        cluster, clock = self._cluster, self._cluster.clock
        missing: list[str] = []
        before = [len(program.client.failures) for program in programs]
        for program in programs:
            program.work_everywhere(missing.append)
        clock.run(clock.now_ns + 2 * _SECOND_NS)
        cluster.check_nothing_waits()
        assert not missing, f"cannot be compiled although everybody is there: {missing}"
        for program, num_failures in zip(programs, before, strict=True):
            new = program.client.failures[num_failures:]
            assert not new, f"{program.client.name} is answered {new[0]} although everybody is there"

    def _check_at_rest(self, programs: list[RecoveringProgram]) -> None:
        cluster = self._cluster
        cluster.check_nothing_waits()
        cluster.core.check_at_rest()
        for program in programs:
            program.client.check_at_rest()
        report = cluster.core.report(cluster.clock.now_ns)
        live = {w["id"] for w in report["worlds"] if w["state"] == "formed"}
        running = {world.world for world in cluster.worlds.values() if world.is_running}
        needed = {world for world in live if cluster.worlds[world].num_members > 1}
        assert running == needed, f"services of worlds {running} run, and those of {needed} are needed"
        sessions = {program.client.session for program in programs}
        for executor in cluster.executors():
            assert executor.describe() == "nothing queued", f"{executor.name}: {executor.describe()}"
            if executor.host >= 0:
                assert executor.sessions == sessions, f"{executor.name} has sessions {executor.sessions}"

    def _played(self) -> Played:
        cluster = self._cluster
        losses = cluster.core.report(cluster.clock.now_ns)["failures"]
        return Played(
            num_faults=self._faults.num_faults,
            num_losses=len(losses),
            num_recoveries=sum(1 for loss in losses if loss["served_again_by"] is not None),
            num_lent_served=sum(1 for loss in losses if "of job 77" in (loss["served_again_by"] or "")),
            num_checks=cluster.num_checks,
            num_values=sum(client.num_checked for client in cluster.clients),
            num_failures=sum(len(client.failures) for client in cluster.clients),
            num_dispatched=cluster.num_dispatched,
            kinds=self._faults.kinds,
            stages=self._faults.stages,
        )


def _meshes(cluster: SimulatedCluster, rng: random.Random) -> list[Mesh]:
    """A slice; another; parts of slices; hosts of two slices; one host; another."""
    topology = cluster.topology
    per_slice = topology.hosts_per_slice
    first = rng.randrange(topology.num_slices)
    second = (first + 1) % topology.num_slices

    def over(*hosts: int) -> Mesh:
        devices = [topology.device_at(host, index) for host in hosts for index in range(topology.devices_per_host)]  # type: ignore[arg-type]
        rng.shuffle(devices)
        return tuple(map(DeviceId, devices))

    of_first, of_second = topology.hosts_of_slice(first), topology.hosts_of_slice(second)
    half = max(1, per_slice // 2)
    return [
        over(*of_first),
        over(*of_second),
        over(*of_first[:half]),
        over(*of_first[-half:]),
        over(*(*of_first[:half], *of_second[: per_slice - half])),
        over(of_first[0]),
        over(of_second[-1]),
    ]
