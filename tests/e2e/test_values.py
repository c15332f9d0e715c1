"""Every check of ``value_checks`` gives the same under the runtime as in plain JAX."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_programs import plain_environment, run_program

from slurm_pathways.launch.local import LocalRuntime

pytestmark = pytest.mark.timeout(900)

Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(shared_runtime: LocalRuntime, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], list[Results]]:
    """What plain JAX and the runtime return for all checks, with 64-bit types off or on.

    Each is made once, and the first case that asks for it is charged with it: the others take no time.
    """

    @functools.cache
    def of(x64: bool) -> list[Results]:
        both = []
        for name, environ in (("plain", plain_environment()), ("runtime", shared_runtime.environment())):
            output: Path = tmp_path_factory.mktemp("values") / f"{name}.json"
            mode = ["--x64"] if x64 else []
            run_program(environ, "-m", "value_checks", "--output", output, *mode, timeout_s=400)
            both.append(json.loads(output.read_text()))
        return both

    return of


def _names() -> list[tuple[str, bool]]:
    from value_checks import CHECKS

    return [(name, x64) for x64 in (False, True) for name, check in CHECKS.items() if x64 or not check.needs_x64]


@pytest.mark.parametrize(("name", "x64"), _names(), ids=lambda value: {True: "x64", False: "x32"}.get(value, value))
def test_same_as_plain_jax(results: Callable[[bool], list[Results]], name: str, x64: bool) -> None:
    from value_checks import CHECKS
    from value_checks.registry import differences

    plain, runtime = results(x64)
    assert "error" not in plain[name], f"the check itself is wrong: {plain[name]['error']}"
    assert differences(CHECKS[name], plain[name], runtime[name]) == []


def test_differences_are_seen() -> None:
    """The comparison itself: a wrong value, type, place or replica is found."""
    import numpy as np
    from value_checks.registry import FLOAT32, Check, differences, encode

    check = Check("one", lambda: None, FLOAT32, needs_x64=False)

    def leaf(value: Any) -> Results:
        return {"leaves": {"": encode(value)}}

    value = np.arange(4, dtype=np.float32)
    assert differences(check, leaf(value), leaf(value * (1 + 1e-7))) == []
    assert differences(check, leaf(value), leaf(value + 1e-2)) != []
    assert differences(check, leaf(value), leaf(value.astype(np.float16))) != []
    assert differences(check, leaf(value), leaf(value.reshape(2, 2))) != []
    assert differences(check, leaf(np.array([1, 2])), leaf(np.array([1, 3]))) != []
    assert differences(check, leaf("a"), leaf("b")) != []
    assert differences(check, leaf(value), {"error": "E"}) == ["plain JAX: no error", "here: E"]
    placed = encode(value) | {"placement": {"committed": True}, "shards": [encode(value), encode(value)]}
    moved = placed | {"placement": {"committed": False}}
    torn = placed | {"shards": [encode(value), encode(value + 1)]}
    assert differences(check, {"leaves": {"": placed}}, {"leaves": {"": moved}}) != []
    assert differences(check, {"leaves": {"": placed}}, {"leaves": {"": torn}}) != []
