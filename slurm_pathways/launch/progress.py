"""What a run says on stderr: one line per stage, in place on a terminal."""

import shutil
import sys
from collections.abc import Mapping
from typing import TextIO

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, RuntimeEvent, describe_end

PREFIX = "slurm-pathways: "
#: Of many hosts, the last ones are those that one waits for.
_HOSTS_NAMED = 8


class Progress:
    """Writes lines for people.

    Args:
        verbosity: below 0 nothing but failures, above 0 also every event of every component.
        stream: stderr; updated in place only if it is a terminal and ``verbosity`` is 0.
    """

    def __init__(self, spec: RuntimeSpec, verbosity: int = 0, stream: TextIO | None = None) -> None:
        self._spec = spec
        self._verbosity = verbosity
        self._stream = sys.stderr if stream is None else stream
        self._is_in_place = verbosity == 0 and self._stream.isatty()
        #: A line without its end is on the terminal.
        self._is_open = False

    def stage(self, text: str, *, is_done: bool = True) -> None:
        """A stage, or with ``is_done=False`` how far one has come."""
        if self._verbosity < 0:
            return
        if self._is_in_place:
            # A line that wraps could not be written over.
            text = text if is_done else text[: shutil.get_terminal_size().columns - len(PREFIX) - 1]
            self._stream.write(f"\r\x1b[K{PREFIX}{text}" + ("\n" if is_done else ""))
            self._stream.flush()
            self._is_open = not is_done
        elif is_done:
            self.line(text)

    def line(self, text: str) -> None:
        """A line that is said whatever the verbosity: failures."""
        if self._is_open:
            self._stream.write("\n")
            self._is_open = False
        self._stream.write(f"{PREFIX}{text}\n")
        self._stream.flush()

    def starting(self) -> None:
        """The first line."""
        spec = self._spec
        spares = f" + {_count(spec.num_spares, 'spare host')}" if spec.num_spares else ""
        absent = f" + {_count(spec.num_absent_slices, 'absent slice')}" if spec.num_absent_slices else ""
        self.stage(
            f"starting {_count(spec.num_slices, 'slice')} x {_count(spec.hosts_per_slice, 'host')} x "
            f"{_count(spec.devices_per_host, f'{spec.platform} device')}{spares}{absent}",
            is_done=False,
        )

    def hosts(self, ready: Mapping[str, float]) -> None:
        """Which hosts are ready; by name, with the seconds since the start at which they were."""
        is_done = len(ready) >= self._spec.num_hosts
        latest = list(ready.items())[-_HOSTS_NAMED:]
        names = ", ".join(f"{name} ({at_s:.1f} s)" for name, at_s in latest)
        names = names if len(ready) <= _HOSTS_NAMED else f"…, {names}"
        self.stage(f"hosts ready: {len(ready)} of {self._spec.num_hosts}: {names}", is_done=is_done)

    def ready(self, elapsed_s: float, logs: str) -> None:
        """The program starts now."""
        self.stage(f"{_count(self._spec.num_devices, 'device')} ready in {elapsed_s:.1f} s; logs in {logs}")

    def event(self, event: RuntimeEvent, elapsed_s: float) -> None:
        """An event, for the verbose."""
        if self._verbosity <= 0:
            return
        match event:
            case ComponentEvent(component, name, fields):
                details = " ".join(f"{key}={value}" for key, value in fields.items())
                self.line(f"{elapsed_s:7.2f} s {component}: {name} {details}".rstrip())
            case ComponentEnded(component, returncode):
                self.line(f"{elapsed_s:7.2f} s {component}: {describe_end(returncode)}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
