"""A host buffer on its way in: put together in its place, mostly without a copy."""

from pathways_runtime.core.ids import Handle
from pathways_runtime.core.status import Code, error
from pathways_runtime.proxy.frontend import Buffer
from pathways_runtime.proxy.host_buffer_messages import chunk_of, header_bytes
from pathways_runtime.proxy.host_buffers import new_memory
from pathways_runtime.proxy.session_server import SessionServer

#: Messages of fewer bytes are not worth their own place.
_MIN_PLACED_BYTES = 1 << 15
#: Room for a message's header in front of the buffer; as much as its alignment needs.
_MARGIN_BYTES = 64


class HostBufferUpload:
    """See ``frontend.Upload``.

    A message is a short header and the bytes of the buffer that come next. It is received where those bytes belong, its
    header over the last ones before them, which are put back once it is there.
    """

    def __init__(self, session: SessionServer, handle: Handle, num_bytes: int) -> None:
        self._session = session
        self._handle = handle
        if num_bytes < 0:
            raise error(Code.INVALID_ARGUMENT, f"host buffer {handle} is announced with {num_bytes} bytes")
        try:
            self._memory = new_memory(_MARGIN_BYTES + num_bytes)
        except (MemoryError, OverflowError, ValueError) as failure:
            raise error(
                Code.RESOURCE_EXHAUSTED, f"the proxy has no room for host buffer {handle} of {num_bytes} bytes"
            ) from failure
        self._content = self._memory[_MARGIN_BYTES:]
        self._filled = 0
        # The message that is being received in its place, and what its header lies on.
        self._placed: memoryview | None = None
        self._covered = b""

    def allocate(self, num_bytes: int) -> memoryview | None:
        """See ``frontend.Upload``."""
        header = header_bytes(num_bytes)
        if num_bytes < _MIN_PLACED_BYTES or num_bytes - header > len(self._content) - self._filled:
            return None
        start = _MARGIN_BYTES + self._filled - header
        self._covered = bytes(self._memory[start : start + header])
        self._placed = self._memory[start : start + num_bytes]
        return self._placed

    def write(self, message: Buffer) -> None:
        """See ``frontend.Upload``."""
        if message is self._placed:
            header = len(self._covered)
            is_in_place = len(chunk_of(message)) == len(message) - header
            if not is_in_place:
                # Other fields than we know are in it, so its bytes lie elsewhere.
                message = bytes(message)
            start = _MARGIN_BYTES + self._filled - header
            self._memory[start : start + header] = self._covered
            self._placed = None
            if is_in_place:
                self._filled += len(message) - header
                return
        chunk = chunk_of(message)
        end = self._filled + len(chunk)
        if end > len(self._content):
            raise self._mismatch(f"at least {end}")
        self._content[self._filled : end] = chunk
        self._filled = end

    def finish(self) -> bytes:
        """See ``frontend.Upload``."""
        if self._filled != len(self._content):
            raise self._mismatch(str(self._filled))
        if self._session.is_over:
            raise error(Code.CANCELLED, f"the session of host buffer {self._handle} is over")
        self._session.store_host_buffer(self._handle, self._content)
        return b""

    def _mismatch(self, arrived: str) -> Exception:
        return error(
            Code.DATA_LOSS, f"host buffer {self._handle}: {len(self._content)} bytes were announced and {arrived} came"
        )
