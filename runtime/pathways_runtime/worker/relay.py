"""A supervisor's second job in large clusters: to stand between the controller and the executors of several hosts.

It passes frames down without looking inside, and adds up what children say of their progress (``core.relay``). All else
that they say goes up as it is. Everything of one child stays in order in either direction.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from pathways_runtime.core import bitmaps
from pathways_runtime.core.relay import Aggregation
from pathways_runtime.transport import streams
from pathways_runtime.transport.frames import AsyncChannel, Buffer, Frame, FrameCodec, FrameError
from pathways_runtime.transport.network import Network
from pathways_runtime.wire.messages import (
    Acknowledge,
    AnyMessage,
    ChildClosed,
    ChildrenAcknowledge,
    FromChild,
    Heartbeat,
    ReadyHere,
    RelayBacklog,
)

logger = logging.getLogger(__name__)

#: The controller is told of the backlog when it has grown or shrunk by so much.
BACKLOG_STEP_BYTES = 4 << 20
_BACKLOG_CHECK_S = 0.01
#: Sets of children that are remembered.
_MOST_REMEMBERED = 1024

_encode = msgspec.msgpack.Encoder().encode


class Relay:
    """Accepts executors at ``address`` on the running loop.

    Args:
        address: where to listen.
        send: sends to the controller: a message and its payload.
        network: needed for TCP.

    Attributes:
        address: where executors connect; of TCP, the real port is known once it listens.
    """

    def __init__(
        self, address: str, send: Callable[[AnyMessage, Buffer], None], network: Network | None = None
    ) -> None:
        self.address = address
        self._network = network
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._codec: FrameCodec[AnyMessage] = FrameCodec(AnyMessage)
        self._server: streams.Server | None = None
        self._channels: dict[int, AsyncChannel[AnyMessage]] = {}
        self._num_accepted = 0
        self._aggregation = Aggregation()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_ns = 0
        #: Who is meant by a bitmap, without those who are gone.
        self._meant: dict[bytes, list[AsyncChannel[AnyMessage]]] = {}
        self._told_backlog_bytes = 0
        self._is_watching_backlog = False
        self._is_closed = False

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            OSError, AddressError: it cannot.
        """
        self._server = await streams.serve(self.address, self._accept, self._network)
        self.address = self._server.address

    def close(self) -> None:
        """Let all children go, once they have been sent what was meant for them, and listen no more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        for channel in list(self._channels.values()):
            channel.close()

    # Downwards

    def pass_on(self, bitmap: bytes, header: Buffer) -> None:
        """Send a frame to those children in a bitmap that are still there."""
        channels = self._meant.get(bitmap)
        if channels is None:
            channels = [self._channels[child] for child in bitmaps.members(bitmap) if child in self._channels]
            if len(self._meant) >= _MOST_REMEMBERED:
                self._meant.clear()
            self._meant[bitmap] = channels
        # One copy for all: a channel keeps it until its socket takes it.
        shared = bytes(header)
        for channel in channels:
            channel.send_header(shared)
        if not self._is_watching_backlog:
            self._is_watching_backlog = True
            self._loop.call_later(_BACKLOG_CHECK_S, self._watch_backlog)

    def close_child(self, child: int) -> None:
        """Close a child's connection once it has been sent what was meant for it."""
        channel = self._channels.get(child)
        if channel is not None:
            channel.close()

    def _watch_backlog(self) -> None:
        if self._is_closed:
            return
        unsent_bytes = max((channel.unsent_bytes() for channel in self._channels.values()), default=0)
        if abs(unsent_bytes - self._told_backlog_bytes) >= BACKLOG_STEP_BYTES or (
            unsent_bytes == 0 and self._told_backlog_bytes
        ):
            self._told_backlog_bytes = unsent_bytes
            self._send(RelayBacklog(unsent_bytes), b"")
        self._is_watching_backlog = unsent_bytes > 0
        if self._is_watching_backlog:
            self._loop.call_later(_BACKLOG_CHECK_S, self._watch_backlog)

    # Upwards

    def _accept(self) -> AsyncChannel[AnyMessage]:
        child = self._num_accepted
        self._num_accepted += 1
        channel = AsyncChannel(
            self._codec, functools.partial(self._received, child), functools.partial(self._child_closed, child)
        )
        self._channels[child] = channel
        self._meant.clear()
        self._aggregation.add_child(child)
        return channel

    def _received(self, child: int, channel: AsyncChannel[AnyMessage], frames: Sequence[Frame[AnyMessage]]) -> None:
        now_ns = time.monotonic_ns()
        for frame in frames:
            message = frame.message
            if isinstance(message, Acknowledge):
                try:
                    self._aggregation.acknowledge(child, message.launches_completed, message.transfers_started, now_ns)
                except ValueError as failure:
                    raise FrameError(str(failure)) from failure
            elif isinstance(message, ReadyHere):
                self._aggregation.arrays_ready(child, message.session, message.wait_id, now_ns)
            else:
                # What it said before goes first: a failure, say, belongs behind the launches that went well.
                if not isinstance(message, Heartbeat):
                    self._tell_progress()
                self._send(FromChild(child), _encode(message))
        self._tell_when_due()

    def _child_closed(self, child: int, channel: AsyncChannel[AnyMessage], failure: Exception | None) -> None:
        del self._channels[child]
        self._meant.clear()
        self._aggregation.remove_child(child)
        if not self._is_closed:
            self._tell_progress()
            self._send(ChildClosed(child, str(failure) if failure is not None else "closed"), b"")

    def _tell_when_due(self) -> None:
        due_ns = self._aggregation.due_ns
        if due_ns is None:
            return
        now_ns = time.monotonic_ns()
        if self._aggregation.is_due(now_ns):
            self._tell_progress()
        elif self._timer is None or due_ns < self._timer_due_ns:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_due_ns = due_ns
            self._timer = self._loop.call_later((due_ns - now_ns) / 1e9, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self._tell_when_due()

    def _tell_progress(self) -> None:
        if self._aggregation.due_ns is not None:
            told = self._aggregation.take()
            self._send(ChildrenAcknowledge(told.completed, told.transfers_started, told.ready), b"")
