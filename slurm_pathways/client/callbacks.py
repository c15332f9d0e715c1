"""The program's end of callbacks (``wire.callbacks``): its Python functions, called by programs that run on workers.

The functions run here, in daemon threads: as in plain JAX, several may run at a time, also while Python ends and JAX
waits for what is under way.
"""

import contextlib
import functools
import logging
import os
import queue
import secrets
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways_runtime.core.status import Code, Status
from pathways_runtime.transport import addresses
from pathways_runtime.transport.frames import Channel, ConnectionClosed, FrameCodec
from pathways_runtime.wire.callbacks import (
    CALLBACKS_VERSION,
    AnyCallbackMessage,
    CallbackCall,
    CallbackResult,
    CallbacksHello,
    CallbacksUnused,
    Functions,
    callbacks_address,
    pack,
    unpack,
)
from slurm_pathways.client.jax_programs import HostCallback, TakenCallbacks

_logger = logging.getLogger(__name__)

_TARGET_PREFIX = "grpc://"
_CONNECT_TIMEOUT_S = 30.0
#: More calls at a time wait for one another.
_MAX_THREADS = 64


class CallbacksError(RuntimeError):
    """There is nothing that would bring the calls. The message is for the user."""


class Callbacks:
    """The functions of this process, by number, and the connection that brings calls; it is made for the first ones.

    Args:
        target: says where the runtime is, as ``JAX_BACKEND_TARGET`` does.
    """

    def __init__(self, target: Callable[[], str]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    def take(self, functions: Sequence[HostCallback]) -> TakenCallbacks:
        """Take the functions of a program in, under numbers of their own. They are kept until it has been deleted and
        the runtime says that no execution under way can call them, or until the connection is lost.

        Raises:
            CallbacksError: the runtime cannot be reached for calls.
        """
        with self._lock:
            if self._connection is None or self._connection.is_lost or self._connection.pid != os.getpid():
                self._connection = _Connection(self._target())
            return self._connection.take(functions)


class _Connection:
    """A connection to the proxy, the thread that reads it, and those that call."""

    def __init__(self, target: str) -> None:
        self.client = secrets.token_hex(16)
        self.pid = os.getpid()
        self.is_lost = False
        self._functions: dict[int, HostCallback] = {}
        self._last_number = -1
        self._calls: queue.SimpleQueue[tuple[CallbackCall, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        # Calls that are not answered yet.
        self._num_open = 0
        self._channel: Channel[AnyCallbackMessage] = Channel(_connect(target), FrameCodec(AnyCallbackMessage))
        self._channel.send(CallbacksHello(self.client, CALLBACKS_VERSION))
        # One from the start: when Python ends no thread can be made any more.
        self._start_thread()
        threading.Thread(target=self._read, name="callbacks", daemon=True).start()

    def take(self, functions: Sequence[HostCallback]) -> TakenCallbacks:
        """See ``Callbacks``; one at a time."""
        numbers = tuple(range(self._last_number + 1, self._last_number + 1 + len(functions)))
        self._last_number += len(functions)
        self._functions.update(zip(numbers, functions, strict=True))
        return TakenCallbacks(Functions(self.client, numbers), functools.partial(self._forget, numbers))

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._functions.pop(number, None)

    def _read(self) -> None:
        try:
            while True:
                for frame in self._channel.receive():
                    message = frame.message
                    if isinstance(message, CallbacksUnused):
                        self._forget(message.numbers)
                        continue
                    if not isinstance(message, CallbackCall):
                        raise ConnectionClosed(f"{type(message).__name__} is not for a client")
                    with self._lock:
                        self._num_open += 1
                        is_one_idle = self._num_open <= self._num_threads
                    if not is_one_idle:
                        self._start_thread()
                    self._calls.put((message, frame.payload))
        except ConnectionClosed as closed:
            _logger.debug("no more callbacks: %s", closed)
        except Exception:
            _logger.exception("callbacks cannot be read any more")
        finally:
            self.is_lost = True
            self._functions.clear()
            self._channel.close()

    def _start_thread(self) -> None:
        if self._num_threads < _MAX_THREADS:
            # While Python ends it is refused.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._serve, name=f"callback-{self._num_threads}", daemon=True).start()
                self._num_threads += 1

    def _serve(self) -> None:
        while True:
            message, payload = self._calls.get()
            answer, results = self._answer(message, payload)
            with self._lock:
                self._num_open -= 1
            try:
                self._channel.send(answer, results)
            except ConnectionClosed as closed:
                _logger.debug("a callback's result comes too late: %s", closed)

    def _answer(self, message: CallbackCall, payload: Any) -> tuple[CallbackResult, bytearray]:
        try:
            function = self._functions.get(message.number)
            if function is None:
                raise CallbacksError("a program calls a Python function that was deleted with its program")
            results = function(*unpack(message.operands, payload))
            specs, packed = pack([None if result is None else np.asarray(result) for result in results])
        except BaseException as raised:
            # What it raises is the program's failure, whatever it is; SystemExit too, as in plain JAX.
            text = "".join(traceback.format_exception(raised)).rstrip()
            return CallbackResult(message.call, Status(Code.INTERNAL, text), ()), bytearray()
        return CallbackResult(message.call, None, specs), packed


def _connect(target: str) -> socket.socket:
    address = callbacks_address(target.removeprefix(_TARGET_PREFIX))
    try:
        return addresses.connect_unix(address, _CONNECT_TIMEOUT_S)
    except (OSError, addresses.AddressError) as failure:
        raise CallbacksError(
            f"This program calls Python functions (jax.debug.print, jax.pure_callback, io_callback and the like), and "
            f"the runtime at {target} cannot be reached for such calls: {failure}. They need the Unix socket that "
            f"slurm-pathways run gives a program"
        ) from failure
