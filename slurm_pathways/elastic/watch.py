"""Looking for slices that come back, while training goes on without them."""

import threading
from types import TracebackType

from slurm_pathways.elastic.slices import Slices


class Watch:
    """A thread that looks at some slices now and then; none while there are none to look for."""

    def __init__(self, slices: Slices, look_every_s: float) -> None:
        self._slices = slices
        self._look_every_s = look_every_s
        self._changed = threading.Condition()
        self._missing: frozenset[int] = frozenset()
        self._found: frozenset[int] = frozenset()
        self._failure: Exception | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="slices")

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def look_for(self, missing: frozenset[int]) -> None:
        """Look for these from now on, and for no others. Nothing is found yet."""
        with self._changed:
            self._missing, self._found = missing, frozenset()
            self._changed.notify_all()

    def found(self) -> frozenset[int]:
        """Those that were there at the last look.

        Raises:
            Exception: what ended the looking, other than a loss.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            return self._found

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._missing or self._is_closing)
                self._changed.wait_for(lambda: self._is_closing, self._look_every_s)
                if self._is_closing:
                    return
                missing = self._missing
            try:
                found = self._slices.live(missing)
            except Exception as error:
                with self._changed:
                    self._failure = error
                return
            with self._changed:
                if missing == self._missing:
                    self._found = found
