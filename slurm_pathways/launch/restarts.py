"""Workers that end while their run goes on are started again, unless that is of no use. Pure: times come in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: So many lives in a row that were short, and there is no further one.
MAX_SHORT_LIVES = 5
#: What is not short, from when it had registered with the controller.
LONG_LIFE_S = 10.0
#: From a supervisor: the controller knows it; it ends, and ``is_run_over`` says whether the controller ends too.
REGISTERED_EVENT, ENDED_EVENT = "registered", "ended"


@dataclass(slots=True)
class _Lives:
    """``registered_s``: of the life that goes on; None until then."""

    registered_s: float | None = None
    num_short: int = 0


class Restarts:
    """Counts the lives of workers by name. Times are those of any one clock, in seconds. Not thread-safe.

    Who has never registered is not started again: what keeps it from that at first will do so again, and is to be said
    at once.

    Args:
        must_register: a later life that ends without having registered is the last one: there is no controller any
            more, and nobody else would say so.
    """

    def __init__(self, *, must_register: bool = False) -> None:
        self._must_register = must_register
        self._lives: dict[str, _Lives] = {}
        self._is_over = False

    def note(self, name: str, event: str, fields: Mapping[str, Any], now_s: float) -> None:
        """A worker said something."""
        if event == REGISTERED_EVENT:
            self._lives.setdefault(name, _Lives()).registered_s = now_s
        elif event == ENDED_EVENT and fields.get("is_run_over"):
            self._is_over = True

    def is_another_due(self, name: str, now_s: float) -> bool | None:
        """A worker has ended that was not asked to: whether it is to be started again.

        None where that is out of the question: it never registered, or the run is over.
        """
        lives = self._lives.get(name)
        if lives is None or self._is_over or (self._must_register and lives.registered_s is None):
            return None
        was_long = lives.registered_s is not None and now_s - lives.registered_s >= LONG_LIFE_S
        lives.registered_s = None
        lives.num_short = 0 if was_long else lives.num_short + 1
        return lives.num_short < MAX_SHORT_LIVES


def describe_restart(will_restart: bool | None) -> str:
    """What becomes of a worker that has ended, to be put behind the word of its end."""
    if will_restart is None:
        return ""
    if will_restart:
        return "; it is started again"
    return (
        f"; it is not started again, because it has ended {MAX_SHORT_LIVES} times in a row within {LONG_LIFE_S:g} s of "
        "its start"
    )
