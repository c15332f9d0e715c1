"""Waiting for what nothing announces. The one place in which tests sleep: between two looks."""

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def until(look: Callable[[], _T], what: str | Callable[[], object], timeout_s: float, interval_s: float = 0.01) -> _T:
    """Look until what is seen is true; returns it.

    Args:
        what: for the message when it does not come true in time; a callable is asked then.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (seen := look()):
        assert time.monotonic() < deadline_s, f"after {timeout_s:g} s: {what() if callable(what) else what}"
        time.sleep(interval_s)
    return seen
