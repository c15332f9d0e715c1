"""The start of a runtime as one waits for it: until it is ready, or a signal comes."""

import queue
import signal
import time
from typing import TypeVar

from slurm_pathways.launch.components import ComponentEnded, ComponentEvent
from slurm_pathways.launch.program import SignalReceived
from slurm_pathways.launch.progress import Progress
from slurm_pathways.launch.runtime import Runtime

_T = TypeVar("_T")


def next_event(inbox: "queue.SimpleQueue[_T]", deadline_s: float | None) -> _T | None:
    """The next event, or None at the deadline (on ``time.monotonic``)."""
    try:
        return inbox.get(timeout=None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
    except queue.Empty:
        return None


def start_up(
    runtime: Runtime, inbox: "queue.SimpleQueue[_T]", progress: Progress, started_s: float
) -> signal.Signals | None:
    """Wait until a runtime that was started is ready; returns the signal that came instead, if one did.

    Args:
        inbox: where the runtime's events and signals arrive. What else arrives is dropped.
        started_s: on ``time.monotonic``.

    Raises:
        StartupFailed: a component ended, the controller gave up, or the time for the start is over.
    """
    num_ready = 0
    while not runtime.is_ready():
        runtime.check_startup()
        match next_event(inbox, runtime.startup_deadline_s):
            case SignalReceived(number):
                progress.line(f"interrupted by {signal.Signals(number).name}")
                return signal.Signals(number)
            case ComponentEvent() | ComponentEnded() as event:
                progress.event(event, time.monotonic() - started_s)
                hosts_ready = runtime.hosts_ready()
                if len(hosts_ready) > num_ready:
                    num_ready = len(hosts_ready)
                    progress.hosts(hosts_ready)
            case _:
                pass
    return None
