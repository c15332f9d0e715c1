"""Python functions that programs call run in the client, and give what they do in plain JAX."""

import subprocess
import sys
from typing import Any

import pytest
from client_programs import HERE, answer_of, answers_of_both, run_program

from slurm_pathways.launch.local import LocalRuntime

pytestmark = pytest.mark.timeout(600)

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(shared_runtime: LocalRuntime) -> tuple[Results, Results]:
    """What all checks give in plain JAX and under the runtime: most of the time of the module is spent here."""
    return answers_of_both(shared_runtime.environment(), "callbacks", timeout_s=180)


CHECKS = (
    "debug_print",
    "debug_print_outside_of_jit",
    "debug_callback_in_scan_under_grad_and_vmap",
    "debug_callback_of_a_sharded_operand",
    "debug_callback_in_shard_map",
    "debug_callback_of_each_part",
    "debug_breakpoint",
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
    "functions_run_in_this_process",
    "functions_compute_with_jax",
    "functions_of_deleted_programs_are_freed",
    "the_compiler_asks_how_to_partition",
    "the_compiler_tells_shardings",
    "a_failure_has_its_text",
    "checkify_errors",
)


@pytest.mark.parametrize("name", CHECKS)
def test_same_as_plain_jax(results: tuple[Results, Results], name: str) -> None:
    plain, runtime = results
    assert "error" not in plain[name], f"the check itself is wrong: {plain[name]['error']}"
    assert runtime[name] == plain[name]


def test_every_check_is_compared(results: tuple[Results, Results]) -> None:
    plain, runtime = results
    assert list(plain) == list(runtime) == list(CHECKS)


def test_the_end_of_the_program_waits_for_its_callbacks(shared_runtime: LocalRuntime) -> None:
    program = (
        "import jax, time\n"
        "jax.jit(lambda: jax.debug.callback(lambda: (time.sleep(0.5), print('at the end', flush=True))))()\n"
        "print('over', flush=True)"
    )
    result = run_program(shared_runtime.environment(), "-c", program)
    assert result.stdout.splitlines() == ["over", "at the end"]


def test_a_client_that_dies_in_a_callback_holds_up_nobody(shared_runtime: LocalRuntime) -> None:
    """Its program has collectives over all devices; those of the next client wait until it has ended."""
    dying = subprocess.Popen(
        [sys.executable, "-m", "programs.callback_that_hangs"],
        env=shared_runtime.environment(),
        cwd=HERE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert dying.stdout is not None
        # The test's own deadline is that of this line too.
        assert dying.stdout.readline() == "called\n"
    finally:
        dying.kill()
        dying.communicate()
    answer = answer_of(shared_runtime.environment(), "callback_that_hangs", "--return")
    assert answer == {"value": 36.0}
