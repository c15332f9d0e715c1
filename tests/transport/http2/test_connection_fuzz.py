"""Whatever a peer sends, in whatever pieces: the same happens, and nothing worse than the connection's end."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pathways_runtime.transport.http2 import frames
from pathways_runtime.transport.http2.connection import Limits
from pathways_runtime.transport.http2.events import ConnectionFailed, MessagesReceived

LIMITS = Limits(stream_window_bytes=1 << 17, connection_window_bytes=1 << 18, max_frame_bytes=1 << 17, max_streams=5)


def merged(events):
    """Events with the messages of each stream in one, as pieces differ in how they share them out."""
    messages, others = {}, []
    for event in events:
        if isinstance(event, MessagesReceived):
            messages.setdefault(event.stream_id, []).extend(bytes(message) for message in event.messages)
        else:
            others.append(event)
    return messages, others


def feed_in_pieces(peer, wire_bytes, sizes):
    events, at = [], 0
    for size in itertools.cycle(sizes):
        if at >= len(wire_bytes):
            return events
        events += peer.feed(wire_bytes[at : at + size])
        at += size
    raise AssertionError


@st.composite
def conversations(draw, wire):
    """What a client with several calls sends, valid but for its order of frames being any."""
    peer = wire.peer()
    parts, next_id, opened, ended, budget = [], 1, [], set(), 100_000
    for _ in range(draw(st.integers(1, 15))):
        live = [stream_id for stream_id in opened if stream_id not in ended]
        kind = draw(st.sampled_from(["open", "data", "data", "data", "end", "reset", "ping", "settings", "update"]))
        if kind == "open":
            fields = [
                *wire.request,
                *draw(st.lists(st.tuples(st.sampled_from(["a", "bb"]), st.text("xyz")), max_size=2)),
            ]
            block = peer.encoder.encode(fields)
            parts.append(frames.header_block(next_id, block, False, draw(st.integers(10, 200))))
            opened.append(next_id)
            next_id += 2
        elif kind in ("data", "end") and live:
            stream_id = draw(st.sampled_from(live))
            sizes = draw(st.lists(st.sampled_from([0, 1, 40, 3000, 70_000]), max_size=3))
            payload = b"".join(wire.message(bytes([size % 251]) * size) for size in sizes)
            budget -= len(payload) + 256
            if budget < 0:
                continue
            padding = draw(st.sampled_from([None, 0, 255]))
            if draw(st.booleans()):
                cut = draw(st.integers(0, len(payload)))
                parts.append(wire.data(stream_id, payload[:cut]))
                payload = payload[cut:]
            parts.append(wire.data(stream_id, payload, ends=kind == "end", padding=padding))
            if kind == "end":
                ended.add(stream_id)
        elif kind == "reset" and live:
            stream_id = draw(st.sampled_from(live))
            ended.add(stream_id)
            parts.append(frames.rst_stream(stream_id, 8))
        elif kind == "ping":
            parts.append(frames.ping(draw(st.binary(min_size=8, max_size=8)), is_ack=draw(st.booleans())))
        elif kind == "settings":
            parts.append(frames.settings({frames.INITIAL_WINDOW_SIZE: draw(st.integers(0, 1 << 20))}))
        elif kind == "update":
            parts.append(frames.window_update(draw(st.sampled_from([0, *live])), draw(st.integers(1, 1000))))
    return b"".join(parts)


@given(st.data(), st.lists(st.sampled_from([1, 2, 3, 8, 13, 100, 5000, 66_000, 200_000]), min_size=1, max_size=5))
@settings(deadline=None, max_examples=150)
def test_pieces_make_no_difference(wire, data, sizes):
    conversation = data.draw(conversations(wire))
    whole, pieces = wire.peer(LIMITS), wire.peer(LIMITS)
    expected = merged(whole.feed(conversation))
    assert not any(isinstance(event, ConnectionFailed) for event in expected[1])
    assert merged(feed_in_pieces(pieces, conversation, sizes)) == expected
    assert pieces.connection.open_streams() == whole.connection.open_streams()


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_damaged_conversations_end_well(wire, data):
    damaged = bytearray(data.draw(conversations(wire)) or b"x")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        change = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if change == "set":
            damaged[at] = data.draw(st.integers(0, 255))
        elif change == "insert":
            damaged[at:at] = data.draw(st.binary(max_size=12))
        elif len(damaged) > 1:
            del damaged[at : at + data.draw(st.integers(1, 8))]
            damaged = damaged or bytearray(b"x")
    peer = wire.peer(LIMITS)
    answer_all(peer, peer.feed(bytes(damaged), 5000))


@given(st.binary(max_size=300), st.booleans(), st.integers(1, 50))
@settings(deadline=None, max_examples=300)
def test_arbitrary_bytes_end_well(wire, noise, opens, piece_bytes):
    peer = wire.peer(LIMITS, opens=opens)
    answer_all(peer, peer.feed(noise, piece_bytes))


FRAMES = st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=40))


@given(st.lists(FRAMES, max_size=20), st.integers(1, 200))
@settings(deadline=None, max_examples=300)
def test_arbitrary_frames_end_well(wire, sent, piece_bytes):
    peer = wire.peer(LIMITS)
    peer.open(1)
    peer.open(3)
    noise = b"".join(frames.frame_header(len(p), kind, flags, stream_id) + p for kind, flags, stream_id, p in sent)
    answer_all(peer, peer.feed(noise, piece_bytes))


def answer_all(peer, events):
    """A failure is the last event and ends all calls; whatever is open can be answered, in whole frames."""
    failures = [event for event in events if isinstance(event, ConnectionFailed)]
    assert failures == events[-1:] or not failures
    if failures:
        assert peer.connection.open_streams() == ()
    for stream_id in peer.connection.open_streams():
        peer.connection.send_messages(stream_id, [b"answer"])
        peer.connection.finish(stream_id)
    peer.output()
    assert all(peer.connection.unsent_bytes(stream_id) > 0 for stream_id in peer.connection.open_streams()), (
        "only windows hold an answer back"
    )


@given(
    st.lists(st.tuples(st.sampled_from([1, 3, 5]), st.integers(0, 3000)), max_size=12),
    st.lists(st.tuples(st.sampled_from([0, 1, 3, 5]), st.integers(1, 5000)), max_size=20),
    st.integers(0, 2000),
    st.integers(1, 5000),
)
@settings(deadline=None, max_examples=150)
def test_answers_arrive_whole_and_within_windows(wire, answers, updates, initial_window, limit_bytes):
    peer = wire.peer(settings={frames.INITIAL_WINDOW_SIZE: initial_window})
    windows = {0: frames.DEFAULT_WINDOW_BYTES, 1: initial_window, 3: initial_window, 5: initial_window}
    expected, got = {1: b"", 3: b"", 5: b""}, {1: b"", 3: b"", 5: b""}
    ended = set()

    def take():
        while output := peer.output(limit_bytes):
            for frame in output:
                if frame.kind == frames.DATA:
                    windows[0] -= len(frame.payload)
                    windows[frame.stream_id] -= len(frame.payload)
                    assert windows[0] >= 0 and windows[frame.stream_id] >= 0
                    got[frame.stream_id] += frame.payload
                elif frame.flags & frames.END_STREAM and frame.kind == frames.HEADERS:
                    ended.add(frame.stream_id)

    for stream_id in expected:
        peer.open(stream_id)
    for answer, update in itertools.zip_longest(answers, updates):
        if answer is not None:
            content = bytes([answer[1] % 256]) * answer[1]
            expected[answer[0]] += wire.message(content)
            peer.connection.send_messages(answer[0], [content])
        take()
        if update is not None:
            windows[update[0]] += update[1]
            peer.feed(frames.window_update(*update))
    for stream_id in expected:
        peer.connection.finish(stream_id)
        peer.feed(frames.window_update(stream_id, 1 << 20))
        windows[stream_id] += 1 << 20
    windows[0] += 1 << 20
    peer.feed(frames.window_update(0, 1 << 20))
    take()
    assert got == expected
    assert ended == {1, 3, 5}
