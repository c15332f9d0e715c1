"""With one slice, snapshots are in the memory of its own hosts: of each shard's host, and of the next one."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_pathways.launch.local import LocalRuntime
from tests.elastic.kills import DEATHS, Training, behind

PROGRAM = Path(__file__).parent / "programs" / "one_slice.py"


@pytest.mark.timeout(400)
def test_no_snapshot_is_lost_with_an_executor_or_a_host(start_runtime: Callable[..., LocalRuntime]) -> None:
    runtime = start_runtime(num_slices=1, hosts_per_slice=2, devices_per_host=2, num_spares=1)
    try:
        # An executor leaves its memory behind; with a host it goes, and the next host has what it had.
        deaths = [(1, "executor"), (0, "host"), (1, "stopped executor")]
        training = Training(runtime, runtime.clients[0], PROGRAM, len(deaths))
        try:
            for number, (host, death) in enumerate(deaths):
                training.until(f"attempt {number} from step {3 * number}$")
                training.until(f"newest {3 * number + 3}$")
                worker = behind(runtime, host)
                keys, signal_number = DEATHS[death]
                for key in keys:
                    os.kill(worker[key], signal_number)
            assert "ended at step 9" in training.end()
        finally:
            training.close()
    finally:
        runtime.close()
        if runtime.kept_logs is not None:
            shutil.rmtree(runtime.kept_logs.parent)
