import json
import socket
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import slurm_pathways
from pathways_runtime.transport.addresses import listen
from pathways_runtime.transport.frames import Channel, FrameCodec
from pathways_runtime.wire.messages import AnyMessage, Hello, Message, Refused, StatusReply, StatusRequest
from slurm_pathways.cli.main import main
from slurm_pathways.launch.run_folder import SCHEMA_VERSION, RunFolder, RunRecord, identify


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_version_and_help() -> None:
    assert _invoke("--version").output == f"slurm-pathways {slurm_pathways.__version__}\n"
    for arguments in (["-h"], ["run", "--help"], ["status", "-h"], ["doctor", "-h"]):
        result = _invoke(*arguments)
        assert result.exit_code == 0
        assert "Usage:" in result.output
    assert "[SLURM_PATHWAYS_DEVICES_PER_HOST]" in _invoke("run", "-h").output.replace("\n" + " " * 31, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slices", "2", "--", "true"], "not inside a Slurm job: SLURM_JOB_ID is missing"),
        (["--local"], "Missing argument"),
        (["--local", "--slices", "0", "--", "true"], "--slices 0: slices must be a whole number from 1 to 4096"),
        (["--local", "--config", "/no/such", "--", "true"], "settings file /no/such cannot be read"),
        (["--local", "--slice", "2", "--", "true"], "No such option"),
        (["--local", "-q", "-v", "--", "true"], "-q and -v exclude each other"),
        (["--local", "--compile-cache", "/proc/no", "--", "true"], "the compile cache /proc/no cannot be written"),
        (["--local", "--run-dir", "/proc/no", "--", "true"], "the folder /proc/no cannot be made"),
        (["--local", "--platform", "cuda", "--slices", "64", "--", "true"], "--platform cuda: 64 GPUs are needed, and"),
    ],
)
def test_wrong_use_is_said_before_anything_starts(runs_root: Path, arguments: list[str], words: str) -> None:
    result = _invoke("run", *arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert list(runs_root.iterdir()) == []


def test_in_a_shell_that_knows_only_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    result = _invoke("run", "--", "true")
    assert result.exit_code == 2
    assert "SLURM_JOB_ID says that this is job 77, but SLURM_JOB_NODELIST is missing" in result.output


def test_in_one_of_many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "4",
    }.items():
        monkeypatch.setenv(name, value)
    result = _invoke("run", "--", "true")
    assert result.exit_code == 2
    assert "one of 4 tasks of a step" in result.output


def test_more_slices_than_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    result = _invoke("run", "--slices", "3", "--", "true")
    assert result.exit_code == 2
    assert "3 slices" in result.output
    assert "the nodes are n[1-2]" in result.output


def test_an_environment_that_contradicts_a_run(monkeypatch: pytest.MonkeyPatch, runs_root: Path) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    result = _invoke("run", "--local", "--", "true")
    assert result.exit_code == 2
    assert "JAX_PLATFORMS=cpu is set" in result.output


REPORT = {
    "schema_version": 1,
    "devices": [{"id": 0, "slice_index": 0, "host": 0, "state": "running"}],
    "workers": [{"host": 0, "slice_index": 0, "state": "bound", "supervisor_pid": 11, "executor_pid": None}],
    "sessions": [{"id": 5, "arrays": 3, "bytes": 4096}],
    "bytes_moved": {"host_buffers": 1, "shared_memory": 2, "socket": 3},
    "waiting": [{"what": "operation 9", "waits_for": "host 0", "since_s": 1.5}],
}


class StandInController:
    """Answers one ``status`` client with ``reply``."""

    def __init__(self, folder: RunFolder, reply: Message) -> None:
        self._reply = reply
        self.received: list[object] = []
        self._sock = listen(folder.address("controller"))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._sock.accept()
        with sock:
            sock.settimeout(10)
            channel: Channel[AnyMessage] = Channel(sock, FrameCodec(AnyMessage))
            while len(self.received) < 2:
                self.received += [frame.message for frame in channel.receive()]
            channel.send(self._reply)  # type: ignore[arg-type]
            sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._thread.join(10)
        self._sock.close()


def _folder(environ: dict[str, str], tmp_path: Path, name: str = "run") -> RunFolder:
    folder = RunFolder.create(environ)
    folder.write(
        RunRecord(
            schema_version=SCHEMA_VERSION,
            run_id=folder.run_id,
            launcher=identify("launcher", 1),
            started_at_unix_s=0.0,
            controller_address=folder.address("controller"),
            components=(),
            program_argv=("python", f"{name}.py"),
        )
    )
    return folder


@pytest.mark.parametrize("found_by", ["being alone", "the environment", "--run"])
def test_status_asks_the_controller(
    runs_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    environ = {"SLURM_PATHWAYS_RUNS": str(runs_root)}
    folder = _folder(environ, tmp_path)
    other = _folder(environ, tmp_path) if found_by != "being alone" else None
    if found_by == "the environment":
        monkeypatch.setenv("SLURM_PATHWAYS_RUN_DIR", str(folder.path))
    options = ["--run", str(folder.path)] if found_by == "--run" else []
    controller = StandInController(folder, StatusReply(1, REPORT))
    try:
        result = _invoke("status", "--json", *options)
    finally:
        controller.close()
        for made in (folder, other):
            if made is not None:
                made.remove(keep_logs=False)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == {**REPORT, "run_dir": str(folder.path)}
    hello, request = controller.received
    assert isinstance(hello, Hello) and hello.role == "status"
    assert request == StatusRequest(1)


def test_status_for_people(runs_root: Path, tmp_path: Path) -> None:
    folder = _folder({"SLURM_PATHWAYS_RUNS": str(runs_root)}, tmp_path)
    controller = StandInController(folder, StatusReply(1, REPORT))
    try:
        result = _invoke("status")
    finally:
        controller.close()
        folder.remove(keep_logs=False)
    assert result.output.splitlines() == [
        f"run {folder.path}",
        "",
        "workers",
        "  host  slice_index  state  supervisor_pid  executor_pid",
        "  0     0            bound  11              -",
        "",
        "devices",
        "  id  slice_index  host  state",
        "  0   0            0     running",
        "",
        "sessions",
        "  id  arrays  bytes",
        "  5   3       4096",
        "",
        "bytes moved",
        "  host_buffers   1",
        "  shared_memory  2",
        "  socket         3",
        "",
        "waiting",
        "  what: operation 9  waits_for: host 0  since_s: 1.5",
    ]


def test_status_refused(runs_root: Path, tmp_path: Path) -> None:
    folder = _folder({"SLURM_PATHWAYS_RUNS": str(runs_root)}, tmp_path)
    controller = StandInController(folder, Refused("another version"))
    try:
        result = _invoke("status")
    finally:
        controller.close()
        folder.remove(keep_logs=False)
    assert result.exit_code == 1
    assert "refuses: another version" in result.output


def test_status_without_or_with_several_runs(runs_root: Path, tmp_path: Path) -> None:
    result = _invoke("status")
    assert result.exit_code == 1
    assert f"no run of yours runs on this machine (looked in {runs_root})" in result.output
    assert "is not the folder of a run" in _invoke("status", "--run", str(tmp_path)).output
    environ = {"SLURM_PATHWAYS_RUNS": str(runs_root)}
    folders = [_folder(environ, tmp_path, name) for name in ("one", "two")]
    result = _invoke("status")
    assert "several runs run on this machine" in result.output
    assert f"{folders[0].path}  python one.py" in result.output
    for folder in folders:
        folder.remove(keep_logs=False)


def test_doctor_as_json(runs_root: Path) -> None:
    result = _invoke("doctor", "--json")
    assert result.exit_code == 0
    assert json.loads(result.output)["is_ok"] is True
