import json
from typing import Any

import pytest
from jax_conformance import journal
from jax_conformance.journal import Outcome, Result, Run


def line(event: str, at_s: float, **fields: Any) -> str:
    return json.dumps({"event": event, "at_s": at_s, **fields})


def ended(name: str, at_s: float, outcome: str = "passed") -> str:
    return line("finished", at_s, id=name, outcome=outcome, message="", duration_s=1.0)


#: a has passed, b runs, c has not begun.
MIDDLE = [
    line("launched", 1.0),
    line("collected", 2.0, ids=["a", "b", "c"], num_collected=5),
    line("started", 3.0, id="a"),
    ended("a", 4.0),
    line("started", 5.0, id="b"),
]


def test_a_journal_in_the_middle_of_a_run() -> None:
    state = journal.read(MIDDLE)
    assert state.ids == ("a", "b", "c")
    assert state.results == {"a": Result(Outcome.PASSED, "", 1.0)}
    assert state.in_flight == Run("b", 5.0)
    assert state.last_event_s == 5.0
    assert not state.is_complete


def test_a_run_is_complete_when_every_test_has_a_result_or_the_file_is_broken() -> None:
    assert not journal.read([]).is_complete
    assert not journal.read(MIDDLE).is_complete
    assert journal.read([*MIDDLE, ended("b", 6.0), ended("c", 7.0)]).is_complete
    assert journal.read([journal.broken("no module named foo", 1.0)]).is_complete
    assert journal.read([line("collected", 1.0, ids=[], num_collected=0)]).is_complete


def test_a_sample_that_is_done_is_not_all_tests() -> None:
    done = journal.read([*MIDDLE, ended("b", 6.0), ended("c", 7.0)])
    assert [done.has_all_of(sample) for sample in (2, 3, 4, 9, 0)] == [True, True, False, False, False]
    assert journal.read([journal.broken("no module named foo", 1.0)]).has_all_of(0)


def test_the_last_line_of_a_killed_process_may_be_half() -> None:
    assert journal.read([*MIDDLE, '{"event": "fini']) == journal.read(MIDDLE)


def test_an_event_of_another_version_is_loud() -> None:
    with pytest.raises(ValueError, match="unknown event 'paused'"):
        journal.read([line("paused", 1.0)])


def test_the_test_of_an_interrupted_run_is_not_in_flight_in_the_next() -> None:
    state = journal.read([*MIDDLE, journal.launched(9.0)])
    assert state.in_flight is None
    assert "b" not in state.results


def test_a_process_that_ends_in_a_test_crashed_in_it() -> None:
    lines = journal.after_child(journal.read(MIDDLE), 0, "was killed by signal 11 (SIGSEGV)", 8.0)
    result = journal.read([*MIDDLE, *lines]).results["b"]
    assert result == Result(Outcome.CRASH, "the process of the tests was killed by signal 11 (SIGSEGV)", 3.0)


def test_a_process_that_ends_between_tests_is_followed_by_another_unless_it_got_nowhere() -> None:
    between = journal.read(MIDDLE[:4])
    assert journal.after_child(between, 0, "ended with exit code 1", 8.0) == []
    (given_up,) = journal.after_child(between, 1, "ended with exit code 1", 8.0)
    assert journal.read([given_up]).broken == "pytest ended with exit code 1 before a test had run"


def test_a_process_that_has_run_everything_leaves_nothing_to_say() -> None:
    complete = journal.read([*MIDDLE, ended("b", 6.0), ended("c", 7.0)])
    assert journal.after_child(complete, 0, "ended with exit code 1", 8.0) == []


def test_trouble_is_of_the_test_of_its_moment_and_those_after_it_run_again() -> None:
    lines = [*MIDDLE, ended("b", 6.0), line("started", 7.0, id="c"), ended("c", 8.0, "failed")]
    after = journal.after_trouble(journal.read(lines), "worker_lost: host-1", trouble_s=5.5, at_s=9.0)
    results = journal.read([*lines, *after]).results
    assert results.keys() == {"a", "b"}
    assert (results["b"].outcome, results["b"].message) == (Outcome.CRASH, "worker_lost: host-1")


def test_trouble_before_any_test_is_no_tests_fault() -> None:
    assert journal.after_trouble(journal.read(MIDDLE[:2]), "worker_lost: host-1", trouble_s=2.5, at_s=9.0) == []
