"""Waiting for launches: counts those that are over, tells which have failed."""

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.worker.launches import PendingLaunch
from pathways_runtime.worker import pjrt
from pathways_runtime.worker.acknowledgements import Acknowledgements

logger = logging.getLogger(__name__)

#: Called with a launch and what its execution raised.
OnFailure = Callable[[PendingLaunch, BaseException], None]


class _InFlight(NamedTuple):
    launch: PendingLaunch
    token: pjrt.Token
    #: An output whose readiness tells, without blocking, that the launch is over; None if there is none.
    probe: pjrt.Array | None


class Completions:
    """Follows launches until they are over.

    Launches on the same devices end in order, so one thread per set of devices waits for them; one that hangs does not
    keep others from being counted.
    """

    def __init__(self, acknowledgements: Acknowledgements, on_failure: OnFailure) -> None:
        self._acknowledgements = acknowledgements
        self._on_failure = on_failure
        self._queues: dict[tuple[DeviceId, ...], queue.SimpleQueue[_InFlight | None]] = {}
        self._lock = threading.Lock()
        self._num_in_flight = 0

    def num_in_flight(self) -> int:
        """Launches that PJRT has and that are not known to be over."""
        return self._num_in_flight

    def follow(
        self, launch: PendingLaunch, devices: tuple[DeviceId, ...], token: pjrt.Token, probe: pjrt.Array | None
    ) -> None:
        """Count a launch once it is over: at once if it is over already (``Acknowledgements.flush`` is the caller's
        then), else from a thread."""
        if probe is not None and pjrt.is_ready(probe):
            self._finish(_InFlight(launch, token, probe))
            return
        waiting = self._queues.get(devices)
        if waiting is None:
            waiting = self._start(devices)
        with self._lock:
            self._num_in_flight += 1
        waiting.put(_InFlight(launch, token, probe))

    def close(self) -> None:
        """End threads once they have nothing to wait for."""
        with self._lock:
            for waiting in self._queues.values():
                waiting.put(None)

    def _start(self, devices: tuple[DeviceId, ...]) -> "queue.SimpleQueue[_InFlight | None]":
        with self._lock:
            if devices not in self._queues:
                waiting: queue.SimpleQueue[_InFlight | None] = queue.SimpleQueue()
                self._queues[devices] = waiting
                # A daemon: it may be inside a collective that never ends.
                name = f"completions of devices {','.join(map(str, devices))}"
                threading.Thread(target=self._run, args=(waiting,), name=name, daemon=True).start()
            return self._queues[devices]

    def _run(self, waiting: "queue.SimpleQueue[_InFlight | None]") -> None:
        held: _InFlight | None = None
        while True:
            in_flight = held or waiting.get()
            held = None
            if in_flight is None:
                return
            self._finish(in_flight)
            count = 1
            del in_flight
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
                count += 1
            with self._lock:
                self._num_in_flight -= count
            self._acknowledgements.flush()

    def _finish(self, in_flight: _InFlight) -> None:
        try:
            pjrt.wait_token(in_flight.token)
        except pjrt.PjrtError as failure:
            self._on_failure(in_flight.launch, failure)
        self._acknowledgements.launches_completed(1)
