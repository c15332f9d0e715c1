"""What has happened on a connection, as ``ServerConnection.advance`` tells it.

Per stream: RequestReceived, then any number of MessagesReceived, then RequestEnded; StreamCancelled may come at any
point after the first, and ends it. What comes of one stream keeps its order; messages of one read come
as one event, which stands where the first of them stood among the events of other streams.
"""

import msgspec

from pathways_runtime.transport.frames import Buffer
from pathways_runtime.transport.http2.frames import ErrorCode
from pathways_runtime.transport.http2.grpc_messages import Metadata


class Event(msgspec.Struct, frozen=True):
    """Base of all events."""


class RequestReceived(Event, frozen=True):
    """A client opened a call. ``path`` is ``/package.Service/Method``."""

    stream_id: int
    path: str
    metadata: Metadata


class MessagesReceived(Event, frozen=True):
    """Whole messages, in order; large ones are bytearrays that nobody else holds."""

    stream_id: int
    messages: list[Buffer]


class RequestEnded(Event, frozen=True):
    """The client sends no more messages in this call."""

    stream_id: int


class StreamCancelled(Event, frozen=True):
    """The call is over before it was answered; nothing can be sent in it any more. ``reason`` is for the log."""

    stream_id: int
    reason: str


class GoAwayReceived(Event, frozen=True):
    """The client opens no more calls; those that run go on."""

    code: int
    reason: str


class ConnectionFailed(Event, frozen=True):
    """The client broke the protocol. Send what is left to send (it says why), then close."""

    code: ErrorCode
    reason: str


AnyEvent = RequestReceived | MessagesReceived | RequestEnded | StreamCancelled | GoAwayReceived | ConnectionFailed
