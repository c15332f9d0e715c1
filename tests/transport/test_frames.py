"""Frames: whatever way a stream is cut into reads, the same messages come out."""

import asyncio
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_runtime.transport.frames import (
    MAX_HEADER_BYTES,
    AsyncChannel,
    Channel,
    ConnectionClosed,
    Frame,
    FrameCodec,
    FrameError,
    FrameReader,
)

TIMEOUT_S = 20.0


class Text(msgspec.Struct, frozen=True, array_like=True, tag="T"):
    text: str


class Wrapped(msgspec.Struct, frozen=True, array_like=True, tag="W"):
    body: msgspec.Raw


AnyTest = Text | Wrapped
#: A sent message and its payload.
Sent = tuple[Text, bytes]


def codec() -> FrameCodec[AnyTest]:
    return FrameCodec(AnyTest)


def filler(size: int) -> bytes:
    return (b"0123456789abcdef" * (size // 16 + 1))[:size]


# Sizes around what the reader's buffer (256 KiB) and its thresholds hold, and small ones.
SIZES = st.one_of(
    st.integers(0, 40),
    st.sampled_from([65535, 65536, 65537, 196608, 262130, 262143, 262144, 262145, 300_000, 600_000]),
)
FRAMES = st.lists(st.tuples(SIZES.map(lambda n: Text(filler(n).decode())), SIZES.map(filler)), min_size=1, max_size=8)


def encode(frames: Sequence[Sent]) -> bytes:
    encoder = codec()
    return b"".join(encoder.encode(message, len(payload)) + payload for message, payload in frames)


def read_in_pieces(reader: FrameReader[AnyTest], stream: bytes, pieces: Sequence[int]) -> list[Frame[AnyTest]]:
    """Feed ``stream`` in reads of at most the sizes in ``pieces``, over and over."""
    frames: list[Frame[AnyTest]] = []
    at = turn = 0
    while at < len(stream):
        target = reader.writable()
        assert len(target) > 0, "the reader offers no memory to receive into"
        count = min(len(target), pieces[turn % len(pieces)], len(stream) - at)
        target[:count] = stream[at : at + count]
        frames += reader.advance(count)
        at, turn = at + count, turn + 1
    return frames


@settings(deadline=None, max_examples=60)
@given(frames=FRAMES, pieces=st.lists(st.sampled_from([97, 4096, 65536, 262144, 1 << 20]), min_size=1, max_size=5))
def test_any_split_of_the_stream_gives_the_same_frames(frames: list[Sent], pieces: list[int]) -> None:
    received = read_in_pieces(FrameReader(codec()), encode(frames), pieces)
    assert [(frame.message, bytes(frame.payload)) for frame in received] == frames


@settings(deadline=None, max_examples=60)
@given(
    frames=st.lists(
        st.tuples(st.text(max_size=30).map(Text), st.binary(max_size=30)),
        min_size=1,
        max_size=10,
    ),
    pieces=st.lists(st.integers(1, 50), min_size=1, max_size=20),
)
def test_small_frames_survive_reads_of_a_few_bytes(frames: list[Sent], pieces: list[int]) -> None:
    received = read_in_pieces(FrameReader(codec()), encode(frames), pieces)
    assert [(frame.message, bytes(frame.payload)) for frame in received] == frames


def test_messages_and_payloads_outlive_what_is_received_after_them() -> None:
    reader = FrameReader(codec())
    encoder = codec()
    bodies = [msgspec.msgpack.encode(f"body {index}") for index in range(50)]
    stream = b"".join(encoder.encode(Wrapped(msgspec.Raw(body)), 4) + b"%04d" % i for i, body in enumerate(bodies))
    received: list[Frame[AnyTest]] = []
    for _ in range(3):
        received += read_in_pieces(reader, stream, [64])
    messages = [frame.message for frame in received]
    assert [bytes(message.body) for message in messages if isinstance(message, Wrapped)] == bodies * 3
    assert [bytes(frame.payload) for frame in received] == [b"%04d" % index for index in range(50)] * 3


@settings(deadline=None)
@given(garbage=st.binary(min_size=12, max_size=300), pieces=st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_garbage_is_refused_or_awaits_more_but_never_breaks_the_reader(garbage: bytes, pieces: list[int]) -> None:
    header_bytes, payload_bytes = struct.unpack_from("<IQ", garbage)
    # What the garbage announces must not be allocated here.
    if header_bytes <= MAX_HEADER_BYTES:
        garbage = struct.pack("<IQ", header_bytes % 256, payload_bytes % 4096) + garbage[12:]
    reader = FrameReader(codec())
    try:
        received = read_in_pieces(reader, garbage, pieces)
    except FrameError:
        return
    assert all(isinstance(frame.message, Text | Wrapped) for frame in received)


@pytest.mark.parametrize("prefix", [struct.pack("<IQ", MAX_HEADER_BYTES + 1, 0), struct.pack("<IQ", 1, 1 << 41)])
def test_an_absurd_length_is_refused_before_anything_is_allocated(prefix: bytes) -> None:
    reader = FrameReader(codec())
    with pytest.raises(FrameError, match="beyond any message"):
        read_in_pieces(reader, prefix, [64])


def test_a_message_of_another_union_is_refused() -> None:
    class Other(msgspec.Struct, frozen=True, array_like=True, tag="O"):
        pass

    header = msgspec.msgpack.encode(Other())
    with pytest.raises(FrameError, match="not a message of this protocol"):
        read_in_pieces(FrameReader(codec()), struct.pack("<IQ", len(header), 0) + header, [64])


# Channels


def test_threads_may_send_at_once_and_each_frame_arrives_whole() -> None:
    ours, theirs = socket.socketpair()
    sending, receiving = Channel(ours, codec()), Channel(theirs, codec())
    theirs.settimeout(TIMEOUT_S)
    num_threads, num_frames = 4, 50

    def send(thread: int) -> None:
        for index in range(num_frames):
            size = (70_000, 3, 0)[index % 3]
            sending.send(Text(f"{thread} {index}"), filler(size))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    received: list[Frame[AnyTest]] = []
    while len(received) < num_threads * num_frames:
        received += receiving.receive()
    for thread in threads:
        thread.join()
    seen: dict[int, list[int]] = {thread: [] for thread in range(num_threads)}
    for frame in received:
        assert isinstance(frame.message, Text)
        thread_number, index = map(int, frame.message.text.split())
        seen[thread_number].append(index)
        assert frame.payload == filler((70_000, 3, 0)[index % 3])
    assert seen == {thread: list(range(num_frames)) for thread in range(num_threads)}
    sending.close()
    with pytest.raises(ConnectionClosed, match="closed by the peer"):
        receiving.receive()
    receiving.close()


def test_closing_wakes_a_thread_that_receives() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, codec())
    failures: list[Exception] = []

    def receive() -> None:
        try:
            channel.receive()
        except ConnectionClosed as failure:
            failures.append(failure)

    thread = threading.Thread(target=receive)
    thread.start()
    channel.close()
    thread.join(TIMEOUT_S)
    theirs.close()
    assert len(failures) == 1
    with pytest.raises(ConnectionClosed, match="sending failed"):
        channel.send(Text("late"))


LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


class Peer:
    """An AsyncChannel with what it received."""

    def __init__(self) -> None:
        self.frames: list[Frame[AnyTest]] = []
        self.failure: Exception | None = None
        self.closed = asyncio.Event()
        self.arrived = asyncio.Event()
        self.channel = AsyncChannel(codec(), self._on_frames, self._on_closed)

    def _on_frames(self, channel: AsyncChannel[AnyTest], frames: Sequence[Frame[AnyTest]]) -> None:
        self.frames += frames
        self.arrived.set()
        if any(frame.message == Text("bad") for frame in frames):
            raise ValueError("a bad message")

    def _on_closed(self, channel: AsyncChannel[AnyTest], failure: Exception | None) -> None:
        self.failure = failure
        self.closed.set()

    async def received(self, count: int) -> None:
        while len(self.frames) < count:
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), TIMEOUT_S)


async def connected(path: Path) -> tuple[Peer, Peer, asyncio.AbstractServer]:
    loop = asyncio.get_running_loop()
    served, connecting = Peer(), Peer()
    server = await loop.create_unix_server(lambda: served.channel, str(path))
    await loop.create_unix_connection(lambda: connecting.channel, str(path))
    return served, connecting, server


@LOOPS
def test_async_channels_exchange_frames_in_order_and_flush_on_close(tmp_path: Path, new_loop: type) -> None:
    async def scenario() -> None:
        served, connecting, server = await connected(tmp_path / "s")
        sent = [(Text(f"{index}"), filler((0, 10, 100_000, 1_000_000)[index % 4])) for index in range(40)]
        for message, payload in sent:
            connecting.channel.send(message, payload)
        connecting.channel.send_header(msgspec.msgpack.encode(Text("shared")))
        connecting.channel.close()
        await served.received(len(sent) + 1)
        await asyncio.wait_for(served.closed.wait(), TIMEOUT_S)
        await asyncio.wait_for(connecting.closed.wait(), TIMEOUT_S)
        assert [(frame.message, bytes(frame.payload)) for frame in served.frames] == [*sent, (Text("shared"), b"")]
        assert served.failure is None
        connecting.channel.send(Text("dropped"))
        server.close()

    run(new_loop, scenario())


@LOOPS
def test_a_closed_channel_holds_no_memory(tmp_path: Path, new_loop: type) -> None:
    """Whoever follows a channel may refer to it for long after its end."""

    async def scenario() -> None:
        served, connecting, server = await connected(tmp_path / "s")
        connecting.channel.send(Text("hello"))
        await served.received(1)
        assert len(served.channel.get_buffer(-1)) > 0
        connecting.channel.close()
        await asyncio.wait_for(served.closed.wait(), TIMEOUT_S)
        await asyncio.wait_for(connecting.closed.wait(), TIMEOUT_S)
        assert [len(peer.channel.get_buffer(-1)) for peer in (served, connecting)] == [0, 0]
        assert served.channel.unsent_bytes() == 0
        server.close()

    run(new_loop, scenario())


@LOOPS
def test_a_message_that_cannot_be_handled_closes_the_channel(tmp_path: Path, new_loop: type) -> None:
    async def scenario() -> None:
        served, connecting, server = await connected(tmp_path / "s")
        connecting.channel.send(Text("bad"))
        await asyncio.wait_for(served.closed.wait(), TIMEOUT_S)
        await asyncio.wait_for(connecting.closed.wait(), TIMEOUT_S)
        assert isinstance(served.failure, ValueError)
        server.close()

    run(new_loop, scenario())


def run(new_loop: type, scenario: object) -> None:
    loop = new_loop()
    try:
        loop.run_until_complete(scenario)
    finally:
        loop.close()
