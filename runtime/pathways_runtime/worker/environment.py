"""What must be in a process's environment before jaxlib is loaded there. Imports nothing of JAX."""

import os

#: XLA reads the size of its thread pool from here. With fewer threads than programs in flight need, collectives of
#: several devices in one process deadlock: each waits in a thread of the pool for a program that has none.
POOL_SIZE_VARIABLE = "NPROC"
MIN_POOL_SIZE = 16
POOL_THREADS_PER_DEVICE = 4


def prepare(num_devices: int, xla_flags: str | None) -> None:
    """Set what jaxlib reads when it is loaded.

    Args:
        num_devices: of one client; clients of several worlds have pools of their own.
        xla_flags: the only XLA flags that apply; what the environment brought along is the user's program's business.
    """
    os.environ[POOL_SIZE_VARIABLE] = str(max(MIN_POOL_SIZE, POOL_THREADS_PER_DEVICE * num_devices))
    os.environ.pop("XLA_FLAGS", None)
    if xla_flags:
        os.environ["XLA_FLAGS"] = xla_flags
    # Nothing here runs on JAX's own backends; should anything ever ask for one, it must not be the proxy.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def prepare_for_tpu_compiler() -> None:
    """Set what libtpu reads when it is loaded to compile: it neither looks for TPUs nor claims them for itself."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
