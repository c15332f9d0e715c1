"""Traces of this process by jaxlib's profiler: the one place that calls it.

A trace is a file ``<host>.xplane.pb`` in ``<folder>/plugins/profile/<run>/``, as TensorBoard's profile plugin finds it,
and beside it ``<host>.perfetto.json.gz`` for Perfetto. (Not ``.trace.json.gz``: JAX takes the one file of that name to
be the client's.) All hosts of a run, and the client, write into one folder.
"""

import gzip
import json
import tempfile
import threading
from pathlib import Path
from typing import Any

from jaxlib import _profiler

from pathways_runtime.core.ids import SessionId
from pathways_runtime.core.status import Code, error

_RUNS = Path("plugins", "profile")


class _Trace:
    """A trace of one session; ``content`` once it has ended."""

    def __init__(self, session: SessionId, options: Any) -> None:
        self.session = session
        self.content: bytes | None = None
        self._recorder = _profiler.ProfilerSession(options)

    def end(self) -> None:
        """Stop recording, if it has not been done."""
        if self.content is None:
            self.content = self._recorder.stop()

    def write(self, target: Path, name: str) -> None:
        """Write what was recorded, in both forms.

        Raises:
            OSError: it cannot be written.
        """
        assert self.content is not None
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{name}.xplane.pb").write_bytes(self.content)
        # jaxlib converts only on the way to a folder of its own choice.
        with tempfile.TemporaryDirectory() as folder:
            self._recorder.export(self.content, folder)
            (exported,) = Path(folder).rglob("*.trace.json.gz")
            with gzip.open(exported, "rt", encoding="utf-8") as file:
                converted = json.load(file)
        # Perfetto does not take it.
        converted.pop("metadata", None)
        with gzip.open(target / f"{name}.perfetto.json.gz", "wt", encoding="utf-8") as file:
            json.dump(converted, file)


class Profiler:
    """The trace of this process, if there is one: jaxlib can make one at a time. Safe for use from several threads.

    Args:
        name: the host's; names its files.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._trace: _Trace | None = None

    def start(self, session: SessionId, host_tracer_level: int, python_tracer_level: int) -> None:
        """Begin a trace for a session; one that it has begun before is dropped.

        Raises:
            StatusError: another session's trace goes on.
        """
        options = _profiler.ProfileOptions()
        options.host_tracer_level = host_tracer_level
        options.python_tracer_level = python_tracer_level
        with self._lock:
            trace = self._trace
            if trace is not None:
                if trace.session != session and trace.content is None:
                    raise error(
                        Code.FAILED_PRECONDITION,
                        f"{self._name} is being traced by another program; a host records one trace at a time",
                    )
                trace.end()
            self._trace = _Trace(session, options)

    def stop(self, session: SessionId, folder: str, run: str) -> None:
        """End a session's trace, and write it if ``folder`` is not empty; else it is kept.

        Raises:
            StatusError: it has begun none. OSError: it cannot be written.
        """
        with self._lock:
            trace = self._trace
            if trace is None or trace.session != session:
                raise error(Code.FAILED_PRECONDITION, f"no trace goes on on {self._name}")
            trace.end()
            if folder:
                self._trace = None
        if folder:
            trace.write(Path(folder) / _RUNS / run, self._name)

    def forget(self, session: SessionId) -> None:
        """Drop a session's trace, if it has one."""
        with self._lock:
            if self._trace is not None and self._trace.session == session:
                self._trace.end()
                self._trace = None
