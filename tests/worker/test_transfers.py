"""What becomes of a transfer whose source has failed in a collective because another host was lost."""

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pathways_runtime.core import operations as ops
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, SessionId, WorkerId, WorldId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.core.worker.arrays import LocalArray, ShardRef
from pathways_runtime.core.worker.events import ArrayFailed, Event, ReadTaken
from pathways_runtime.core.worker.instructions import AssembleArray, OutgoingPiece, Part, SendPieces
from pathways_runtime.worker import failures, pjrt, worlds
from pathways_runtime.worker.acknowledgements import Acknowledgements
from pathways_runtime.worker.endings import Endings
from pathways_runtime.worker.shards import Shards
from pathways_runtime.worker.transfers import Transfers

SESSION = SessionId(1)
LOST = Status(Code.DATA_LOSS, "host 1 was lost")


class Sent:
    """A data plane that keeps what it is given."""

    def __init__(self) -> None:
        self.payloads: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, target: HostIndex, key: object, contents: Any, sent: Any) -> None:
        self.payloads.put(contents)


class Bench:
    """Transfers, and an array whose values cannot be read since a collective has failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.sent = Sent()
        self.endings = Endings()
        world = worlds.form(WorldId(1), Topology(1, 1, 2, "cpu"), "cpu", (HostIndex(0),), 0, "")
        self.transfers = Transfers(
            self.sent,  # type: ignore[arg-type]
            Acknowledgements(WorkerId(0), lambda message: None),
            self.events.put,
            lambda event: [],
            lambda: world,
            self.endings,
        )
        self.array = LocalArray(Handle(1), (DeviceId(0),))
        placement = world.placement((DeviceId(0),), None)
        self.array.value = Shards(pjrt.put([np.ones(4, np.float32)], placement.sharding, placement.physical), placement)

        def failed(shard: object) -> None:
            raise pjrt.PjrtError("INTERNAL: Gloo all-reduce failed: Connection reset by peer")

        monkeypatch.setattr(pjrt, "view", failed)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    yield bench
    bench.transfers.close()


def test_a_copied_range_names_the_host(bench: Bench) -> None:
    part = Part(ShardRef(bench.array, 0), None, ((0, 2),), None)
    target = LocalArray(Handle(2), (DeviceId(1),))
    result = ops.ShardedResult(Handle(2), DType.F32, (2,), None, (DeviceId(1),))
    bench.transfers.assemble(AssembleArray(SESSION, OpId(2), target, result, ((part,),)))
    bench.endings.note(LOST)
    assert isinstance(bench.events.get(timeout=30), ReadTaken)
    failed = bench.events.get(timeout=30)
    assert isinstance(failed, ArrayFailed)
    assert failed.failure == LOST


def test_what_is_sent_names_the_host(bench: Bench) -> None:
    """The source is ready, as it has failed; whoever performs instructions does not wait for the word of the loss."""
    piece = OutgoingPiece(0, HostIndex(1), 16, ShardRef(bench.array, 0), None, None)
    assert bench.transfers.send(SendPieces(SESSION, OpId(2), (piece,))) is None
    bench.endings.note(LOST)
    assert failures.decode(bench.sent.payloads.get(timeout=30), 16) == LOST
    assert isinstance(bench.events.get(timeout=30), ReadTaken)
