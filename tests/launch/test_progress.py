import io

import pytest

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, describe_end
from slurm_pathways.launch.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _tell(progress: Progress) -> None:
    progress.starting()
    progress.hosts({"host-0": 0.5})
    progress.hosts({"host-0": 0.5, "host-1": 0.75})
    progress.ready(1.04, "/logs")
    progress.event(ComponentEvent("controller", "ready", {"took_s": 1}), 1.0)
    progress.event(ComponentEnded("worker-0", -9, was_asked=False), 2.0)


SPEC = RuntimeSpec(hosts_per_slice=2)
HOSTS = "slurm-pathways: hosts ready: 2 of 2: host-0 (0.5 s), host-1 (0.8 s)\n"
READY = "slurm-pathways: 2 devices ready in 1.0 s; logs in /logs\n"


def test_a_file_gets_one_line_per_stage() -> None:
    stream = io.StringIO()
    _tell(Progress(SPEC, 0, stream))
    assert stream.getvalue() == HOSTS + READY


def test_quiet_says_only_what_fails() -> None:
    stream = io.StringIO()
    progress = Progress(SPEC, -1, stream)
    _tell(progress)
    assert stream.getvalue() == ""
    progress.line("it failed")
    assert stream.getvalue() == "slurm-pathways: it failed\n"


def test_verbose_tells_every_event() -> None:
    stream = io.StringIO()
    _tell(Progress(SPEC, 1, stream))
    assert stream.getvalue() == (
        HOSTS
        + READY
        + "slurm-pathways:    1.00 s controller: ready took_s=1\n"
        + "slurm-pathways:    2.00 s worker-0: was killed by signal 9 (SIGKILL), "
        + "perhaps by the kernel for want of memory\n"
    )


def test_a_terminal_is_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    progress = Progress(SPEC, 0, stream)
    _tell(progress)
    start = "\r\x1b[Kslurm-pathways: "
    assert stream.getvalue() == (
        f"{start}starting 1 slice x 2 ho{start}hosts ready: 1 of 2: ho\r\x1b[K{HOSTS}\r\x1b[K{READY}"
    )


def test_a_failure_begins_a_line_of_its_own() -> None:
    stream = Terminal()
    progress = Progress(SPEC, 0, stream)
    progress.starting()
    progress.line("it failed")
    assert stream.getvalue().endswith("\nslurm-pathways: it failed\n")


def test_of_many_hosts_the_latest_are_named() -> None:
    stream = io.StringIO()
    progress = Progress(RuntimeSpec(hosts_per_slice=20), 0, stream)
    progress.hosts({f"host-{n}": 1.0 for n in range(20)})
    assert "20 of 20: …, host-12 (1.0 s)" in stream.getvalue()
    assert "host-11 " not in stream.getvalue()


def test_ends_in_words() -> None:
    assert describe_end(0) == "ended with exit code 0"
    assert describe_end(-15) == "was killed by signal 15 (SIGTERM)"
    assert describe_end(-60) == "was killed by signal 60 (unknown)"
