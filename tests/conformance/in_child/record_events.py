"""A pytest plugin that writes what happens to each test into a file, one JSON object a line, as it happens.

It runs in the process of JAX's tests and imports nothing of ours. ``jax_conformance.journal`` reads what it writes.
"""

import faulthandler
import hashlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

#: Of a failure's first line; longer ones hold whole programs.
_MESSAGE_LENGTH = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--journal", type=Path, required=True, help="file that lines are appended to")
    group.addoption("--stacks", type=Path, required=True, help="file that SIGUSR1 writes every thread's stack to")
    group.addoption("--done", type=Path, required=True, help="file with ids of tests to leave out, one a line")
    group.addoption("--sample", type=int, default=0, help="how many tests to take; 0 takes all")


def pytest_configure(config: pytest.Config) -> None:
    stacks = config.getoption("--stacks").open("a")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    config.pluginmanager.register(_Recorder(config), "conformance-recorder")


class _Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self._file = config.getoption("--journal").open("a")
        self._done = set(config.getoption("--done").read_text().splitlines())
        self._sample = config.getoption("--sample")
        self._reports: list[pytest.TestReport] = []
        self._broken: list[str] = []

    def _write(self, event: str, **fields: Any) -> None:
        # One write a line, so that a process that is killed leaves whole lines.
        self._file.write(json.dumps({"event": event, "at_s": time.time(), **fields}) + "\n")
        self._file.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken.append(str(report.longrepr).strip().splitlines()[-1])
        elif report.skipped:
            self._broken.append("the whole file is skipped: " + _first_line(report))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._broken:
            return
        num_collected = len(items)
        if self._sample:
            # By a hash: the same tests whatever else is collected, and a larger sample has all of a smaller one.
            chosen = sorted(items, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())[: self._sample]
            wanted = {item.nodeid for item in chosen}
            items[:] = [item for item in items if item.nodeid in wanted]
        self._write("collected", ids=[item.nodeid for item in items], num_collected=num_collected)
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_collection_finish(self) -> None:
        if self._broken:
            self._write("broken", message=self._broken[0][:_MESSAGE_LENGTH])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports.clear()
        self._write("started", id=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        failed = [report for report in self._reports if report.failed]
        skipped = [report for report in self._reports if report.skipped]
        told = (failed or skipped or [None])[0]
        self._write(
            "finished",
            id=nodeid,
            outcome="failed" if failed else "skipped" if skipped else "passed",
            message="" if told is None else _first_line(told),
            duration_s=round(sum(report.duration for report in self._reports), 3),
        )


def _first_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    if isinstance(longrepr, tuple):
        text = str(longrepr[2])
    else:
        crash = getattr(longrepr, "reprcrash", None)
        text = str(longrepr) if crash is None else crash.message
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:_MESSAGE_LENGTH] if lines else ""
