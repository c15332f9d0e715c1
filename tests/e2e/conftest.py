"""Runtimes that the tests of a module share, and programs that run in them as users' programs do."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pathways.config import RUNS_VARIABLE, RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime

HERE = Path(__file__).parent
# Tests and the programs that they start share modules of this folder; nothing else of the tree gets on the path.
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="module")
def shared_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRuntime]:
    """2 slices x 2 hosts x 2 CPU devices for all tests of a module."""
    yield from run_for_module(tmp_path_factory, RuntimeSpec(num_slices=2, hosts_per_slice=2, devices_per_host=2))


def run_for_module(tmp_path_factory: pytest.TempPathFactory, spec: RuntimeSpec) -> Iterator[LocalRuntime]:
    """A runtime in a folder of runs of its own, which must be empty when it has ended."""
    root = tmp_path_factory.mktemp("r")
    root.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNS_VARIABLE, str(root))
        with LocalRuntime(spec) as runtime:
            yield runtime
        assert list(root.iterdir()) == [], "the run left something behind"
