"""What lies between a front end (the transport of the IFRT proxy protocol) and the sessions behind it.

A front end moves bytes: it knows gRPC's methods and framing and nothing of what the messages mean. It is given a
``Backend`` and calls it for every RPC; towards each session's client it offers a ``Connection``. Everything happens on
one event loop. ``frontend_grpc`` is the reference.

    GetVersion             answer = backend.get_version(request)
    IfrtSession            session = backend.open_session(connection, metadata); session.request(message) for each
                           message; session.disconnected() once, however the stream ends
    HostBufferStore        upload = backend.open_upload(metadata); upload.begin(flow); upload.write(message) for each
                           message; answer = upload.finish(), or upload.cancel()
    HostBufferLookup       messages of backend.lookup_host_buffer(request), each written to the stream
    HostBufferDelete       answer = backend.delete_host_buffer(request)
    HostBufferReadFromDisk UNIMPLEMENTED

What the backend's methods raise as ``core.status.StatusError`` becomes the status of the RPC.
"""

from collections.abc import Iterator
from typing import Protocol

from pathways_runtime.core.status import Status

#: Metadata keys of the RPCs; the values are serialized messages.
SESSION_METADATA_KEY = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
HOST_BUFFER_METADATA_KEY = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"

Buffer = bytes | bytearray | memoryview
#: A message for the client, whole or as the parts that it consists of.
Message = Buffer | tuple[Buffer, ...]


class Flow(Protocol):
    """A stream from the client that can be held back."""

    def pause_reading(self) -> None:
        """Take no more from the client. Messages already read may still be delivered."""

    def resume_reading(self) -> None:
        """Undo ``pause_reading``."""


class Connection(Flow, Protocol):
    """One IFRT session's stream, towards the client."""

    def send(self, response: bytes) -> None:
        """Queue one IfrtResponse; dropped once the stream has ended."""

    def close(self, status: Status | None) -> None:
        """Send what is queued, then end the stream: in good order, or with a failure."""


class Session(Protocol):
    """One IFRT session, as a front end sees it."""

    def request(self, message: bytes) -> None:
        """One IfrtRequest, in the order of the stream."""

    def disconnected(self) -> None:
        """The stream has ended; nothing is sent any more. Called exactly once."""


class Upload(Protocol):
    """One host buffer on its way in."""

    def begin(self, flow: Flow) -> None:
        """``flow``: by which the client can be held back."""

    def cancel(self) -> None:
        """Not all will come; ``finish`` is not called."""

    def allocate(self, num_bytes: int) -> memoryview | None:
        """Memory for the next message, of so many bytes, where the front end can choose; ``write`` gets it filled.

        All messages before it have been written. None: it does not matter.
        """

    def write(self, message: Buffer) -> None:
        """One GrpcHostBufferStoreRequest.

        Raises:
            StatusError: it is none, or more arrives than was announced.
        """

    def finish(self) -> bytes:
        """All has arrived: store it.

        Returns:
            The response of the RPC.

        Raises:
            StatusError: less arrived than was announced, or the session is gone.
        """


class Backend(Protocol):
    """Everything behind the front ends of a proxy."""

    def get_version(self, request: bytes) -> bytes:
        """Negotiate.

        Raises:
            StatusError: no version suits both.
        """

    def open_session(self, connection: Connection, metadata: bytes | None, peer: str) -> Session:
        """A client's stream has begun. ``peer`` is a name for the log.

        Raises:
            StatusError: the metadata are missing or wrong, or no more sessions are taken.
        """

    def open_upload(self, metadata: bytes | None) -> Upload:
        """A client begins to store a host buffer.

        Raises:
            StatusError: the metadata are missing or wrong, or there is no such session.
        """

    def lookup_host_buffer(self, request: bytes) -> Iterator[Message]:
        """The messages of a host buffer, at least one; made one by one, so write each before asking for the next.

        Raises:
            StatusError: no such session or buffer. At once, not at the first ``next``.
        """

    def delete_host_buffer(self, request: bytes) -> bytes:
        """Forget a host buffer.

        Raises:
            StatusError: no such session or buffer.
        """


class Frontend(Protocol):
    """A transport that listens."""

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            OSError: it cannot.
        """

    async def stop(self, grace_s: float) -> None:
        """Listen no more, and cut the streams that are still open after ``grace_s``."""
