"""The warning that a job is about to end: its time limit, or another job that needs the nodes."""

import contextlib
import dataclasses
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class Preempted(Exception):
    """The job is about to end, and where training is has been written to disk.

    Attributes:
        step: the number of steps that are done.
        path: the folder; the next ``elastic.run`` with this folder continues from it. None: there was nothing to keep.
    """

    def __init__(self, step: int, path: Path | None) -> None:
        super().__init__(f"preempted after step {step}; " + (f"it is in {path}" if path else "nothing was saved"))
        self.step = step
        self.path = path


@dataclasses.dataclass(frozen=True, slots=True)
class Preemption:
    """What to do on the warning.

    Attributes:
        folder: where the state is written, and looked for at the start, on a file system that all hosts share: each
            writes and reads its own part. All that writes there is this training.
        signals: the warning. The templates' ``requeue.sbatch`` sends SIGUSR1; Slurm's own is SIGTERM.
        on_warning: is called after the step in which it came, with that step's number, before the state is written.
    """

    folder: Path
    signals: tuple[signal.Signals, ...] = (signal.SIGUSR1, signal.SIGTERM)
    on_warning: Callable[[int], None] | None = None


class Warnings:
    """Listens to signals from entering to leaving; then what handled them before does so again.

    Raises:
        ValueError: on entering, not in the main thread: Python gives signals to that alone.
    """

    def __init__(self, signals: tuple[signal.Signals, ...]) -> None:
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}
        #: Handlers run between any two steps of the main thread, so they must take no lock: they write here.
        self._came, self._note = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    @property
    def is_due(self) -> bool:
        """Whether a signal has come."""
        return self.wait(0)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a signal; whether one has come, now or before."""
        return bool(select.select([self._came], [], [], timeout_s)[0])

    def __enter__(self) -> "Warnings":
        for number in self._signals:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._came)
        os.close(self._note)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A full pipe says it already.
        with contextlib.suppress(BlockingIOError):
            os.write(self._note, b"\0")
