"""A training in a process of its own, and the deaths of hosts while it goes on."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from slurm_pathways.launch.local import Client, LocalRuntime
from tests.waiting import until

PROJECT = Path(__file__).resolve().parent.parent.parent
#: For anything to happen; on a loaded machine programs compile for long.
TIMEOUT_S = 150.0
#: What hosts die of: which of their processes get which signal.
DEATHS = {
    "executor": (("executor_pid",), signal.SIGKILL),
    "supervisor": (("supervisor_pid",), signal.SIGKILL),
    "host": (("supervisor_pid", "executor_pid"), signal.SIGKILL),
    "stopped executor": (("executor_pid",), signal.SIGSTOP),
    "stopped host": (("supervisor_pid", "executor_pid"), signal.SIGSTOP),
}


class Line(NamedTuple):
    """What a program printed, and when, on ``time.monotonic``."""

    at_s: float
    text: str


class Training:
    """A program whose lines tell how far it is."""

    def __init__(self, runtime: LocalRuntime, client: Client, *argv: object) -> None:
        self.runtime = runtime
        #: All that it printed so far.
        self.lines: list[Line] = []
        self._changed = threading.Condition()
        self._has_ended = False
        self._num_read = 0
        self.process = subprocess.Popen(
            [sys.executable, *map(str, argv)],
            env=runtime.environment(client),
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            with self._changed:
                self.lines.append(Line(time.monotonic(), text.rstrip("\n")))
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def printed(self) -> str:
        """All of it."""
        return "\n".join(line.text for line in self.lines)

    def last_line(self) -> str:
        """What it printed last."""
        return self.lines[-1].text if self.lines else "nothing"

    def until(self, pattern: str) -> re.Match[str]:
        """Read on until a line matches; what it printed is in the error if none does."""
        deadline_s = time.monotonic() + TIMEOUT_S
        with self._changed:
            while True:
                while self._num_read < len(self.lines):
                    self._num_read += 1
                    if found := re.search(pattern, self.lines[self._num_read - 1].text):
                        return found
                assert not self._has_ended, f"it ended without a line {pattern!r}:\n{self.printed()}"
                is_in_time = self._changed.wait(max(0.0, deadline_s - time.monotonic()))
                assert is_in_time, f"no line {pattern!r} for {TIMEOUT_S:g} s:\n{self.printed()}"

    def end(self) -> str:
        """Wait for its end, which must be a good one; all that it printed."""
        try:
            returncode = self.process.wait(TIMEOUT_S)
        finally:
            self.close()
        assert returncode == 0, self.printed()
        return self.printed()

    def close(self) -> None:
        """Leave nothing."""
        self.process.kill()
        self.process.wait()
        self._reader.join(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def behind(runtime: LocalRuntime, host: int) -> dict[str, Any]:
    """Who stands behind a virtual host, once all hosts are there: an entry of the report's ``workers``."""

    def found() -> list[dict[str, Any]]:
        report = runtime.status(10)
        is_whole = all(device["state"] in ("idle", "running") for device in report["devices"])
        states = [(worker["host"], worker["state"]) for worker in report["workers"]]
        return [report["workers"][states.index((host, "bound"))]] if is_whole and (host, "bound") in states else []

    (worker,) = until(found, "a host is missing", TIMEOUT_S, 0.1)
    return worker


def resume(*pids: int) -> None:
    """Let processes go on that were stopped, unless they have been replaced for their silence meanwhile."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
