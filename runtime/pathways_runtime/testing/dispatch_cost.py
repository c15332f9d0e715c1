"""What a dispatch costs proxy and controller in CPU time, for clusters of any size, in one process.

One client runs one program over all hosts again and again, each call on the result of the one before. Real cores do the
thinking, real codecs the encoding, and every message goes through a socket, so that the kernel's part is counted.
The far ends, which belong to other processes, are served outside of what is measured.

    python -m pathways_runtime.testing.dispatch_cost
"""

import asyncio
import contextlib
import functools
import gc
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec
import uvloop

from pathways_runtime.controller.streams import OperationStreams, Place
from pathways_runtime.core.controller import events as ev
from pathways_runtime.core.controller import instructions as ins
from pathways_runtime.core.controller.core import ControllerCore
from pathways_runtime.core.controller.events import PeerId
from pathways_runtime.core.defaults import RELAY_FANOUT
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, RequestId, WaitId, WorkerId
from pathways_runtime.core.operations import Await
from pathways_runtime.core.relay import Aggregation
from pathways_runtime.core.session import events as sev
from pathways_runtime.core.session import instructions as sins
from pathways_runtime.core.session import requests
from pathways_runtime.core.session.core import SessionCore
from pathways_runtime.core.sharding import Sharding, TileAssignment, TileKind
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.controller_driver import Driver
from pathways_runtime.transport.frames import AsyncChannel, Frame, FrameCodec
from pathways_runtime.wire import links
from pathways_runtime.wire import messages as msg
from pathways_runtime.wire.host_names import HostNames

_ResultT = TypeVar("_ResultT")

_PROXY = PeerId(1)
_FIRST_EXECUTOR = 1000
_DEADLINE_S = 30.0
_encode = msgspec.msgpack.Encoder().encode
_LINK_CODEC: FrameCodec[links.AnyLinkMessage] = FrameCodec(links.AnyLinkMessage)


@dataclass(frozen=True)
class DispatchCost:
    """CPU time per dispatch, in microseconds, but for ``wait_us``.

    Attributes:
        num_streams: connections that carry operations to hosts: one per host, or one per relay.
        session_us: the session core, from the client's request to its instruction.
        submit_us: encoding it in the proxy, sending, decoding it in the controller.
        order_us: the controller core puts it in the order.
        stream_us: encoding it for the hosts, once for all.
        hand_over_us: sending it: one message per stream and turn. And telling the proxy.
        acknowledge_us: what hosts say of completed launches, received, decoded and taken in: one message per stream and
            turn.
        wait_us: per wait for an array on all hosts, not per dispatch: the hosts' answers, in controller and proxy.
    """

    num_hosts: int
    num_streams: int
    launches_per_turn: int
    session_us: float
    submit_us: float
    order_us: float
    stream_us: float
    hand_over_us: float
    acknowledge_us: float
    wait_us: float

    @property
    def thinking_us(self) -> float:
        """All but what is one message per stream."""
        return self.session_us + self.submit_us + self.order_us + self.stream_us

    @property
    def total_us(self) -> float:
        """All that a dispatch costs."""
        return self.thinking_us + self.hand_over_us + self.acknowledge_us


def measure_dispatch_cost(
    num_hosts: int,
    num_dispatches: int = 1024,
    launches_per_turn: int = 8,
    relay_fanout: int = RELAY_FANOUT,
    num_waits: int = 8,
) -> DispatchCost:
    """Measure. Credits allow two turns in flight; garbage collection is off meanwhile, as nothing here makes cycles.

    Args:
        relay_fanout: see ``core.controller.relays.RelayPlan``.
    """
    if num_dispatches % launches_per_turn:
        raise ValueError(f"{num_dispatches} dispatches are no whole turns of {launches_per_turn}")

    async def measure() -> DispatchCost:
        measurement = _Measurement(num_hosts, launches_per_turn, relay_fanout)
        try:
            await measurement.run(4)
            await measurement.wait()
            measurement.spent_ns.clear()
            await measurement.run(num_dispatches // launches_per_turn)
            for _ in range(num_waits):
                await measurement.wait()
        finally:
            measurement.close()
        spent_us = {f"{part}_us": spent / num_dispatches / 1e3 for part, spent in measurement.spent_ns.items()}
        spent_us["wait_us"] *= num_dispatches / num_waits
        return DispatchCost(num_hosts, len(measurement.streams_by_end), launches_per_turn, **spent_us)

    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        cost: DispatchCost = uvloop.run(measure())
        return cost
    finally:
        if was_enabled:
            gc.enable()


class _Stream:
    """A connection whose near end is measured. What comes in is counted and handed to ``on_message``."""

    def __init__(self, union: Any, on_message: Callable[[Any], None]) -> None:
        self._on_message = on_message
        near, self.far = socket.socketpair()
        self._near = near
        self.far.setblocking(False)
        self.channel: AsyncChannel[Any] = AsyncChannel(FrameCodec(union), self._received, self._closed)
        self.num_received = 0

    async def open(self) -> "_Stream":
        await asyncio.get_running_loop().create_unix_connection(lambda: self.channel, sock=self._near)
        return self

    def read_far(self) -> bytes:
        """What has come to the far end; not empty."""
        return self.far.recv(1 << 20)

    def close(self) -> None:
        self.channel.close()
        self.far.close()

    def _received(self, channel: AsyncChannel[Any], frames: Sequence[Frame[Any]]) -> None:
        for frame in frames:
            self.num_received += 1
            self._on_message(frame.message)

    def _closed(self, channel: AsyncChannel[Any], failure: Exception | None) -> None:
        assert failure is None, f"a stream broke: {failure}"


class _Measurement:
    """Proxy and controller of one client. ``spent_ns``: CPU time by part."""

    def __init__(self, num_hosts: int, launches_per_turn: int, relay_fanout: int) -> None:
        topology = Topology(1, num_hosts, 1, "cpu")
        driver = Driver(topology, checks=False, relay_fanout=relay_fanout).start()
        self.core: ControllerCore = driver.core
        self.places: dict[int, Place] = driver.places
        accepted = self.core.handle(ev.SessionRequested(_PROXY, "client", 0, "unix:/links", 0))
        self.session_id = next(i.session for i in accepted if isinstance(i, ins.AcceptSession))
        self.session = SessionCore(self.session_id, topology)
        self.topology = topology
        self.host_names = HostNames()
        self.codec: FrameCodec[msg.AnyMessage] = FrameCodec(msg.AnyMessage)
        self.launches_per_turn = launches_per_turn
        self.streams = OperationStreams(self._send, self._send_through, self.places.get)
        self.spent_ns: dict[str, int] = {}
        self.last_handle = 1
        self.last_request = 0
        self.executable = Handle(0)
        self.is_answered = False
        #: Of the controller: to each relay, by its PeerId, and to each host without one, by its executor's.
        self.streams_by_end: dict[PeerId, _Stream] = {}
        self.proxy_of_controller: _Stream
        self.controller_of_proxy: _Stream
        #: Of the proxy: session links of hosts without relays.
        self.links: list[_Stream] = []
        self.submitted: list[msg.SubmitBatch] = []
        self.num_taken_in = self.num_awaited = 0

    def close(self) -> None:
        for stream in (*self.streams_by_end.values(), *self.links, self.proxy_of_controller, self.controller_of_proxy):
            stream.close()

    async def _prepare(self) -> None:
        """Connect, compile the program, make its first argument; nothing of this is measured."""
        for host in range(self.topology.num_hosts):
            place = self.places.get(host)
            end = PeerId(_FIRST_EXECUTOR + host) if place is None else place[0]
            if end not in self.streams_by_end:
                take_in = functools.partial(self._take_in_progress, end)
                self.streams_by_end[end] = await _Stream(msg.AnyMessage, take_in).open()
            if place is None:
                take_in = functools.partial(self._take_in_answer, HostIndex(host))
                self.links.append(await _Stream(links.AnyLinkMessage, take_in).open())
        self.proxy_of_controller = await _Stream(msg.AnyMessage, self.submitted.append).open()
        self.controller_of_proxy = await _Stream(msg.AnyMessage, self._take_in_told).open()
        devices = tuple(DeviceId(device) for device in range(self.topology.num_devices))
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
        await self._submit(told)
        self.executable = asked.executable

    # what is measured

    async def run(self, num_turns: int) -> None:
        """Whole turns: calls, dispatches, hand-over, acknowledgements."""
        if not self.executable:
            await self._prepare()
        for _ in range(num_turns):
            await self._submit(self._spend("session", self._call))
            frames = {end: self._acknowledgement(end) for end in self.streams_by_end}
            self.num_awaited += len(frames)
            for end, frame in frames.items():
                self.streams_by_end[end].far.send(frame)
            await self._spend_in("acknowledge", self._until(lambda: self.num_taken_in >= self.num_awaited))

    async def wait(self) -> None:
        """Wait for a fresh result on all hosts. Only the answers are measured."""
        spent_ns = dict(self.spent_ns)
        await self.run(1)
        told = self._ask(requests.CheckValueReady((Handle(self.last_handle),)))
        (submitted,) = [t for t in told if isinstance(t, sins.SubmitOperation)]
        assert isinstance(submitted.operation, Await)
        wait_id = submitted.operation.wait_id
        await self._submit(told)
        self.spent_ns = spent_ns
        self.is_answered = False
        assert not self.links or not self.places, "either all hosts are behind relays or none is"
        for link in self.links:
            link.far.send(_LINK_CODEC.encode(links.ArraysReady(wait_id, None)))
        if self.places:
            self.num_awaited += len(self.streams_by_end)
            for end, stream in self.streams_by_end.items():
                stream.far.send(self._readiness(end, wait_id))
        await self._spend_in("wait", self._until(self._is_answered))

    async def _submit(self, told: list[sins.Instruction]) -> None:
        await self._spend_in("submit", self._send_submits(told))
        self.proxy_of_controller.far.send(self.controller_of_proxy.read_far())
        await self._spend_in("submit", self._until(lambda: bool(self.submitted)))
        batch = self.submitted.pop()
        instructions = self._spend("order", functools.partial(self._put_in_order, batch))
        self._spend("stream", functools.partial(self._perform, instructions))
        await self._spend_in("hand_over", self._hand_over())
        for end, stream in self.streams_by_end.items():
            assert stream.read_far(), f"nothing came to {end}"
        num_received = self.controller_of_proxy.num_received
        self.controller_of_proxy.far.send(self.proxy_of_controller.read_far())
        await self._spend_in("hand_over", self._until(lambda: self.controller_of_proxy.num_received > num_received))

    def _spend(self, part: str, work: Callable[[], _ResultT]) -> _ResultT:
        began_ns = time.process_time_ns()
        result = work()
        self.spent_ns[part] = self.spent_ns.get(part, 0) + time.process_time_ns() - began_ns
        return result

    async def _spend_in(self, part: str, work: Coroutine[Any, Any, None]) -> None:
        began_ns = time.process_time_ns()
        await work
        self.spent_ns[part] = self.spent_ns.get(part, 0) + time.process_time_ns() - began_ns

    async def _until(self, is_done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        while not is_done():
            await asyncio.sleep(0)
            assert time.monotonic() < deadline_s, f"not all messages came within {_DEADLINE_S:g} s"

    def _is_answered(self) -> bool:
        if self.places:
            # The controller passes the answers on to the proxy; the socket between them is turned round here.
            with contextlib.suppress(BlockingIOError):
                self.controller_of_proxy.far.send(self.proxy_of_controller.read_far())
        return self.is_answered

    # the proxy

    def _call(self) -> list[sins.Instruction]:
        told = []
        for _ in range(self.launches_per_turn):
            argument, result = Handle(self.last_handle), Handle(self.last_handle + 1)
            self.last_handle += 1
            told += self._ask(requests.LoadedExecutableExecute(self.executable, (argument,), (result,)))
            told += self._ask(requests.DestructArray((argument,)))
        return [instruction for instruction in told if isinstance(instruction, sins.SubmitOperation)]

    def _ask(self, request: requests.Request) -> list[sins.Instruction]:
        self.last_request += 1
        return self.session.handle(sev.Requested(RequestId(self.last_request), request))

    async def _send_submits(self, told: list[sins.Instruction]) -> None:
        submits = tuple(self._submit_of(t) for t in told if isinstance(t, sins.SubmitOperation))
        self.controller_of_proxy.channel.send(msg.SubmitBatch(submits))
        await _written()

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

    def _take_in_told(self, message: Any) -> None:
        if isinstance(message, msg.ReadyOnHosts):
            self._note_answers(self.session.handle(sev.ReadyOnHosts(message.wait_id, message.hosts)))
        else:
            assert isinstance(message, msg.Dispatched), message

    def _take_in_answer(self, host: HostIndex, message: Any) -> None:
        assert isinstance(message, links.ArraysReady), message
        self._note_answers(self.session.handle(sev.ArraysReady(message.wait_id, host, message.failure)))

    def _note_answers(self, told: list[sins.Instruction]) -> None:
        self.is_answered = self.is_answered or any(isinstance(t, sins.Respond) for t in told)

    # the controller

    def _put_in_order(self, batch: msg.SubmitBatch) -> list[ins.Instruction]:
        return self.core.handle(ev.OperationsSubmitted(_PROXY, batch.submits, 0))

    def _perform(self, instructions: list[ins.Instruction]) -> None:
        for instruction in instructions:
            if type(instruction) is ins.Dispatch:
                submission = instruction.submission
                assert isinstance(submission, msg.Submit)
                self.streams.dispatch(instruction, submission.body)
            elif type(instruction) is ins.ReportDispatched:
                told = msg.Dispatched(instruction.session, instruction.count)
                self.proxy_of_controller.channel.send(told)
            elif type(instruction) is ins.ReportReady:
                told_ready = msg.ReadyOnHosts(instruction.session, instruction.wait_id, instruction.hosts)
                self.proxy_of_controller.channel.send(told_ready)

    async def _hand_over(self) -> None:
        self.streams.flush()
        await _written()

    def _send(self, host: HostIndex, batch: bytes) -> None:
        self.streams_by_end[PeerId(_FIRST_EXECUTOR + host)].channel.send_header(batch)

    def _send_through(self, relay: PeerId, bitmap: bytes, batch: bytes) -> None:
        self.streams_by_end[relay].channel.send(msg.ToChildren(bitmap), batch)

    def _take_in_progress(self, end: PeerId, message: Any) -> None:
        if isinstance(message, msg.Acknowledge):
            event: ev.Event = ev.Acknowledged(end, message.launches_completed, message.transfers_started)
        else:
            assert isinstance(message, msg.ChildrenAcknowledge), message
            event = ev.ChildrenAcknowledged(end, message.completed, message.transfers_started, message.ready)
        self._perform(self.core.handle(event))
        self.num_taken_in += 1

    # executors and relays; not measured

    def _acknowledgement(self, end: PeerId) -> bytes:
        if end < 10_000:
            return self.codec.encode(msg.Acknowledge(WorkerId(end - _FIRST_EXECUTOR), self.launches_per_turn, ()))
        aggregation = self._aggregation(end)
        for child in self._children(end):
            aggregation.acknowledge(child, self.launches_per_turn, (), 0)
        return self._told(aggregation)

    def _readiness(self, relay: PeerId, wait_id: WaitId) -> bytes:
        aggregation = self._aggregation(relay)
        for child in self._children(relay):
            aggregation.arrays_ready(child, self.session_id, wait_id, 0)
        return self._told(aggregation)

    def _children(self, relay: PeerId) -> list[int]:
        return [child for other, child in self.places.values() if other == relay]

    def _aggregation(self, relay: PeerId) -> Aggregation:
        aggregation = Aggregation()
        for child in self._children(relay):
            aggregation.add_child(child)
        return aggregation

    def _told(self, aggregation: Aggregation) -> bytes:
        assert aggregation.is_due(0), "all have spoken"
        told = aggregation.take()
        return self.codec.encode(msg.ChildrenAcknowledge(told.completed, told.transfers_started, told.ready))


async def _written() -> None:
    """Channels flush at the next turn of the loop, and transports write at its end."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def main() -> int:
    """Print a table."""
    measure_dispatch_cost(8, 64)
    names = [field.name for field in fields(DispatchCost)]
    print("  ".join(f"{name:>{max(9, len(name))}}" for name in (*names, "total_us")))
    for num_hosts, fanout in [(n, RELAY_FANOUT) for n in (8, 32, 128, 512, 2048)] + [(2048, 2048)]:
        cost = measure_dispatch_cost(num_hosts, relay_fanout=fanout)
        values = [*(getattr(cost, name) for name in names), cost.total_us]
        row = zip((*names, "total_us"), values, strict=True)
        print(
            "  ".join(
                f"{value:>{max(9, len(name))}.2f}" if isinstance(value, float) else f"{value:>{max(9, len(name))}}"
                for name, value in row
            ),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
