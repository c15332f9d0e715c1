"""Random requests, reordering workers, injected failures and lost hosts, against a model of values."""

import math

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, RequestId
from pathways_runtime.core.session import events, requests, responses
from pathways_runtime.core.session.requests import ArrayCopySemantics, ArraySpec
from pathways_runtime.core.sharding import REPLICATED, Shape, Sharding, TileAssignment, TileKind
from pathways_runtime.core.status import Code, Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.session_driver import SessionDriver
from pathways_runtime.testing.session_workers import MISSING, Program, gather, scatter

TOPOLOGY = Topology(num_slices=2, hosts_per_slice=2, devices_per_host=2, platform="cpu")
SHAPE: Shape = (4, 3)
GROUPS: list[tuple[DeviceId, ...]] = [
    tuple(map(DeviceId, devices)) for devices in [(0, 1, 2, 3), (4, 5, 6, 7), (3, 2, 1, 0), (0, 4), (5,)]
]
MEMORIES = [None, "device", "pinned_host"]


class Value:
    """What the model knows of an array.

    Attributes:
        causes: failures that it may carry; it may also carry none unless ``must_fail``.
        parents: what it was made of, whose later failures may reach it.
    """

    def __init__(self, values: np.ndarray, sharding: Sharding, parents: list["Value"]) -> None:
        self.values = values
        self.sharding = sharding
        self.parents = parents
        self.causes: set[Status] = set()
        self.seen: Status | None = None

    def possible(self) -> set[Status]:
        """All causes that may have reached it."""
        return self.causes.union(*(parent.possible() for parent in self.parents))


def tiled(
    devices: tuple[DeviceId, ...], dims: tuple[int, int], places: tuple[int, ...], memory: str | None
) -> Sharding:
    """Tiles over two dimensions, the rest of the devices with copies."""
    copies = len(devices) // math.prod(dims)
    return Sharding(devices, TileAssignment(TileKind.TILED, (*dims, copies), (), (), places, 1), memory)


# Few, so that programs find arguments and copies find their places; what plans can do is for test_reshard.
SHARDINGS = [
    Sharding(GROUPS[0], REPLICATED, "device"),
    Sharding(GROUPS[0], REPLICATED, "pinned_host"),
    tiled(GROUPS[0], (2, 2), (2, 0, 3, 1), "device"),
    tiled(GROUPS[0], (2, 1), (0, 1, 2, 3), None),
    Sharding(GROUPS[1], REPLICATED, None),
    tiled(GROUPS[1], (1, 4), (0, 1, 2, 3), "device"),
    tiled(GROUPS[3], (2, 1), (0, 1), "device"),
    Sharding(GROUPS[4], REPLICATED, "device"),
]
SOME_SHARDING = st.sampled_from(SHARDINGS)
ONE_IN_FOUR = st.sampled_from([True, False, False, False])


class Session(RuleBasedStateMachine):
    """One client against one core."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = SessionDriver(TOPOLOGY)
        self.live: dict[Handle, Value] = {}
        self.values: dict[Handle, Value] = {}
        self.deleted: set[Handle] = set()
        self.programs: list[tuple[Handle, Sharding, bytes]] = []
        self.compile_requests: dict[RequestId, tuple[Sharding, bytes]] = {}
        self.ready_requests: dict[RequestId, list[Value]] = {}
        self.fetch_requests: dict[RequestId, tuple[Handle, Value, Sharding]] = {}
        self.known_outputs: set[Handle] = set()
        self.checked: set[RequestId] = set()
        self.next_handle = 0
        self.num_failures = 0
        self.lost: dict[HostIndex, Status] = {}
        self.losses: list[tuple[HostIndex, Status]] = []
        #: Lost hosts whose memory is still there, and causes that may pass.
        self.away: set[HostIndex] = set()
        self.passing: set[Status] = set()

    # helpers

    def mint(self) -> Handle:
        self.next_handle += 1
        return Handle(self.next_handle)

    def pick(self, data: st.DataObject) -> Handle:
        return data.draw(st.sampled_from(sorted(self.live)))

    def new(self, handle: Handle, value: Value) -> None:
        for host in TOPOLOGY.hosts_of(value.sharding.devices):
            if host in self.lost:
                value.causes.add(self.lost[host])
        self.live[handle] = value
        self.values[handle] = value

    def drop(self, handle: Handle) -> None:
        del self.live[handle]
        self.deleted.add(handle)

    # arrays

    @initialize(seed=st.integers(0, 2**16))
    def begin(self, seed: int) -> None:
        self.driver.workers.rng.seed(seed)

    @rule(sharding=SOME_SHARDING)
    def make_array(self, sharding: Sharding) -> None:
        handle = self.mint()
        values = np.arange(12, dtype=np.int32).reshape(SHAPE) + 100 * handle
        self.driver.stored[handle] = values
        answer = self.driver.ask(requests.MakeArrayFromHostBuffer(DType.S32, SHAPE, sharding, handle, None, handle))
        assert answer == responses.ArrayHandle(handle)
        assert handle not in self.driver.stored
        self.new(handle, Value(values, sharding, []))

    @rule(sharding=SOME_SHARDING)
    def make_array_from_shards(self, sharding: Sharding) -> None:
        handle = self.mint()
        values = np.arange(12, dtype=np.int32).reshape(SHAPE) + 100 * handle
        by_box: dict[object, list[int]] = {}
        for index, box in enumerate(sharding.boxes(SHAPE)):
            by_box.setdefault(box, []).append(index)
        buffers, indices = [], []
        for box, shards in by_box.items():
            buffer = self.mint()
            part = values[tuple(slice(*r) for r in box)]  # type: ignore[attr-defined]
            self.driver.stored[buffer] = part
            buffers.append(requests.HostBuffer(DType.S32, part.shape, buffer))
            indices.append(tuple(shards))
        spec = requests.HostBufferShards(ArraySpec(DType.S32, SHAPE, sharding), tuple(buffers), tuple(indices))
        answer = self.driver.ask(requests.MakeArraysFromHostBufferShards((spec,), (handle,)))
        assert answer == responses.ArrayHandles((handle,))
        self.new(handle, Value(values, sharding, []))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), layout=SOME_SHARDING, donate=st.booleans(), is_named=st.booleans())
    def reshard(self, data: st.DataObject, layout: Sharding, donate: bool, is_named: bool) -> None:
        source = self.pick(data)
        value = self.live[source]
        semantics = ArrayCopySemantics.DONATE_INPUT if donate else ArrayCopySemantics.ALWAYS_COPY
        results = (self.mint(),) if is_named else ()
        spec = ArraySpec(DType.S32, SHAPE, layout)
        if value.values.shape != SHAPE:
            return
        answer = self.driver.ask(requests.ReshardArrays((source,), (spec,), semantics, results))
        assert isinstance(answer, responses.ArrayHandles)
        self.new(answer.array_handles[0], Value(value.values, layout, [value]))
        if donate:
            self.drop(source)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), memory_kind=st.sampled_from([None, "", "device", "pinned_host"]), donate=st.booleans())
    def copy(self, data: st.DataObject, memory_kind: str | None, donate: bool) -> None:
        source = self.pick(data)
        value = self.live[source]
        old = value.sharding
        devices = data.draw(st.sampled_from([g for g in GROUPS if len(g) == len(old.devices)] + [old.devices, ()]))
        semantics = ArrayCopySemantics.DONATE_INPUT if donate else ArrayCopySemantics.REUSE_INPUT
        handle = self.mint()
        answer = self.driver.ask(requests.CopyArrays((source,), devices, memory_kind, semantics, (handle,)))
        assert answer == responses.ArrayHandles((handle,))
        kind = old.memory_kind if memory_kind is None else memory_kind or None
        self.new(handle, Value(value.values, Sharding(devices or old.devices, old.tiles, kind), [value]))
        if donate:
            self.drop(source)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), donate=st.booleans(), again=st.booleans())
    def take_apart(self, data: st.DataObject, donate: bool, again: bool) -> None:
        source = self.pick(data)
        value = self.live[source]
        semantics = ArrayCopySemantics.DONATE_INPUT if donate else ArrayCopySemantics.REUSE_INPUT
        handles = tuple(self.mint() for _ in value.sharding.devices)
        answer = self.driver.ask(requests.DisassembleIntoSingleDeviceArrays(source, semantics, handles))
        assert answer == responses.ArrayHandles(handles)
        pieces = scatter(value.values, value.sharding)
        for handle, device, piece in zip(handles, value.sharding.devices, pieces, strict=True):
            single = Sharding((device,), REPLICATED, value.sharding.memory_kind, is_single_device=True)
            self.new(handle, Value(piece, single, [value]))
        if again:
            result = self.mint()
            made = self.driver.ask(
                requests.AssembleArrayFromSingleDeviceArrays(
                    value.values.shape, value.sharding, handles, semantics, result, DType.S32
                )
            )
            assert made == responses.ArrayHandle(result)
            self.new(result, Value(value.values, value.sharding, [self.live[handle] for handle in handles]))
            if donate:
                for handle in handles:
                    self.drop(handle)
        if donate:
            self.drop(source)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), forget=st.booleans())
    def delete(self, data: st.DataObject, forget: bool) -> None:
        handles = tuple(data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, max_size=3, unique=True)))
        if forget:
            assert self.driver.ask(requests.DestructArray(handles)) == responses.EMPTY
            for handle in handles:
                del self.live[handle]
        else:
            answer = self.driver.ask(requests.DeleteArray(handles))
            assert isinstance(answer, responses.FutureHandle)
            assert self.driver.ask(requests.CheckFuture(answer.future_handle)) == responses.EMPTY
            second = self.driver.ask(requests.CheckFuture(answer.future_handle))
            assert isinstance(second, Status) and second.code is Code.NOT_FOUND
            for handle in handles:
                self.drop(handle)

    @precondition(lambda self: self.deleted)
    @rule(data=st.data())
    def use_deleted(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.deleted)))
        result = self.mint()
        answer = self.driver.ask(requests.FullyReplicatedShard(handle, ArrayCopySemantics.REUSE_INPUT, result))
        assert isinstance(answer, Status) and answer.code is Code.INVALID_ARGUMENT
        assert self.driver.ask(requests.CheckValueReady((result,))) == answer
        assert self.driver.ask(requests.IsArrayDeleted(handle)) == responses.Deleted(True)
        assert self.driver.ask(requests.DestructArray((handle, result))) == responses.EMPTY
        self.deleted.discard(handle)

    # programs

    @rule(sharding=SOME_SHARDING, donated=st.sampled_from([(), (0,), (1,), (0, 1)]))
    def compile(self, sharding: Sharding, donated: tuple[int, ...]) -> None:
        """A program of two arguments: their sum, and the second less one, both laid out as ``sharding``."""
        sharding = Sharding(sharding.devices, sharding.tiles, "device")
        name = f"program {len(self.driver.programs)}".encode()

        def run(arguments: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
            first, second = (gather(shards, sharding, SHAPE) for shards in arguments)
            return [scatter(first + second, sharding), scatter(second - 1, sharding)]

        output = events.ProgramOutput(DType.S32, SHAPE, sharding.tiles, "device")
        compiled = events.CompiledProgram(name.decode(), b"", (output, output), donated, 2)
        self.driver.programs[name] = (compiled, Program(sharding.devices, run, donated))
        request_id = self.driver.request(requests.Compile(name, b"", sharding.devices))
        self.compile_requests[request_id] = (sharding, name)

    @precondition(lambda self: self.driver.compiling)
    @rule()
    def finish_compiling(self) -> None:
        self.driver.compile_all()
        for request_id, (sharding, name) in self.compile_requests.items():
            answer = self.driver.answers[request_id]
            assert isinstance(answer, responses.Compiled) and answer.devices == sharding.devices
            assert self.driver.ask(requests.CheckFuture(answer.ready_future_handle)) == responses.EMPTY
            self.programs.append((answer.loaded_executable_handle, sharding, name))
        self.compile_requests.clear()

    @precondition(lambda self: self.programs)
    @rule(data=st.data(), fill_status=st.booleans(), keep=st.sampled_from([(), (0,), (0, 1)]))
    def execute(self, data: st.DataObject, fill_status: bool, keep: tuple[int, ...]) -> None:
        executable, sharding, name = data.draw(st.sampled_from(self.programs))
        fitting = sorted(
            h
            for h, v in self.live.items()
            if v.sharding.devices == sharding.devices and v.sharding.tiles == sharding.tiles and v.values.shape == SHAPE
        )
        while len(fitting) < 2:
            self.make_array(sharding)
            fitting.append(Handle(self.next_handle))
        args = (data.draw(st.sampled_from(fitting)), data.draw(st.sampled_from(fitting)))
        donated = self.driver.programs[name][1].donated
        is_first = executable not in self.known_outputs
        results = () if is_first else (self.mint(), self.mint())
        status_handle = self.mint() if fill_status else Handle(0)
        values = [self.live[handle] for handle in args]
        answer = self.driver.ask(
            requests.LoadedExecutableExecute(executable, args, results, status_handle, fill_status, keep)
        )
        assert isinstance(answer, responses.Executed)
        assert answer.status_handle == status_handle
        if is_first:
            self.known_outputs.add(executable)
            assert [output.sharding for output in answer.outputs] == [sharding, sharding]
            results = tuple(output.array_handle for output in answer.outputs)
        else:
            assert answer.outputs == ()
        self.new(results[0], Value(values[0].values + values[1].values, sharding, values))
        self.new(results[1], Value(values[1].values - 1, sharding, values))
        needed = set(TOPOLOGY.hosts_of(sharding.devices))
        if len(needed) > 1:
            # A program over several hosts runs in the world of their slices, which ends with any of its hosts.
            for slice_index in TOPOLOGY.slices_of(sharding.devices):
                needed.update(TOPOLOGY.hosts_of_slice(slice_index))
        if needed.intersection(self.lost):
            for handle in results:
                self.live[handle].causes.update(cause for host, cause in self.losses if host in needed)
        for position in donated:
            if position not in keep and args[position] in self.live:
                gone = self.driver.ask(requests.IsArrayDeleted(args[position]))
                assert isinstance(gone, responses.Deleted)
                if gone.deleted:
                    self.drop(args[position])
                else:
                    assert self.live[results[0]].possible(), "it did not run"
        if fill_status:
            request_id = self.driver.request(requests.LoadedExecutableFetchExecuteResult(status_handle))
            self.ready_requests[request_id] = [self.live[handle] for handle in results]

    @precondition(lambda self: self.programs)
    @rule(data=st.data())
    def destruct_executable(self, data: st.DataObject) -> None:
        program = data.draw(st.sampled_from(self.programs))
        assert self.driver.ask(requests.LoadedExecutableDestruct(program[0])) == responses.EMPTY
        self.programs.remove(program)

    # values back

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def check_ready(self, data: st.DataObject) -> None:
        handles = tuple(data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, max_size=4)))
        request_id = self.driver.request(requests.CheckValueReady(handles))
        self.ready_requests[request_id] = [self.live[handle] for handle in handles]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def read_all_shards(self, data: st.DataObject) -> None:
        handle = self.pick(data)
        self.fetch_whole(handle, self.live[handle])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        handle = self.pick(data)
        value = self.live[handle]
        buffer = self.mint()
        request_id = self.driver.request(requests.CopyToHostBuffer(handle, buffer))
        if not value.sharding.is_fully_replicated():
            answer = self.driver.answers[request_id]
            assert isinstance(answer, Status)
            assert answer.code is Code.INVALID_ARGUMENT or answer in value.possible()
            return
        self.fetch_requests[request_id] = (buffer, value, value.sharding)

    # workers

    @precondition(lambda self: self.driver.workers.waiting)
    @rule(most=st.integers(1, 6))
    def work(self, most: int) -> None:
        self.driver.run_workers(most)
        self.check_answers()

    @precondition(lambda self: self.driver.workers.waiting)
    @rule(data=st.data(), really=ONE_IN_FOUR)
    def fail_one(self, data: st.DataObject, really: bool) -> None:
        """One of the operations that wait will fail."""
        if not really:
            return
        submit = data.draw(st.sampled_from(self.driver.workers.waiting))
        if not submit.writes:
            return
        self.num_failures += 1
        cause = Status(Code.RESOURCE_EXHAUSTED, f"failure {self.num_failures}")
        self.driver.workers.to_fail[submit.operation.op_id] = cause
        for handle in submit.writes:
            self.values[handle].causes.add(cause)

    @precondition(lambda self: len(self.lost) < 2)
    @rule(host=st.sampled_from(range(4)), really=ONE_IN_FOUR, may_return=st.booleans())
    def lose_host(self, host: HostIndex, really: bool, may_return: bool) -> None:
        if host in self.lost or not really:
            return
        self.num_failures += 1
        cause = Status(Code.DATA_LOSS, f"host {host} went ({self.num_failures})")
        self.lost[host] = cause
        self.losses.append((host, cause))
        for value in self.values.values():
            if host in TOPOLOGY.hosts_of(value.sharding.devices):
                value.causes.add(cause)
        if may_return:
            self.away.add(host)
            self.passing.add(cause)
            self.driver.lose_executor(host, cause)
        else:
            self.driver.lose_host(host, cause)
        self.check_answers()

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def bind_host(self, data: st.DataObject) -> None:
        host = min(self.lost)
        del self.lost[host]
        if host not in self.away:
            self.driver.bind_host(host)
            return
        self.away.remove(host)
        retained = [handle for handle in self.driver.workers.in_host_memory(host) if data.draw(st.booleans())]
        self.driver.return_host(host, tuple(retained))

    def check_answers(self) -> None:
        for request_id, values in list(self.ready_requests.items()):
            answer = self.driver.answers.get(request_id)
            if answer is None:
                continue
            del self.ready_requests[request_id]
            if isinstance(answer, Status):
                assert answer in set().union(*(value.possible() for value in values)), answer
                if len(values) == 1:
                    self.note_cause(values[0], answer)
            else:
                assert answer == responses.EMPTY
        for request_id, (buffer, value, _) in list(self.fetch_requests.items()):
            answer = self.driver.answers.get(request_id)
            if answer is None:
                continue
            del self.fetch_requests[request_id]
            if isinstance(answer, Status):
                assert answer in value.possible()
                self.note_cause(value, answer)
            else:
                is_padding = value.values == MISSING
                fetched = np.where(is_padding, MISSING, self.driver.stored.pop(buffer))
                np.testing.assert_array_equal(fetched, value.values)

    def note_cause(self, value: Value, cause: Status) -> None:
        if cause not in self.passing and value in self.live.values():  # once it is deleted, nobody remembers
            assert value.seen in (None, cause), f"first {value.seen}, then {cause}"
            value.seen = cause

    @invariant()
    def nothing_is_answered_twice(self) -> None:
        assert self.driver.open_requests.isdisjoint(self.driver.answers)

    def teardown(self) -> None:
        """Let everything come to its end: all is answered, values are right, workers hold what the client holds."""
        driver = self.driver
        if driver.compiling:
            self.finish_compiling()
        driver.run_workers()
        self.check_answers()
        for handle, value in sorted(self.live.items()):
            self.fetch_whole(handle, value)
        driver.run_workers()
        self.check_answers()
        assert not driver.open_requests, f"never answered: {driver.open_requests}"
        driver.ask(requests.DestructArray(tuple(sorted({*self.live, *self.deleted}))))
        driver.run_workers()
        # What is in the memory of a lost host is given up when that is back.
        for host in sorted(self.away):
            driver.return_host(host, driver.workers.in_host_memory(host))
        driver.run_workers()
        assert not driver.workers.held(), "workers hold what the client has given up"
        assert driver.core.figures()["arrays"] == 0

    def fetch_whole(self, handle: Handle, value: Value) -> None:
        """Fetch every shard; the singles are given up at once, before they are fetched."""
        singles = tuple(self.mint() for _ in value.sharding.devices)
        answer = self.driver.ask(
            requests.DisassembleIntoSingleDeviceArrays(handle, ArrayCopySemantics.REUSE_INPUT, singles)
        )
        assert answer == responses.ArrayHandles(singles)
        for single, piece in zip(singles, scatter(value.values, value.sharding), strict=True):
            buffer = self.mint()
            request_id = self.driver.request(requests.CopyToHostBuffer(single, buffer))
            self.values[single] = Value(piece, value.sharding, [value])
            self.fetch_requests[request_id] = (buffer, self.values[single], value.sharding)
        assert self.driver.ask(requests.DestructArray(singles)) == responses.EMPTY


TestSession = Session.TestCase
TestSession.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)


def test_the_same_events_give_the_same_instructions() -> None:
    """A log of a busy session, replayed into a fresh core."""
    driver = SessionDriver(TOPOLOGY, seed=3)
    machine = Session()
    machine.driver = driver
    sharding = Sharding(GROUPS[0], TileAssignment(TileKind.TILED, (2, 2), places=(0, 1, 2, 3)), "device")
    replicated = Sharding(GROUPS[1], REPLICATED, "device")
    machine.make_array(sharding)
    machine.make_array_from_shards(replicated)
    machine.compile(sharding, (0,))
    machine.finish_compiling()
    executable = machine.programs[0][0]
    first = min(machine.live)
    driver.ask(requests.LoadedExecutableExecute(executable, (first, first), (), Handle(900), True))
    spec = ArraySpec(DType.S32, SHAPE, replicated)
    driver.ask(requests.ReshardArrays((max(machine.live),), (spec,), ArrayCopySemantics.ALWAYS_COPY, (Handle(901),)))
    driver.request(requests.LoadedExecutableFetchExecuteResult(Handle(900)))
    driver.request(requests.CopyToHostBuffer(Handle(901), Handle(902)))
    driver.run_workers(3)
    driver.lose_host(HostIndex(1), Status(Code.DATA_LOSS, "host 1 went"))
    driver.run_workers()
    driver.bind_host(HostIndex(1))
    driver.compile_all()
    replayed = SessionDriver(TOPOLOGY).core
    assert len(driver.log) > 10
    for event, told in driver.log:
        assert replayed.handle(event) == told
