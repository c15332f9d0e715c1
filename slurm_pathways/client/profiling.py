"""Traces of the hosts beside that of the program: what ``jax.profiler`` records is both, in one folder.

JAX makes every trace by a ``ProfilerSession`` of jaxlib's, which knows of its own process only. Ours asks the runtime
to record too (by a plugin program, ``hostTraceRequest``), so ``start_trace``, ``stop_trace`` and ``trace`` are covered,
and pathwaysutils', which has asked the runtime by itself already; the runtime then leaves it at that.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from slurm_pathways.client import jax_plugin_programs, jax_profiler

_logger = logging.getLogger(__name__)

#: Of a run's folder, as jaxlib names it.
_RUN_FORMAT = "%Y_%m_%d_%H_%M_%S"


#: How many hosts a trace covers; not set, all.
HOSTS_VARIABLE = "SLURM_PATHWAYS_TRACE_HOSTS"


def _max_hosts(text: str) -> int | None:
    """The number that the variable gives, None for all.

    Raises:
        ValueError: it is none. The message is for the user.
    """
    if text in ("", "all"):
        return None
    if not text.isdecimal():
        raise ValueError(f"{HOSTS_VARIABLE}={text}: must be a number of hosts, 0 for none, or all")
    return int(text)


def install() -> None:
    """Make JAX's traces cover the hosts, from the next trace on. Again does nothing new.

    Raises:
        PrivateNamesChangedError: JAX makes its traces in another way.
    """
    jax_profiler.replace_profiler(_Trace, _export)


class _Trace:
    """What JAX takes for jaxlib's session: begins when it is made.

    Args:
        make: makes jaxlib's session.
        options: jaxlib's ``ProfileOptions``.
    """

    #: The latest that has ended without being written, and what it has recorded.
    ended: "tuple[_Trace, Any] | None" = None

    def __init__(self, make: Callable[[Any], Any], options: Any) -> None:
        # jaxlib calls the run's folder so; it would take the time of the end, and the hosts would write elsewhere.
        options.session_id = self.run = options.session_id or time.strftime(_RUN_FORMAT)
        max_hosts = _max_hosts(os.environ.get(HOSTS_VARIABLE, ""))
        if max_hosts != 0:
            levels = {"hostTracerLevel": options.host_tracer_level}
            self._ask({"starts": True, "maxNumHosts": max_hosts or 0, **levels}, "the hosts are not traced")
        self._session = make(options)

    def stop_and_export(self, folder: str) -> None:
        """End the traces, and write both to ``<folder>/plugins/profile/<run>/``."""
        self._session.stop_and_export(self.written_by_hosts(folder, self.run))

    def stop_and_get_profile_data(self) -> Any:
        """End the traces; ``_export`` may write them later."""
        self._ask({"starts": False}, "the trace of the hosts goes on")
        data = self._session.stop_and_get_profile_data()
        _Trace.ended = (self, data)
        return data

    def stop(self) -> Any:
        """End the traces; the program's is returned."""
        self._ask({"starts": False}, "the trace of the hosts goes on")
        return self._session.stop()

    def written_by_hosts(self, folder: str, run: str) -> str:
        """Have the hosts write what they have recorded; returns the folder as a path."""
        path = folder if "://" in folder else os.path.abspath(folder)  # noqa: PTH100 - as text, like JAX
        # What gs:// stands for is the runtime's to say.
        request = {"starts": False, "folder": path, "run": run}
        return self._ask(request, "the trace of the hosts is not written") or path

    def _ask(self, request: dict[str, Any], loss: str) -> str | None:
        try:
            return jax_plugin_programs.run_plugin_program(json.dumps({"hostTraceRequest": request}))
        except jax_plugin_programs.RuntimeFailure as failure:
            # The program's own trace is there all the same.
            _logger.warning("%s: %s", loss, failure)
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def _export(export: Callable[[Any, str, str], None], data: Any, folder: str, session_id: str) -> None:
    ended = _Trace.ended
    if ended is not None and ended[1] is data:
        trace, _ = ended
        session_id = session_id or trace.run
        folder = trace.written_by_hosts(folder, session_id)
    export(data, folder, session_id)
