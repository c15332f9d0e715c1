"""Runs the tests in two halves side by side: those that wait for a real Slurm most of the time, and all others.

    python tools/run_tests.py [PYTEST_OPTIONS ...]

The second half's output is shown as it comes, the first half's after it. The exit code is that of the first half that
failed, else 0.
"""

import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

#: Daemons on this machine: their tests wait, and take turns among themselves.
_WAITING = ("tests/slurm", "tests/spank", "tests/native")


def halves(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command of each half."""
    # Not `python -m pytest`, which puts the tree on sys.path: tests are of what is installed.
    pytest = [str(pathlib.Path(sys.executable).with_name("pytest")), *options]
    # Two would write to one cache of results.
    return (
        [*pytest, "-p", "no:cacheprovider", *_WAITING],
        [*pytest, *(f"--ignore={folder}" for folder in _WAITING)],
    )


def run_side_by_side(apart: Sequence[str], shown: Sequence[str]) -> int:
    """Run both; the output of ``apart`` comes last."""
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen(apart, stdout=output, stderr=subprocess.STDOUT)
        try:
            shown_code = subprocess.run(shown, check=False).returncode
            apart_code = beside.wait()
        finally:
            # Interrupted: pytest ends what it has started.
            if beside.poll() is None:
                beside.terminate()
                beside.wait()
        output.seek(0)
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
    return apart_code or shown_code


if __name__ == "__main__":
    # Whoever runs this in the background of a script, or by nohup, has these ignored; so would the programs that tests
    # send them to.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    sys.exit(run_side_by_side(*halves(sys.argv[1:])))
