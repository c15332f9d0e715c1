"""Runtimes that several tests share."""

from collections.abc import Iterator

import pytest

from slurm_pathways.config import RUNS_VARIABLE, RuntimeSpec
from slurm_pathways.launch.local import REAL_MODULES, LocalRuntime, Modules


def shared_by_tests(
    tmp_path_factory: pytest.TempPathFactory, spec: RuntimeSpec, modules: Modules = REAL_MODULES
) -> Iterator[LocalRuntime]:
    """A runtime in a folder of runs of its own, which must be empty when it has ended; for a fixture to yield from."""
    root = tmp_path_factory.mktemp("r")
    root.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUNS_VARIABLE, str(root))
        with LocalRuntime(spec, modules=modules) as runtime:
            yield runtime
        assert list(root.iterdir()) == [], "the run left something behind"
