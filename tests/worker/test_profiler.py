"""A process's trace: one at a time, of one session."""

import gzip
import json
from pathlib import Path

import pytest

from pathways_runtime.core.ids import SessionId
from pathways_runtime.core.status import Code, StatusError
from pathways_runtime.worker.profiler import Profiler

MINE, OTHERS = SessionId(1), SessionId(2)


def test_a_trace_is_written_for_tensorboard_and_perfetto(tmp_path: Path) -> None:
    profiler = Profiler("node7")
    profiler.start(MINE, 2, 0)
    profiler.stop(MINE, str(tmp_path), "run")
    run = tmp_path / "plugins" / "profile" / "run"
    assert sorted(path.name for path in run.iterdir()) == ["node7.perfetto.json.gz", "node7.xplane.pb"]
    assert b"/host:CPU" in (run / "node7.xplane.pb").read_bytes()
    with gzip.open(run / "node7.perfetto.json.gz", "rt") as file:
        content = json.load(file)
    assert "traceEvents" in content and "metadata" not in content


def test_a_trace_that_has_ended_may_be_written_later(tmp_path: Path) -> None:
    profiler = Profiler("node7")
    profiler.start(MINE, 2, 0)
    profiler.stop(MINE, "", "")
    profiler.stop(MINE, str(tmp_path), "run")
    assert (tmp_path / "plugins" / "profile" / "run" / "node7.xplane.pb").exists()
    with pytest.raises(StatusError, match="no trace goes on on node7"):
        profiler.stop(MINE, str(tmp_path), "run")


def test_one_at_a_time() -> None:
    profiler = Profiler("node7")
    profiler.start(MINE, 2, 0)
    with pytest.raises(StatusError, match="node7 is being traced by another program") as refused:
        profiler.start(OTHERS, 2, 0)
    assert refused.value.status.code is Code.FAILED_PRECONDITION
    with pytest.raises(StatusError, match="no trace goes on"):
        profiler.stop(OTHERS, "/t", "run")
    # Begun again by its own session, it is dropped; one that has ended, or whose session is gone, keeps nobody out.
    profiler.start(MINE, 2, 0)
    profiler.stop(MINE, "", "")
    profiler.start(OTHERS, 2, 0)
    profiler.forget(MINE)
    with pytest.raises(StatusError, match="another program"):
        profiler.start(MINE, 2, 0)
    profiler.forget(OTHERS)
    profiler.start(MINE, 2, 0)
    profiler.forget(MINE)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "plugins").write_text("a file")
    profiler = Profiler("node7")
    profiler.start(MINE, 2, 0)
    with pytest.raises(OSError):
        profiler.stop(MINE, str(tmp_path), "run")
