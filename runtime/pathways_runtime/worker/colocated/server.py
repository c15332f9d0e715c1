"""The loop of a Python process: takes what the executor sends, and answers."""

import logging
import os
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.status import Status
from pathways_runtime.transport.dataplane.memory import Bytes
from pathways_runtime.transport.frames import Buffer, ConnectionClosed
from pathways_runtime.worker.colocated.connection import Connection
from pathways_runtime.worker.colocated.functions import Function, describe_failure, extend_module_path
from pathways_runtime.worker.colocated.memory import SharedMemory
from pathways_runtime.worker.colocated.messages import (
    AnyMessage,
    Call,
    ForgetBlock,
    FreeBlock,
    Load,
    Loaded,
    NewBlock,
    Pieces,
    Ready,
    Returned,
    Unload,
)

logger = logging.getLogger(__name__)

#: A stream's thread that has nothing to do for so long ends.
_IDLE_S = 60.0


class _Task(NamedTuple):
    """A call with its arguments, which were taken when it came.

    Attributes:
        after: so many functions must have been let go of before it begins.
    """

    message: Call
    function: "Future[Function]"
    arguments: list[list[tuple[DeviceId, Bytes]]]
    after: int


class Server:
    """Serves one executor until it is gone.

    Functions are unpickled, and let go of, on one thread; calls run on a thread for each stream.

    Args:
        host: its name for people.
        devices: JAX's by the client's numbers.
    """

    def __init__(self, connection: Connection, host: str, devices: Mapping[DeviceId, Any]) -> None:
        self._connection = connection
        self._memory = SharedMemory(connection)
        self._host = host
        self._devices = devices
        self._functions: dict[int, Future[Function]] = {}
        self._loading: queue.SimpleQueue[Load | Unload] = queue.SimpleQueue()
        self._pickles: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._unloaded = threading.Condition()
        self._num_unloaded = 0
        self._num_to_unload = 0
        #: Of what is to be let go of: for what later calls wait.
        self._awaited: list[Unload] = []
        #: Calls that have come and not ended, and functions that go when some of them have; under ``_unloaded``.
        self._running: set[int] = set()
        self._to_unload: list[tuple[Unload, set[int]]] = []
        self._streams: dict[int, queue.SimpleQueue[_Task]] = {}
        self._streams_lock = threading.Lock()

    def run(self) -> None:
        """Serve.

        Raises:
            ConnectionClosed: the executor is gone.
        """
        threading.Thread(target=self._load_functions, name="functions", daemon=True).start()
        self._connection.send(Ready())
        while True:
            for frame in self._connection.receive():
                self._take(frame.message, frame.payload)
                del frame

    def _take(self, message: AnyMessage, payload: Any) -> None:
        match message:
            case Call():
                self._take_call(message, payload)
            case FreeBlock(block=block):
                self._memory.freed(block)
            case NewBlock():
                self._memory.new_block(message)
            case ForgetBlock():
                self._memory.forget_block(message)
            case Load():
                self._functions[message.function] = Future()
                self._pickles.put(bytes(payload))
                self._loading.put(message)
            case Unload():
                self._take_unload(message)
            case _:
                raise ConnectionClosed(f"{type(message).__name__} is not for a Python process")

    # Functions

    def _take_unload(self, message: Unload) -> None:
        with self._unloaded:
            if self._running:
                self._to_unload.append((message, set(self._running)))
                return
        # Nobody else adds to it, and the thread that takes away does so only after this.
        self._awaited.append(message)
        self._num_to_unload += 1
        self._loading.put(message)

    def _unload_after(self, call: int) -> None:
        """A call has ended; functions may have waited for it."""
        with self._unloaded:
            self._running.discard(call)
            for message, before in self._to_unload:
                before.discard(call)
                if not before:
                    self._loading.put(message)
            self._to_unload = [entry for entry in self._to_unload if entry[1]]

    def _load_functions(self) -> None:
        while True:
            message = self._loading.get()
            if isinstance(message, Load):
                self._load(message, self._pickles.get())
                continue
            # With it goes what it alone refers to, objects of classes among it, whose ends run here.
            del self._functions[message.function]
            if message in self._awaited:
                self._awaited.remove(message)
                with self._unloaded:
                    self._num_unloaded += 1
                    self._unloaded.notify_all()

    def _load(self, message: Load, pickled: bytes) -> None:
        future = self._functions[message.function]
        failure = None
        try:
            extend_module_path(message.module_path)
            future.set_result(Function(message.name, pickled, message.enable_x64, self._devices))
        except BaseException as raised:
            # Whatever a client's pickle brings about is the client's business.
            future.set_exception(raised)
            failure = describe_failure(message.name, self._host, raised)
            logger.info("function %s cannot be loaded: %s", message.name, failure.message)
        self._connection.send(Loaded(message.function, failure))

    # Calls

    def _take_call(self, message: Call, payload: Buffer) -> None:
        arguments = []
        start = 0
        for pieces in message.arguments:
            contents, start = self._memory.take(pieces, payload, start)
            arguments.append([(piece.device, content) for piece, content in zip(pieces, contents, strict=True)])
        with self._unloaded:
            self._running.add(message.call)
        task = _Task(message, self._functions[message.function], arguments, self._num_to_unload)
        with self._streams_lock:
            stream = self._streams.get(message.stream)
            if stream is None:
                stream = self._streams[message.stream] = queue.SimpleQueue()
                name = f"calls of stream {message.stream}"
                threading.Thread(
                    target=self._serve_stream, args=(message.stream, stream), name=name, daemon=True
                ).start()
            stream.put(task)

    def _serve_stream(self, name: int, stream: "queue.SimpleQueue[_Task]") -> None:
        while True:
            try:
                task = stream.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._streams_lock:
                    if stream.empty():
                        del self._streams[name]
                        return
                continue
            try:
                self._call(task)
            except ConnectionClosed as gone:
                end(0, str(gone))
            del task

    def _call(self, task: _Task) -> None:
        message = task.message
        with self._unloaded:
            self._unloaded.wait_for(lambda: self._num_unloaded >= task.after)
        name = "?"
        payload: list[Buffer] = []
        results: tuple[Pieces, ...] = ()
        failure: Status | None = None
        try:
            function = task.function.result()
            name = function.name
            values = function.call(task.arguments, message.results)
            task.arguments.clear()
            results = tuple(
                tuple(
                    [self._memory.give(number, value, payload) for number, value in zip(numbers, shards, strict=True)]
                )
                for numbers, shards in zip(message.results, values, strict=True)
            )
        except ConnectionClosed:
            raise
        except BaseException as raised:
            # SystemExit too: a function does not end the process by it, nor its thread.
            failure = describe_failure(name, self._host, raised)
            results, payload = (), []
        # Before the executor hears of it: what it sends then must not find the call under way.
        self._unload_after(message.call)
        self._connection.send(Returned(message.call, results, failure), payload)


def end(code: int, reason: str) -> None:
    """End at once, whatever threads are doing."""
    logger.info("ends: %s", reason)
    logging.shutdown()
    os._exit(code)
