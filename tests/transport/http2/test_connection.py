"""ServerConnection: calls, flow control both ways, and what it does about peers that break the rules."""

import struct

import pytest

from pathways_runtime.transport.http2 import frames
from pathways_runtime.transport.http2.connection import Limits
from pathways_runtime.transport.http2.events import (
    ConnectionFailed,
    GoAwayReceived,
    MessagesReceived,
    RequestEnded,
    RequestReceived,
    StreamCancelled,
)
from pathways_runtime.transport.http2.frames import ErrorCode

SMALL = Limits(stream_window_bytes=1000, connection_window_bytes=1 << 17, max_frame_bytes=1 << 14, max_streams=4)


def update(stream_id, num_bytes):
    return frames.window_update(stream_id, num_bytes)


def payload_of(output, stream_id):
    return b"".join(f.payload for f in output if f.kind == frames.DATA and f.stream_id == stream_id)


# Calls.


def test_a_call_from_headers_to_trailers(wire):
    peer = wire.peer()
    fields = (*wire.request, ("who", "me"), ("key-bin", "AAE"))
    asked = (
        peer.headers(1, fields) + wire.data(1, wire.message(b"one") + wire.message(b"")) + wire.data(1, b"", ends=True)
    )
    assert peer.feed(asked) == [
        RequestReceived(1, "/test.Service/Method", (("who", "me"), ("key-bin", b"\0\1"))),
        MessagesReceived(1, [b"one", b""]),
        RequestEnded(1),
    ]
    peer.connection.send_messages(1, [b"answer", memoryview(b""), bytearray(b"more")], (("x", "y"),))
    peer.connection.finish(1, 5, "not here")
    opening, content, trailers = peer.output()
    assert peer.decode(opening) == {":status": "200", "content-type": "application/grpc", "x": "y"}
    assert content == (frames.DATA, 0, 1, wire.message(b"answer") + wire.message(b"") + wire.message(b"more"))
    assert trailers.flags == frames.END_HEADERS | frames.END_STREAM
    assert peer.decode(trailers) == {"grpc-status": "5", "grpc-message": "not here"}
    assert peer.connection.open_streams() == ()
    peer.connection.send_messages(1, [b"late"])
    peer.connection.finish(1)
    assert peer.output() == []


def test_messages_of_one_read_come_as_one_event_for_each_stream(wire):
    peer = wire.peer()
    peer.open(1)
    peer.open(3)
    parts = [wire.data(1, wire.message(b"a")), wire.data(3, wire.message(b"b")), wire.data(1, wire.message(b"c"))]
    assert peer.feed(b"".join(parts)) == [MessagesReceived(1, [b"a", b"c"]), MessagesReceived(3, [b"b"])]
    assert peer.feed(parts[1]) == [MessagesReceived(3, [b"b"])]


def test_messages_of_one_turn_leave_as_one_frame(wire):
    peer = wire.peer()
    peer.open(1)
    peer.connection.send_messages(1, [b"a"] * 100)
    peer.connection.send_messages(1, [b"b"] * 100)
    kinds = [frame.kind for frame in peer.output()]
    assert kinds == [frames.HEADERS, frames.DATA]


def test_an_answer_before_the_request_has_ended_stops_the_client(wire):
    peer = wire.peer()
    peer.open(1)
    peer.connection.finish(1, 13, "no")
    status, stop = peer.output()
    assert peer.decode(status)["grpc-status"] == "13"
    assert stop == (frames.RST_STREAM, 0, 1, struct.pack(">I", ErrorCode.NO_ERROR))
    # What was under way then is no fault, and the connection goes on.
    assert peer.feed(wire.data(1, wire.message(b"late"), ends=True) + frames.rst_stream(1, 8)) == []
    peer.open(3)


def test_request_trailers_end_the_request(wire):
    peer = wire.peer()
    peer.open(1)
    assert peer.feed(peer.headers(1, [("checksum", "1")], ends=True)) == [RequestEnded(1)]


def test_padding_and_priority_are_left_out(wire):
    peer = wire.peer()
    block = b"\0\0\0\0\7" + peer.encoder.encode(list(wire.request))
    flags = frames.PADDED | frames.PRIORITY_FLAG | frames.END_HEADERS
    payload = b"\3" + block + b"\0\0\0"
    events = peer.feed(frames.frame_header(len(payload), frames.HEADERS, flags, 1) + payload)
    assert [type(event) for event in events] == [RequestReceived]
    padded = (
        wire.data(1, wire.message(b"x"), padding=200) + wire.data(1, b"", padding=0) + wire.data(1, wire.message(b"y"))
    )
    assert peer.feed(padded) == [MessagesReceived(1, [b"x", b"y"])]


def test_long_header_blocks_continue_in_both_directions(wire):
    peer = wire.peer()
    block = peer.encoder.encode([*wire.request, ("long", "~" * 20_000)], huffman=False)
    assert peer.feed(frames.header_block(1, block, False, 1 << 14), 100) == [
        RequestReceived(1, "/test.Service/Method", (("long", "~" * 20_000),))
    ]
    peer.connection.send_metadata(1, (("long", "x" * 40_000),))
    first, middle, last = peer.output()
    assert [first.kind, middle.kind, last.kind] == [frames.HEADERS, frames.CONTINUATION, frames.CONTINUATION]
    assert last.flags == frames.END_HEADERS
    peer.decoder.max_header_list_size = 1 << 20
    fields = dict(peer.decoder.decode(first.payload + middle.payload + last.payload))
    assert fields["long"] == "x" * 40_000


def test_pings_are_answered_before_data(wire):
    peer = wire.peer()
    peer.open(1)
    peer.connection.send_messages(1, [b"x"])
    assert peer.feed(frames.ping(b"12345678", is_ack=False) + frames.ping(b"87654321", is_ack=True)) == []
    output = peer.output()
    assert output[0] == (frames.PING, frames.ACK, 0, b"12345678")
    assert [frame.kind for frame in output[1:]] == [frames.HEADERS, frames.DATA]


def test_unknown_frames_and_settings_are_ignored(wire):
    peer = wire.peer(settings={0xFE03: 1, frames.HEADER_TABLE_SIZE: 0, frames.ENABLE_PUSH: 0})
    assert peer.feed(frames.frame_header(3, 0xBE, 0xFF, 5) + b"abc") == []
    peer.open(1)


def test_what_a_large_message_needs_no_copy_for_is_received_in_place(wire):
    peer = wire.peer()
    peer.open(1)
    content = bytes(range(256)) * 2048
    frame = wire.data(1, wire.message(content), ends=True)
    events = peer.feed(frame[:30])
    vacant = peer.connection.writable()
    assert len(vacant) == len(frame) - 30, "exactly what is missing of the message"
    vacant[:] = frame[30:]
    events += peer.connection.advance(len(vacant))
    assert events == [MessagesReceived(1, [bytearray(content)]), RequestEnded(1)]


def test_a_message_lies_where_its_consumer_wants_it_once_that_has_all_before_it(wire):
    peer = wire.peer()
    peer.open(1)
    places = []

    def allocate(num_bytes):
        places.append(memoryview(bytearray(num_bytes)))
        return places[-1]

    peer.connection.receive_into(1, allocate)
    contents = [b"a" * 100_000, b"b" * 10, b"c" * 100_000, b"d" * 200_000]
    first, *rest = (wire.message(content) for content in contents)
    # "c" begins in the piece in which "b" ends, so its consumer may not have that yet.
    events = peer.feed(wire.data(1, first)) + peer.feed(wire.data(1, b"".join(rest[:2])))
    events += peer.feed(wire.data(1, rest[2]))
    received = [message for event in events for message in event.messages]
    assert [bytes(message) for message in received] == contents
    assert [any(message is place for place in places) for message in received] == [True, False, False, True]
    peer.connection.pause(1)
    assert peer.feed(wire.data(1, first)) + peer.feed(wire.data(1, first)) == []
    assert len(places) == 3, "what is held back has not been given to the consumer"


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096, 70_000, 1 << 30])
def test_large_frames_with_several_messages_and_padding(wire, piece_bytes):
    peer = wire.peer()
    peer.open(1)
    contents = [b"a" * 10, b"b" * 100_000, b"", b"c" * 70_000, b"d" * 3]
    payload = b"".join(map(wire.message, contents))
    cut = 100_009
    sent = wire.data(1, payload[:cut], padding=255) + wire.data(1, payload[cut:]) + wire.data(1, b"", ends=True)
    events = peer.feed(sent, piece_bytes)
    assert events.pop() == RequestEnded(1)
    assert [bytes(message) for event in events for message in event.messages] == contents


# Flow control, receiving.


def test_windows_are_credited_in_batches(wire):
    peer = wire.peer(SMALL)
    peer.open(1)
    updates = []
    for _ in range(100):
        peer.feed(wire.data(1, wire.message(b"x" * 95)))
        updates += [struct.unpack(">I", f.payload)[0] for f in peer.output() if f.kind == frames.WINDOW_UPDATE]
    assert updates == [600] * 16, "each time half the window is used"


def test_a_paused_stream_holds_its_client_back_and_no_other(wire):
    peer = wire.peer(SMALL)
    peer.open(1)
    peer.open(3)
    peer.connection.pause(1)
    assert peer.feed(b"".join(wire.data(1, wire.message(b"%4d" % i)) for i in range(100))) == []
    assert peer.output() == []
    assert peer.feed(wire.data(3, wire.message(b"y" * 595), ends=True)) == [
        MessagesReceived(3, [b"y" * 595]),
        RequestEnded(3),
    ]
    assert [f.stream_id for f in peer.output()] == [3]
    assert peer.feed(wire.data(1, wire.message(b"z"), ends=True)) == []
    held = peer.resume(1)
    assert [message for event in held[:-1] for message in event.messages] == [b"%4d" % i for i in range(100)] + [b"z"]
    assert held[-1] == RequestEnded(1)
    assert peer.resume(1) == []


def test_resuming_credits_what_came_meanwhile(wire):
    peer = wire.peer(SMALL)
    peer.open(1)
    peer.connection.pause(1)
    peer.feed(wire.data(1, wire.message(b"x" * 995)))
    assert peer.output() == []
    assert peer.resume(1) == [MessagesReceived(1, [b"x" * 995])]
    assert peer.output() == [(frames.WINDOW_UPDATE, 0, 1, struct.pack(">I", 1000))]


def test_pausing_again_keeps_what_is_left(wire):
    peer = wire.peer()
    peer.open(1)
    peer.connection.pause(1)
    for content in (b"a", b"b", b"c"):
        peer.feed(wire.data(1, wire.message(content)))
    peer.connection.resume(1)
    assert peer.connection.next_held(1) == MessagesReceived(1, [b"a"])
    peer.connection.pause(1)
    assert peer.connection.next_held(1) is None
    peer.connection.resume(1)
    assert peer.feed(wire.data(1, wire.message(b"d"))) == [], "behind what waits"
    assert peer.resume(1) == [MessagesReceived(1, [content]) for content in (b"b", b"c", b"d")]
    assert peer.feed(wire.data(1, wire.message(b"e"))) == [MessagesReceived(1, [b"e"])]


def test_a_message_larger_than_the_window_arrives(wire):
    peer = wire.peer(SMALL)
    peer.open(1)
    content = b"x" * 20_000
    wire_bytes = wire.message(content)
    credit, at, events = 1000, 0, []
    while at < len(wire_bytes):
        assert credit > 0, "the server gives no more credit"
        piece = wire_bytes[at : at + credit]
        events += peer.feed(wire.data(1, piece))
        at += len(piece)
        credit -= len(piece)
        credit += sum(struct.unpack(">I", f.payload)[0] for f in peer.output() if f.stream_id == 1)
    assert events == [MessagesReceived(1, [content])]


@pytest.mark.parametrize(
    ("limits", "whose"),
    [
        (SMALL, "stream 1"),
        (SMALL._replace(stream_window_bytes=1 << 20, max_frame_bytes=1 << 20), "connection"),
    ],
)
def test_sending_beyond_a_window_ends_the_connection(wire, limits, whose):
    peer = wire.peer(limits)
    peer.open(1)
    peer.connection.pause(1)
    assert peer.feed(wire.data(1, wire.message(b"x" * 595))) == []
    (failed,) = peer.feed(wire.data(1, b"x" * 15_000) if whose != "connection" else wire.data(1, bytes(1 << 18)))
    assert isinstance(failed, ConnectionFailed) and failed.code == ErrorCode.FLOW_CONTROL_ERROR
    assert whose in failed.reason


# Flow control, sending.


def test_answers_keep_to_the_clients_windows(wire):
    peer = wire.peer(settings={frames.INITIAL_WINDOW_SIZE: 100})
    peer.open(1)
    content = bytes(range(256))
    peer.connection.send_messages(1, [content])
    peer.connection.finish(1)
    output = peer.output()
    assert payload_of(output, 1) == wire.message(content)[:100]
    assert peer.connection.unsent_bytes(1) == 161
    assert peer.output() == []
    peer.feed(update(1, 60))
    assert payload_of(peer.output(), 1) == wire.message(content)[100:160]
    peer.feed(update(1, 1000))
    *rest, trailers, _stop = peer.output()
    assert payload_of(rest, 1) == wire.message(content)[160:]
    assert peer.decode(output[0])[":status"] == "200"
    assert peer.decode(trailers)["grpc-status"] == "0"


def test_the_connections_window_binds_all_streams(wire):
    peer = wire.peer(settings={frames.INITIAL_WINDOW_SIZE: 1 << 20})
    for stream_id in (1, 3):
        peer.open(stream_id)
        peer.connection.send_messages(stream_id, [b"x" * 50_000])
    assert sum(len(f.payload) for f in peer.output() if f.kind == frames.DATA) == 65_535
    # Trailers need no window.
    peer.open(5)
    peer.connection.finish(5)
    assert [f.kind for f in peer.output()] == [frames.HEADERS, frames.RST_STREAM]
    peer.feed(update(0, 1_000_000))
    assert sum(len(f.payload) for f in peer.output() if f.kind == frames.DATA) == 2 * 50_005 - 65_535


def test_a_change_of_the_initial_window_moves_open_streams(wire):
    peer = wire.peer(settings={frames.INITIAL_WINDOW_SIZE: 100})
    peer.open(1)
    peer.connection.send_messages(1, [b"x" * 295])
    assert len(payload_of(peer.output(), 1)) == 100
    peer.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 50}))
    peer.feed(update(1, 50))
    assert payload_of(peer.output(), 1) == b"", "the window went to -50, then to 0"
    peer.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 90}))
    assert len(payload_of(peer.output(), 1)) == 40
    peer.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 20}))
    assert len(payload_of(peer.output(), 1)) == 160


def test_streams_take_turns(wire):
    peer = wire.peer(settings={frames.INITIAL_WINDOW_SIZE: 1 << 24})
    peer.feed(update(0, 1 << 24))
    peer.open(1)
    peer.open(3)
    big = bytes(4 << 20)
    peer.connection.send_messages(1, [big])
    peer.output(1)
    peer.connection.send_messages(3, [b"small"])
    output = peer.output(1 << 20)
    assert payload_of(output, 3) == wire.message(b"small")
    assert len(payload_of(output, 1)) <= 1 << 20
    total = len(payload_of(output, 1)) + (1 << 18)
    while more := peer.output(1 << 20):
        total += len(payload_of(more, 1))
    assert total == len(big) + 5


@pytest.mark.parametrize("max_frame_bytes", [1 << 14, 100_000, 1 << 22])
def test_frames_are_no_longer_than_the_client_takes(wire, max_frame_bytes):
    settings = {frames.INITIAL_WINDOW_SIZE: 1 << 22, frames.MAX_FRAME_SIZE: max_frame_bytes}
    peer = wire.peer(settings=settings)
    peer.feed(update(0, 1 << 22))
    peer.open(1)
    contents = [bytes([i]) * 99_999 for i in range(10)]
    peer.connection.send_messages(1, contents)
    output = peer.output()
    assert payload_of(output, 1) == b"".join(map(wire.message, contents))
    assert max(len(f.payload) for f in output) <= max_frame_bytes


# Ends of streams and connections.


def test_a_reset_cancels_the_call(wire):
    peer = wire.peer()
    peer.open(1)
    peer.connection.pause(1)
    peer.connection.send_messages(1, [b"x"])
    (event,) = peer.feed(frames.rst_stream(1, ErrorCode.CANCEL))
    assert isinstance(event, StreamCancelled) and event.stream_id == 1
    assert peer.output() == []
    assert peer.connection.open_streams() == ()


def test_reset_by_the_server(wire):
    peer = wire.peer()
    peer.open(1)
    peer.connection.send_messages(1, [b"x"])
    peer.connection.reset(1)
    assert peer.output() == [(frames.RST_STREAM, 0, 1, struct.pack(">I", ErrorCode.CANCEL))]
    assert peer.feed(wire.data(1, b"abc") + update(1, 5)) == []


def test_going_away_lets_calls_end(wire):
    peer = wire.peer()
    peer.open(1)
    peer.connection.go_away()
    (goaway,) = peer.output()
    assert goaway.kind == frames.GOAWAY and goaway.payload[:8] == struct.pack(">II", 1, 0)
    assert peer.feed(peer.headers(3)) == []
    assert peer.output() == [(frames.RST_STREAM, 0, 3, struct.pack(">I", ErrorCode.REFUSED_STREAM))]
    assert peer.feed(wire.data(1, wire.message(b"x"), ends=True)) == [MessagesReceived(1, [b"x"]), RequestEnded(1)]


def test_the_client_going_away_is_told(wire):
    assert wire.peer().feed(frames.goaway(0, ErrorCode.NO_ERROR, "bye")) == [GoAwayReceived(0, "bye")]


def test_streams_are_counted(wire):
    peer = wire.peer(SMALL)
    for stream_id in (1, 3, 5, 7):
        peer.open(stream_id)
    assert peer.feed(peer.headers(9)) == []
    assert peer.output() == [(frames.RST_STREAM, 0, 9, struct.pack(">I", ErrorCode.REFUSED_STREAM))]
    peer.feed(frames.rst_stream(3, 8))
    peer.open(11)


@pytest.mark.parametrize(
    ("change", "status"),
    [((":method", "GET"), "405"), (("content-type", "text/plain"), "415")],
)
def test_what_is_not_grpc_is_answered_in_http(wire, change, status):
    peer = wire.peer()
    fields = [change if field[0] == change[0] else field for field in wire.request]
    assert peer.feed(peer.headers(1, fields, ends=True)) == []
    (answer,) = peer.output()
    assert peer.decode(answer)[":status"] == status


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"\1\0\0\0\0", "12"), (b"\0\xff\xff\xff\xff", "8"), (b"\0\0\0\0\2a", "13")],
)
def test_messages_that_are_not_taken_end_their_call(wire, sent, status):
    peer = wire.peer()
    peer.open(1)
    peer.open(3)
    peer.connection.send_messages(1, [b"unsent"])
    events = peer.feed(wire.data(1, wire.message(b"good") + sent, ends=True))
    assert events[0] == MessagesReceived(1, [b"good"])
    assert isinstance(events[1], StreamCancelled) and len(events) == 2
    answer = peer.output()[0]
    assert peer.decode(answer)["grpc-status"] == status
    assert peer.feed(wire.data(3, wire.message(b"on"))) == [MessagesReceived(3, [b"on"])]


def test_malformed_headers_end_their_stream_only(wire):
    peer = wire.peer()
    assert peer.feed(peer.headers(1, [*wire.request, ("Bad", "x")])) == []
    assert peer.output() == [(frames.RST_STREAM, 0, 1, struct.pack(">I", ErrorCode.PROTOCOL_ERROR))]
    peer.open(3)
    assert isinstance(peer.feed(peer.headers(3))[0], StreamCancelled), "headers twice"
    peer.open(5)
    assert isinstance(peer.feed(update(5, 0))[0], StreamCancelled)
    peer.open(7)
    assert isinstance(peer.feed(update(7, frames.MAX_WINDOW_BYTES))[0], StreamCancelled)
    peer.open(9)


def raw(kind, flags, stream_id, payload=b""):
    return frames.frame_header(len(payload), kind, flags, stream_id) + payload


FAULTS = {
    "data on stream 0": (raw(frames.DATA, 0, 0, b"x"), "PROTOCOL_ERROR"),
    "data on an idle stream": (raw(frames.DATA, 0, 5, b"x"), "PROTOCOL_ERROR"),
    "data on a server's stream": (raw(frames.DATA, 0, 2, b"x"), "PROTOCOL_ERROR"),
    "data after the end": (raw(frames.DATA, 1, 1) + raw(frames.DATA, 0, 1, b"\0\0\0\0\0"), "STREAM_CLOSED"),
    "data after a reset": (raw(frames.RST_STREAM, 0, 1, bytes(4)) + raw(frames.DATA, 0, 1, b"x"), "STREAM_CLOSED"),
    "more padding than data": (raw(frames.DATA, frames.PADDED, 1, b"\5abcd"), "PROTOCOL_ERROR"),
    "no padding length": (raw(frames.DATA, frames.PADDED, 1), "FRAME_SIZE_ERROR"),
    "headers on stream 0": (raw(frames.HEADERS, 4, 0, b"\x82"), "PROTOCOL_ERROR"),
    "headers on a server's stream": (raw(frames.HEADERS, 4, 2, b"\x82"), "PROTOCOL_ERROR"),
    "headers of nonsense": (raw(frames.HEADERS, 4, 3, b"\xff\xff\xff\xff\xff\xff\xff"), "COMPRESSION_ERROR"),
    "headers that end early": (raw(frames.HEADERS, 4, 3, b"\x40\x0aabc"), "COMPRESSION_ERROR"),
    "headers with more padding": (raw(frames.HEADERS, 4 | frames.PADDED, 3, b"\x10\x82"), "PROTOCOL_ERROR"),
    "headers after the end": (raw(frames.DATA, 1, 1) + raw(frames.HEADERS, 5, 1, b"\x82"), "STREAM_CLOSED"),
    "another frame in a block": (
        raw(frames.HEADERS, 0, 3, b"\x82") + raw(frames.PING, 0, 0, bytes(8)),
        "PROTOCOL_ERROR",
    ),
    "data in a block": (raw(frames.HEADERS, 0, 3, b"\x82") + raw(frames.DATA, 0, 1, bytes(5)), "PROTOCOL_ERROR"),
    "another block in a block": (raw(frames.HEADERS, 0, 3) + raw(frames.CONTINUATION, 4, 5), "PROTOCOL_ERROR"),
    "continuation of nothing": (raw(frames.CONTINUATION, 4, 1, b"\x82"), "PROTOCOL_ERROR"),
    "endless continuation": (raw(frames.HEADERS, 0, 3) + raw(frames.CONTINUATION, 0, 3) * 100, "ENHANCE_YOUR_CALM"),
    "large continuation": (
        raw(frames.HEADERS, 0, 3) + raw(frames.CONTINUATION, 0, 3, bytes(16_000)) * 5,
        "ENHANCE_YOUR_CALM",
    ),
    "a push": (raw(frames.PUSH_PROMISE, 4, 1, bytes(5)), "PROTOCOL_ERROR"),
    "a priority of stream 0": (raw(frames.PRIORITY, 0, 0, bytes(5)), "PROTOCOL_ERROR"),
    "a short ping": (raw(frames.PING, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
    "a ping in a stream": (raw(frames.PING, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
    "short settings": (raw(frames.SETTINGS, 0, 0, bytes(5)), "FRAME_SIZE_ERROR"),
    "settings in a stream": (raw(frames.SETTINGS, 0, 1), "PROTOCOL_ERROR"),
    "an acknowledgement with settings": (raw(frames.SETTINGS, 1, 0, bytes(6)), "FRAME_SIZE_ERROR"),
    "a huge initial window": (frames.settings({4: 1 << 31}), "FLOW_CONTROL_ERROR"),
    "a tiny longest frame": (frames.settings({5: 100}), "PROTOCOL_ERROR"),
    "a strange push setting": (frames.settings({2: 2}), "PROTOCOL_ERROR"),
    "a window of 0": (update(0, 0), "PROTOCOL_ERROR"),
    "a window that overflows": (update(0, (1 << 31) - 1), "FLOW_CONTROL_ERROR"),
    "windows that overflow by a setting": (
        update(1, (1 << 31) - 1 - 65_535) + frames.settings({4: 70_000}),
        "FLOW_CONTROL_ERROR",
    ),
    "a window of an idle stream": (update(9, 5), "PROTOCOL_ERROR"),
    "a short window update": (raw(frames.WINDOW_UPDATE, 0, 1, bytes(3)), "FRAME_SIZE_ERROR"),
    "a reset of an idle stream": (frames.rst_stream(9, 8), "PROTOCOL_ERROR"),
    "a reset of stream 0": (frames.rst_stream(0, 8), "PROTOCOL_ERROR"),
    "a short reset": (raw(frames.RST_STREAM, 0, 1, bytes(3)), "FRAME_SIZE_ERROR"),
    "a goaway in a stream": (raw(frames.GOAWAY, 0, 1, bytes(8)), "PROTOCOL_ERROR"),
    "a short goaway": (raw(frames.GOAWAY, 0, 0, bytes(7)), "FRAME_SIZE_ERROR"),
    "a frame beyond the limit": (frames.frame_header((1 << 22) + 1, 0, 0, 1), "FRAME_SIZE_ERROR"),
    "huge headers": (frames.frame_header(1 << 20, 1, 4, 3), "ENHANCE_YOUR_CALM"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("piece_bytes", [1, 1 << 30])
def test_faults_end_the_connection_with_a_reason(wire, fault, piece_bytes):
    peer = wire.peer()
    peer.open(1)
    sent, code = FAULTS[fault]
    *_, failed = peer.feed(sent, piece_bytes)
    assert isinstance(failed, ConnectionFailed) and failed.code == ErrorCode[code], failed
    goaway = peer.output()[-1]
    assert goaway.kind == frames.GOAWAY
    assert goaway.payload[4:8] == struct.pack(">I", ErrorCode[code])
    assert goaway.payload[8:].decode() == failed.reason
    # Nothing happens any more, whatever comes and whatever is asked.
    assert peer.feed(frames.ping(bytes(8), is_ack=False)) == []
    peer.connection.send_messages(1, [b"x"])
    peer.connection.finish(1)
    peer.connection.go_away()
    assert peer.output() == []


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01",
        frames.PREFACE + frames.ping(bytes(8), is_ack=False),
        frames.PREFACE[:-1] + b"x",
    ],
)
def test_the_connection_must_begin_as_http2(wire, start):
    peer = wire.peer(opens=False)
    *_, failed = peer.feed(start, 1)
    assert isinstance(failed, ConnectionFailed) and failed.code == ErrorCode.PROTOCOL_ERROR


def test_a_peer_that_reads_no_answers_is_cut_off(wire):
    peer = wire.peer()
    events = []
    for _ in range(200):
        events += peer.feed(frames.ping(bytes(8), is_ack=False) * 100)
    assert [type(event) for event in events] == [ConnectionFailed]
    assert events[0].code == ErrorCode.ENHANCE_YOUR_CALM


def test_a_peer_that_opens_and_resets_in_a_row_is_cut_off(wire):
    peer = wire.peer()
    events = []
    for stream_id in range(1, 30_001, 2):
        events = peer.feed(peer.headers(stream_id) + frames.rst_stream(stream_id, 8))
        if isinstance(events[-1], ConnectionFailed):
            break
    assert isinstance(events[-1], ConnectionFailed) and events[-1].code == ErrorCode.ENHANCE_YOUR_CALM


def test_resets_among_calls_that_end_well_are_fine(wire):
    peer = wire.peer()
    for stream_id in range(1, 48_001, 4):
        events = peer.feed(
            peer.headers(stream_id, ends=True) + peer.headers(stream_id + 2) + frames.rst_stream(stream_id + 2, 8)
        )
        assert not isinstance(events[-1], ConnectionFailed)
        peer.connection.finish(stream_id)
        peer.output()
