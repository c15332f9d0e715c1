"""Callbacks: Python functions of a client that a program calls while it runs here.

XLA calls a *forwarder*, on one of its threads; it sends the operands over the session's link (``wire.callbacks``) and
waits for the results. The function itself runs in the client's process.
"""

import itertools
import threading
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


def forwarders(call: Call, client: str, numbers: Sequence[int]) -> list[Forwarder]:
    """What XLA is given for the callbacks of a program, in their order."""
    return [_forwarder(call, client, number) for number in numbers]


def _forwarder(call: Call, client: str, number: int) -> Forwarder:
    def forward(*operands: Any) -> tuple[Value, ...]:
        return tuple(call(client, number, [None if each is None else np.asarray(each) for each in operands]))

    return forward
