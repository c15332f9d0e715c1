"""Operations where nothing is executed: who is told what, and which values are kept."""

import msgspec
import pytest

from pathways_runtime.core import operations as ops
from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, HostIndex, OpId, WaitId
from pathways_runtime.core.sharding import Shape
from pathways_runtime.core.status import Code
from pathways_runtime.worker.aot.arrays import KEPT_BYTES, AbstractSession, Answer, Ready, Value

H0, H1 = HostIndex(0), HostIndex(1)
D0, D1, D2 = DeviceId(0), DeviceId(1), DeviceId(2)
ZEROS = None


class Session(AbstractSession):
    """Two devices per host. Operations are numbered as they come."""

    def __init__(self) -> None:
        super().__init__(lambda device: HostIndex(device // 2))
        self._last = 0

    def number(self) -> OpId:
        self._last += 1
        return OpId(self._last)

    def make(self, handle: int, shape: Shape, dtype: DType, *devices: DeviceId) -> OpId:
        """An array whose shards all come from the host buffer 0."""
        op_id = self.number()
        result = ops.ShardedResult(Handle(handle), dtype, shape, None, devices)
        assert self.perform(ops.MakeArrays(op_id, (result,), ((0,) * len(devices),)), (H0, H1)) == ()
        return op_id

    def fetch(self, handle: int, device: DeviceId, host: HostIndex = H0) -> list[Answer]:
        return list(self.perform(ops.Fetch(self.number(), WaitId(9), Handle(handle), device), (host,)))


def value(contents: bytes | None, num_bytes: int, host: HostIndex = H0) -> list[Answer]:
    return [Value(host, WaitId(9), contents, num_bytes)]


def result(handle: int, *devices: DeviceId) -> ops.ShardedResult:
    return ops.ShardedResult(Handle(handle), DType.S32, (), None, devices)


def test_outputs_are_zeros_of_their_size() -> None:
    session = Session()
    session.add_program(Handle(1), [((2, 3), DType.BF16), ((), DType.TOKEN), ((5,), DType.S4)])
    session.perform(ops.Launch(session.number(), Handle(1), (), (Handle(2), Handle(3), Handle(4))), (H0,))
    assert session.fetch(2, D0) == value(ZEROS, 12)
    assert session.fetch(3, D0) == value(ZEROS, 0)
    assert session.fetch(4, D0) == value(ZEROS, 5)


@pytest.mark.parametrize("buffer_comes_first", [False, True])
def test_small_host_buffers_read_as_they_were_put(buffer_comes_first: bool) -> None:
    session = Session()
    contents = (7).to_bytes(4, "little")
    if buffer_comes_first:
        for host in (H0, H1):
            assert list(session.take_buffer(host, OpId(1), 0, contents)) == []
    assert session.make(2, (), DType.S32, D0, D2) == OpId(1)
    if buffer_comes_first:
        assert session.fetch(2, D0) == value(contents, 4)
    else:
        # Who reads before the bytes are there waits for them.
        assert session.fetch(2, D0) == []
        assert session.take_buffer(H0, OpId(1), 0, contents) == value(contents, 4)
        assert list(session.take_buffer(H1, OpId(1), 0, contents)) == []
    assert session.fetch(2, D2, H1) == value(contents, 4, H1)
    assert session.num_kept_apart() == 0, "buffers of arrays that are there are not kept a second time"


def test_larger_ones_are_not_kept() -> None:
    session = Session()
    session.make(2, (KEPT_BYTES + 1,), DType.U8, D0)
    assert session.fetch(2, D0) == value(ZEROS, KEPT_BYTES + 1)
    assert session.take_buffer(H0, OpId(1), 0, bytes(KEPT_BYTES + 1)) == ()
    assert session.num_kept_apart() == 0


def test_values_go_with_shards() -> None:
    session = Session()
    contents = b"\1\2\3\4"
    session.take_buffer(H0, session.make(1, (), DType.S32, D0, D1), 0, contents)
    session.perform(ops.Alias(session.number(), (result(2, D1),), ((Handle(1),),)), (H0,))
    assert session.fetch(2, D1) == value(contents, 4)
    whole = ops.Move(Handle(2), D1, 0, D2)
    part = ops.Move(Handle(1), D0, 1, D2, ((0, 1),), ((0, 1),))
    session.perform(ops.Transfer(session.number(), (result(3, D2), result(4, D2)), (whole, part)), (H0, H1))
    assert session.fetch(3, D2, H1) == value(contents, 4, H1)
    assert session.fetch(4, D2, H1) == value(ZEROS, 4, H1)


def test_all_hosts_of_a_wait_are_ready() -> None:
    session = Session()
    session.make(1, (), DType.S32, D0, D2)
    awaited = session.perform(ops.Await(session.number(), WaitId(3), (Handle(1),)), (H0, H1))
    assert awaited == [Ready(H0, WaitId(3)), Ready(H1, WaitId(3))]


def test_what_is_deleted_is_gone() -> None:
    session = Session()
    session.make(1, (), DType.S32, D0)
    session.perform(ops.Delete(session.number(), (Handle(1), Handle(8))), (H0,))
    session.perform(ops.DeleteExecutable(session.number(), Handle(5)), (H0,))
    with pytest.raises(KeyError):
        session.fetch(1, D0)


class WriteSomewhere(msgspec.Struct):
    """As of operations that write what they read to files."""

    wait_id: WaitId


class ReadSomewhere(msgspec.Struct):
    """As of operations that make arrays of files."""

    results: tuple[ops.ShardedResult, ...]


def test_contents_that_are_wanted_elsewhere() -> None:
    """Who waits is told that there are none, arrays from elsewhere are zeros, and the unknown is not passed over."""
    session = Session()
    (answer,) = session.perform(WriteSomewhere(WaitId(4)), (H1,))  # type: ignore[arg-type]
    assert isinstance(answer, Ready)
    assert answer.failure is not None
    assert (answer.host, answer.wait_id, answer.failure.code) == (H1, WaitId(4), Code.UNIMPLEMENTED)
    assert answer.failure.message == "WriteSomewhere: this runtime only compiles, and has no contents of arrays"
    assert session.perform(ReadSomewhere((result(6, D0),)), (H0,)) == ()  # type: ignore[arg-type]
    assert session.fetch(6, D0) == value(ZEROS, 4)
    with pytest.raises(TypeError, match="does not know Poison"):
        session.perform(ops.Poison(session.number(), (), None), (H0,))  # type: ignore[arg-type]
