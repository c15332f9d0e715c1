"""Behind relays, as large clusters have them, programs compute what they compute without; made small by a setting."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_programs import HERE, answer_of

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime

NUM_LAUNCHES = 60


@pytest.fixture
def relayed_runtime(runs_root: Path) -> Iterator[LocalRuntime]:
    """2 slices x 2 hosts x 2 CPU devices; the hosts of a slice are behind a relay."""
    spec = RuntimeSpec(num_slices=2, hosts_per_slice=2, devices_per_host=2, relay_fanout=2)
    with LocalRuntime(spec) as runtime:
        yield runtime
    # Logs are kept where something failed.
    assert not [path for path in runs_root.rglob("*") if path.is_socket()]


@pytest.mark.timeout(240)
def test_values_behind_relays(relayed_runtime: LocalRuntime) -> None:
    assert len(relays_of(relayed_runtime)) == 2
    answer = answer_of(relayed_runtime.environment(), "gang_client", 3, NUM_LAUNCHES, timeout_s=180)
    assert answer["wrong"] == []
    assert answer["checked"] >= NUM_LAUNCHES


@pytest.mark.timeout(240)
def test_a_lost_relay_is_data_loss_of_its_slice_and_the_other_goes_on(relayed_runtime: LocalRuntime) -> None:
    relay = relays_of(relayed_runtime)[0]
    assert relay in (0, 1)
    with subprocess.Popen(
        [sys.executable, "-m", "programs.after_a_loss"],
        env=relayed_runtime.environment(),
        cwd=HERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            assert program.stdout is not None and program.stdout.readline() == "up\n"
            os.kill(relayed_runtime.pids()[f"worker-{relay}"], signal.SIGKILL)
            output, errors = program.communicate("go on\n", timeout=120)
        finally:
            program.kill()
    assert program.returncode == 0, errors[-3000:]
    answer = json.loads(output.splitlines()[-1])
    assert "DATA_LOSS" in answer["failure"] and f"host {relay} (host-{relay})" in answer["failure"], answer
    assert answer["value"] == [81.0] * 8


def relays_of(runtime: LocalRuntime) -> list[int]:
    """The workers whose supervisors are relays."""
    return sorted(int(path.stem.rpartition("-")[2]) for path in runtime.run_dir.glob("relay-*.sock"))
