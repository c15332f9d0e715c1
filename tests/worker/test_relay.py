"""A relay's shell, between children on real sockets and a controller that the test plays."""

import asyncio

import msgspec

from pathways_runtime.core.bitmaps import bitmap_of
from pathways_runtime.transport.frames import FrameCodec
from pathways_runtime.wire import messages as msg
from pathways_runtime.worker.relay import BACKLOG_STEP_BYTES, Relay

DEADLINE_S = 15.0
CODEC = FrameCodec(msg.AnyMessage)
encode = msgspec.msgpack.encode


class Rig:
    """A relay whose messages to the controller are kept."""

    def __init__(self, relay: Relay, told: asyncio.Queue) -> None:
        self.relay = relay
        self.told = told
        self.children: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def connect(self) -> None:
        """One more child, which has said hello."""
        number = len(self.children)
        self.children.append(await asyncio.open_unix_connection(self.relay.address.removeprefix("unix:")))
        hello = msg.Hello("executor", msg.PROTOCOL_VERSION, number)
        self.say(number, hello)
        assert await self.next() == (msg.FromChild(number), encode(hello))

    def say(self, child: int, *messages: msg.AnyMessage) -> None:
        self.children[child][1].write(b"".join(map(CODEC.encode, messages)))

    async def next(self) -> tuple[msg.AnyMessage, bytes]:
        """What the controller is told next."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.told.get()

    async def heard(self, child: int) -> msg.AnyMessage:
        """What a child is told next."""
        async with asyncio.timeout(DEADLINE_S):
            prefix = await self.children[child][0].readexactly(12)
            return CODEC.decode(await self.children[child][0].readexactly(int.from_bytes(prefix[:4], "little")))


def with_children(tmp_path, count, test):
    async def run():
        told = asyncio.Queue()
        relay = Relay(f"unix:{tmp_path}/relay", lambda message, payload: told.put_nowait((message, bytes(payload))))
        await relay.start()
        rig = Rig(relay, told)
        try:
            for _ in range(count):
                await rig.connect()
            await test(rig)
        finally:
            relay.close()
            for _, writer in rig.children:
                writer.close()

    asyncio.run(run())


def test_frames_go_down_untouched_to_those_who_are_meant(tmp_path):
    async def test(rig):
        rig.relay.pass_on(bitmap_of((0, 2)), encode(msg.Refused("a")))
        rig.relay.pass_on(bitmap_of((0, 1, 2, 7)), encode(msg.Refused("b")))
        assert [await rig.heard(0), await rig.heard(0)] == [msg.Refused("a"), msg.Refused("b")]
        assert [await rig.heard(2), await rig.heard(2)] == [msg.Refused("a"), msg.Refused("b")]
        assert await rig.heard(1) == msg.Refused("b")

    with_children(tmp_path, 3, test)


def test_progress_is_told_together_and_before_what_a_child_says_next(tmp_path):
    async def test(rig):
        rig.say(0, msg.Acknowledge(0, 2, ()))
        rig.say(1, msg.Acknowledge(1, 2, ((5, 6),)))
        reply = msg.StatusReply(1, {})
        rig.say(0, msg.ReadyHere(5, 8), msg.Acknowledge(0, 1, ()), reply)
        launches, starts, ready = {0: 0, 1: 0}, [], []
        while (told := await rig.next())[0] != msg.FromChild(0):
            note(told[0], launches, starts, ready)
        assert told[1] == encode(reply)
        # What child 0 has said before is told; of child 1 it may be on its way.
        assert launches[0] == 3 and ready == [(5, 8, b"\x01")]
        while launches[1] < 2:
            note((await rig.next())[0], launches, starts, ready)
        assert launches == {0: 3, 1: 2} and starts == [(5, 6, b"\x02")]

    with_children(tmp_path, 2, test)


def note(told, launches, starts, ready):
    assert isinstance(told, msg.ChildrenAcknowledge)
    for bitmap, count in told.completed:
        for child in launches:
            launches[child] += count * (int.from_bytes(bitmap, "little") >> child & 1)
    starts += told.transfers_started
    ready += told.ready


def test_one_message_is_enough_for_a_gang(tmp_path):
    async def test(rig):
        for child in range(4):
            rig.say(child, msg.Acknowledge(child, 8, ()))
        counts = [0] * 4
        num_told = 0
        while counts != [8] * 4:
            told, _ = await rig.next()
            num_told += 1
            launches = dict(enumerate(counts))
            note(told, launches, [], [])
            counts = list(launches.values())
        assert num_told <= 2

    with_children(tmp_path, 4, test)


def test_a_child_that_is_gone_is_told_of_behind_its_progress(tmp_path):
    async def test(rig):
        rig.say(1, msg.Acknowledge(1, 3, ()))
        rig.children[1][1].close()
        assert (await rig.next())[0] == msg.ChildrenAcknowledge(((b"\x02", 3),), (), ())
        assert (await rig.next())[0] == msg.ChildClosed(1, "closed")
        rig.relay.pass_on(bitmap_of((0, 1)), encode(msg.Refused("x")))
        assert await rig.heard(0) == msg.Refused("x")

    with_children(tmp_path, 2, test)


def test_a_child_that_takes_nothing_is_told_of_until_it_does(tmp_path):
    async def test(rig):
        header = encode(msg.Refused("x" * (1 << 20)))
        for _ in range(8):
            rig.relay.pass_on(bitmap_of((0,)), header)
        told, _ = await rig.next()
        assert isinstance(told, msg.RelayBacklog) and told.unsent_bytes >= BACKLOG_STEP_BYTES
        for _ in range(8):
            assert await rig.heard(0) == msg.Refused("x" * (1 << 20))
        while told != msg.RelayBacklog(0):
            told, _ = await rig.next()

    with_children(tmp_path, 1, test)
