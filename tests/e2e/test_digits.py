"""The example: learns, in both modes, with the losses of plain JAX."""

import json
from pathlib import Path

import numpy as np
import pytest
from client_programs import PROJECT, plain_environment, run_program

from slurm_pathways.launch.local import LocalRuntime

TRAIN = PROJECT / "examples" / "digits" / "train.py"


@pytest.mark.parametrize("mode", ["data", "pipeline"])
@pytest.mark.timeout(300)
def test_losses_are_those_of_plain_jax(shared_runtime: LocalRuntime, tmp_path: Path, mode: str) -> None:
    losses = {}
    for name, environ in (("plain", plain_environment()), ("runtime", shared_runtime.environment())):
        path = tmp_path / f"{name}.json"
        result = run_program(environ, TRAIN, "--mode", mode, "--epochs", 3, "--losses", path, timeout_s=140)
        losses[name] = json.loads(path.read_text())
    assert losses["runtime"]["accuracies"][-1] >= 0.95
    assert len(losses["runtime"]["losses"]) == 3 * 44
    np.testing.assert_allclose(losses["runtime"]["losses"], losses["plain"]["losses"], rtol=0, atol=1e-5)
    lines = result.stdout.splitlines()
    assert lines[0] == f"8 cpu devices in 2 slice(s), mode {mode}"
    assert [line for line in lines if line.startswith("slice ")], "no utilisation per slice"
    assert [line for line in lines if line.endswith(" steps/s") and not line.startswith("epoch")]
