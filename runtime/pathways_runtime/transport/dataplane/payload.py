"""Payloads: what has arrived, and whose memory it lies in."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pathways_runtime.transport.dataplane.memory import Bytes, Lease
from pathways_runtime.transport.dataplane.messages import Key, PeerLost


def _noop() -> None:
    return


class Payload:
    """The bytes of one key, or why they never come.

    The reader looks at the bytes with ``array`` and then calls ``release``, or takes them over with ``adopt``. Between
    arrival and either, it must wait for nothing that waits for another payload: unreleased bytes hold the sender back.

    Attributes:
        failure: None, or why there are no bytes.
    """

    __slots__ = ("_keep", "_memory", "_release", "failure")

    def __init__(
        self,
        memory: Bytes | None,
        failure: Exception | None = None,
        keep: Callable[[], None] = _noop,
        release: Callable[[], None] = _noop,
    ) -> None:
        self._memory = memory
        self.failure = failure
        self._keep = keep
        self._release = release

    def array(self, dtype: npt.DTypeLike, shape: Sequence[int]) -> npt.NDArray[Any]:
        """The bytes as an array, aligned to 64 bytes, without a copy. Not to be read after ``release``.

        Raises:
            ValueError: ``dtype`` and ``shape`` say another number of bytes. The failure, when there is one.
        """
        return self._view(self._require(), dtype, shape)

    def adopt(self, dtype: npt.DTypeLike, shape: Sequence[int]) -> npt.NDArray[Any]:
        """Like ``array``, but the array owns the payload from now on: it is released when the array, all views of it
        and all device arrays that were made of it without a copy are gone. Do not call ``release``.

        It may live as long as it likes; the sender does not wait for it.
        """
        memory = self._require()
        array = self._view(memory, dtype, shape)
        self._keep()
        release, self._release, self._memory = self._release, _noop, None
        lease = Lease(memory, release)
        return self._view(np.asarray(lease), array.dtype, shape)

    def release(self) -> None:
        """Nobody reads the bytes any more. Calling it again does nothing."""
        release, self._release, self._memory = self._release, _noop, None
        release()

    def _require(self) -> Bytes:
        if self.failure is not None:
            raise self.failure
        if self._memory is None:
            raise ValueError("the payload has been released or adopted")
        return self._memory

    @staticmethod
    def _view(memory: Bytes, dtype: npt.DTypeLike, shape: Sequence[int]) -> npt.NDArray[Any]:
        return memory.view(dtype).reshape(shape)


OnArrived = Callable[[Payload], None]

logger = logging.getLogger(__name__)


def _deliver(on_arrived: OnArrived, payload: Payload) -> None:
    try:
        on_arrived(payload)
    except Exception:
        # The thread belongs to other payloads too: a reader's mistake must not end it.
        logger.exception("a payload's reader failed")


class Arrivals:
    """Brings together what is expected and what has arrived, whichever comes first. Callbacks run without locks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[Key, tuple[OnArrived, int | None]] = {}
        self._stashed: dict[Key, Payload] = {}
        # Ids are never used again, so this only tells latecomers apart; it grows by one number per session.
        self._forgotten: set[int] = set()
        self._lost: dict[int, Exception] = {}

    def expect(self, key: Key, on_arrived: OnArrived, source: int | None) -> None:
        """Have ``on_arrived`` called once, at once if the payload is there or its source is lost."""
        with self._lock:
            payload = self._stashed.pop(key, None)
            if payload is None and source is not None and source in self._lost:
                payload = Payload(None, self._lost[source])
            if payload is None:
                if key in self._expected:
                    raise ValueError(f"payload {key} is expected twice")
                if key[0] not in self._forgotten:
                    self._expected[key] = (on_arrived, source)
                return
        _deliver(on_arrived, payload)

    def arrived(self, key: Key, payload: Payload) -> None:
        """A payload has come."""
        with self._lock:
            expectation = self._expected.pop(key, None)
            is_unwanted = key[0] in self._forgotten or key in self._stashed
            if expectation is None and not is_unwanted:
                self._stashed[key] = payload
                return
        if expectation is None:
            payload.release()
        else:
            _deliver(expectation[0], payload)

    def forget(self, session: int) -> None:
        """Drop what is expected and what has come for a session, now and later; its callbacks are not called."""
        with self._lock:
            self._forgotten.add(session)
            for key in [key for key in self._expected if key[0] == session]:
                del self._expected[key]
            released = [self._stashed.pop(key) for key in [key for key in self._stashed if key[0] == session]]
        for payload in released:
            payload.release()

    def source_lost(self, host: int, failure: Exception) -> None:
        """Fail what is expected from a host, now and until ``source_found``."""
        with self._lock:
            self._lost[host] = failure
            failed = [(key, on_arrived) for key, (on_arrived, source) in self._expected.items() if source == host]
            for key, _ in failed:
                del self._expected[key]
        for _, on_arrived in failed:
            _deliver(on_arrived, Payload(None, failure))

    def source_found(self, host: int) -> None:
        """What is expected from the host from now on may come."""
        with self._lock:
            self._lost.pop(host, None)

    def close(self) -> None:
        """Fail all expectations; release what nobody asked for."""
        with self._lock:
            failed = list(self._expected.values())
            stashed = list(self._stashed.values())
            self._expected.clear()
            self._stashed.clear()
        for on_arrived, _ in failed:
            _deliver(on_arrived, Payload(None, PeerLost("this data plane is closed")))
        for payload in stashed:
            payload.release()

    def counts(self) -> tuple[int, int]:
        """How many payloads are expected, and how many have come that nobody asked for yet."""
        with self._lock:
            return len(self._expected), len(self._stashed)
