"""A command at a terminal, and somebody who types."""

import os
import select
import subprocess
import time
from collections.abc import Mapping

DEADLINE_S = 120.0


class Terminal:
    """A command at a terminal of its own, and what it shows since what was waited for before."""

    def __init__(self, *argv: str, environ: Mapping[str, str] | None = None) -> None:
        self._fd, theirs = os.openpty()
        # Not pty.fork: JAX, which other tests have imported, rightly warns of forks.
        self._process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *argv], stdin=theirs, stdout=theirs, stderr=theirs, env=environ
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, words: str) -> None:
        """Until it has shown this."""
        deadline_s = time.monotonic() + DEADLINE_S
        while words not in self.shown:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"after {DEADLINE_S:g} s it has not shown {words!r}:\n{self.shown}"
            chunk = self._read()
            assert chunk, f"it has ended and not shown {words!r}:\n{self.shown}"
            self.shown += chunk
        self.shown = self.shown.partition(words)[2]

    def wait(self) -> int:
        """Its exit code."""
        while chunk := self._read():
            self.shown += chunk
        os.close(self._fd)
        return self._process.wait()

    def _read(self) -> str:
        try:
            return os.read(self._fd, 1 << 16).decode(errors="replace")
        except OSError:  # EIO: the other side is closed
            return ""


def use_shell(terminal: Terminal, num_devices: int) -> None:
    """Type at ``slurm-pathways shell``: see all devices, compute, interrupt, go on, and leave."""
    terminal.until("In [1]:")
    terminal.type("import jax; print('devices', jax.device_count() * 100)\n")
    terminal.until(f"devices {num_devices * 100}")
    # What is typed before it runs would be taken by the prompt.
    terminal.type("print('turn' + 'ing'); exec('while True: pass')\n")
    terminal.until("turning")
    terminal.type("\x03")
    terminal.until("KeyboardInterrupt")
    terminal.type("print('sum', float(jax.numpy.arange(5.0).sum()) * 100)\n")
    terminal.until("sum 1000.0")
    terminal.type("exit\n")
    assert terminal.wait() == 0
