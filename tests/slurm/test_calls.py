"""What a run costs slurmctld: commands that ask it something, on the launcher's node and on all others."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from .jobs import COMMAND, Submit

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(180)]

COMMANDS = ("sacct", "salloc", "sattach", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun", "sstat")


def test_a_run_of_n_nodes_calls_at_most_n_and_10_commands(submit: Submit, tmp_path: Path) -> None:
    num_nodes = 3
    folder, log = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name in COMMANDS:
        (folder / name).write_text(f'#!/bin/sh\necho {name} >> {log}\nexec {shutil.which(name)} "$@"\n')
        (folder / name).chmod(0o755)
    job = submit(num_nodes, f"export PATH={folder}:$PATH", f"exec {COMMAND} run -q -- true")
    assert job.wait() == "0:0", job.said()
    called = Counter(log.read_text().split())
    assert called["srun"] == num_nodes + 2, called  # controller, program, and a worker each
    assert called.total() <= num_nodes + 10, called
