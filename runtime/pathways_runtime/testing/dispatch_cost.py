"""What a dispatch costs proxy and controller in CPU time, for clusters of any size, without processes or sockets.

One client runs one program over all hosts again and again, each call on the result of the one before. Real cores do the
thinking and real codecs the encoding; only sockets are missing, as the streams end in a list per host.

    python -m pathways_runtime.testing.dispatch_cost
"""

import functools
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

import msgspec

from pathways_runtime.controller.streams import OperationStreams
from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.controller.core import ControllerCore
from pathways_runtime.core.controller.events import PeerId
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, RequestId, WorkerId
from pathways_runtime.core.session import events as sev
from pathways_runtime.core.session import instructions as sins
from pathways_runtime.core.session import requests
from pathways_runtime.core.session.core import SessionCore
from pathways_runtime.core.sharding import Sharding, TileAssignment, TileKind
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.controller_driver import Driver
from pathways_runtime.transport.frames import FrameCodec
from pathways_runtime.wire import messages as msg
from pathways_runtime.wire.host_names import HostNames
from pathways_runtime.wire.messages import AnyMessage

_ResultT = TypeVar("_ResultT")

_PROXY = PeerId(1)
_FIRST_EXECUTOR = 1000


@dataclass(frozen=True)
class DispatchCost:
    """CPU time per dispatch, in microseconds.

    Attributes:
        session_us: the session core, from the client's request to its instruction.
        submit_us: encoding it in the proxy, decoding it in the controller.
        order_us: the controller core puts it in the order.
        stream_us: encoding it for the hosts, once for all.
        hand_over_us: one append per host and turn: what is not O(1), as there is one connection per host.
        acknowledge_us: what hosts say of completed launches, decoded and taken in; one message per host and turn.
    """

    num_hosts: int
    launches_per_turn: int
    session_us: float
    submit_us: float
    order_us: float
    stream_us: float
    hand_over_us: float
    acknowledge_us: float

    @property
    def thinking_us(self) -> float:
        """All but what is one message per host: it should not grow with hosts."""
        return self.session_us + self.submit_us + self.order_us + self.stream_us

    @property
    def total_us(self) -> float:
        """All of it."""
        return self.thinking_us + self.hand_over_us + self.acknowledge_us


def measure_dispatch_cost(num_hosts: int, num_dispatches: int = 1024, launches_per_turn: int = 8) -> DispatchCost:
    """Measure. Credits allow two turns in flight; garbage collection is off meanwhile, as nothing here makes cycles."""
    if num_dispatches % launches_per_turn:
        raise ValueError(f"{num_dispatches} dispatches are no whole turns of {launches_per_turn}")
    measurement = _Measurement(num_hosts, launches_per_turn)
    measurement.run(4)
    measurement.spent_ns.clear()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        measurement.run(num_dispatches // launches_per_turn)
    finally:
        if was_enabled:
            gc.enable()
    spent_us = {part: spent_ns / num_dispatches / 1e3 for part, spent_ns in measurement.spent_ns.items()}
    return DispatchCost(num_hosts, launches_per_turn, **{f"{part}_us": spent for part, spent in spent_us.items()})


class _Measurement:
    def __init__(self, num_hosts: int, launches_per_turn: int) -> None:
        topology = Topology(1, num_hosts, 1, "cpu")
        self.core: ControllerCore = Driver(topology, checks=False).start().core
        accepted = self.core.handle(ev.SessionRequested(_PROXY, "client", 0, "unix:/links", 0))
        self.session_id = next(i.session for i in accepted if isinstance(i, ins.AcceptSession))
        self.session = SessionCore(self.session_id, topology)
        self.host_names = HostNames()
        self.codec: FrameCodec[AnyMessage] = FrameCodec(AnyMessage)
        self.launches_per_turn = launches_per_turn
        self.received: list[list[bytes]] = [[] for _ in range(num_hosts)]
        self.streams = OperationStreams(self._receive)
        self.spent_ns: dict[str, int] = {}
        self.last_handle = 1
        self.last_request = 0
        self.executable = self._prepare(topology)

    def _receive(self, host: HostIndex, batch: bytes) -> None:
        self.received[host].append(batch)

    def _prepare(self, topology: Topology) -> Handle:
        """Compile the program and make its first argument; nothing of this is measured."""
        devices = tuple(DeviceId(device) for device in range(topology.num_devices))
        size = len(devices)
        tiles = TileAssignment(TileKind.TILED, (size,), (size,), (0,))
        (asked,) = self._ask(requests.Compile(b"program", b"", devices))
        assert isinstance(asked, sins.CompileProgram)
        output = sev.ProgramOutput(DType.S32, (size,), tiles, None)
        program = sev.CompiledProgram("program", b"", (output,), num_parameters=1)
        self.session.handle(sev.ProgramCompiled(asked.executable, program, None))
        buffer = requests.HostBuffer(DType.S32, (1,), Handle(1 << 40))
        shards = requests.HostBufferShards(
            requests.ArraySpec(DType.S32, (size,), Sharding(devices, tiles)), (buffer,), (tuple(range(size)),)
        )
        told = self._ask(requests.MakeArraysFromHostBufferShards((shards,), (Handle(1),)))
        self._submit(told)
        self._check_received()
        return asked.executable

    def _ask(self, request: requests.Request) -> list[sins.Instruction]:
        self.last_request += 1
        return self.session.handle(sev.Requested(RequestId(self.last_request), request))

    def _submit(self, told: list[sins.Instruction]) -> None:
        submits = tuple(self._submit_of(t) for t in told if isinstance(t, sins.SubmitOperation))
        self._perform(self.core.handle(ev.OperationsSubmitted(_PROXY, submits, 0)))
        self.streams.flush()

    def _perform(self, instructions: list[ins.Instruction]) -> None:
        for instruction in instructions:
            if type(instruction) is ins.Dispatch:
                submission = instruction.submission
                assert isinstance(submission, msg.Submit)
                self.streams.dispatch(instruction, submission.body)

    def run(self, num_turns: int) -> None:
        """Whole turns: calls, dispatches, hand-over, acknowledgements."""
        for _ in range(num_turns):
            told = self._spend("session", self._call)
            batch = self._spend("submit", functools.partial(self._through_the_wire, told))
            instructions = self._spend("order", functools.partial(self._put_in_order, batch))
            self._spend("stream", functools.partial(self._perform, instructions))
            self._spend("hand_over", self.streams.flush)
            self._check_received()
            frames = [self._acknowledgement(host) for host in range(len(self.received))]
            self._spend("acknowledge", functools.partial(self._acknowledge, frames))

    def _spend(self, part: str, work: Callable[[], _ResultT]) -> _ResultT:
        began_ns = time.process_time_ns()
        result = work()
        self.spent_ns[part] = self.spent_ns.get(part, 0) + time.process_time_ns() - began_ns
        return result

    def _call(self) -> list[sins.Instruction]:
        told = []
        for _ in range(self.launches_per_turn):
            argument, result = Handle(self.last_handle), Handle(self.last_handle + 1)
            self.last_handle += 1
            told += self._ask(requests.LoadedExecutableExecute(self.executable, (argument,), (result,)))
            told += self._ask(requests.DestructArray((argument,)))
        return [instruction for instruction in told if isinstance(instruction, sins.SubmitOperation)]

    def _through_the_wire(self, told: list[sins.Instruction]) -> msg.SubmitBatch:
        submits = [self._submit_of(t) for t in told if isinstance(t, sins.SubmitOperation)]
        header = self.codec.encode(msg.SubmitBatch(tuple(submits)))[12:]
        batch = self.codec.decode(header)
        assert isinstance(batch, msg.SubmitBatch)
        return batch

    def _submit_of(self, told: sins.SubmitOperation) -> msg.Submit:
        """What the proxy's shell makes of an instruction."""
        host_set, is_new = self.host_names.name(told.hosts)
        if is_new:
            self.core.handle(ev.HostsNamed(_PROXY, host_set, told.hosts))
        return msg.Submit(
            self.session_id,
            told.operation.op_id,
            told.is_launch,
            () if host_set else told.hosts,
            told.reads,
            told.writes,
            told.consumes,
            told.after_transfers,
            told.is_transfer,
            msgspec.Raw(_encode(told.operation)),
            told.senders,
            host_set,
        )

    def _put_in_order(self, batch: msg.SubmitBatch) -> list[ins.Instruction]:
        return self.core.handle(ev.OperationsSubmitted(_PROXY, batch.submits, 0))

    def _check_received(self) -> None:
        assert all(len(batches) == 1 for batches in self.received), "every host gets one batch per turn"
        for batches in self.received:
            batches.clear()

    def _acknowledgement(self, host: int) -> bytes:
        return self.codec.encode(msg.Acknowledge(WorkerId(host), self.launches_per_turn, ()))[12:]

    def _acknowledge(self, frames: list[bytes]) -> None:
        for host, frame in enumerate(frames):
            message = self.codec.decode(frame)
            assert isinstance(message, msg.Acknowledge)
            self.core.handle(
                ev.Acknowledged(PeerId(_FIRST_EXECUTOR + host), message.launches_completed, message.transfers_started)
            )


_encode = msgspec.msgpack.Encoder().encode


def main() -> int:
    """Print a table."""
    columns = list(asdict(measure_dispatch_cost(8, 64)))
    print("  ".join(f"{column:>16}" for column in (*columns, "thinking_us", "total_us")))
    for num_hosts in (8, 32, 128, 512, 2048):
        cost = measure_dispatch_cost(num_hosts)
        values = [*asdict(cost).values(), cost.thinking_us, cost.total_us]
        print("  ".join(f"{value:>16.2f}" if isinstance(value, float) else f"{value:>16}" for value in values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
