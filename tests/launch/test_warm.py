"""Runtimes that outlive programs, on this machine, with the real processes."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from slurm_pathways.launch.run_folder import live_runs
from slurm_pathways.launch.warm.commands import without_job
from tests.terminal import Terminal, use_shell
from tests.waiting import until

COMMAND = str(Path(sys.executable).with_name("slurm-pathways"))
DEADLINE_S = 120.0

pytestmark = pytest.mark.usefixtures("no_leaks")

SUM = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
devices = jax.devices()
mesh = Mesh(np.array(devices), ("x",))
total = jax.jit(jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
print([device.id for device in devices], float(total(jnp.arange(1.0, len(devices) + 1))[0]), flush=True)
sys.exit(int(sys.argv[1]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture
def warm(runs_root: Path) -> Iterator[Path]:
    """The run folder of a warm runtime of two hosts; ended after the test if it has not ended."""
    done = run("up", "--local", "--hosts-per-slice", "2", "--failure-grace-s", "0")
    assert done.returncode == 0, done.stderr
    assert "2 devices ready in" in done.stderr
    [(path, _)] = live_runs(runs_root)
    yield path
    if live_runs(runs_root):
        done = run("down", "--force")
        assert done.returncode == 0, done.stderr


@pytest.fixture
def started(warm: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts shell programs on the warm runtime that say ``up``; killed after the test."""
    processes = []

    def start(script: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [COMMAND, "run", "-q", "--", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in processes:
        with process:
            process.kill()


def test_programs_come_and_go(warm: Path, runs_root: Path) -> None:
    before = {component.name: component.pid for component in live_runs(runs_root)[0][1].components}
    for code in (0, 7):
        done = run("run", "--", sys.executable, "-c", SUM, str(code))
        assert (done.returncode, done.stdout) == (code, "[0, 1] 3.0\n"), done.stderr
        assert re.search(r"2 devices ready in \d\.\d s", done.stderr)
        assert "starting" not in done.stderr
    status = json.loads(run("status", "--json").stdout)
    assert {worker["supervisor_pid"] for worker in status["workers"]} == {before["worker-0"], before["worker-1"]}
    assert status["sessions"] == []
    down = run("down")
    assert (down.returncode, down.stderr) == (0, "")
    assert not warm.exists()


def test_each_program_has_a_session_of_its_own(started: Callable[[str], "subprocess.Popen[str]"]) -> None:
    script = f"{sys.executable} -c 'import jax; jax.devices(); print(\"up\", flush=True); input()'"
    # Their input is ours, which ends when they are killed.
    for _ in range(2):
        read, write = os.pipe()
        process = subprocess.Popen(
            [COMMAND, "run", "-q", "--", "sh", "-c", script], stdin=read, stdout=subprocess.PIPE, text=True
        )
        os.close(read)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        sessions = json.loads(run("status", "--json").stdout)["sessions"]
        assert len(sessions) == 1
        os.write(write, b"\n")
        os.close(write)
        assert process.communicate(timeout=DEADLINE_S) == ("", None)
        assert process.returncode == 0


def test_down_leaves_running_programs_alone_unless_forced(
    started: Callable[[str], "subprocess.Popen[str]"], runs_root: Path
) -> None:
    processes = [started("trap 'echo ended; exit 9' TERM; echo up; while :; do sleep 0.1; done") for _ in range(2)]
    refused = run("down")
    assert refused.returncode == 1
    assert "2 of its programs still run; --force ends them too:\n  sh -c trap" in refused.stderr
    assert run("down", "--force").returncode == 0
    for process in processes:
        out, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, out) == (9, "ended\n")
        assert "the keeper of the warm runtime" in err
    assert live_runs(runs_root) == []


def test_what_cannot_be_is_said(warm: Path) -> None:
    more = run("run", "--slices", "3", "--", "true")
    assert more.returncode == 2
    assert (
        f"a warm runtime is here ({warm}), and programs run on it as it is: --slices 3 was asked for, and it has 1"
        in (more.stderr)
    )
    assert run("run", "--hosts-per-slice", "2", "--", "true").returncode == 0
    second = run("up", "--local")
    assert (second.returncode, f"a warm runtime is here already ({warm})" in second.stderr) == (2, True)
    both = run("run", "--local", "--job", "3", "--", "true")
    assert (both.returncode, "--local and --job exclude each other" in both.stderr) == (2, True)
    other = run("run", "--run", "/nonsuch", "--", "true")
    assert (other.returncode, "--run /nonsuch: this is not the folder of a warm runtime" in other.stderr) == (2, True)
    assert run("run", "--run", str(warm), "--", "true").returncode == 0


def test_without_a_warm_runtime(runs_root: Path) -> None:
    none = run("down")
    assert (none.returncode, "there is no warm runtime on this machine" in none.stderr) == (2, True)
    # No job, and nothing warm.
    none = run("run", "--", "true")
    assert (none.returncode, "this is not inside a Slurm job" in none.stderr) == (2, True)
    failed = run("up", "--local", "--run-dir", "/proc/nonsuch")
    assert (failed.returncode, "cannot be made" in failed.stderr) == (2, True)


def test_a_launcher_that_is_killed_takes_its_program_with_it(
    started: Callable[[str], "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    said = tmp_path / "said"
    process = started(f"trap 'echo ended > {said}; exit 9' TERM; echo up; while :; do sleep 0.1; done")
    process.kill()
    until(said.exists, "the program has not ended", DEADLINE_S)
    # Its place is free again.
    until(lambda: json.loads(run("status", "--json").stdout)["sessions"] == [], "its session is open", DEADLINE_S)
    assert run("run", "--", "true").returncode == 0


def test_a_keeper_that_is_killed_leaves_nothing(
    started: Callable[[str], "subprocess.Popen[str]"], runs_root: Path
) -> None:
    process = started("trap 'echo ended; exit 9' TERM; echo up; while :; do sleep 0.1; done")
    [(_, record)] = live_runs(runs_root)
    os.kill(record.launcher.pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (9, "ended\n")


def test_a_lost_proxy_ends_its_program_and_no_other(
    warm: Path, started: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    first, second = started("echo up; exec sleep 600"), started("echo up; exec sleep 600")
    proxies = sorted(
        (process.create_time(), process.pid)
        for process in psutil.process_iter()
        if re.search(rf"pathways_runtime\.proxy .*{re.escape(str(warm))}", " ".join(_argv(process)))
    )
    os.kill(proxies[0][1], signal.SIGKILL)
    _, err = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 128 + signal.SIGTERM
    assert "proxy-0 was killed by signal 9 (SIGKILL)" in err
    assert second.poll() is None
    assert run("run", "--", "true").returncode == 0
    assert run("down", "--force").returncode == 0
    # Something of the runtime had failed: its logs stay.
    assert "was killed by signal 9" in (warm / "logs" / "keeper.log").read_text()
    shutil.rmtree(warm)


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_a_shell_at_which_one_types(warm: Path) -> None:
    terminal = Terminal("env", "TERM=dumb", COMMAND, "shell")
    use_shell(terminal, 2)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=DEADLINE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(self._path)


def _request(path: str, method: str, url: str, token: str | None) -> tuple[int, Any]:
    connection = _UnixConnection(path)
    headers = {"Authorization": f"token {token}"} if token else {}
    connection.request(method, url, body="{}" if method == "POST" else None, headers=headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text else None


def _execute(connection_file: str, code: str) -> str:
    client = BlockingKernelClient(connection_file=connection_file)
    client.load_connection_file()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=DEADLINE_S)
        printed: list[str] = []

        def keep(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        reply = client.execute_interactive(code, timeout=DEADLINE_S, output_hook=keep)
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(printed)
    finally:
        client.stop_channels()


def test_a_notebook_with_two_kernels(warm: Path) -> None:
    with subprocess.Popen([COMMAND, "notebook"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = ""
            while not (found := re.search(r"ssh -N -L 8888:(\S+) .*\n.*token: in (\S+)\)", said)):
                line = process.stderr.readline()
                assert line, said
                said += line
            path, token_file = found.groups()
            until(lambda: Path(path).exists(), "Jupyter does not listen", DEADLINE_S)
            assert (Path(token_file).stat().st_mode & 0o777, Path(path).stat().st_mode & 0o777) == (0o600, 0o600)
            token = Path(token_file).read_text().strip()
            assert _request(path, "GET", "/api/kernels", None)[0] == 403
            kernels = [_request(path, "POST", "/api/kernels", token)[1]["id"] for _ in range(2)]
            for number, kernel in enumerate(kernels):
                code = f"import jax; print(jax.device_count(), float(jax.numpy.arange(4.0).sum()) + {number})"
                assert _execute(f"{warm}/kernel-{kernel}.json", code) == f"2 {6.0 + number}\n"
            assert len(json.loads(run("status", "--json").stdout)["sessions"]) == 2
            for kernel in kernels:
                assert _request(path, "DELETE", f"/api/kernels/{kernel}", token)[0] == 204
            listening = {
                c.laddr for p in psutil.Process(process.pid).children(recursive=True) for c in p.net_connections("inet")
            }
            assert listening == set()
        finally:
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
        assert process.wait(DEADLINE_S) in (0, 128 + signal.SIGTERM)


@pytest.mark.parametrize("words", [["--job", "7"], ["--job=7"]])
def test_a_command_line_without_its_job(words: list[str]) -> None:
    line = ["run", "-q", *words, "--", "prog", "--job", "8"]
    assert without_job(line) == ["run", "-q", "--", "prog", "--job", "8"]
