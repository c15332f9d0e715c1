"""Colocated Python on a real cluster: functions run on the nodes, and nothing of theirs outlives the job."""

import sys
from pathlib import Path

import pytest

from slurm_pathways.sandbox.cluster import Sandbox
from tests.waiting import until

from .jobs import (
    COMMAND,
    COMMAND_TIMEOUT_S,
    GONE_TIMEOUT_S,
    POLL_INTERVAL_S,
    Submit,
    commands,
    remove_kept_logs,
    until_gone,
)

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(180)]

PROGRAM = """
import os, subprocess, time, jax, numpy as np
from jax.experimental import colocated_python as cp
devices = cp.colocated_cpu_devices(jax.devices())
rows = jax.NamedSharding(jax.sharding.Mesh(np.array(devices), ("x",)), jax.P("x"))
where = jax.device_put(np.arange(len(devices), dtype=np.int32), rows)

@cp.colocated_python
def name(x):
    texts = np.array([os.environ["SLURMD_NODENAME"]], np.dtypes.StringDType())
    parts = [jax.device_put(texts, shard.device) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)

@cp.colocated_python
def stay(x):
    subprocess.Popen(["sleep", "717"])
    return x + 1

print("nodes", jax.device_get(name(where)).tolist(), flush=True)
print("sum", jax.device_get(stay(where)).sum(), flush=True)
time.sleep(600)
"""


def test_functions_run_on_the_nodes_and_end_with_the_job(
    submit: Submit, sandbox: Sandbox, tmp_path: Path, runs_root: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = submit(
        4, f"exec {COMMAND} run -q --slices 2 --hosts-per-slice 2 --devices-per-host 2 -- {sys.executable} {program}"
    )
    job.until_said("sum 36\n")
    nodes = sorted(job.nodes())
    assert len(nodes) == 4
    assert f"nodes {[node for node in nodes for _ in range(2)]}\n" in job.said()

    def left() -> list[list[str]]:
        return [
            argv
            for _, argv in commands(sandbox)
            if argv == ["sleep", "717"] or "pathways_runtime.worker.colocated" in argv
        ]

    assert sum(argv == ["sleep", "717"] for argv in left()) == 4
    assert sandbox.run(["scancel", str(job.job_id)], COMMAND_TIMEOUT_S).returncode == 0
    until(lambda: not left(), lambda: f"there is still {left()}", GONE_TIMEOUT_S, POLL_INTERVAL_S)
    until_gone(runs_root)
    job.until_without_steps()
    remove_kept_logs(runs_root)
