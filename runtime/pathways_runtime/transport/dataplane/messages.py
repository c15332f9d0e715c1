"""What travels on a data plane connection.

Connections are one-way: whoever has something to send opens them. From the sender come messages of one fixed head,
some with payload bytes behind it; back come fixed-size notices about shared memory.

    HELLO     first; payload: a ``Hello``
    INLINE    a whole payload
    CHUNK     one part of a payload: ``length`` bytes at ``offset`` of ``total``; in place of the segment stands the
    payload's
              ticket: see ``Inbound``
    SEGMENT   the file descriptor that comes along is shared memory ``segment`` of ``total`` bytes
    BLOCK     a whole payload of ``length`` bytes lies at the start of ``segment``, which is the receiver's until it is
    released DROP      ``segment`` is not used any more

    TUNNEL    first, instead of HELLO: the connection is given away, to what ``segment`` says; it carries no messages

    RELEASE   back: the receiver has done with ``segment``
    KEEP      back: the receiver holds ``segment`` for as long as an array of its own lives
    OPENED    back: whatever follows on this connection, either way, belongs to the tunnel
"""

import struct

import msgspec

#: (session, op id, index of the move): names one payload for good.
Key = tuple[int, int, int]

DATA_PLANE_VERSION = 1

HELLO, INLINE, CHUNK, SEGMENT, BLOCK, DROP, TUNNEL = range(1, 8)
RELEASE, KEEP, OPENED = range(1, 4)

#: Payloads below this travel in the message itself.
INLINE_BYTES = 64 << 10

#: Tickets count the payloads of a link that travel in chunks, and wrap around.
NUM_TICKETS = 1 << 32

#: kind, segment or ticket, session, op id, move index, offset, length, total.
HEAD = struct.Struct("<B3xIQQQQQQ")
#: kind, segment.
NOTICE = struct.Struct("<II")


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who opens a connection.

    Attributes:
        address: where the sender itself listens: that is how the receiver knows it.
        link: the same for all connections that carry parts of the same payloads.
    """

    version: int
    address: str
    link: str


class DataPlaneError(Exception):
    """A peer that does not speak this protocol."""


class PeerLost(Exception):
    """What was to come from or go to a peer never will; the message names the peer and says why."""


def encode_hello(hello: Hello) -> bytes:
    """HELLO with its payload."""
    body = msgspec.msgpack.encode(hello)
    return HEAD.pack(HELLO, 0, 0, 0, 0, 0, len(body), len(body)) + body


def encode_tunnel(number: int) -> bytes:
    """TUNNEL."""
    return HEAD.pack(TUNNEL, number, 0, 0, 0, 0, 0, 0)


def decode_hello(body: bytes) -> Hello:
    """A HELLO's payload.

    Raises:
        DataPlaneError: not a hello, or of another version.
    """
    try:
        hello = msgspec.msgpack.decode(body, type=Hello)
    except msgspec.MsgspecError as failure:
        raise DataPlaneError(f"not a data plane's hello: {failure}") from failure
    if hello.version != DATA_PLANE_VERSION:
        raise DataPlaneError(f"{hello.address} speaks data plane version {hello.version}, not {DATA_PLANE_VERSION}")
    return hello
