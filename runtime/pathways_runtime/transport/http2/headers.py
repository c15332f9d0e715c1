"""Header blocks (HPACK, RFC 7541): decoding requests, encoding answers.

Answers are encoded as literals that enter no table: they are short, there are few of them per call, and so they can be
encoded once and shared between connections. Requests are decoded by the ``hpack`` library. It takes some 3 us per
header, and a client sends the same block for each call of a method once its table is filled; so what a block means is
remembered for as long as the table stays as it is.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import hpack
import hpack.exceptions
import hpack.table

from pathways_runtime.transport.http2.frames import ConnectionFault, ErrorCode

Headers = tuple[tuple[bytes, bytes], ...]
ParsedT = TypeVar("ParsedT")

# In front of a connection's first block: our encoder's table has size zero, whatever the peer's limit becomes later.
NO_TABLE = b"\x20"

_STATUS_200 = b"\x88"
_MAX_KNOWN_BLOCKS = 64
_MAX_KNOWN_BLOCK_BYTES = 256


def _string(value: bytes) -> bytes:
    """A string literal without Huffman coding (RFC 7541, section 5.2)."""
    length = len(value)
    if length < 127:
        return bytes((length,)) + value
    prefix = bytearray((127,))
    length -= 127
    while length >= 128:
        prefix.append(length & 127 | 128)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + value


def encode(headers: Headers) -> bytes:
    """A header block that depends on no table; pseudo headers first."""
    parts = []
    for name, value in headers:
        if name == b":status" and value == b"200":
            parts.append(_STATUS_200)
        else:
            parts.append(b"\x00" + _string(name) + _string(value))
    return b"".join(parts)


class _WatchedTable(hpack.table.HeaderTable):
    """The decoder's dynamic table, which counts its changes."""

    num_changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.num_changes += 1
        super().add(name, value)


class HeaderDecoder(Generic[ParsedT]):
    """Decodes the header blocks of one connection, all of them in their order.

    Args:
        max_list_bytes: names and values of one block, 32 bytes added for each (RFC 9113, section 6.5.2).
        parse: what ``parsed`` makes of the headers; a function of nothing else.
    """

    def __init__(self, max_list_bytes: int, parse: Callable[[Headers], ParsedT]) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=max_list_bytes)
        self._table = _WatchedTable()
        self._decoder.header_table = self._table
        self._parse = parse
        # What blocks mean while the table is as it is now.
        self._known: dict[bytes, ParsedT] = {}

    def decode(self, block: bytes) -> Headers:
        """The headers of a whole block.

        Raises:
            ConnectionFault: it is no header block, or one beyond the limit. With the table, the connection is lost.
        """
        changes_before = self._table.num_changes
        try:
            headers = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except hpack.exceptions.OversizedHeaderListError as failure:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, str(failure)) from failure
        except (hpack.exceptions.HPACKError, IndexError) as failure:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, f"not a header block: {failure}") from failure
        # A size update (RFC 7541, section 6.3) stands at the start of a block.
        if self._table.num_changes != changes_before or (block[:1] and block[0] & 0xE0 == 0x20):
            self._known.clear()
        return headers

    def parsed(self, block: bytes) -> ParsedT:
        """``parse`` of the block's headers.

        Raises:
            ConnectionFault: as ``decode``; and what ``parse`` raises.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        changes_before = self._table.num_changes
        parsed = self._parse(self.decode(block))
        if (
            self._table.num_changes == changes_before
            and len(block) <= _MAX_KNOWN_BLOCK_BYTES
            and block[0] & 0xE0 != 0x20
        ):
            if len(self._known) >= _MAX_KNOWN_BLOCKS:
                self._known.clear()
            self._known[block] = parsed
        return parsed
