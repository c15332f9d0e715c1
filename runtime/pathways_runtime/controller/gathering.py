"""One answer to ``status``: the controller's own report, with what proxies and executors add in time."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from pathways_runtime.core.controller.events import PeerId
from pathways_runtime.core.controller.usage import add_up
from pathways_runtime.core.ids import HostIndex

#: Those who have not answered by then are named in the report.
DEADLINE_S = 2.0

Report = dict[str, Any]


class Asked(NamedTuple):
    """Who is asked: a name for people, and an executor's virtual host."""

    name: str
    host: HostIndex | None


class Gathering:
    """Collects reports of peers into the controller's, and hands it on when all have answered or the deadline is over.

    Args:
        report: the controller's; see docs/status.md. It is added to.
        asked: who was asked.
        on_done: called once with the report.
    """

    def __init__(self, report: Report, asked: dict[PeerId, Asked], on_done: Callable[[Report], None]) -> None:
        self._report = report
        self._unanswered = dict(asked)
        self._on_done = on_done
        self._is_done = False
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(DEADLINE_S, self._finish)
        if not asked:
            loop.call_soon(self._finish)

    @property
    def is_done(self) -> bool:
        """Whether the report has been handed on."""
        return self._is_done

    def add(self, peer: PeerId, answer: Report) -> None:
        """What a peer says of itself."""
        asked = self._unanswered.pop(peer, None)
        if asked is None or self._is_done:
            return
        if asked.host is not None:
            _add_executor(self._report, asked.host, answer)
        else:
            _add_proxy(self._report, answer)
        self._finish_if_complete()

    def drop(self, peer: PeerId) -> None:
        """A peer is gone and will not answer."""
        asked = self._unanswered.pop(peer, None)
        if asked is not None:
            self._report["did_not_answer"].append(f"{asked.name} (gone)")
            self._finish_if_complete()

    def cancel(self) -> None:
        """Nobody wants the report any more."""
        self._is_done = True
        self._deadline.cancel()

    def _finish_if_complete(self) -> None:
        if not self._unanswered:
            self._finish()

    def _finish(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        self._deadline.cancel()
        self._report["did_not_answer"] += [asked.name for asked in self._unanswered.values()]
        self._report |= add_up(self._report["workers"])
        self._on_done(self._report)


#: Of an executor's report, what is told of its worker.
_OF_WORKER = ("arrays", "bytes", "bytes_moved", "usage", "python", "retained")


def _add_executor(report: Report, host: HostIndex, answer: Report) -> None:
    for way, num_bytes in answer.get("bytes_moved", {}).items():
        report["bytes_moved"][way] = report["bytes_moved"].get(way, 0) + num_bytes
    for worker in report["workers"]:
        if worker["host"] == host:
            worker.update({key: answer[key] for key in _OF_WORKER if key in answer})
    report["transfers"] += _with(answer.get("transfers", []), host=host)
    report["waiting"] += _with(answer.get("waiting", []), host=host)


def _add_proxy(report: Report, answer: Report) -> None:
    known = {session["id"]: session for session in report["sessions"]}
    for session in answer.get("sessions", []):
        if (mine := known.get(session.get("id"))) is not None:
            mine.update(session)
    report["waiting"] += answer.get("waiting", [])


def _with(entries: Iterable[Any], **fields: Any) -> list[Any]:
    return [{**entry, **fields} if isinstance(entry, dict) else {"what": entry, **fields} for entry in entries]
