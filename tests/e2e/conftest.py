"""Runtimes that the tests of a module share, and programs that run in them as users' programs do."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime
from tests.runtimes import shared_by_tests

HERE = Path(__file__).parent
# Tests and the programs that they start share modules of this folder; nothing else of the tree gets on the path.
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="module")
def shared_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRuntime]:
    """2 slices x 2 hosts x 2 CPU devices for all tests of a module."""
    yield from shared_by_tests(tmp_path_factory, RuntimeSpec(num_slices=2, hosts_per_slice=2, devices_per_host=2))
