"""The client's task without Slurm: signals that come while it ends."""

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_pathways.launch import client_step

DEADLINE_S = 60.0
#: Signals a process without a pause, until it is a zombie.
HAIL = """
import os, sys
pid, number = map(int, sys.argv[1:])
os.kill(pid, number)
print("begun", flush=True)
while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
    os.kill(pid, number)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_late_signal_is_not_what_it_ends_by(tmp_path: Path, number: signal.Signals) -> None:
    """Slurm signals the processes of a step one after the other, and the program may have ended by then."""
    python = [sys.executable, "-I", "-S"]
    lock = tmp_path / "lock"
    argv = [*python, client_step.__file__, "--lock", lock, "--over", tmp_path / "over", "--pid-file", tmp_path / "pid"]
    argv += ["--grace-s", "60", "--kill-after-s", "60", "--", "sh", "-c", "echo ready; read line; exit 5"]
    with lock.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(list(map(str, argv)), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as task:
            assert task.stdin is not None and task.stdout is not None
            assert task.stdout.readline() == b"ready\n"
            with subprocess.Popen(
                [*python, "-c", HAIL, str(task.pid), str(int(number))], stdout=subprocess.PIPE
            ) as sender:
                assert sender.stdout is not None
                assert sender.stdout.readline() == b"begun\n"
                task.stdin.close()
                assert sender.wait(DEADLINE_S) == 0
            assert task.wait(DEADLINE_S) == 5
