"""Checks of libraries in processes of their own, and their values compared."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from client_programs import run_program

HERE = Path(__file__).parent

#: ``(*libraries, timeout_s=…, VARIABLE=…) -> outcomes``: runs checks in one process.
RunChecks = Callable[..., dict[str, Any]]


def run_checks(environ: Mapping[str, str], *libraries: str, timeout_s: float = 300, **variables: str) -> dict[str, Any]:
    """The outcomes of the checks of modules of ``checks``, by module and check; see ``checks.__main__``."""
    result = run_program(environ, "-m", "checks", *libraries, timeout_s=timeout_s, cwd=HERE, **variables)
    outcomes: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return outcomes


def assert_same(here: dict[str, Any], plain: dict[str, Any]) -> None:
    """Every check of a library gave its values, and the same here as on plain JAX."""
    for outcomes in (plain, here):
        for check, outcome in outcomes.items():
            assert "values" in outcome, f"{check} failed:\n{outcome['failed']}"
    assert here.keys() == plain.keys() and here
    for check in plain:
        assert here[check]["values"] == close_to(plain[check]["values"]), check


def close_to(value: Any) -> Any:
    """``value`` with its fractions to be compared with some tolerance: sums over devices have an order of their own."""
    if isinstance(value, dict):
        return {key: close_to(each) for key, each in value.items()}
    if isinstance(value, list):
        return [close_to(each) for each in value]
    return pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True) if isinstance(value, float) else value
