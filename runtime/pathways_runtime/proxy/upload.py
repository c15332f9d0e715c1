"""A host buffer on its way in: put together in its place, mostly without a copy."""

from pathways_runtime.core.ids import Handle
from pathways_runtime.core.status import Code, StatusError, error
from pathways_runtime.proxy.frontend import Buffer, Flow
from pathways_runtime.proxy.host_buffer_messages import chunk_of, header_bytes
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
        self._num_bytes = num_bytes
        # Taken when bytes come: an upload that is held back from the start needs none.
        self._memory: memoryview | None = None
        self._filled = 0
        # The message that is being received in its place, and what its header lies on.
        self._placed: memoryview | None = None
        self._covered = b""
        self._flow: Flow | None = None

    def begin(self, flow: Flow) -> None:
        """See ``frontend.Upload``."""
        self._flow = flow
        self._session.uploads.enter(self._handle, flow)

    def cancel(self) -> None:
        """See ``frontend.Upload``."""
        if self._flow is not None:
            self._session.uploads.leave(self._flow)
        # The flow knows this upload: the memory must not wait for the collector of cycles.
        self._flow = self._placed = self._memory = None

    def allocate(self, num_bytes: int) -> memoryview | None:
        """See ``frontend.Upload``."""
        header = header_bytes(num_bytes)
        if num_bytes < _MIN_PLACED_BYTES or num_bytes - header > self._num_bytes - self._filled:
            return None
        try:
            memory = self._take_memory()
        except StatusError:
            # The front end is in the middle of reading: ``write`` says it.
            return None
        start = _MARGIN_BYTES + self._filled - header
        self._covered = bytes(memory[start : start + header])
        self._placed = memory[start : start + num_bytes]
        return self._placed

    def write(self, message: Buffer) -> None:
        """See ``frontend.Upload``."""
        self._session.uploads.advanced()
        memory = self._take_memory()
        if message is self._placed:
            header = len(self._covered)
            is_in_place = len(chunk_of(message)) == len(message) - header
            if not is_in_place:
                # Other fields than we know are in it, so its bytes lie elsewhere.
                message = bytes(message)
            start = _MARGIN_BYTES + self._filled - header
            memory[start : start + header] = self._covered
            self._placed = None
            if is_in_place:
                self._filled += len(message) - header
                return
        chunk = chunk_of(message)
        end = self._filled + len(chunk)
        if end > self._num_bytes:
            raise self._mismatch(f"at least {end}")
        memory[_MARGIN_BYTES + self._filled : _MARGIN_BYTES + end] = chunk
        self._filled = end

    def finish(self) -> bytes:
        """See ``frontend.Upload``."""
        content = self._take_memory()[_MARGIN_BYTES:]
        self.cancel()
        if self._filled != self._num_bytes:
            raise self._mismatch(str(self._filled))
        if self._session.is_over:
            raise error(Code.CANCELLED, f"the session of host buffer {self._handle} is over")
        self._session.store_host_buffer(self._handle, content)
        return b""

    def _take_memory(self) -> memoryview:
        if self._memory is None:
            try:
                self._memory = self._session.memory.take(self._num_bytes, _MARGIN_BYTES)
            except (MemoryError, OverflowError, ValueError) as failure:
                raise error(
                    Code.RESOURCE_EXHAUSTED,
                    f"the proxy has no room for host buffer {self._handle} of {self._num_bytes} bytes",
                ) from failure
        return self._memory

    def _mismatch(self, arrived: str) -> Exception:
        return error(
            Code.DATA_LOSS, f"host buffer {self._handle}: {self._num_bytes} bytes were announced and {arrived} came"
        )
