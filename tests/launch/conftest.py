"""Runtimes of stand-ins: what is tested here is the launching."""

import os
import sys
from pathlib import Path

import pytest

from slurm_pathways.launch.local import Modules

FAKES = Path(__file__).parent / "fakes"
FAKE_MODULES = Modules(controller="fake_controller", worker="fake_worker", proxy="fake_proxy")


@pytest.fixture
def fake_modules(monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> Modules:
    """Stand-ins for the runtime's processes; FAKE_<NAME> tells them how to misbehave."""
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    return FAKE_MODULES


@pytest.fixture
def run_in_child(fake_modules: Modules, tmp_path: Path) -> list[str]:
    """The command line, up to the program, of a ``run`` with stand-ins in a process of its own."""
    script = tmp_path / "run_with_fakes.py"
    script.write_text(
        "import os, sys\n"
        "from slurm_pathways.config import resolve\n"
        "from slurm_pathways.launch.local import Modules\n"
        "from slurm_pathways.launch.run import run_local\n"
        f"modules = {fake_modules!r}\n"
        "spec = resolve({'hosts_per_slice': 2}, os.environ)\n"
        "sys.exit(run_local(spec, sys.argv[1:], os.environ, 0, modules))\n"
    )
    assert os.environ["PYTHONPATH"] == str(FAKES)
    return [sys.executable, str(script)]
