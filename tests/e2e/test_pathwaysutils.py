"""pathwaysutils works, initialized when the user likes."""

import pytest
from client_programs import answer_of

from slurm_pathways.launch.local import LocalRuntime


@pytest.mark.parametrize("when", ["before", "after"])
def test_pathwaysutils(shared_runtime: LocalRuntime, when: str) -> None:
    assert answer_of(shared_runtime.environment(), "with_pathwaysutils", when) == {
        "is_pathways": True,
        "num_devices": 8,
        "moved": True,
        "donated": True,
        "halves": [True, True],
        "half_devices": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "whole": True,
        "slices": {"0": [0, 1, 2, 3], "1": [4, 5, 6, 7]},
        "active": [0, 1],
    }
