"""Logs where the user wants them: one per process and host, there also when all went well."""

import os
from pathlib import Path

import pytest

from slurm_pathways.config import ConfigurationError, RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime, Modules, StartupFailed
from slurm_pathways.launch.run_folder import place_log


def test_logs_stay_under_names_that_say_process_and_host(
    fake_modules: Modules, tmp_path: Path, runs_root: Path
) -> None:
    logs = tmp_path / "of all" / "logs"
    here = os.uname().nodename
    with LocalRuntime(RuntimeSpec(hosts_per_slice=2, log_dir=logs), modules=fake_modules) as runtime:
        assert "proxy_0 begins" in runtime.folder.log_of("proxy-0").read_text()
    assert runtime.kept_logs is None
    assert list(runs_root.iterdir()) == []
    # The stand-ins of workers have no executors.
    assert {path.name for path in logs.iterdir()} == {
        f"controller.{here}.log",
        f"proxy-0.{here}.log",
        "worker-0.host-0.log",
        "worker-1.host-1.log",
    }
    # A second run goes on in the same files.
    begun = (logs / f"proxy-0.{here}.log").read_text()
    with LocalRuntime(RuntimeSpec(log_dir=logs), modules=fake_modules):
        pass
    assert (logs / f"proxy-0.{here}.log").read_text() == 2 * begun


def test_a_failure_names_the_folder_and_leaves_nothing_else(
    fake_modules: Modules, tmp_path: Path, runs_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_WORKER_0", "exit:3")
    monkeypatch.setenv("FAKE_CONTROLLER", "mute")
    runtime = LocalRuntime(RuntimeSpec(log_dir=tmp_path / "logs"), modules=fake_modules)
    with pytest.raises(StartupFailed, match="worker_0 cannot go on"), runtime:
        pass
    assert runtime.kept_logs == tmp_path / "logs"
    assert list(runs_root.iterdir()) == []
    assert "worker_0 cannot go on" in (tmp_path / "logs" / "worker-0.host-0.log").read_text()


def test_a_folder_that_cannot_be_made(fake_modules: Modules, tmp_path: Path, runs_root: Path) -> None:
    (tmp_path / "file").touch()
    runtime = LocalRuntime(RuntimeSpec(log_dir=tmp_path / "file" / "logs"), modules=fake_modules)
    with pytest.raises(ConfigurationError, match=r"the log folder .*/file/logs cannot be made: Not a directory"):
        runtime.start()
    assert list(runs_root.iterdir()) == []


def test_what_a_worker_starts_has_logs_there_too(tmp_path: Path) -> None:
    logs, log_dir = tmp_path / "run", tmp_path / "kept"
    logs.mkdir()
    for _ in range(2):
        place_log(logs, log_dir, "worker-3", "node7")
    assert {path.name: path.readlink() for path in logs.iterdir()} == {
        f"{name}-3.log": log_dir / f"{name}-3.node7.log" for name in ("worker", "executor", "python")
    }
