"""One call's two directions: what arrives and is credited, what waits to be sent."""

from collections import deque

from pathways_runtime.transport.frames import Buffer
from pathways_runtime.transport.http2.events import AnyEvent
from pathways_runtime.transport.http2.grpc_messages import MESSAGE_PREFIX, MessageReader

#: A message, or the parts that it consists of.
Message = Buffer | tuple[Buffer, ...]


class SendQueue:
    """Bytes of one stream's answer that wait for windows, cut into DATA frames when they may go."""

    __slots__ = ("num_bytes", "parts")

    def __init__(self) -> None:
        self.parts: deque[Buffer] = deque()
        self.num_bytes = 0

    def append(self, message: Message) -> None:
        """Queue one message. It must not change until it is sent."""
        if type(message) is tuple:
            length = sum(map(len, message))
            self.parts.append(MESSAGE_PREFIX.pack(0, length))
            self.parts.extend(part for part in message if len(part))
        else:
            length = message.nbytes if isinstance(message, memoryview) else len(message)
            self.parts.append(MESSAGE_PREFIX.pack(0, length))
            if length:
                self.parts.append(message)  # type: ignore[arg-type]
        self.num_bytes += length + 5

    def take(self, num_bytes: int, out: list[Buffer]) -> None:
        """Move the next ``num_bytes`` (at most what is there) to ``out``."""
        parts = self.parts
        self.num_bytes -= num_bytes
        if not self.num_bytes:
            out.extend(parts)
            parts.clear()
            return
        while num_bytes:
            part = parts[0]
            length = len(part)
            if length <= num_bytes:
                out.append(part)
                parts.popleft()
                num_bytes -= length
            else:
                view = memoryview(part)
                out.append(view[:num_bytes])
                parts[0] = view[num_bytes:]
                return


class Stream:
    """The state of one call; ``connection`` keeps it."""

    __slots__ = (
        "batch",
        "closing_block",
        "has_answered",
        "held",
        "id",
        "is_ended_by_client",
        "is_paused",
        "opening_block",
        "queue",
        "reader",
        "receive_window",
        "send_window",
    )

    def __init__(self, stream_id: int, receive_window: int, send_window: int, max_message_bytes: int) -> None:
        self.id = stream_id
        self.reader = MessageReader(max_message_bytes)
        #: The messages of the read in progress, shared with their event; None: no message yet.
        self.batch: list[Buffer] | None = None
        #: What the client may still send.
        self.receive_window = receive_window
        #: While paused, events of this stream wait in ``held`` and no credit is given.
        self.is_paused = False
        self.held: deque[AnyEvent] = deque()
        self.is_ended_by_client = False

        #: What we may still send; negative after the peer has shrunk it.
        self.send_window = send_window
        self.queue = SendQueue()
        #: Header blocks that go before and after the queue; None: not asked for, or sent.
        self.opening_block: bytes | None = None
        self.closing_block: bytes | None = None
        self.has_answered = False
