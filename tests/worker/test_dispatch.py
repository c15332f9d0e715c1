"""The shell in this process: what a session held is free when it ends, whatever was under way."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pathways_runtime.core import operations as ops
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, SessionId, WorkerId, WorldId
from pathways_runtime.core.topology import Topology
from pathways_runtime.core.worker.arrays import Program
from pathways_runtime.core.worker.events import (
    BufferArrived,
    OperationReceived,
    ProgramLoaded,
    SessionClosed,
    SessionOpened,
)
from pathways_runtime.core.worker.worker import WorkerCore
from pathways_runtime.transport.dataplane import DataPlane
from pathways_runtime.worker import pjrt, programs, worlds
from pathways_runtime.worker.acknowledgements import Acknowledgements
from pathways_runtime.worker.compile_cache import CompileCache
from pathways_runtime.worker.dispatch import Dispatcher
from pathways_runtime.worker.endings import Endings
from tests.waiting import until

TOPOLOGY = Topology(1, 1, 2, "cpu")
SESSION = SessionId(1)
X, Y, Z, LATE, ALIAS = map(Handle, range(1, 6))
PROGRAM = Handle(100)


@pytest.fixture(scope="module")
def world() -> worlds.World:
    return worlds.form(WorldId(1), TOPOLOGY, "cpu", (HostIndex(0),), 0, "")


@pytest.fixture
def core() -> WorkerCore:
    return WorkerCore(HostIndex(0), TOPOLOGY, "host-0")


@pytest.fixture
def acknowledged() -> list[Any]:
    return []


@pytest.fixture
def dispatcher(
    core: WorkerCore, world: worlds.World, acknowledged: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dispatcher]:
    data_plane = DataPlane(f"unix:{tmp_path_factory.mktemp('d')}/data", "key")
    acknowledgements = Acknowledgements(WorkerId(0), acknowledged.append)
    dispatcher = Dispatcher(core, data_plane, acknowledgements, lambda failed: None, lambda: world, Endings())
    yield dispatcher
    dispatcher.close()
    data_plane.close()


def make(dispatcher: Dispatcher, op_id: int, handle: Handle, value: float) -> None:
    result = ops.ShardedResult(handle, DType.F32, (2,), None, (DeviceId(0), DeviceId(1)))
    dispatcher.feed(OperationReceived(SESSION, ops.MakeArrays(OpId(op_id), (result,), ((0, 0),)), 0))
    dispatcher.feed(BufferArrived(SESSION, OpId(op_id), 0, np.full(2, value, np.float32).tobytes()))


def settle(dispatcher: Dispatcher) -> None:
    """Wait until no other thread launches or follows anything."""
    has_launched = threading.Event()
    dispatcher._launching.submit(has_launched.set)
    assert has_launched.wait(10), "the launching thread is busy"
    in_flight = dispatcher.completions.num_in_flight
    until(lambda: not in_flight(), lambda: f"{in_flight()} launches are not over", 10, 0.001)


def test_a_closed_session_frees_everything(
    dispatcher: Dispatcher,
    core: WorkerCore,
    world: worlds.World,
    lower: Callable[..., Any],
    sharded: Callable[..., Any],
    tmp_path: Path,
) -> None:
    before = len(world.client.live_arrays())
    argument = sharded((4,), np.float32, 2, "x")
    devices = (DeviceId(0), DeviceId(1))
    program, options = lower(lambda x, y: x + y, argument, argument, devices=devices)
    loaded = programs.load(world, devices, program, options, CompileCache(tmp_path))
    executable = weakref.ref(loaded.program.value)
    dispatcher.feed(SessionOpened(SESSION))
    dispatcher.feed(ProgramLoaded(SESSION, PROGRAM, loaded.program))
    del loaded
    make(dispatcher, 1, X, 1.0)
    make(dispatcher, 2, Y, 2.0)
    dispatcher.feed(OperationReceived(SESSION, ops.Launch(OpId(3), PROGRAM, (X, Y), (Z,)), 0))
    alias = ops.ShardedResult(ALIAS, DType.F32, (2,), None, (DeviceId(1),))
    dispatcher.feed(OperationReceived(SESSION, ops.Alias(OpId(4), (alias,), ((Z,),)), 0))
    never = ops.ShardedResult(LATE, DType.F32, (2,), None, devices)
    dispatcher.feed(OperationReceived(SESSION, ops.MakeArrays(OpId(5), (never,), ((0, 0),)), 0))
    dispatcher.feed(OperationReceived(SESSION, ops.Launch(OpId(6), PROGRAM, (LATE, Y), (Handle(9),)), 0))
    arrays = core.sessions[SESSION].arrays
    np.testing.assert_array_equal(np.asarray(arrays[ALIAS].value.shard(0)), [3, 3])
    values = [weakref.ref(array.value) for array in arrays.values() if array.value is not None]
    assert len(values) == 4
    assert len(world.client.live_arrays()) > before
    del arrays
    settle(dispatcher)
    dispatcher.feed(SessionClosed(SESSION))
    # No cycles: nothing waits for a collection.
    gc.disable()
    try:
        assert [value() for value in values] == [None] * 4
        assert executable() is None
    finally:
        gc.enable()
    assert len(world.client.live_arrays()) == before


def test_a_deleted_array_frees_its_memory_when_the_last_alias_goes(
    dispatcher: Dispatcher, core: WorkerCore, world: worlds.World
) -> None:
    dispatcher.feed(SessionOpened(SESSION))
    make(dispatcher, 1, X, 1.0)
    alias = ops.ShardedResult(ALIAS, DType.F32, (2,), None, (DeviceId(1), DeviceId(0)))
    dispatcher.feed(OperationReceived(SESSION, ops.Alias(OpId(2), (alias,), ((X, X),)), 0))
    arrays = core.sessions[SESSION].arrays
    value, shared = arrays[X].value, arrays[ALIAS].value
    assert value.is_shared
    assert shared.is_shared
    del value
    dispatcher.feed(OperationReceived(SESSION, ops.Delete(OpId(3), (X,)), 0))
    assert not shared.is_shared


def test_launches_are_counted_once(
    dispatcher: Dispatcher,
    world: worlds.World,
    acknowledged: list[Any],
    lower: Callable[..., Any],
    sharded: Callable[..., Any],
    tmp_path: Path,
) -> None:
    argument = sharded((2,), np.float32, 1)
    program, options = lower(lambda x: x * 2, argument, devices=[0])
    loaded = programs.load(world, (DeviceId(0),), program, options, CompileCache(tmp_path))
    dispatcher.feed(SessionOpened(SESSION))
    dispatcher.feed(ProgramLoaded(SESSION, PROGRAM, loaded.program))
    result = ops.ShardedResult(X, DType.F32, (2,), None, (DeviceId(0),))
    dispatcher.feed(OperationReceived(SESSION, ops.MakeArrays(OpId(1), (result,), ((0,),)), 0))
    dispatcher.feed(BufferArrived(SESSION, OpId(1), 0, bytes(8)))
    for number in range(10):
        launch = ops.Launch(OpId(2 + number), PROGRAM, (X,), (Handle(20 + number),))
        dispatcher.feed(OperationReceived(SESSION, launch, 0))
    # Small programs of one device run within the call, here or, after one that took long, on the other thread.
    settle(dispatcher)
    dispatcher._acknowledgements.flush()
    assert sum(message.launches_completed for message in acknowledged) == 10
    assert dispatcher.completions.num_in_flight() == 0


class WaitingForPeers:
    """A loaded program over several hosts with one device here, which runs within its launch."""

    name, scope = "waiting", ""
    usage = None
    last_launch_s = last_launched_s = 0.0

    def __init__(self, world: worlds.World) -> None:
        self.world = world
        self.devices = (DeviceId(0),)
        self.has_begun = threading.Event()
        self.is_cut = threading.Event()

    def launch(self, arguments: list[Any], launch_id: int) -> Any:
        self.has_begun.set()
        assert self.is_cut.wait(60), "nobody ended it"
        raise pjrt.PjrtError("INTERNAL: a member is gone")


def test_the_controllers_stream_goes_on_while_a_program_waits_for_other_hosts(
    dispatcher: Dispatcher, core: WorkerCore, world: worlds.World
) -> None:
    """The word that one of them is lost comes over that stream."""
    waiting = WaitingForPeers(world)
    dispatcher.feed(SessionOpened(SESSION))
    dispatcher.feed(ProgramLoaded(SESSION, PROGRAM, Program(waiting.devices, (), True, waiting)))
    launch = OperationReceived(SESSION, ops.Launch(OpId(1), PROGRAM, (), (Z,)), 0)
    stream = threading.Thread(target=dispatcher.feed, args=(launch,), daemon=True)
    stream.start()
    assert waiting.has_begun.wait(30)
    stream.join(20)
    assert not stream.is_alive()
    assert dispatcher.is_busy_in(world)
    waiting.is_cut.set()
    until(lambda: core.sessions[SESSION].arrays[Z].failure, "the launch has not failed", 30)
