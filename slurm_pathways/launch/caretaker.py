"""The caretaker: a small process that clears up after a launcher that was killed.

It waits for the end of its lifeline. When the launcher ended in good order there is no ``run.json`` by then, and
nothing to do. Else it ends the program (SIGTERM, later SIGKILL) and the runtime's processes (which end by themselves,
by their own lifelines; SIGKILL for those that do not) and removes the folder. Shared memory has no names: it goes with
the processes.

Started by its path with ``python -I -S``: it imports nothing beyond the standard library, so that it costs little and
is up before anything else.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

RECORD_NAME = "run.json"
LOCK_NAME = "run.lock"
#: In the environment of every program of a run; as in ``config``.
RUN_DIR_VARIABLE = "SLURM_PATHWAYS_RUN_DIR"
#: The name of a program that is the srun in front of one: it kills the program when it is told to end.
STEP = "srun"

#: For components that see their lifeline end: they close sessions, and their children.
COMPONENT_GRACE_S = 5.0
#: For the program, from SIGTERM to SIGKILL.
PROGRAM_GRACE_S = 10.0
_POLL_INTERVAL_S = 0.02


def start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None when no process of this pid lives."""
    try:
        # The name, in parentheses, may hold spaces and parentheses of its own.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def with_variable(setting: str) -> list[int]:
    """The processes of ours that were started with ``NAME=value`` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # Gone, or another user's.
            with contextlib.suppress(OSError):
                if os.fsencode(setting) in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def remove_run(path: Path, *, keep_logs: bool, keep_folder: bool = False) -> None:
    """Remove a run's folder; with ``keep_logs`` all but the logs, with ``keep_folder`` all in it."""
    # First: without it, the folder is no run any more.
    (path / RECORD_NAME).unlink(missing_ok=True)
    if not path.is_dir():
        return
    # Last: whoever is killed on the way leaves what is still taken for an abandoned run.
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == LOCK_NAME):
        if keep_logs and entry.name == "logs":
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    if not keep_logs and not keep_folder:
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()


class _Remembered:
    """A process of the record. Signals go to it only while it is the one that was recorded."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self.pid: int = recorded["pid"]
        self.is_step = recorded["name"] == STEP
        self._start_ticks: int = recorded["start_ticks"]

    def is_alive(self) -> bool:
        return start_ticks(self.pid) == self._start_ticks

    def signal(self, signal_number: int) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def kill_group(self) -> None:
        """Kill all that is left of its process group, also when its leader is gone."""
        # The id of a group is not given to a new process while the group has members; a leader that is another
        # process than the recorded one therefore means that the group was empty and the id is a stranger's.
        if start_ticks(self.pid) in (None, self._start_ticks):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def _wait(processes: list[_Remembered], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline_s:
        time.sleep(_POLL_INTERVAL_S)


def clear_up(path: Path) -> None:
    """End what the record of a run names, and remove the run."""
    try:
        record = json.loads((path / RECORD_NAME).read_bytes())
    except FileNotFoundError:
        return
    components = [_Remembered(component) for component in record["components"]]
    programs = [_Remembered(one) for one in (record["program"], *record["programs"]) if one]
    if not programs:
        # Its launcher may have been killed between the program's start and the word of it.
        started = {pid: start_ticks(pid) for pid in with_variable(f"{RUN_DIR_VARIABLE}={path}")}
        programs = [
            _Remembered({"name": "program", "pid": pid, "start_ticks": ticks})
            for pid, ticks in started.items()
            if ticks
        ]
    for program in programs:
        # The task of a step has seen that its runtime goes, and ends the program.
        if not program.is_step:
            program.signal(signal.SIGTERM)
        # A stopped one (Ctrl-Z) would not see it.
        program.signal(signal.SIGCONT)
    _wait(components, COMPONENT_GRACE_S)
    for component in components:
        component.kill_group()
    _wait(programs, PROGRAM_GRACE_S)
    for program in programs:
        program.signal(signal.SIGTERM if program.is_step else signal.SIGKILL)
    _wait(components + programs, COMPONENT_GRACE_S)
    remove_run(path, keep_logs=False)


def main() -> int:
    """Wait for the launcher's end, then clear up."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    arguments = parser.parse_args()
    # Whoever ends the run ends it by the launcher; this process must be the last one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(arguments.lifeline_fd, 4096):
        pass
    clear_up(arguments.run_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
