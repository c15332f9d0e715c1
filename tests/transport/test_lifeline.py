"""Lives of processes, with real ones: children hear of their parent's end and parents of their children's."""

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from pathways_runtime.transport.lifeline import Child, EventWriter, log_tail, spawn, watch_lifeline

from .dataplane_ends import num_descriptors

TIMEOUT_S = 20.0

#: Says that it is ready, then sleeps; ends with 7 when its parent does.
SLEEPER = """
import os, sys, threading
from pathways_runtime.transport.lifeline import EventWriter, watch_lifeline
def number(name): return int(sys.argv[sys.argv.index(name) + 1])
watch = watch_lifeline(number("--lifeline-fd"), lambda: os._exit(7))
print("to the log", flush=True)
EventWriter(number("--events-fd")).write("ready", pid=os.getpid())
threading.Event().wait()
"""


def start(script: str, log_path: Path | None = None) -> Child:
    return spawn([sys.executable, "-c", script], name="child", env=os.environ, log_path=log_path, with_events=True)


def first_event(child: Child) -> dict[str, object]:
    fd = child.take_events_fd()
    with os.fdopen(fd, "rb") as events:
        line: dict[str, object] = json.loads(events.readline())
        return line


def test_a_child_ends_when_its_lifeline_does(tmp_path: Path) -> None:
    fds = num_descriptors()
    child = start(SLEEPER, tmp_path / "log")
    assert first_event(child) == {"event": "ready", "pid": child.pid}
    assert os.getpgid(child.pid) == child.pid
    assert not child.has_ended()
    child.release_lifeline()
    assert child.has_ended(TIMEOUT_S)
    assert child.reap() == 7
    assert child.reap() == 7
    assert (tmp_path / "log").read_text() == "to the log\n"
    assert num_descriptors() == fds


def test_stop_ends_a_child_and_what_it_started() -> None:
    script = """
import subprocess, sys, os, time
from pathways_runtime.transport.lifeline import EventWriter
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)"
grandchild = subprocess.Popen([sys.executable, "-c", stubborn])
EventWriter(int(sys.argv[sys.argv.index("--events-fd") + 1])).write("ready", grandchild=grandchild.pid)
time.sleep(100)
"""
    child = start(script)
    grandchild = psutil.Process(int(str(first_event(child)["grandchild"])))
    assert child.stop(TIMEOUT_S) == -signal.SIGTERM
    # Killed with its group; orphaned, it is reaped by whoever adopts orphans here, if anybody does.
    _, alive = psutil.wait_procs([grandchild], TIMEOUT_S)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(on_loop: bool) -> None:
    script = """
import signal, sys, threading
from pathways_runtime.transport.lifeline import EventWriter
signal.signal(signal.SIGTERM, signal.SIG_IGN)
EventWriter(int(sys.argv[sys.argv.index("--events-fd") + 1])).write("ready")
threading.Event().wait()
"""
    child = start(script)
    assert first_event(child) == {"event": "ready"}
    returncode = asyncio.run(child.stop_on_loop(0.05)) if on_loop else child.stop(0.05)
    assert returncode == -signal.SIGKILL


def test_the_end_of_a_child_is_seen_on_the_loop() -> None:
    async def scenario() -> int:
        child = start(SLEEPER)
        first_event(child)
        waiter, cancelled = asyncio.ensure_future(child.ended()), asyncio.ensure_future(child.ended())
        await asyncio.sleep(0)
        cancelled.cancel()
        child.signal(signal.SIGKILL)
        await asyncio.wait_for(waiter, TIMEOUT_S)
        return child.reap()

    assert asyncio.run(scenario()) == -signal.SIGKILL


def test_a_program_that_does_not_exist_leaves_no_descriptor() -> None:
    fds = num_descriptors()
    with pytest.raises(FileNotFoundError):
        spawn(["/no/such/program"], name="child", env={}, log_path=None, with_events=True)
    assert num_descriptors() == fds


def test_a_watch_can_be_closed_and_then_says_nothing() -> None:
    fds = num_descriptors()
    read, write = os.pipe()
    ended = threading.Event()
    watch = watch_lifeline(read, ended.set)
    assert watch is not None
    watch.close()
    os.close(write)
    assert not ended.is_set()
    assert num_descriptors() == fds


def test_events_without_a_reader_are_dropped() -> None:
    read, write = os.pipe()
    writer = EventWriter(write)
    os.close(read)
    writer.write("nobody listens")
    writer.write("still nobody")
    writer.close()
    EventWriter(None).write("nowhere")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write)


def test_log_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == ""
    log.write_bytes(b"".join(b"line %d\n" % index for index in range(5000)) + b"bad \xff byte")
    assert log_tail(log, 3) == "line 4998\nline 4999\nbad \ufffd byte"
