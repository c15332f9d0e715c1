"""Makes JAX's ``proxy`` backend ours: called once per program, before any backend exists."""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from slurm_pathways.client import (
    jax_adapter,
    jax_arrays,
    jax_functions,
    jax_partitioning,
    jax_platforms,
    jax_programs,
    profiling,
)
from slurm_pathways.client.connection import TARGET_VARIABLE, allow_plaintext, explain_failure, read_settings
from slurm_pathways.client.resharding import Resharder

if TYPE_CHECKING:
    from slurm_pathways.client.callbacks import Callbacks

_logger = logging.getLogger(__name__)

#: JAX sets this to "1" (warnings) itself when the user has not set it.
_CPP_LOG_LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"


def register(backend_name: str) -> None:
    """Register the backend and take the array moves over. Again does nothing new."""
    # Here and not in the factory: pathwaysutils may put its own factory in the place of ours.
    allow_plaintext(os.environ)
    jax_adapter.keep_target_as_it_is_written(os.environ.get(TARGET_VARIABLE))
    if os.environ.get(_CPP_LOG_LEVEL_VARIABLE) == "1":
        jax_adapter.hide_cpp_warnings()
    jax_adapter.use_no_client_compile_cache()
    jax_adapter.register_backend(backend_name, make_client)
    jax_adapter.have_own_cpu()
    for install, loss in _PARTS.items():
        try:
            install()
        except jax_adapter.PrivateNamesChangedError as error:
            _logger.warning(
                "jax %s is not one that this version of Slurm Pathways knows (%s): %s", jax.__version__, error, loss
            )


def _prepare_programs() -> None:
    jax_programs.prepare_programs(_take_callbacks)


def _say_where_functions_come_from() -> None:
    jax_functions.replace_pickles(_with_origin)


def _with_origin(pickled: bytes) -> bytes:
    # Most programs have none, and need not wait for the import.
    from slurm_pathways.client.functions import with_this_origin

    return with_this_origin(pickled)


def _move_arrays() -> None:
    Resharder(jax_adapter.load()).install()


#: What is put into JAX, and what does not work without it.
_PARTS: dict[Callable[[], None], str] = {
    _prepare_programs: "programs with callbacks (jax.debug.print, jax.pure_callback, io_callback) do not run",
    jax_partitioning.remember_inspectors: "programs with jax.debug.inspect_array_sharding do not run",
    jax_platforms.know_by_platform: "programs for GPUs cannot have callbacks",
    _move_arrays: "jax.device_put from one sharding to another goes through the memory of the program instead of from "
    "worker to worker",
    jax_programs.estimate_costs_here: "Lowered.cost_analysis does not work",
    profiling.install: "traces of jax.profiler are of the program alone, not of the hosts",
    _say_where_functions_come_from: "functions of colocated Python run in hosts of any version, and may fail there",
    jax_arrays.serve_copies: "arrays cannot be given to other libraries by DLPack; numpy.asarray works",
}


@functools.cache
def _callbacks() -> "Callbacks":
    # Most programs have none, and need not wait for the import.
    from slurm_pathways.client.callbacks import Callbacks

    return Callbacks(lambda: read_settings(jax_adapter.backend_target(), os.environ).target)


def _take_callbacks(functions: Sequence[jax_programs.HostCallback]) -> jax_programs.TakenCallbacks:
    return _callbacks().take(functions)


def make_client() -> Any:
    """Connect to the runtime that the environment names.

    Raises:
        RuntimeError: not within the deadline; says where it looked and what to look at.
    """
    settings = read_settings(jax_adapter.backend_target(), os.environ)
    try:
        return jax_adapter.connect(settings.target, settings.timeout_s)
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(explain_failure(settings, str(error))) from error
