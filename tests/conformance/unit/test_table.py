import pytest
from jax_conformance import kinds, table
from jax_conformance.journal import Outcome, Result, State
from jax_conformance.plan import Target, TestFile
from jax_conformance.table import Verdict

VERSIONS = {"jax": "1.2.3", "jaxlib": "1.2.4", "python": "3.11.7", "date": "2031-05-06"}
FILE = TestFile("tiny")


def state(**outcomes: Outcome) -> State:
    results = {name: Result(outcome, f"why {name}") for name, outcome in outcomes.items()}
    return State(ids=tuple(results), num_collected=70, results=results)


@pytest.mark.parametrize(
    ("plain", "here", "said"),
    [
        (Outcome.PASSED, Outcome.PASSED, Verdict.PASSED_BOTH),
        (Outcome.PASSED, Outcome.FAILED, Verdict.FAILED_HERE),
        (Outcome.PASSED, Outcome.HANG, Verdict.FAILED_HERE),
        (Outcome.PASSED, Outcome.CRASH, Verdict.FAILED_HERE),
        (Outcome.PASSED, Outcome.SKIPPED, Verdict.SKIPPED_HERE),
        (Outcome.FAILED, Outcome.CRASH, Verdict.FAILED_BOTH),
        (Outcome.HANG, Outcome.PASSED, Verdict.PASSED_HERE),
        (Outcome.SKIPPED, Outcome.FAILED, Verdict.SKIPPED),
    ],
)
def test_a_verdict_is_of_both_results(plain: Outcome, here: Outcome, said: Verdict) -> None:
    assert table.verdict(Result(plain), Result(here)) is said


def test_a_test_without_a_result_on_one_side_has_not_run() -> None:
    comparison = table.compare(FILE, Target.ONE_SLICE, state(a=Outcome.PASSED), state(b=Outcome.FAILED))
    assert comparison.counts == {Verdict.NOT_RUN: 2}
    assert comparison.failures == ()


def page() -> str:
    plain = state(a=Outcome.PASSED, b=Outcome.PASSED, c=Outcome.PASSED, d=Outcome.FAILED, e=Outcome.SKIPPED)
    here = state(a=Outcome.PASSED, b=Outcome.HANG, c=Outcome.FAILED, d=Outcome.FAILED, e=Outcome.SKIPPED)
    here.results["c"] = Result(Outcome.FAILED, "BufferError: `Only local arrays are supported` | 0x7f3c")
    return table.as_markdown([table.compare(FILE, Target.ONE_SLICE, plain, here)], VERSIONS)


def test_the_page_counts_and_names_what_failed() -> None:
    lines = page().splitlines()
    assert "| tiny (5 of 70) | 1x4x2 | 1 | 2 | 1 | 0 | 1 | 0 | 0 | 1, 0 |" in lines
    assert "* `b`: **hang**, not sorted yet: `why b`" in lines
    assert "* `c`: buffer protocol, dlpack: `BufferError: 'Only local arrays are supported' \\| 0x...`" in lines
    assert "jax 1.2.3, jaxlib 1.2.4, Python 3.11.7, 2031-05-06." in lines


def test_the_page_says_what_share_passes_and_whose_the_rest_is() -> None:
    assert (
        "Of 3 tests that plain JAX passes, 1 pass here (33.3 %). Of the other 2, 1 ask for what JAX's client itself "
        "cannot do through the proxy." in page()
    )


def test_the_page_says_what_has_not_run() -> None:
    assert "\n* `sparse_bcoo_bcsr` needs gigabytes of memory.\n" in page()


def test_a_file_that_cannot_run_says_why() -> None:
    comparison = table.compare(FILE, Target.ONE_SLICE, State(broken="no module named foo"), State())
    text = table.as_markdown([comparison], VERSIONS)
    assert "* tiny on 1x4x2: `plain: no module named foo`" in text.splitlines()
    assert "Nothing that plain JAX passes has run here." in text


def test_kinds_are_recognised_by_message_or_by_name() -> None:
    assert kinds.kind_of("x", "nothing that anybody has seen") is kinds.UNSORTED
    for kind in kinds.KINDS:
        assert kind.cause.endswith(".")
    assert len({kind.name for kind in kinds.KINDS}) == len(kinds.KINDS)
