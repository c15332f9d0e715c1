"""What ``slurm-pathways compile`` does."""

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from pathways_runtime.worker.aot import targets
from slurm_pathways.config import CUDA, RECORDS_VARIABLE, ConfigurationError, gather
from slurm_pathways.launch.compiling.report import CompileReport
from slurm_pathways.launch.compiling.runtime import CompileRuntime, CompileSpec, spec_for
from slurm_pathways.launch.compiling.settings import USED_SETTINGS
from slurm_pathways.launch.preflight import check_machine
from slurm_pathways.launch.progress import Progress
from slurm_pathways.launch.run import run_with

#: The exit code when the program ended well, and one of its programs did not compile.
COMPILATION_FAILED = 1


class _CompileProgress(Progress):
    def __init__(self, spec: CompileSpec, verbosity: int) -> None:
        super().__init__(spec, verbosity)
        self._compile_spec = spec

    def starting(self) -> None:
        self.stage(f"starting the compiler for {self._compile_spec.topology}", is_done=False)

    def ready(self, elapsed_s: float, logs: str) -> None:
        spec = self._compile_spec
        slices = "" if spec.num_slices == 1 else f"{spec.num_slices} slices of "
        self.stage(
            f"compiling for {slices}{spec.topology}, {spec.num_devices} device(s), nothing is executed; logs in {logs}"
        )


def compile_program(
    topology: str,
    num_slices: int,
    idle_launches: int,
    options: Mapping[str, object],
    environ: Mapping[str, str],
    argv: Sequence[str],
    *,
    config_path: Path | None = None,
    json_path: Path | None = None,
    verbosity: int = 0,
) -> int:
    """Run the program ``argv`` against a compiler, and say what it compiled. From the main thread.

    Args:
        options: settings that were given, by key; those that say what the devices are come from ``topology``.
        idle_launches: see ``CompileSpec``.
        json_path: where the report goes as JSON.

    Returns:
        The program's exit code, as of ``run_local``; 0 if it was ended because it was idle; ``COMPILATION_FAILED``
        instead of 0 if something did not compile.

    Raises:
        ConfigurationError: what was asked for cannot be; nothing has been started.
    """
    try:
        target = targets.parse(topology)
    except targets.TargetError as failure:
        raise ConfigurationError(f"--topology {failure}") from failure
    if (wanted := missing_compiler(target.platform)) is not None:
        raise ConfigurationError(f"--topology {topology}: the compiler for it is not installed here: {wanted}")
    given = gather(options, environ, config_path)
    spec = spec_for(target, num_slices, idle_launches, {key: given[key] for key in given if key in USED_SETTINGS})
    check_machine(spec)
    report = CompileReport(
        target.name,
        num_slices,
        spec.num_devices,
        None if spec.compile_cache_dir is None else str(spec.compile_cache_dir),
    )
    exit_code = run_with(
        lambda on_event: CompileRuntime(spec, report, on_event=on_event, environ=environ),
        spec,
        argv,
        # There are no devices whose use could be recorded.
        {**environ, RECORDS_VARIABLE: "none"},
        verbosity,
        make_progress=lambda: _CompileProgress(spec, verbosity),
    )
    if json_path is not None:
        json_path.write_text(json.dumps(report.values(), indent=2) + "\n")
    if verbosity >= 0 or report.has_failures:
        print(report.as_text(), file=sys.stderr)
    return final_exit_code(exit_code, report.was_idle, report.has_failures)


def missing_compiler(platform: str) -> str | None:
    """How to install the compiler for a platform that is not installed; None if it is."""
    if platform == "tpu" and find_spec("libtpu") is None:
        return "pip install 'slurm-pathways[tpu]'"
    if platform == CUDA and not (find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin")):
        return "pip install 'slurm-pathways[cuda]'"
    return None


def final_exit_code(exit_code: int, was_idle: bool, has_failures: bool) -> int:
    """See ``compile_program``."""
    if was_idle and exit_code == 128 + signal.SIGTERM:
        exit_code = 0
    return COMPILATION_FAILED if exit_code == 0 and has_failures else exit_code
