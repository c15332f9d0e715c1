"""Drives a ControllerCore by hand: feeds events, keeps instructions, checks invariants after each."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from pathways_runtime.core.bitmaps import bitmap_of
from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.controller.core import ControllerCore
from pathways_runtime.core.controller.events import PeerId
from pathways_runtime.core.ids import Handle, HostIndex, OpId, SessionId, WorkerId
from pathways_runtime.core.topology import Topology

InstructionT = TypeVar("InstructionT", bound=ins.Instruction)

SECOND_NS = 1_000_000_000
WALL_CLOCK_S = 1_700_000_000.0


@dataclass(frozen=True)
class Operation:
    """A submission without a body."""

    session: SessionId
    op_id: OpId
    hosts: tuple[HostIndex, ...]
    is_launch: bool = True
    is_transfer: bool = False
    senders: tuple[HostIndex, ...] = ()
    reads: tuple[Handle, ...] = ()
    writes: tuple[Handle, ...] = ()
    consumes: tuple[Handle, ...] = ()
    after_transfers: tuple[OpId, ...] = ()
    host_set: int = 0


class Driver:
    """Peers are numbered: the supervisor of worker w is 10000 + w, its executor 1000 + w, proxies go from 1.

    An executor of a later epoch has a number higher by 100000 for each epoch.

    Relays listen as soon as they are told to. Without ``checks``, invariants are left out, for large clusters.
    """

    def __init__(self, topology: Topology, num_spares: int = 0, *, checks: bool = True, **options: int) -> None:
        self.topology = topology
        num_absent = options.get("num_absent_slices", 0) * topology.hosts_per_slice
        self.num_workers = topology.num_hosts - num_absent + num_spares
        self.checks = checks
        self.core = ControllerCore(topology, num_spares, **options)
        self.now_ns = 5 * SECOND_NS
        self.out: list[ins.Instruction] = []
        #: Per worker whose executor is behind a relay: the relay, and its number there.
        self.places: dict[int, tuple[PeerId, int]] = {}
        self.streams: dict[HostIndex, list[tuple[int, object]]] = {HostIndex(h): [] for h in range(topology.num_hosts)}
        self.send(ev.Started(self.now_ns, WALL_CLOCK_S))

    def send(self, event: ev.Event) -> list[ins.Instruction]:
        out = self.core.handle(event)
        if self.checks:
            self.core.check_invariants()
        for instruction in out:
            if isinstance(instruction, ins.Dispatch | ins.Substitute):
                what = instruction.submission if isinstance(instruction, ins.Dispatch) else instruction.operation
                for host in instruction.group.hosts:
                    stream = self.streams[host]
                    assert not stream or stream[-1][0] < instruction.seq
                    stream.append((instruction.seq, what))
        self.out += out
        return out

    def register_worker(self, worker: int, devices: int | None = None, companion: str = "") -> list[ins.Instruction]:
        devices = self.topology.devices_per_host if devices is None else devices
        registered = ev.WorkerRegistered(
            PeerId(10000 + worker), WorkerId(worker), f"node-{worker}", 5000 + worker, devices, self.now_ns, companion
        )
        return self.start_relays(self.send(registered))

    def start_relays(self, out: list[ins.Instruction]) -> list[ins.Instruction]:
        """Supervisors that are told to be relays are; executors that are started have their place behind them."""
        followed: list[ins.Instruction] = []
        for instruction in out:
            if isinstance(instruction, ins.StartRelay):
                followed += self.send(ev.RelayListening(instruction.peer, f"unix:/relay-{instruction.peer}"))
        for instruction in out + followed:
            if isinstance(instruction, ins.StartExecutor) and instruction.relay_address:
                relay = PeerId(int(instruction.relay_address.rpartition("-")[2]))
                child = sum(other == relay for other, _ in self.places.values())
                self.places[instruction.peer - 10000] = (relay, child)
        return out + followed

    def register_executor(self, worker: int, epoch: int = 1, num_devices: int | None = None) -> list[ins.Instruction]:
        return self.send(self.executor(worker, epoch, num_devices))

    def executor(self, worker: int, epoch: int = 1, num_devices: int | None = None) -> ev.ExecutorRegistered:
        """What an executor says of itself."""
        relay, child = self.places.get(worker, (None, 0))
        return ev.ExecutorRegistered(
            PeerId(1000 + worker + 100_000 * (epoch - 1)),
            WorkerId(worker),
            epoch,
            6000 + worker,
            f"unix:/data-{worker}",
            "machine",
            self.topology.platform,
            "version 1",
            "cpu",
            self.topology.devices_per_host if num_devices is None else num_devices,
            self.now_ns,
            relay,
            child,
        )

    def start(self) -> "Driver":
        """Bring everything up to ready."""
        for instruction in list(self.out):
            if isinstance(instruction, ins.StartCoordination):
                self.send(ev.CoordinationStarted(instruction.world, f"127.0.0.1:{7000 + instruction.world}"))
        for worker in range(self.num_workers):
            self.register_worker(worker)
        for worker in range(self.num_workers):
            self.register_executor(worker)
        self.form_members(self.out)
        assert any(isinstance(i, ins.Announce) and i.event == "ready" for i in self.out)
        return self

    def form_members(self, instructions: list[ins.Instruction]) -> list[ins.Instruction]:
        out: list[ins.Instruction] = []
        for instruction in list(instructions):
            if isinstance(instruction, ins.FormMember):
                out += self.send(ev.MemberFormed(instruction.peer, instruction.world, None, self.now_ns))
        return out

    def attach(self, peer: int = 1) -> SessionId:
        out = self.send(
            ev.SessionRequested(PeerId(peer), f"client-{peer}", 100 + peer, f"unix:/links-{peer}", self.now_ns)
        )
        accepted = [i for i in out if isinstance(i, ins.AcceptSession)]
        assert len(accepted) == 1
        return accepted[0].session

    def submit(self, *operations: Operation, peer: int = 1) -> list[int]:
        """Returns the op ids that went out, in order."""
        return dispatched(self.send(ev.OperationsSubmitted(PeerId(peer), operations, self.now_ns)))

    def acknowledge(self, host: int, launches: int = 0, transfers: tuple[tuple[int, int], ...] = ()) -> list[int]:
        started = tuple((SessionId(s), OpId(o)) for s, o in transfers)
        return dispatched(self.send(ev.Acknowledged(PeerId(1000 + host), launches, started)))

    def acknowledge_through(
        self,
        relay: PeerId,
        launches: dict[int, int],
        transfers: tuple[tuple[int, int, tuple[int, ...]], ...] = (),
    ) -> list[int]:
        """A relay says how many launches hosts have completed, and who has started transfers; like ``acknowledge``."""

        def children(hosts: Iterable[int]) -> bytes:
            assert all(self.places[host][0] == relay for host in hosts), f"not all of {hosts} are behind {relay}"
            return bitmap_of(self.places[host][1] for host in hosts)

        completed = tuple(
            (children([host for host, its in launches.items() if its == count]), count)
            for count in sorted(set(launches.values()) - {0})
        )
        started = tuple((SessionId(s), OpId(o), children(hosts)) for s, o, hosts in transfers)
        return dispatched(self.send(ev.ChildrenAcknowledged(relay, completed, started, ())))

    def pass_time(self, seconds: float) -> list[ins.Instruction]:
        """In steps as small as the shell's, with heartbeats of nobody."""
        out: list[ins.Instruction] = []
        end_ns = self.now_ns + int(seconds * SECOND_NS)
        while self.now_ns < end_ns:
            self.now_ns = min(end_ns, self.now_ns + SECOND_NS // 4)
            out += self.send(ev.TimePassed(self.now_ns))
        return out

    def waiting(self) -> dict[str, str]:
        """What waits, for what."""
        return {w["what"]: w["waits_for"] for w in self.core.report(self.now_ns)["waiting"]}


def dispatched(out: list[ins.Instruction]) -> list[int]:
    """The op ids that went out, in order."""
    return [i.submission.op_id for i in out if isinstance(i, ins.Dispatch)]


def of_type(out: list[ins.Instruction], kind: type[InstructionT]) -> list[InstructionT]:
    """Those instructions of one type."""
    return [i for i in out if isinstance(i, kind)]
