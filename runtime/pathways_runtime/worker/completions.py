"""Waiting for launches: counts those that are over and the time they took, tells which have failed."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.worker.launches import PendingLaunch
from pathways_runtime.core.worker.usage import ProgramUsage, Running, Usage
from pathways_runtime.worker import pjrt
from pathways_runtime.worker.acknowledgements import Acknowledgements
from pathways_runtime.worker.worlds import World

logger = logging.getLogger(__name__)

#: Called with a launch and what its execution raised.
OnFailure = Callable[[PendingLaunch, BaseException], None]


class _InFlight(NamedTuple):
    launch: PendingLaunch
    devices: tuple[DeviceId, ...]
    token: pjrt.Token
    #: An output whose readiness tells, without blocking, that the launch is over; None if there is none.
    probe: pjrt.Array | None
    usage: ProgramUsage
    launched_s: float


class Completions:
    """Follows launches until they are over.

    Launches on the same devices end in order, so one thread per set of devices waits for them; one that hangs does not
    keep others from being counted.

    An end is seen when a thread comes back from PJRT, so where the machine has no processor free it is seen late, and
    the sums of a program may hold some of the time of the one before it.

    Args:
        usage: what the launches are added to. Nobody else touches it.
    """

    def __init__(self, acknowledgements: Acknowledgements, on_failure: OnFailure, usage: Usage) -> None:
        self._acknowledgements = acknowledgements
        self._usage = usage
        #: Guards ``_usage``.
        self._usage_lock = threading.Lock()
        #: What the thread of each set of devices waits for.
        self._awaited: dict[tuple[DeviceId, ...], Running | None] = {}
        self._on_failure = on_failure
        self._queues: dict[tuple[DeviceId, ...], queue.SimpleQueue[_InFlight | None]] = {}
        #: What is in these queues or was just taken from them, for who asks.
        self._in_flight: dict[tuple[DeviceId, ...], deque[_InFlight]] = {}
        #: Guards which sets of devices have a thread.
        self._lock = threading.Lock()

    def num_in_flight(self) -> int:
        """Launches that PJRT has and that are not known to be over."""
        return sum(map(len, self._in_flight.copy().values()))

    def is_busy_in(self, world: World) -> bool:
        """Whether a program of a world is not known to be over."""
        everything = [in_flight for followed in self._in_flight.copy().values() for in_flight in tuple(followed)]
        return any(i.launch.program is not None and i.launch.program.value.world is world for i in everything)

    def program(self, name: str, scope: str) -> ProgramUsage:
        """See ``Usage.program``."""
        with self._usage_lock:
            return self._usage.program(name, scope)

    def report_usage(self) -> dict[str, Any]:
        """See ``Usage.report``."""
        with self._usage_lock:
            running = [awaited for awaited in self._awaited.copy().values() if awaited is not None]
            return self._usage.report(time.monotonic(), running)

    def follow(
        self,
        launch: PendingLaunch,
        devices: tuple[DeviceId, ...],
        token: pjrt.Token,
        probe: pjrt.Array | None,
        usage: ProgramUsage,
        launched_s: float,
    ) -> None:
        """Count a launch once it is over: at once if it is over already (``Acknowledgements.flush`` is the caller's
        then), else from a thread.

        Args:
            usage: the program's row, from ``program``.
            launched_s: when it was given to PJRT, on ``time.monotonic``.
        """
        in_flight = _InFlight(launch, devices, token, probe, usage, launched_s)
        if probe is not None and pjrt.is_ready(probe):
            self._finish(in_flight)
            return
        waiting = self._queues.get(devices)
        if waiting is None:
            waiting = self._start(devices)
        self._in_flight[devices].append(in_flight)
        waiting.put(in_flight)

    def close(self) -> None:
        """End threads once they have nothing to wait for."""
        with self._lock:
            for waiting in self._queues.values():
                waiting.put(None)

    def _start(self, devices: tuple[DeviceId, ...]) -> "queue.SimpleQueue[_InFlight | None]":
        with self._lock:
            if devices not in self._queues:
                waiting: queue.SimpleQueue[_InFlight | None] = queue.SimpleQueue()
                self._in_flight[devices] = deque()
                self._queues[devices] = waiting
                # A daemon: it may be inside a collective that never ends.
                name = f"completions of devices {','.join(map(str, devices))}"
                threading.Thread(target=self._run, args=(waiting, devices), name=name, daemon=True).start()
            return self._queues[devices]

    def _run(self, waiting: "queue.SimpleQueue[_InFlight | None]", devices: tuple[DeviceId, ...]) -> None:
        held: _InFlight | None = None
        followed = self._in_flight[devices]
        while True:
            in_flight = held or waiting.get()
            held = None
            if in_flight is None:
                return
            self._awaited[devices] = Running(in_flight.usage, devices, in_flight.launched_s)
            self._finish(in_flight)
            self._awaited[devices] = None
            # Whoever sees that none is in flight finds that nothing here refers to one.
            del in_flight
            followed.popleft()
            # Whatever else is over by now goes into the same message.
            while not waiting.empty():
                held = waiting.get()
                if held is None:
                    waiting.put(None)
                    break
                if held.probe is None or not pjrt.is_ready(held.probe):
                    break
                self._finish(held)
                held = None
                followed.popleft()
            self._acknowledgements.flush()

    def _finish(self, ended: _InFlight) -> None:
        try:
            pjrt.wait_token(ended.token)
        except pjrt.PjrtError as failure:
            self._on_failure(ended.launch, failure)
        received_s = ended.launch.received_ns * 1e-9
        with self._usage_lock:
            self._usage.count(ended.usage, ended.devices, received_s, ended.launched_s, time.monotonic())
        self._acknowledgements.launches_completed(1)
