"""A keeper that goes on when its command has returned."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from slurm_pathways.config import ConfigurationError
from slurm_pathways.launch.run import KEEPER, RUN_FAILED
from slurm_pathways.launch.run_folder import LOGS_NAME

_READY = b"ready"
#: As click ends for other wrong use.
_WRONG_USE = 2


def keep_in_background(keep: Callable[[Callable[[Path], None]], int]) -> int:
    """Run ``keep`` in a process that outlives this one, and wait until it has told that it is ready.

    To be called from the main thread, before there is another. Until it is ready, what it says is said here, and a
    Ctrl-C ends it. Afterwards it logs to the run folder.

    Args:
        keep: gets what is to be told the run folder once it is ready; returns an exit code.

    Returns:
        0, or the exit code of a keeper that ended before it was ready.
    """
    ready_read, ready_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready_read)
        os._exit(_be_keeper(keep, ready_write))
    os.close(ready_write)
    while True:
        try:
            said = os.read(ready_read, len(_READY))
            break
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGINT)
    os.close(ready_read)
    if said == _READY:
        return 0
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _be_keeper(keep: Callable[[Callable[[Path], None]], int], ready_fd: int) -> int:
    # Neither the terminal's signals nor its end are this process's.
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)

    def on_ready(run_dir: Path) -> None:
        log = os.open(run_dir / LOGS_NAME / f"{KEEPER}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        sys.stderr.flush()
        os.dup2(log, 2)
        os.close(log)
        try:
            os.write(ready_fd, _READY)
        except BrokenPipeError:
            # Nobody waits any more, and nobody would know of it.
            os.kill(os.getpid(), signal.SIGTERM)
        os.close(ready_fd)

    try:
        return keep(on_ready)
    except ConfigurationError as failure:
        print(f"Error: {failure}", file=sys.stderr)
        return _WRONG_USE
    except Exception:
        import traceback

        traceback.print_exc()
        return RUN_FAILED
    finally:
        sys.stderr.flush()
