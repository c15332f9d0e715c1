"""How long this host's devices were busy, and with which programs. Pure: times come in, sums go out.

A device is *busy* with an execution from when it was launched, or from the end of the execution before if that was
later, until its end. That includes what the execution itself waits for: other hosts in a collective, inputs that
another device of this host still computes. A device is *waiting* while it is idle and a launch for it is on this host
that cannot be made yet: its inputs, or those of launches before it, have not arrived. Spans of one device never
overlap, so busy and waiting together are at most the time that has passed.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pathways_runtime.core.ids import DeviceId

#: Programs with rows of their own; a client that makes up names for ever fills no memory. Later ones share a row.
MAX_PROGRAMS = 512
OTHERS = "(others)"


class ProgramUsage:
    """The sums of one program on this host's devices.

    Attributes:
        name: of its XLA module. Programs with equal names on the same devices share a row.
        scope: all its devices, those of other hosts too, as ``device_ranges`` writes them.
        executions: those that are over.
        busy_s, waiting_s: device-seconds.
    """

    __slots__ = ("busy_s", "executions", "name", "scope", "waiting_s")

    def __init__(self, name: str, scope: str) -> None:
        self.name = name
        self.scope = scope
        self.executions = 0
        self.busy_s = 0.0
        self.waiting_s = 0.0


class _Device:
    __slots__ = ("busy_s", "free_since_s", "waiting_s")

    def __init__(self, now_s: float) -> None:
        self.free_since_s = now_s
        self.busy_s = 0.0
        self.waiting_s = 0.0


class Running(NamedTuple):
    """An execution that is not over."""

    program: ProgramUsage
    devices: Sequence[DeviceId]
    launched_s: float


class Usage:
    """The sums of one host. All times are seconds on one monotonic clock. Not thread-safe.

    Args:
        devices: this host's.
    """

    def __init__(self, devices: Iterable[DeviceId], now_s: float) -> None:
        self._started_s = now_s
        self._devices = {device: _Device(now_s) for device in devices}
        self._programs: dict[tuple[str, str], ProgramUsage] = {}

    def program(self, name: str, scope: str) -> ProgramUsage:
        """The row of a program, to be given to ``count``."""
        key = (name, scope)
        if key not in self._programs and len(self._programs) >= MAX_PROGRAMS:
            key = (OTHERS, "")
        return self._programs.setdefault(key, ProgramUsage(*key))

    def count(
        self,
        program: ProgramUsage,
        devices: Sequence[DeviceId],
        received_s: float,
        launched_s: float,
        ended_s: float,
    ) -> None:
        """An execution is over. Once per launch, so it must cost next to nothing."""
        busy_s = waiting_s = 0.0
        for device_id in devices:
            device = self._devices.get(device_id)
            if device is None:
                # A CPU beside an accelerator: what it does is not the accelerator's.
                continue
            since_s = device.free_since_s
            if since_s < launched_s:
                waited_s = launched_s - (received_s if received_s > since_s else since_s)
                device.waiting_s += waited_s
                waiting_s += waited_s
                device.free_since_s = since_s = launched_s
            # What ended before was seen later, where executions on other sets of devices come between.
            if ended_s > since_s:
                device.busy_s += ended_s - since_s
                busy_s += ended_s - since_s
                device.free_since_s = ended_s
        program.executions += 1
        program.busy_s += busy_s
        program.waiting_s += waiting_s

    def report(self, now_s: float, running: Iterable[Running] = ()) -> dict[str, Any]:
        """The sums as plain values; docs/status.md has the schema.

        Args:
            running: what they have taken so far counts too.
        """
        devices = {d: (device.busy_s, device.waiting_s) for d, device in self._devices.items()}
        free_since_s = {d: device.free_since_s for d, device in self._devices.items()}
        so_far_s = dict.fromkeys(self._programs.values(), 0.0)
        for execution in running:
            for device_id in execution.devices:
                more_s = max(0.0, now_s - max(execution.launched_s, free_since_s[device_id]))
                free_since_s[device_id] = now_s
                busy_s, waiting_s = devices[device_id]
                devices[device_id] = (busy_s + more_s, waiting_s)
                so_far_s[execution.program] += more_s
        return {
            "elapsed_s": _rounded(now_s - self._started_s),
            "busy_s": _rounded(sum(busy_s for busy_s, _ in devices.values())),
            "waiting_s": _rounded(sum(waiting_s for _, waiting_s in devices.values())),
            "devices": [
                {"id": device_id, "busy_s": _rounded(busy_s), "waiting_s": _rounded(waiting_s)}
                for device_id, (busy_s, waiting_s) in devices.items()
            ],
            "programs": [
                {
                    "name": program.name,
                    "devices": program.scope,
                    "executions": program.executions,
                    "busy_s": _rounded(program.busy_s + more_s),
                    "waiting_s": _rounded(program.waiting_s),
                }
                for program, more_s in so_far_s.items()
            ],
        }


def _rounded(duration_s: float) -> float:
    return round(duration_s, 6)


def device_ranges(devices: Iterable[DeviceId]) -> str:
    """A set of devices in few words: ``0-3,8``."""
    spans: list[list[int]] = []
    for device in sorted(set(devices)):
        if spans and spans[-1][1] == device - 1:
            spans[-1][1] = device
        else:
            spans.append([device, device])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
