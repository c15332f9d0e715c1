"""Which versions of Python and JAX are supported, and which of those the tests have been run with.

``doctor`` and ``tools/test_matrix.py`` go by this table; tests compare the documents and the package's metadata with
it. To add a version: add its row, run ``make test-matrix``, and let failing tests say what else names the versions.

The standard library alone is imported: the table is also read where nothing is installed.
"""

from typing import NamedTuple


class Combination(NamedTuple):
    """A Python and the jax (and jaxlib) that the tests have been run with on it. Versions as pip writes them."""

    python: str
    jax: str


#: Oldest first. The oldest and the newest jax for the oldest Python, and the newest jax for each later one.
TESTED = (
    Combination("3.11", "0.10.1"),
    Combination("3.11", "0.10.2"),
    Combination("3.12", "0.12.0.1"),
    Combination("3.13", "0.12.0.1"),
)

#: Releases of Slurm that a run was tried on.
TESTED_SLURMS = ("22.05",)

#: Each once, oldest first.
TESTED_PYTHONS = tuple(dict.fromkeys(row.python for row in TESTED))
TESTED_JAXES = tuple(dict.fromkeys(row.jax for row in TESTED))

#: Earlier Pythons lack what is used here.
OLDEST_PYTHON = TESTED[0].python
#: Earlier clients speak the IFRT proxy protocol in ways that were not looked at.
OLDEST_JAX = TESTED[0].jax


def numbers(version: str) -> tuple[int, ...]:
    """A version to compare: ``0.12.0.1`` is ``(0, 12, 0, 1)``; it ends before the first part that is no number."""
    found: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)
