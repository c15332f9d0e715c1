import os
import queue
import signal
import stat
from pathlib import Path

import pytest

from slurm_pathways.config import ConfigurationError, RuntimeSpec
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent, RuntimeEvent
from slurm_pathways.launch.local import LocalRuntime, Modules, StartupFailed
from slurm_pathways.launch.restarts import MAX_SHORT_LIVES
from slurm_pathways.launch.run_folder import live_runs
from tests.waiting import until


def test_starts_every_process_and_leaves_nothing(fake_modules: Modules, runs_root: Path) -> None:
    spec = RuntimeSpec(num_slices=2, hosts_per_slice=2)
    with LocalRuntime(spec, modules=fake_modules) as runtime:
        assert set(runtime.pids()) == {"controller", "worker-0", "worker-1", "worker-2", "worker-3", "proxy-0"}
        assert list(runtime.hosts_ready()) == ["host-0", "host-1", "host-2", "host-3"]
        assert stat.S_IMODE(runtime.run_dir.stat().st_mode) == 0o700
        assert runtime.run_dir.parent == runs_root
        [(path, record)] = live_runs(runs_root)
        assert path == runtime.run_dir
        assert {component.name: component.pid for component in record.components} == runtime.pids()
        assert record.controller_address == runtime.controller_address
        environment = runtime.environment()
        assert environment["JAX_BACKEND_TARGET"] == f"grpc://unix:{runtime.run_dir}/proxy-0.sock"
    assert runtime.kept_logs is None
    assert list(runs_root.iterdir()) == []


def test_more_clients_get_proxies_of_their_own(fake_modules: Modules) -> None:
    with LocalRuntime(RuntimeSpec(), modules=fake_modules) as runtime:
        second = runtime.new_proxy()
        assert runtime.environment(second)["JAX_BACKEND_TARGET"].endswith("/proxy-1.sock")
        assert "proxy-1" in runtime.pids()
        runtime.close_proxy(second)
        assert "proxy-1" not in runtime.pids()
        assert runtime.failure is None
        third = runtime.new_proxy()
        assert third.proxy == "proxy-2"


def test_a_component_that_fails_at_start_is_explained(
    fake_modules: Modules, monkeypatch: pytest.MonkeyPatch, runs_root: Path
) -> None:
    monkeypatch.setenv("FAKE_WORKER_1", "exit:3")
    monkeypatch.setenv("FAKE_CONTROLLER", "mute")
    runtime = LocalRuntime(RuntimeSpec(hosts_per_slice=2), modules=fake_modules)
    with pytest.raises(StartupFailed) as failure, runtime:
        pass
    message = str(failure.value)
    assert "worker-1 ended with exit code 3" in message
    assert "worker_1 cannot go on: the reason is written here" in message
    assert runtime.kept_logs is not None
    assert [path.name for path in runtime.kept_logs.parent.iterdir()] == ["logs"]
    assert live_runs(runs_root) == []
    _remove(runtime.kept_logs)


def test_of_what_ends_a_start_the_first_thing_is_told(fake_modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CONTROLLER", "failed:there is no such network")
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def note(event: RuntimeEvent) -> None:
        if isinstance(event, ComponentEnded):
            ended.put(event.component)

    runtime = LocalRuntime(RuntimeSpec(), modules=fake_modules, on_event=note)
    try:
        runtime.start()
        # It has ended before anybody has looked at why.
        assert ended.get(timeout=30) == "controller"
        with pytest.raises(StartupFailed, match=r"^the runtime did not start: there is no such network$"):
            runtime.check_startup()
    finally:
        runtime.close()
    assert runtime.kept_logs is not None
    _remove(runtime.kept_logs)


def test_a_start_that_takes_too_long_names_who_is_missing(
    fake_modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_PROXY_0", "mute")
    runtime = LocalRuntime(RuntimeSpec(startup_timeout_s=1.5), modules=fake_modules)
    with pytest.raises(StartupFailed, match=r"within 1\.5 s; missing: proxy-0\n") as failure, runtime:
        pass
    assert "proxy_0 begins" in str(failure.value)
    assert runtime.kept_logs is not None
    _remove(runtime.kept_logs)


def test_a_killed_worker_is_started_again_and_its_logs_stay(fake_modules: Modules, runs_root: Path) -> None:
    events: list[RuntimeEvent] = []
    runtime = LocalRuntime(RuntimeSpec(hosts_per_slice=2), modules=fake_modules, on_event=events.append)

    def num_registered() -> int:
        return sum(
            isinstance(e, ComponentEvent) and (e.component, e.name) == ("worker-0", "registered") for e in events
        )

    with runtime:
        for life in range(1, MAX_SHORT_LIVES + 1):
            until(lambda life=life: num_registered() == life, "worker-0 did not register", 20)
            os.kill(runtime.pids()["worker-0"], signal.SIGKILL)
        until(lambda: "worker-0" not in runtime.pids(), "there is a sixth worker-0", 20)
        [(_, record)] = live_runs(runs_root)
        # A warm runtime takes programs still.
        runtime.close_proxy(runtime.new_proxy())
    assert runtime.failure is None
    assert "worker-1" in {component.name for component in record.components}
    ends = [event for event in events if isinstance(event, ComponentEnded)]
    assert [end.will_restart for end in ends if end.component == "worker-0"] == [True, True, True, True, False]
    assert {end.component for end in ends if end.was_asked} == {"controller", "worker-1", "proxy-0", "proxy-1"}
    assert runtime.kept_logs is not None
    assert (runtime.kept_logs / "worker-0.log").read_text().count("worker_0 begins") == MAX_SHORT_LIVES
    _remove(runtime.kept_logs)


def test_a_worker_that_is_killed_for_being_stuck_is_started_again(fake_modules: Modules) -> None:
    with LocalRuntime(RuntimeSpec(), modules=fake_modules) as runtime:
        stopped = runtime.pids()["worker-0"]
        until(lambda: runtime._restarts.is_another_due("worker-0", 0.0), "worker-0 did not register", 20)
        os.kill(stopped, signal.SIGSTOP)
        runtime._note(ComponentEvent("controller", "supervisor_stuck", {"worker": 0, "name": "host-0"}))
        until(lambda: runtime.pids().get("worker-0", stopped) != stopped, "there is no other worker-0", 20)
    assert runtime.kept_logs is not None
    _remove(runtime.kept_logs)


def test_a_component_that_ignores_its_lifeline_is_killed(
    fake_modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_pathways.launch.local.CLOSE_GRACE_S", 0.3)
    monkeypatch.setenv("FAKE_WORKER_0", "deaf")
    with LocalRuntime(RuntimeSpec(), modules=fake_modules) as runtime:
        pass
    assert runtime.kept_logs is not None
    _remove(runtime.kept_logs)


@pytest.mark.parametrize("keep", [False, True])
def test_a_run_folder_of_the_users_choice(fake_modules: Modules, tmp_path: Path, keep: bool) -> None:
    mine = tmp_path / "mine"
    if keep:
        mine.mkdir(mode=0o700)
    with LocalRuntime(RuntimeSpec(run_dir=mine), modules=fake_modules) as runtime:
        assert runtime.run_dir == mine
    assert mine.exists() == keep, "a folder that was there before stays, empty"


def test_a_folder_in_use_or_too_deep_is_refused(fake_modules: Modules, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir(mode=0o700)
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ConfigurationError, match="is not empty"):
        LocalRuntime(RuntimeSpec(run_dir=tmp_path / "full"), modules=fake_modules).start()
    with pytest.raises(ConfigurationError, match="107 is the most that Unix sockets allow"):
        LocalRuntime(RuntimeSpec(run_dir=tmp_path / ("x" * 90)), modules=fake_modules).start()
    with pytest.raises(ConfigurationError, match="has # and % in its path"):
        LocalRuntime(RuntimeSpec(run_dir=tmp_path / "1%#"), modules=fake_modules).start()


def test_the_root_must_be_private(fake_modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "private")
    for name, words in (("open", "open to other users"), ("link", "is not a folder but a link")):
        monkeypatch.setenv("SLURM_PATHWAYS_RUNS", str(tmp_path / name))
        with pytest.raises(ConfigurationError, match=words):
            LocalRuntime(RuntimeSpec(), modules=fake_modules).start()


def test_what_the_dead_have_left_is_removed_by_the_next_run(fake_modules: Modules, runs_root: Path) -> None:
    """A run that was killed, one that was killed while it removed its folder, and logs that were kept."""
    for name, files in (("a", ("run.json", "run.lock")), ("b", ("run.lock", "credentials.pem")), ("c", ())):
        folder = runs_root / f"run-{name}"
        (folder / "logs").mkdir(parents=True)
        for file in files:
            (folder / file).touch()
        os.utime(folder, (0, 0))
    with LocalRuntime(RuntimeSpec(), modules=fake_modules) as runtime:
        assert {path.name for path in runs_root.iterdir()} == {"run-c", runtime.folder.run_id}
    _remove(runs_root / "run-c" / "logs")


def _remove(logs: Path) -> None:
    """Kept logs are right in these tests, and a leak in all others."""
    for path in logs.iterdir():
        path.unlink()
    logs.rmdir()
    logs.parent.rmdir()
