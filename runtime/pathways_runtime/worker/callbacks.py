"""Callbacks: Python functions of a client that a program calls while it runs here.

XLA calls a *forwarder*, on one of its threads; it sends the operands over the session's link (``wire.callbacks``) and
waits for the results. The function itself runs in the client's process.
"""

import collections
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from pathways_runtime.core.status import Code, Status
from pathways_runtime.wire.callbacks import CallbackCall, CallbackResult, pack, unpack

#: An array, or None, which is a token.
Value = np.ndarray[Any, Any] | None
#: What XLA calls.
Forwarder = Callable[..., tuple[Value, ...]]
#: Calls function ``number`` of a client, blocks until it has returned.
Call = Callable[[str, int, list[Value]], list[Value]]


SESSION_IS_OVER = Status(Code.CANCELLED, "the session whose Python function this calls is over")


class CallbackFailed(Exception):
    """The function raised, or cannot be reached. ``pjrt.status_of`` finds the status in what XLA makes of this."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"{status.code.name}: {status.message}")


class Calls:
    """The calls of one session link that are not answered. For any thread.

    Args:
        send: sends a frame; never blocks.
    """

    def __init__(self, send: Callable[[CallbackCall, np.ndarray[Any, Any]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, Future[list[Value]]] = {}
        self._is_closed = False

    def call(self, client: str, number: int, operands: list[Value]) -> list[Value]:
        """Call function ``number`` of ``client``; blocks until it has returned or the link is closed.

        Raises:
            CallbackFailed: the function raised; or, with code CANCELLED, the client or the session is gone.
            ValueError: operands of a type that cannot be passed.
        """
        specs, payload = pack(operands)
        waiting: Future[list[Value]] = Future()
        with self._lock:
            if self._is_closed:
                raise CallbackFailed(SESSION_IS_OVER)
            name = next(self._numbers)
            self._open[name] = waiting
        self._send(CallbackCall(name, client, number, specs), np.frombuffer(payload, np.uint8))
        return waiting.result()

    def answered(self, message: CallbackResult, payload: Any) -> None:
        """An answer has come."""
        with self._lock:
            waiting = self._open.pop(message.call, None)
        if waiting is None:
            return
        if message.failure is not None:
            waiting.set_exception(CallbackFailed(message.failure))
            return
        try:
            waiting.set_result(unpack(message.results, payload))
        except ValueError as failure:
            reason = f"a callback's results cannot be read: {failure}"
            waiting.set_exception(CallbackFailed(Status(Code.INVALID_ARGUMENT, reason)))

    def close(self) -> None:
        """All calls fail, also later ones. Again does nothing."""
        with self._lock:
            self._is_closed = True
            left, self._open = list(self._open.values()), {}
        for waiting in left:
            waiting.set_exception(CallbackFailed(SESSION_IS_OVER))


def nobody(client: str, number: int, operands: list[Value]) -> list[Value]:
    """A ``Call`` where there is no client.

    Raises:
        CallbackFailed: always.
    """
    raise CallbackFailed(SESSION_IS_OVER)


class Forwarders:
    """Which functions of clients may still be called from this process: those whose forwarders XLA holds.

    A forwarder is gone when its executable is, and that when its last execution is over. One thread keeps the account:
    the end of an object is told at any moment, on any thread, with whatever locks that holds.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Of the thread alone.
        self._alive: collections.Counter[tuple[str, int]] = collections.Counter()
        self._waiting: list[tuple[set[tuple[str, int]], Callable[[], None]]] = []

    def made(self, client: str, number: int, forwarder: Forwarder) -> None:
        """XLA is about to be given this one."""
        key = (client, number)
        self._put(lambda: self._count(key, 1))
        weakref.finalize(forwarder, self._events.put, lambda: self._count(key, -1)).atexit = False

    def when_gone(self, client: str, numbers: Sequence[int], tell: Callable[[], None]) -> None:
        """Call ``tell``, from a thread, once no forwarder of these is left; no new one is made."""
        self._put(lambda: self._wait_for({(client, number) for number in numbers}, tell))

    def _put(self, event: Callable[[], None]) -> None:
        self._events.put(event)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="forwarders", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._events.get()()

    def _count(self, key: tuple[str, int], change: int) -> None:
        self._alive[key] += change
        if not self._alive[key]:
            del self._alive[key]
            self._tell()

    def _wait_for(self, keys: set[tuple[str, int]], tell: Callable[[], None]) -> None:
        self._waiting.append((keys, tell))
        self._tell()

    def _tell(self) -> None:
        over = [(keys, tell) for keys, tell in self._waiting if not any(key in self._alive for key in keys)]
        self._waiting = [each for each in self._waiting if each not in over]
        for _, tell in over:
            tell()


#: Of this process: XLA, which holds forwarders, is one for all sessions too.
FORWARDERS = Forwarders()


def forwarders(call: Call, client: str, numbers: Sequence[int]) -> list[Forwarder]:
    """What XLA is given for the callbacks of a program, in their order."""
    return [_forwarder(call, client, number) for number in numbers]


def _forwarder(call: Call, client: str, number: int) -> Forwarder:
    def forward(*operands: Any) -> tuple[Value, ...]:
        return tuple(call(client, number, [None if each is None else np.asarray(each) for each in operands]))

    FORWARDERS.made(client, number, forward)
    return forward
