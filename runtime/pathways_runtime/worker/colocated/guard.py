"""The guard of a Python process: whatever a client's functions have started ends with it.

A second process of its group, forked before anything is imported. It waits for the end of the executor (the lifeline)
or of the Python process, whatever that process is doing and whether its Python can run or not, and kills the group.
What has left the group is left to the job.
"""

import os
import select
import signal
from collections.abc import Sequence

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def start(lifeline_fd: int, not_inherited: Sequence[int]) -> None:
    """Fork the guard of this process, which must lead its group and have one thread.

    Args:
        lifeline_fd: is at its end when the executor is gone; only the guard needs it.
        not_inherited: descriptors that the guard must not hold open.
    """
    pidfd = os.pidfd_open(os.getpid())
    if os.fork():
        os.close(pidfd)
        os.close(lifeline_fd)
        return
    # Nothing may be raised from here on: it would go on as a second Python process.
    try:
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        for fd in not_inherited:
            os.close(fd)
        poll = select.poll()
        poll.register(lifeline_fd, select.POLLIN)
        poll.register(pidfd, select.POLLIN)
        poll.poll()
    finally:
        os.killpg(0, signal.SIGKILL)
        os._exit(1)
