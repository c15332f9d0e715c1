"""Libraries whose checks take seconds: the same values as on plain JAX."""

from typing import Any

import pytest
from running import RunChecks, assert_same

LIBRARIES = ("flax", "optax", "equinox", "chex", "grain", "orbax", "orbax_on_hosts")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def outcomes(checks_here: RunChecks, checks_on_plain_jax: RunChecks) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of all libraries, in one process each: importing JAX takes longer than many of them."""
    return checks_here(*LIBRARIES), checks_on_plain_jax(*LIBRARIES)


@pytest.mark.parametrize("library", LIBRARIES)
def test_library(outcomes: tuple[dict[str, Any], dict[str, Any]], library: str) -> None:
    here, plain = outcomes
    assert_same(here[library], plain[library])
