"""Whoever is deaf to SIGTERM does not make deaf what users' functions start."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, subprocess
from pathways_runtime.worker.colocated import sigterm
sigterm.outlast()
os.kill(os.getpid(), signal.SIGTERM)
started = subprocess.Popen(["sleep", "60"])
started.terminate()
forked = os.fork()
if not forked:
    signal.pause()
os.kill(forked, signal.SIGTERM)
print(started.wait(), os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
"""


@pytest.mark.parametrize(("blocked", "exit_code", "said"), [((signal.SIGTERM,), 0, "-15 -15\n"), ((), -15, "")])
def test_what_functions_start_hears_sigterm(blocked: tuple[int, ...], exit_code: int, said: str) -> None:
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with process:
        try:
            assert (process.communicate(timeout=60)[0], process.returncode) == (said, exit_code)
        finally:
            process.kill()
