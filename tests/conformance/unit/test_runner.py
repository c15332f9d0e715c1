"""The runner on a small file in the place of JAX's: its tests hang and end their process."""

from pathlib import Path

import pytest
from jax_conformance import journal, runner
from jax_conformance.journal import Outcome, State
from jax_conformance.places import Place, Trouble
from jax_conformance.plan import Target, TestFile

FILE = TestFile("tiny")

TINY = """
import os, signal, threading, unittest

class Tiny(unittest.TestCase):
    def test_1_passes(self):
        self.assertEqual(os.environ["JAX_PLATFORMS"], "cpu")

    def test_2_ends_its_process(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def test_3_hangs(self):
        threading.Event().wait()

    def test_4_fails(self):
        self.assertEqual([1], [2], "not the same\\nat all")

    def test_5_is_skipped(self):
        self.skipTest("for want of a TPU")
"""


def run(folder: Path, text: str, *, file: TestFile = FILE) -> State:
    (folder / "tests").mkdir()
    (folder / "tests" / file.file_name).write_text(text)
    # Trivial tests; ten seconds of them are a hang on the slowest machine.
    settings = runner.Settings(folder / "tests", folder / "results", test_deadline_s=10)
    runner.run_file(file, Target.PLAIN, settings, lambda text: None)
    return runner.read_journal(settings.journal_of(file, Target.PLAIN))


def test_every_test_gets_a_result_whatever_the_others_do(tmp_path: Path) -> None:
    state = run(tmp_path, TINY)
    assert state.is_complete
    assert {name.rpartition(":")[2]: result.outcome for name, result in state.results.items()} == {
        "test_1_passes": Outcome.PASSED,
        "test_2_ends_its_process": Outcome.CRASH,
        "test_3_hangs": Outcome.HANG,
        "test_4_fails": Outcome.FAILED,
        "test_5_is_skipped": Outcome.SKIPPED,
    }
    messages = [result.message for result in state.results.values()]
    assert messages[1].startswith("the process of the tests was killed by signal 9 (SIGKILL)")
    assert messages[2:] == [
        "not done after 10 s",
        "AssertionError: Lists differ: [1] != [2]",
        "Skipped: for want of a TPU",
    ]
    stacks = (tmp_path / "results" / "plain" / "tiny.stacks").read_text()
    assert "test_3_hangs" in stacks


def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "results" / "plain" / "tiny.jsonl"
    path.parent.mkdir(parents=True)
    old = journal.Run("tiny_test.py::Tiny::test_1", 1.0)
    path.write_text(
        journal.launched(0.0)
        + journal.finished(old, Outcome.FAILED, "an earlier result", 2.0)
        + '{"event": "started", "at_s": 3.0, "id": "tiny_test.py::Tiny::test_2"}\n'
    )
    state = run(
        tmp_path,
        "import unittest\nclass Tiny(unittest.TestCase):\n def test_1(self): pass\n def test_2(self): pass\n",
    )
    assert state.is_complete
    assert [result.outcome for result in state.results.values()] == [Outcome.FAILED, Outcome.PASSED]


def test_a_runtime_that_breaks_is_started_anew_and_only_the_test_at_fault_crashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign = tmp_path / "broken"

    class BreakingPlace(Place):
        """Plain JAX, with trouble once a test has made a file."""

        num_starts = 0

        def restart(self) -> None:
            BreakingPlace.num_starts += 1
            sign.unlink(missing_ok=True)

        @property
        def trouble(self) -> Trouble | None:
            return Trouble("worker-1 ended", float(sign.read_text())) if sign.exists() else None

    monkeypatch.setattr(runner, "Place", BreakingPlace)
    state = run(
        tmp_path,
        f"""
import pathlib, threading, time, unittest
class Tiny(unittest.TestCase):
    def test_1(self): pass
    def test_2(self):
        written = pathlib.Path({str(sign)!r} + ".new")
        written.write_text(str(time.time()))
        written.rename({str(sign)!r})
        threading.Event().wait()
    def test_3(self): pass
""",
    )
    assert state.is_complete
    assert [(result.outcome, result.message) for result in state.results.values()] == [
        (Outcome.PASSED, ""),
        (Outcome.CRASH, "worker-1 ended"),
        (Outcome.PASSED, ""),
    ]
    assert BreakingPlace.num_starts == 2


def test_failures_are_forgotten_to_run_again(tmp_path: Path) -> None:
    path = tmp_path / "tiny.jsonl"
    results = [journal.finished(journal.Run(outcome, 1.0), outcome, "", 2.0) for outcome in Outcome]
    path.write_text("".join(results) + journal.broken("for a reason that is gone", 3.0))
    runner.forget_failures(path)
    state = runner.read_journal(path)
    assert set(state.results) == {Outcome.PASSED, Outcome.SKIPPED}
    assert state.broken is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("import os; os._exit(3)", "pytest ended with exit code 3 before a test had run"),
    ],
)
def test_a_file_that_cannot_be_collected_is_given_up(tmp_path: Path, text: str, why: str) -> None:
    state = run(tmp_path, text)
    assert state.broken is not None and state.broken.endswith(why)


def test_a_sample_is_as_large_as_asked_for_and_always_the_same(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.parametrize('n', range(50))\ndef test_n(n): pass\n"
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    first, second = (run(tmp_path / folder, text, file=TestFile("tiny", sample=4)) for folder in ("a", "b"))
    assert first.ids == second.ids
    assert len(first.results) == 4
    assert first.num_collected == 50
