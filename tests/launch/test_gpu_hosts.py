"""A host that may use fewer GPUs than it should: who says so, and where a user reads it."""

import shutil
from pathlib import Path

import pytest

from slurm_pathways.config import ConfigurationError, RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime, StartupFailed
from slurm_pathways.launch.preflight import check_devices


def test_before_anything_starts() -> None:
    spec = RuntimeSpec(platform="cuda", num_slices=2, devices_per_host=2)
    check_devices(spec, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    check_devices(RuntimeSpec(), {"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(
        ConfigurationError, match=r"^--platform cuda: 4 GPUs are needed, and .*CUDA_VISIBLE_DEVICES=4 a"
    ):
        check_devices(spec, {"CUDA_VISIBLE_DEVICES": "4"})


@pytest.mark.timeout(120)
def test_on_a_host_that_only_itself_can_know(no_leaks: None, runs_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node of Slurm."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    runtime = LocalRuntime(RuntimeSpec(platform="cuda", devices_per_host=2))
    with pytest.raises(StartupFailed) as raised, runtime:
        pass
    assert "GPUs 0 to 1 are this host's, and" in str(raised.value)
    assert "CUDA_VISIBLE_DEVICES=3 allows 1" in str(raised.value)
    assert runtime.kept_logs is not None and runs_root in runtime.kept_logs.parents
    shutil.rmtree(runtime.kept_logs.parent)
