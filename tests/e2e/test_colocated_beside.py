"""Colocated Python beside accelerators: made-up ones (CPU devices by another name), with real CPUs beside them."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from client_programs import HERE, PROJECT, answer_of, plain_environment, run_program

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime, Modules
from tests.runtimes import shared_by_tests

pytestmark = pytest.mark.timeout(400)

LOADER = PROJECT / "examples" / "data_loading" / "train.py"


@pytest.fixture(scope="module")
def accelerators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRuntime]:
    """2 slices x 2 hosts x 2 devices that say that they are GPUs."""
    spec = RuntimeSpec(num_slices=2, hosts_per_slice=2, devices_per_host=2, platform="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE / "accelerators"))
        yield from shared_by_tests(tmp_path_factory, spec, Modules(worker="made_up_worker"))


def test_functions_run_on_the_cpus_beside_the_devices(accelerators: LocalRuntime) -> None:
    answer = answer_of(accelerators.environment(), "colocated_beside", timeout_s=200)
    refusal = answer.pop("program over hosts")
    assert answer == {
        "kinds": ["gpu", "made up chip", "cpu"],
        "ids": list(range(8, 16)),
        "doubled": [[2.0 * (i + 1) for i in range(16)], True],
        "back": 272.0,
        "program on a CPU": 36.0,
        "strings": ["a", "bc"],
    }
    assert "a program for the CPUs beside accelerators must be for those of one host alone" in refusal


def test_hosts_read_the_batches_for_their_devices(accelerators: LocalRuntime, tmp_path: Path) -> None:
    losses = {}
    for name, environ in (("plain", plain_environment()), ("runtime", accelerators.environment())):
        path = tmp_path / f"{name}.json"
        more = [] if (tmp_path / "data").exists() else ["--make-data"]
        run_program(environ, LOADER, "--data", tmp_path / "data", "--steps", 10, "--losses", path, *more, timeout_s=180)
        losses[name] = json.loads(path.read_text())
    np.testing.assert_allclose(losses["runtime"], losses["plain"], rtol=1e-4, atol=1e-6)
