"""Threads whose unforeseen failures are seen."""

import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def tell(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function; what it raises goes to ``threading.excepthook``, as if this thread ended with it.

    An executor installs a hook that ends the process: a core in an unknown state must not go on, and a thread that dies
    unseen leaves everybody waiting.
    """
    try:
        function(*arguments)
    except Exception:
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))


def apart(function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Call a function on a thread that is made for it, and wait for its result, or what it raises."""
    with ThreadPoolExecutor(1, thread_name_prefix="apart") as thread:
        return thread.submit(function, *arguments).result()


class Pool:
    """Threads for calls that block, made as needed. Nobody waits for the calls' results."""

    def __init__(self, name: str, max_threads: int, initializer: Callable[[], None] | None = None) -> None:
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix=name, initializer=initializer)

    def submit(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have it called soon; in order of submission as long as there are threads."""
        self._threads.submit(tell, function, *arguments)

    def close(self) -> None:
        """Drop what has not begun; does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Sequence:
    """One thread that makes calls in order."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        # A daemon: it may be inside a call that never returns.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[..., None], *arguments: Any) -> None:
        """Have it called after all that was submitted before."""
        self._calls.put((function, arguments))

    def close(self) -> None:
        """End after what was submitted."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            tell(call[0], *call[1])
            del call
