"""The examples of colocated Python: the values of plain JAX, and no bytes by way of the program."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_programs import PROJECT, plain_environment, run_program

from slurm_pathways.launch.local import LocalRuntime

pytestmark = pytest.mark.timeout(400)

LOADER = PROJECT / "examples" / "data_loading" / "train.py"
CHECKPOINT = PROJECT / "examples" / "host_checkpoint" / "train.py"
#: What a program may send and fetch whose arrays stay on the hosts: constants, specs of results, losses.
SMALL_BYTES = 100_000


def host_buffer_bytes(runtime: LocalRuntime) -> int:
    report: Any = runtime.status(30)
    return int(report["bytes_moved"]["host_buffers"])


def test_hosts_read_the_batches(shared_runtime: LocalRuntime, tmp_path: Path) -> None:
    data, losses = tmp_path / "data", {}
    before = host_buffer_bytes(shared_runtime)
    for name, environ in (("plain", plain_environment()), ("runtime", shared_runtime.environment())):
        path = tmp_path / f"{name}.json"
        options = ["--data", data, "--steps", 40, "--losses", path]
        if not data.exists():
            options.append("--make-data")
        result = run_program(environ, LOADER, *options, timeout_s=180)
        losses[name] = json.loads(path.read_text())
    assert result.stdout.startswith("8 devices, 40 steps: loss ")
    np.testing.assert_allclose(losses["runtime"], losses["plain"], rtol=1e-4, atol=1e-6)
    assert losses["runtime"][-1] < losses["runtime"][0] / 100
    batches_bytes = 40 * 8 * 64 * 33 * 4
    assert host_buffer_bytes(shared_runtime) - before < SMALL_BYTES < batches_bytes / 10


def test_hosts_write_and_read_the_checkpoint(shared_runtime: LocalRuntime, tmp_path: Path) -> None:
    before = host_buffer_bytes(shared_runtime)
    result = run_program(shared_runtime.environment(), CHECKPOINT, "--folder", tmp_path, "--size", 1024, timeout_s=240)
    size_bytes = 2 * 1024 * 1024 * 4 + 1024 * 4
    assert json.loads(result.stdout) == {"devices": 8, "bytes": size_bytes, "files": 3}
    assert host_buffer_bytes(shared_runtime) - before < SMALL_BYTES < size_bytes / 10
    bias = np.load(tmp_path / "step-0" / "first.bias.npy")
    np.testing.assert_array_equal(bias, np.arange(1024, dtype=np.float32))
    assert np.load(tmp_path / "step-0" / "second.weights.npy").std() == pytest.approx(1, abs=0.01)
