"""The halves of the tests: nothing is left out, nothing runs twice, and neither half's failure is lost."""

import importlib.util
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent.parent
_spec = importlib.util.spec_from_file_location("run_tests", PROJECT / "tools" / "run_tests.py")
assert _spec is not None and _spec.loader is not None
run_tests = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run_tests)


def test_what_one_half_runs_the_other_leaves_out() -> None:
    waiting, others = run_tests.halves(["--wheel=dist"])
    folders = [word for word in waiting if word.startswith("tests/")]
    assert folders and all((PROJECT / folder).is_dir() for folder in folders)
    assert [word for word in others if word.startswith("--ignore=")] == [f"--ignore={folder}" for folder in folders]
    assert "--wheel=dist" in waiting and "--wheel=dist" in others


@pytest.mark.parametrize(("apart", "shown", "expected"), [(0, 0, 0), (3, 0, 3), (0, 4, 4), (3, 4, 3)])
def test_a_failure_of_either_counts(
    apart: int, shown: int, expected: int, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    def says(what: str, code: int) -> list[str]:
        return [sys.executable, "-c", f"import sys; print({what!r}, flush=True); sys.exit({code})"]

    assert run_tests.run_side_by_side(says("apart", apart), says("shown", shown)) == expected
    assert capfdbinary.readouterr().out == b"shown\napart\n"
