"""A command at a terminal, and somebody who types."""

import os
import pty
import select
import time
from collections.abc import Mapping

DEADLINE_S = 120.0


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, *argv: str, environ: Mapping[str, str] | None = None) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execvpe(argv[0], argv, dict(os.environ if environ is None else environ))
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, words: str) -> None:
        """Until ``words`` appear after what has been waited for before."""
        deadline_s = time.monotonic() + DEADLINE_S
        while words not in self.screen:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"no {words!r} in: {self.screen}"
            self.screen += os.read(self._fd, 1 << 16).decode(errors="replace")
        self.screen = self.screen.partition(words)[2]

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)


def use_shell(terminal: Terminal, num_devices: int) -> None:
    """Type at ``slurm-pathways shell``: see all devices, compute, interrupt, go on, and leave."""
    terminal.until("In [1]:")
    terminal.type("import jax; print('devices', jax.device_count() * 100)\n")
    terminal.until(f"devices {num_devices * 100}")
    terminal.type("while True: pass\n\n")
    terminal.type("\x03")
    terminal.until("KeyboardInterrupt")
    terminal.type("print('sum', float(jax.numpy.arange(5.0).sum()) * 100)\n")
    terminal.until("sum 1000.0")
    terminal.type("exit\n")
    assert terminal.wait() == 0
