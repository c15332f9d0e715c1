"""SIGTERM in a Python process: where the runtime is deaf to it, this process is, and what functions start is not."""

import os
import signal
import threading
from types import FrameType

_SIGTERM = frozenset((signal.SIGTERM,))


def outlast() -> None:
    """Do nothing on SIGTERM if it is blocked, as it then is in all of the runtime; unblock it, for children.

    From the main thread, before others are started.
    """
    if not _is_blocked():
        return
    # Not SIG_IGN, which children would inherit.
    signal.signal(signal.SIGTERM, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)
    forking = threading.local()

    def before() -> None:
        # What comes before the child hears again must wait.
        forking.was_blocked = _is_blocked()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)

    def after() -> None:
        if not forking.was_blocked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGTERM)

    def after_in_child() -> None:
        if signal.getsignal(signal.SIGTERM) is _ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)


def _is_blocked() -> bool:
    return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _ignore(number: int, frame: FrameType | None) -> None:
    pass
