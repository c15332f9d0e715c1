"""The table of versions, and everything that repeats it."""

import re
import tomllib
from pathlib import Path

from slurm_pathways.supported import (
    OLDEST_JAX,
    OLDEST_PYTHON,
    TESTED,
    TESTED_JAXES,
    TESTED_PYTHONS,
    Combination,
    numbers,
)

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_versions_are_compared_by_number() -> None:
    assert numbers("0.12.0.1") == (0, 12, 0, 1)
    assert numbers("0.10.2") < numbers("0.12.0.1")
    assert numbers("0.9.9") < numbers("0.10.0")
    assert numbers("0.13.0.dev20270101+abc") == (0, 13, 0)


def test_the_table_is_in_order() -> None:
    assert list(TESTED) == sorted(TESTED, key=lambda row: (numbers(row.python), numbers(row.jax)))
    assert TESTED_PYTHONS == ("3.11", "3.12", "3.13")
    assert TESTED_JAXES == ("0.10.1", "0.10.2", "0.12.0.1")


def test_the_package_says_the_same() -> None:
    assert PROJECT["requires-python"] == f">={OLDEST_PYTHON}"
    assert f"jax>={OLDEST_JAX}" in PROJECT["dependencies"]
    python = re.compile(r"Programming Language :: Python :: (3\.\d+)")
    named = [match[1] for line in PROJECT["classifiers"] if (match := python.fullmatch(line))]
    assert tuple(named) == TESTED_PYTHONS


def test_the_documents_say_the_same() -> None:
    readme, guide = ((ROOT / name).read_text() for name in ("README.md", "docs/getting-started.md"))
    for text in (readme, guide):
        assert f"Python {OLDEST_PYTHON} or newer" in " ".join(text.split())
    assert f"jax {OLDEST_JAX} or newer" in " ".join(readme.split())
    rows = re.findall(r"^\| (3\.\d+) \| (.+) \|$", guide, re.MULTILINE)
    assert [Combination(python, jax) for python, jaxes in rows for jax in jaxes.split(", ")] == list(TESTED)
