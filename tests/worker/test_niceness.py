"""Compiling gives way to launches, whatever niceness the executor was started with."""

import os
import subprocess
import sys

import pytest

GIVE_WAY = "import os; from pathways_runtime.worker import control; control._give_way(); print(os.nice(0))"


@pytest.mark.parametrize("niceness", [0, 9])
def test_compiling_gives_way_and_never_asks_for_more_than_it_has(niceness: int) -> None:
    """Only a privileged process may become less nice, and one of a job is not."""
    done = subprocess.run(
        [
            *("setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice"),
            *("nice", "-n", str(niceness), sys.executable, "-c", GIVE_WAY),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    wanted = max(5, min(19, os.nice(0) + niceness))
    assert (done.returncode, done.stdout) == (0, f"{wanted}\n"), done.stderr
