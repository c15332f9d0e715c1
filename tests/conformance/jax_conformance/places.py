"""Where tests run: plain JAX, or a runtime that is started anew when something has broken it."""

import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from jax_conformance.plan import Target
from slurm_pathways.config import RECORDS_VARIABLE, RUNS_VARIABLE, RuntimeSpec
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, RuntimeEvent, describe_end
from slurm_pathways.launch.local import LocalRuntime
from slurm_pathways.launch.news import TROUBLE_EVENTS

#: What chooses a backend.
_CHOOSING = ("JAX_PLATFORMS", "JAX_BACKEND_TARGET", "XLA_FLAGS")
#: A loaded machine with two cores starts a runtime of four hosts in less.
_STARTUP_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something of the runtime broke. ``at_s`` is in seconds since the epoch."""

    text: str
    at_s: float


def base_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the process of the tests has in every place: 8 CPU devices of its own."""
    kept = {name: value for name, value in environ.items() if name not in _CHOOSING}
    return kept | {
        "JAX_NUM_CPU_DEVICES": "8",
        # In flight together on a small machine, programs over several devices can wait in plain JAX for one another for
        # ever: each keeps threads that the others need of the one pool, whose size this is.
        "NPROC": "64",
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
        # Our plugin turns it off when the backend is made, which is in the first test, and JAX's tests see that.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }


class Place:
    """One target, up while the context is entered. ``environment`` is for the process of the tests."""

    def __init__(self, target: Target, logs: Path) -> None:
        self._target = target
        #: Logs of runtimes that broke.
        self._logs = logs
        self._runtime: LocalRuntime | None = None
        self._trouble: Trouble | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Place":
        self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def restart(self) -> None:
        """End what is there and start it anew; from the main thread.

        Raises:
            StartupFailed: the runtime did not come up.
        """
        self._stop()
        if (shape := self._target.shape) is None:
            return
        root = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="jc")))
        environ = base_environment(os.environ)
        environ |= {"JAX_PLATFORMS": "proxy,cpu", RUNS_VARIABLE: str(root), RECORDS_VARIABLE: "none"}
        # JAX's tests count the files of a trace: one, the program's.
        environ["SLURM_PATHWAYS_TRACE_HOSTS"] = "0"
        slices, hosts, devices = shape
        spec = RuntimeSpec(
            num_slices=slices,
            hosts_per_slice=hosts,
            devices_per_host=devices,
            startup_timeout_s=_STARTUP_TIMEOUT_S,
            log_dir=self._logs / f"{self._target.value}-{time.time():.0f}",
        )
        self._runtime = self._stack.enter_context(LocalRuntime(spec, on_event=self._note, environ=environ))

    def _stop(self) -> None:
        self._runtime = None
        self._stack.close()
        self._trouble = None

    def _note(self, event: RuntimeEvent) -> None:
        match event:
            case ComponentEvent(_, name, fields) if name in TROUBLE_EVENTS:
                text = f"{name}: {fields.get('reason', '')}"
            case ComponentEnded(component, returncode, was_asked=False):
                text = f"{component} {describe_end(returncode)}"
            case _:
                return
        if self._trouble is None:
            self._trouble = Trouble(" ".join(text.split()), time.time())

    @property
    def trouble(self) -> Trouble | None:
        """What broke first since the last start."""
        return self._trouble

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of the process of the tests."""
        if self._runtime is not None:
            return self._runtime.environment()
        return base_environment(os.environ) | {"JAX_PLATFORMS": "cpu"}
