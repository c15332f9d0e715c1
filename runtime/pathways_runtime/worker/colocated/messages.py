"""What an executor and a Python process of it say to each other, over a pair of Unix sockets.

Frames as everywhere (``transport.frames``); a payload holds the bytes of small values one after another. Larger ones
lie in *blocks*: shared memory of one of the two, its *owner*, which the other maps. A block is announced once
(``NewBlock``, with its descriptor), may hold one value after another, and is withdrawn with ``ForgetBlock``.
"""

import msgspec

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.status import Status


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all headers."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One shard's bytes, row-major and dense; of strings, as in a host buffer.

    Attributes:
        num_bytes: how many. A value in a block begins where the block does.
        block: 0 if they are the next bytes of the payload.
        is_receivers: whether the block's owner is who receives this.
    """

    device: DeviceId
    num_bytes: int
    block: int = 0
    is_receivers: bool = False


Pieces = tuple[Piece, ...]


class Ready(Message, frozen=True, tag="R"):
    """Process to executor, first: it can load functions."""


class Load(Message, frozen=True, tag="L"):
    """Load a function; Loaded answers. Payload: the pickle.

    Attributes:
        module_path: where modules are looked for besides, behind the process's own folders.
    """

    function: int
    name: str
    module_path: tuple[str, ...]
    enable_x64: bool


class Loaded(Message, frozen=True, tag="LD"):
    """A function can be called, or why not."""

    function: int
    failure: Status | None


class Unload(Message, frozen=True, tag="U"):
    """A function is needed no more. It goes, with all that it alone refers to, when the calls that came before have
    ended: theirs may be what it refers to. If all have ended, calls that come later begin after that."""

    function: int


class Call(Message, frozen=True, tag="C"):
    """Call a function; Returned answers. Calls of one stream run one after another, in order of receipt.

    Attributes:
        arguments: the shards that are here, per argument.
        results: of which devices' shards are wanted, per result of the function.
    """

    call: int
    function: int
    stream: int
    arguments: tuple[Pieces, ...]
    results: tuple[tuple[DeviceId, ...], ...]


class Returned(Message, frozen=True, tag="CR"):
    """A call is over: its results' shards in the order asked for, or why there are none."""

    call: int
    results: tuple[Pieces, ...]
    failure: Status | None


class NewBlock(Message, frozen=True, tag="B"):
    """A block of the sender's; one descriptor comes with the frame."""

    block: int
    num_bytes: int


class FreeBlock(Message, frozen=True, tag="BF"):
    """One value in a block of the receiver's is not looked at any more."""

    block: int


class ForgetBlock(Message, frozen=True, tag="BX"):
    """A block of the sender's will hold nothing any more."""

    block: int


AnyMessage = Ready | Load | Loaded | Unload | Call | Returned | NewBlock | FreeBlock | ForgetBlock
