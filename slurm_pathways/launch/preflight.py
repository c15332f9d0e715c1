"""Whether this machine can carry a run: checked before anything starts."""

import os
import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pathways_runtime.worker import gpu
from slurm_pathways.config import CUDA, ConfigurationError, RuntimeSpec

#: Each host's processes hold sockets to all others, files and pipes.
_OPEN_FILES_BASE = 256
_OPEN_FILES_PER_HOST = 16


def open_files_needed(spec: RuntimeSpec) -> int:
    """Descriptors that one process of the run may need."""
    return _OPEN_FILES_BASE + _OPEN_FILES_PER_HOST * spec.num_hosts


def open_files_limit() -> int | None:
    """How many descriptors the run's processes may have (the hard limit; they raise their own); None for no limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def shares_memory() -> bool:
    """Whether this system gives memory that processes can share without a name (memfd)."""
    try:
        os.close(os.memfd_create("probe", os.MFD_CLOEXEC))
    except OSError:
        return False
    return True


def check_machine(spec: RuntimeSpec) -> None:
    """Refuse a run that could not go well here.

    Raises:
        ConfigurationError: what is short, how much is needed, and how to get it.
    """
    limit, needed = open_files_limit(), open_files_needed(spec)
    if limit is not None and limit < needed:
        raise ConfigurationError(
            f"{spec.num_hosts} hosts need {needed} open files per process, and the limit here is {limit}: raise it "
            "with ulimit -Hn (or in /etc/security/limits.conf), or ask for fewer hosts"
        )
    if not spec.force_sockets and not shares_memory():
        raise ConfigurationError("this system gives no memory to share (memfd_create fails): use --force-sockets")
    if spec.compile_cache_dir is not None:
        check_writable(spec.compile_cache_dir, "the compile cache")


def check_devices(spec: RuntimeSpec, environ: Mapping[str, str]) -> None:
    """Refuse a run whose hosts are all this machine, and which has too few GPUs for them.

    Raises:
        ConfigurationError: how many are needed, how many there are, and what to do.
    """
    if spec.platform != CUDA:
        return
    num_devices = spec.num_hosts * spec.devices_per_host
    if (shortage := gpu.missing(environ, num_devices)) is not None:
        raise ConfigurationError(
            f"--platform {CUDA}: {shortage}. Ask for fewer slices, hosts or devices, or give another platform"
        )


def check_writable(folder: Path, what: str) -> None:
    """Make ``folder`` if it is missing, and write to it.

    Raises:
        ConfigurationError: either fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as failure:
        raise ConfigurationError(
            f"{what} {folder} cannot be written: {failure.strerror}; give a folder of yours"
        ) from failure
