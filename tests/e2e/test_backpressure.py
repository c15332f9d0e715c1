"""A client that runs far ahead is held back; nobody's memory grows with what it has asked for."""

import pytest
from client_programs import answer_of

from slurm_pathways.launch.local import LocalRuntime

NUM_CALLS = 50_000
GROWTH_BYTES = 30 << 20


@pytest.mark.timeout(240)
def test_memory_stays_bounded(shared_runtime: LocalRuntime) -> None:
    pids = shared_runtime.pids()
    watched = ["controller", "proxy-0", "worker-0"]
    answer = answer_of(
        shared_runtime.environment(), "run_ahead", NUM_CALLS, *(pids[name] for name in watched), timeout_s=200
    )
    assert answer["value"] == NUM_CALLS + 2000
    for name, before, most in zip(watched, answer["before"], answer["most"], strict=True):
        assert most - before < GROWTH_BYTES, f"{name} grew from {before >> 20} to {most >> 20} MiB"
