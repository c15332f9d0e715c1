"""Runs one file of JAX's tests to its end, whatever the tests do to their process and to the runtime."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jax_conformance import journal
from jax_conformance.places import Place
from jax_conformance.plan import Target, TestFile
from slurm_pathways.launch.components import describe_end

_PLUGIN_FOLDER = Path(__file__).parent.parent / "in_child"
_PLUGIN = "record_events"
_POLL_S = 0.2
#: Importing JAX and collecting thousands of tests on a loaded machine.
_COLLECTION_DEADLINE_S = 300.0
#: For a hanging process to write its threads' stacks.
_STACKS_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a run.

    Attributes:
        source: JAX's folder of tests.
        results: folder with journals and logs.
        test_deadline_s: what takes longer is a hang.
        max_sample: at most so many tests of a file; 0: as many as the plan says.
        stop_at_s: when to end in the middle, seconds since the epoch; None: never.
    """

    source: Path
    results: Path
    test_deadline_s: float
    max_sample: int = 0
    stop_at_s: float | None = None

    def journal_of(self, file: TestFile, target: Target) -> Path:
        """Where the journal of a file lies."""
        return self.results / target.value / f"{file.name}.jsonl"

    def sample_of(self, file: TestFile) -> int:
        """How many tests of a file to take; 0: all."""
        return min(filter(None, (file.sample, self.max_sample)), default=0)

    @property
    def is_over(self) -> bool:
        """Whether the time for the run has passed."""
        return self.stop_at_s is not None and time.time() >= self.stop_at_s


def read_journal(path: Path) -> journal.State:
    """What a journal amounts to; one that is not there is empty."""
    return journal.read(path.read_text().splitlines() if path.exists() else ())


def forget_failures(path: Path) -> None:
    """Let everything of a file that neither passed nor was skipped run again."""
    results = read_journal(path).results
    good = (journal.Outcome.PASSED, journal.Outcome.SKIPPED)
    if path.exists():
        with path.open("a") as out:
            out.write(
                journal.forgotten([n for n, result in results.items() if result.outcome not in good], time.time())
            )


def run_file(file: TestFile, target: Target, settings: Settings, say: Callable[[str], None]) -> None:
    """Run what the file's journal lacks; returns when it is complete, or the time is over.

    Raises:
        StartupFailed: the runtime did not come up.
    """
    path = settings.journal_of(file, target)
    path.parent.mkdir(parents=True, exist_ok=True)
    sample = settings.sample_of(file)
    if read_journal(path).has_all_of(sample):
        return
    with Place(target, settings.results / "logs") as place:
        while not read_journal(path).has_all_of(sample) and not settings.is_over:
            lines = _run_child(file, place, settings, path)
            for line in lines:
                say(f"{file.name} on {target.value}: {line.strip()}")
            with path.open("a") as out:
                out.writelines(lines)
            if lines:
                place.restart()


def _run_child(file: TestFile, place: Place, settings: Settings, path: Path) -> list[str]:
    """Run pytest until it ends or has to be ended; returns the lines that it could not write itself."""
    before = read_journal(path)
    with path.open("a") as out:
        out.write(journal.launched(time.time()))
    log = path.with_suffix(".log")
    stacks = path.with_suffix(".stacks")
    with tempfile.TemporaryDirectory(prefix="jt") as folder, log.open("ab") as output:
        done = Path(folder) / "done"
        done.write_text("\n".join(before.results))
        child = subprocess.Popen(
            _command(file, settings, path, stacks, done),
            env=_with_plugin(place.environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return _watch(child, place, settings, path, len(before.results))
        finally:
            _kill(child)


def _with_plugin(environ: Mapping[str, str]) -> dict[str, str]:
    earlier = [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
    return {**environ, "PYTHONPATH": os.pathsep.join([*earlier, str(_PLUGIN_FOLDER)])}


def _command(file: TestFile, settings: Settings, path: Path, stacks: Path, done: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "pytest", str(settings.source / file.file_name)),
        # Nothing of JAX's or our own configuration: a conftest.py would put JAX's source tree before what is installed.
        *("-c", os.devnull, "--rootdir", str(settings.source), "--noconftest", "--import-mode=importlib"),
        *("-p", _PLUGIN, "-p", "no:cacheprovider", "-p", "no:timeout", "-q", "--tb=short"),
        *(
            "--journal",
            str(path),
            "--stacks",
            str(stacks),
            "--done",
            str(done),
            "--sample",
            str(settings.sample_of(file)),
        ),
    ]


def _watch(
    child: "subprocess.Popen[bytes]", place: Place, settings: Settings, path: Path, num_results_before: int
) -> list[str]:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_S)
        # In this order: what the child wrote before it ended is in the state.
        returncode = child.poll()
        state = read_journal(path)
        now_s = time.time()
        if (trouble := place.trouble) is not None:
            _kill(child)
            return journal.after_trouble(read_journal(path), trouble.text, trouble.at_s, now_s)
        if returncode is not None:
            return journal.after_child(state, num_results_before, describe_end(returncode), now_s)
        if settings.is_over:
            return []
        run = state.in_flight
        if run is not None and now_s - run.started_s > settings.test_deadline_s:
            child.send_signal(signal.SIGUSR1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_STACKS_GRACE_S)
            _kill(child)
            if read_journal(path).in_flight != run:
                # It was done in the last moment.
                return []
            message = f"not done after {settings.test_deadline_s:g} s"
            return [journal.finished(run, journal.Outcome.HANG, message, now_s)]
        if run is None and now_s - state.last_event_s > _COLLECTION_DEADLINE_S:
            return [journal.broken(f"pytest said nothing for {_COLLECTION_DEADLINE_S:g} s", now_s)]


def _kill(child: "subprocess.Popen[bytes]") -> None:
    """End the process and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
