"""Colocated Python: functions on hosts give what they give in plain JAX, in processes that hold up nobody else."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from client_programs import answer_of, answers_of_both

from slurm_pathways.launch.local import LocalRuntime
from tests.waiting import until

pytestmark = pytest.mark.timeout(600)

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(shared_runtime: LocalRuntime) -> tuple[Results, Results]:
    """What all checks give in plain JAX and under the runtime: most of the time of the module is spent here."""
    return answers_of_both(shared_runtime.environment(), "colocated", timeout_s=280)


@pytest.fixture(scope="module")
def on_hosts(shared_runtime: LocalRuntime) -> dict[str, Any]:
    """What the checks of ``programs.colocated_hosts`` give."""
    return answer_of(shared_runtime.environment(), "colocated_hosts", timeout_s=280)


CHECKS = (
    "element_types",
    "trees_and_keywords",
    "arrays_over_all_devices",
    "specialized",
    "other_orders_of_devices",
    "strings",
    "objects_keep_state",
    "objects_end",
    "calls_of_a_thread_are_in_order",
    "calls_of_threads_overlap",
    "failures_have_their_text",
    "programs_use_results",
    "random_keys",
    "wide_types",
)


@pytest.mark.parametrize("name", CHECKS)
def test_same_as_plain_jax(results: tuple[Results, Results], name: str) -> None:
    plain, runtime = results
    assert "error" not in plain[name], f"the check itself is wrong: {plain[name]['error']}"
    assert runtime[name] == plain[name]


def test_every_check_is_compared(results: tuple[Results, Results]) -> None:
    plain, runtime = results
    assert list(plain) == list(runtime) == list(CHECKS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("each_host_has_a_process", {"distinct": 4, "same again": True, "not here": True}),
        ("a_process_sees_the_shards_of_its_host", [[2, 2, 8, host] for host in range(4) for _ in range(2)]),
        ("devices_of_one_host_compute_together", [6.0] * 8),
        ("modules_beside_the_program_are_found", ["int32", 1001.0]),
        ("other_versions_are_refused", [["3.99.1", "host-0"]]),
        ("wrong_results_are_explained", []),
        ("values_stay_as_they_were_given", [True, True, 3.0]),
        ("large_values_pass_over_all_hosts", True),
    ],
)
def test_on_hosts(on_hosts: dict[str, Any], name: str, expected: Any) -> None:
    assert on_hosts[name] == expected


def test_a_crash_is_named_and_the_next_call_works(on_hosts: dict[str, Any]) -> None:
    crash = on_hosts["what_crashes_is_named_and_the_next_call_works"]
    assert len(crash["exit"]) == len(crash["signal"]) == 1, crash
    assert crash["poisoned"], "what depends on it has the same cause"
    assert crash["works"] == [["int32", 6.0], ["int32", 6.0]]
    assert crash["new processes"] == [True, True, *[False] * 6], "other hosts go on"


def test_nothing_that_a_function_has_started_is_left(on_hosts: dict[str, Any]) -> None:
    left = on_hosts["what_a_function_starts_ends_with_its_process"]
    assert left["exit"] == ["exit code 4"], "a child that holds the connection open delays nothing"
    # The program has ended, and its session with it.
    child = left["child"]
    until(lambda: not Path(f"/proc/{child}").exists(), lambda: f"process {child} is still there", 30, 0.05)


HANGING = """
import os, time, jax, numpy as np
from jax.experimental import colocated_python as cp
x = jax.device_put(np.int32(0), cp.colocated_cpu_devices(jax.devices())[0])
print(int(cp.colocated_python(lambda x: x + os.getpid())(x)), flush=True)
jax.block_until_ready(cp.colocated_python(lambda x: time.sleep(100000)).specialize(out_specs_fn=lambda x: x)(x))
"""


def test_a_client_that_dies_leaves_no_process_however_it_hangs(shared_runtime: LocalRuntime) -> None:
    dying = subprocess.Popen(
        [sys.executable, "-c", HANGING], env=shared_runtime.environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert dying.stdout is not None
        # The test's own deadline is that of this line too.
        process = psutil.Process(int(dying.stdout.readline()))
    finally:
        dying.kill()
        dying.communicate()
    until(lambda: not process.is_running(), lambda: f"{process} is still there", 30, 0.05)
