"""The proxy's control stream to the controller."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

from pathways_runtime.core.ids import HostIndex
from pathways_runtime.transport import streams
from pathways_runtime.transport.addresses import ConnectFailed
from pathways_runtime.transport.frames import AsyncChannel, Frame, FrameCodec
from pathways_runtime.transport.network import Network
from pathways_runtime.wire import messages
from pathways_runtime.wire.host_names import HostNames
from pathways_runtime.wire.messages import AnyMessage, Message

logger = logging.getLogger(__name__)


class ControllerLink:
    """Sends to the controller and hands on what comes from it, all on one event loop.

    Submits of one turn of the loop travel as one SubmitBatch; everything else that is sent keeps its place among them.

    Args:
        on_message: called with each message, in order.
        on_lost: called once with the reason when the stream has ended without ``close``.
    """

    def __init__(self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._channel: AsyncChannel[AnyMessage] | None = None
        self._submits: list[messages.Submit] = []
        self._host_names = HostNames()
        self._is_closing = False
        self._loop = asyncio.get_running_loop()

    async def connect(self, address: str, timeout_s: float, network: Network | None = None) -> None:
        """Connect and say hello; waits for a controller that does not listen yet.

        Raises:
            AddressError, ConnectFailed: it was not there in time; see ``streams.connect``.
        """
        codec: FrameCodec[AnyMessage] = FrameCodec(AnyMessage)
        try:
            self._channel = await streams.connect(
                address, lambda: AsyncChannel(codec, self._received, self._closed), timeout_s, network
            )
        except ConnectFailed as failure:
            raise ConnectFailed(f"the proxy has no controller: {failure.strerror}") from failure
        self._channel.send(messages.Hello("proxy", messages.PROTOCOL_VERSION, os.getpid()))

    def name_hosts(self, hosts: tuple[HostIndex, ...]) -> int:
        """The number that stands for a set of hosts in Submits from now on; 0 if it is to be spelled out."""
        number, is_new = self._host_names.name(hosts)
        if is_new:
            self.send(messages.NameHosts(number, hosts))
        return number

    def submit(self, submit: messages.Submit) -> None:
        """Send with the others of this turn."""
        if not self._submits:
            self._loop.call_soon(self._flush)
        self._submits.append(submit)

    def send(self, message: AnyMessage) -> None:
        """Send behind what was submitted before."""
        self._flush()
        if self._channel is not None:
            self._channel.send(message)

    def close(self) -> None:
        """End the stream in good order."""
        self._flush()
        self._is_closing = True
        if self._channel is not None:
            self._channel.close()

    def _flush(self) -> None:
        if self._submits and self._channel is not None:
            batch = messages.SubmitBatch(tuple(self._submits))
            self._submits.clear()
            self._channel.send(batch)

    def _received(self, channel: AsyncChannel[AnyMessage], frames: Sequence[Frame[AnyMessage]]) -> None:
        for frame in frames:
            self._on_message(frame.message)

    def _closed(self, channel: AsyncChannel[AnyMessage], failure: Exception | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._on_lost(str(failure) if failure is not None else "closed by the controller")
