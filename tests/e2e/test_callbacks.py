"""Python functions that programs call run in the client, and give what they do in plain JAX."""

from collections.abc import Callable
from typing import Any

import pytest

from slurm_pathways.launch.local import LocalRuntime

pytestmark = pytest.mark.timeout(600)

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(shared_runtime: LocalRuntime) -> Callable[[], tuple[Results, Results]]:
    """What the checks give in plain JAX and under the runtime, made once."""
    from client_programs import answer_of, plain_environment

    made: list[Results] = []

    def give() -> tuple[Results, Results]:
        if not made:
            for environ in (plain_environment(), shared_runtime.environment()):
                made.append(answer_of(environ, "callbacks", timeout_s=180))
        return made[0], made[1]

    return give


CHECKS = (
    "debug_print",
    "debug_print_outside_of_jit",
    "debug_callback_in_scan_under_grad_and_vmap",
    "debug_callback_of_a_sharded_operand",
    "debug_callback_in_shard_map",
    "pure_callback_types",
    "pure_callback_without_operands",
    "pure_callback_of_shardings",
    "pure_callback_in_shard_map",
    "pure_callback_in_pmap",
    "pure_callback_under_vmap",
    "pure_callback_with_custom_jvp",
    "pure_callback_in_while",
    "large_values",
    "many_programs_share_a_function",
    "ordered_in_scan_and_cond",
    "ordered_across_programs_and_devices",
    "ordered_prints",
    "unordered_io_with_state",
    "functions_compute_with_jax",
    "a_failure_has_its_text",
    "checkify_errors",
)


@pytest.mark.parametrize("name", CHECKS)
def test_same_as_plain_jax(results: Callable[[], tuple[Results, Results]], name: str) -> None:
    plain, runtime = results()
    assert "error" not in plain[name], f"the check itself is wrong: {plain[name]['error']}"
    assert runtime[name] == plain[name]


def test_every_check_is_compared(results: Callable[[], tuple[Results, Results]]) -> None:
    plain, runtime = results()
    assert list(plain) == list(runtime) == list(CHECKS)
