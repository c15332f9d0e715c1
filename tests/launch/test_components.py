"""The processes of a runtime as its launcher has them."""

import os
import queue
import signal
import sys
from pathlib import Path

import pytest

from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, Components, RuntimeEvent

pytestmark = pytest.mark.usefixtures("no_leaks")

#: Says what it and a child of it do on SIGTERM, and ends with its lifeline.
PROGRAM = """
import os, subprocess, sys
heard = [sys.executable, "-c", "import signal; print(signal.SIGTERM in signal.pthread_sigmask(0, ()))"]
events = os.fdopen(int(sys.argv[-1]), "w")
print('{"event": "child", "is_deaf": %s}' % subprocess.check_output(heard, text=True).strip().lower(), file=events)
events.flush()
os.read(int(sys.argv[-3]), 1)
sys.exit(3)
"""


@pytest.mark.parametrize("outlast", [True, False])
def test_components_that_outlast_sigterm_end_when_they_are_told_to(outlast: bool, tmp_path: Path) -> None:
    events: queue.SimpleQueue[RuntimeEvent] = queue.SimpleQueue()
    components = Components(os.environ, events.put, outlast_sigterm=outlast)
    try:
        child = components.start("worker-0", [sys.executable, "-c", PROGRAM], tmp_path / "log")
        assert events.get(timeout=30) == ComponentEvent("worker-0", "child", {"is_deaf": outlast})
        child.signal(signal.SIGTERM)
        if not outlast:
            assert events.get(timeout=30) == ComponentEnded("worker-0", -signal.SIGTERM, was_asked=False)
            return
        # It would have ended by SIGTERM before it could end by anything else.
        assert components.stop(["worker-0"], 30) == []
        assert events.get(timeout=30) == ComponentEnded("worker-0", 3, was_asked=True)
    finally:
        components.close(5)
