"""What happened to the tests of one file on one target: lines appended as it happens, and what they amount to.

The journal is the only state of a run, so a run goes on from any moment at which it was interrupted.
"""

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Outcome(enum.StrEnum):
    """What became of a test."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    #: Not done by its deadline.
    HANG = "hang"
    #: The process of the tests, or one of the runtime, ended during it.
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Result:
    """Of one test. ``message``: the first line of its failure, or why it was skipped."""

    outcome: Outcome
    message: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """A test's time in the journal, seconds since the epoch; ``finished_s`` is None while it runs."""

    id: str
    started_s: float
    finished_s: float | None = None


@dataclass
class State:
    """What a journal amounts to.

    Attributes:
        ids: the tests that are to run; None before pytest has said.
        num_collected: how many the file has.
        results: by id; also of an earlier, larger sample.
        runs: in order, also of tests that have no result.
        broken: why the file's tests cannot run at all.
        last_event_s: when the last line was written; 0 without lines.
    """

    ids: tuple[str, ...] | None = None
    num_collected: int = 0
    results: dict[str, Result] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    broken: str | None = None
    last_event_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left of ``ids``."""
        return self.broken is not None or (self.ids is not None and all(name in self.results for name in self.ids))

    def has_all_of(self, sample: int) -> bool:
        """Whether nothing is left of a sample of this size; 0: of all tests."""
        wanted = min(sample or self.num_collected, self.num_collected)
        return self.is_complete and (self.broken is not None or len(self.ids or ()) >= wanted)

    @property
    def in_flight(self) -> Run | None:
        """The test that runs, or ran when its process ended."""
        last = self.runs[-1] if self.runs else None
        return last if last is not None and last.finished_s is None else None


def read(lines: Iterable[str]) -> State:
    """What a journal's lines amount to. A line that was cut off at the end of a killed process is passed over.

    Raises:
        ValueError: an event that no version of ours writes.
    """
    state = State()
    for line in lines:
        try:
            event: Mapping[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue
        _take(state, event)
    return state


def _take(state: State, event: Mapping[str, Any]) -> None:
    state.last_event_s = event["at_s"]
    match event["event"]:
        case "launched":
            # A test of a run that was interrupted has no result; it runs again.
            _end_run(state, event["at_s"])
        case "collected":
            state.ids = tuple(event["ids"])
            state.num_collected = event["num_collected"]
        case "broken":
            state.broken = event["message"]
        case "started":
            _end_run(state, event["at_s"])
            state.runs.append(Run(event["id"], event["at_s"]))
        case "finished":
            _end_run(state, event["at_s"])
            state.results[event["id"]] = Result(Outcome(event["outcome"]), event["message"], event["duration_s"])
        case "forgotten":
            state.broken = None
            for name in event["ids"]:
                state.results.pop(name, None)
        case other:
            raise ValueError(f"unknown event {other!r} in a journal")


def _end_run(state: State, at_s: float) -> None:
    if (run := state.in_flight) is not None:
        state.runs[-1] = Run(run.id, run.started_s, at_s)


def launched(at_s: float) -> str:
    """The line before those of a new process of tests."""
    return _line("launched", at_s)


def finished(run: Run, outcome: Outcome, message: str, at_s: float) -> str:
    """The line that gives a test a result that its own process could not write."""
    return _line(
        "finished", at_s, id=run.id, outcome=outcome, message=message, duration_s=round(at_s - run.started_s, 3)
    )


def forgotten(ids: Iterable[str], at_s: float) -> str:
    """The line that takes results back, so that these tests run again."""
    return _line("forgotten", at_s, ids=list(ids))


def broken(message: str, at_s: float) -> str:
    """The line that gives a file up."""
    return _line("broken", at_s, message=message)


def _line(event: str, at_s: float, **fields: Any) -> str:
    return json.dumps({"event": event, "at_s": at_s, **fields}) + "\n"


def after_trouble(state: State, trouble: str, trouble_s: float, at_s: float) -> list[str]:
    """The lines to append when the runtime broke at ``trouble_s``: the test of that moment crashed it, and what came
    after it ran on a broken runtime and has to run again."""
    at_fault = [run for run in state.runs if run.started_s <= trouble_s]
    later = [run.id for run in state.runs if run.started_s > trouble_s and run.id in state.results]
    lines = [forgotten(later, at_s)] if later else []
    if at_fault:
        lines.append(finished(at_fault[-1], Outcome.CRASH, trouble, at_s))
    return lines


def after_child(state: State, num_results_before: int, how_it_ended: str, at_s: float) -> list[str]:
    """The lines to append when pytest's process has ended by itself.

    A test in flight crashed it. One that got nowhere at all would get nowhere again.
    """
    if state.is_complete:
        return []
    if (run := state.in_flight) is not None:
        return [finished(run, Outcome.CRASH, f"the process of the tests {how_it_ended}", at_s)]
    if len(state.results) <= num_results_before:
        return [broken(f"pytest {how_it_ended} before a test had run", at_s)]
    return []
