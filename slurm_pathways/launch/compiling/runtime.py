"""The runtime of ``compile``: a proxy, and one process that compiles in the place of controller and workers."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pathways_runtime.worker.aot.targets import Target
from slurm_pathways.config import COMPILE_TOPOLOGY_VARIABLE, MAX_HOSTS, RuntimeSpec
from slurm_pathways.launch.compiling.report import CompileReport
from slurm_pathways.launch.components import ComponentEvent, RuntimeEvent
from slurm_pathways.launch.local import CONTROLLER, Client, LocalRuntime

COMPILER_MODULE = "pathways_runtime.worker.aot"


@dataclass(frozen=True, slots=True)
class CompileSpec(RuntimeSpec):
    """What is compiled for.

    Attributes:
        topology: the name of one slice's.
        idle_launches: end the program after so many launches without a new program; 0: never.

    Raises:
        ConfigurationError: there are too many hosts.
    """

    topology: str = ""
    idle_launches: int = 0

    def __post_init__(self) -> None:
        # Not that of a runtime with devices: of the platforms, more can be compiled for than run on.
        self.check_hosts(MAX_HOSTS, "are allowed")


def spec_for(target: Target, num_slices: int, idle_launches: int, settings: Mapping[str, object]) -> CompileSpec:
    """The spec of ``num_slices`` slices of a target; ``settings`` are other fields of ``RuntimeSpec``."""
    return CompileSpec(
        num_slices=num_slices,
        hosts_per_slice=target.hosts_per_slice,
        devices_per_host=target.devices_per_host,
        platform=target.platform,
        topology=target.name,
        idle_launches=idle_launches,
        job_comment=False,
        **settings,  # type: ignore[arg-type]
    )


class CompileRuntime(LocalRuntime):
    """See the module. The program is sent SIGTERM, by way of this process, when it compiles nothing new any more.

    Args:
        report: is told what is compiled.
    """

    def __init__(
        self,
        spec: CompileSpec,
        report: CompileReport,
        *,
        on_event: Callable[[RuntimeEvent], None],
        environ: Mapping[str, str],
    ) -> None:
        super().__init__(spec, on_event=on_event, environ=environ)
        self._compile_spec = spec
        self._report = report

    @property
    def host_names(self) -> tuple[str, ...]:
        """None: no host is waited for."""
        return ()

    def describe_component(self, name: str) -> str:
        """A component's name for people."""
        return "the compiler's process" if name == CONTROLLER else name

    def environment(self, client: Client | None = None) -> dict[str, str]:
        """The program's environment; it can tell from it that nothing is executed."""
        return {**super().environment(client), COMPILE_TOPOLOGY_VARIABLE: self._compile_spec.topology}

    def _start_processes(self, cache: Path) -> None:
        self._start_component(
            CONTROLLER,
            COMPILER_MODULE,
            *("--listen", self.controller_address),
            *("--topology", self._compile_spec.topology),
            *("--num-slices", self.spec.num_slices),
            *("--compile-cache", cache),
            *("--idle-launches", self._compile_spec.idle_launches),
        )
        self._start_proxy()

    def _note(self, event: RuntimeEvent) -> None:
        if isinstance(event, ComponentEvent) and event.component == CONTROLLER:
            self._report.note(event.name, event.fields)
            if event.name == "idle":
                os.kill(os.getpid(), signal.SIGTERM)
        super()._note(event)
