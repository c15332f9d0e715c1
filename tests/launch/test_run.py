import contextlib
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slurm_pathways.launch.run_folder import RunRecord, live_runs, read_record
from tests.waiting import until

DEADLINE_S = 20.0


def _run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, **options)  # type: ignore[call-overload,no-any-return]


@contextlib.contextmanager
def _running(command: list[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    """A run whose program has said ``up``."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == "up\n", f"the program did not start: {line!r} {process.stderr and process.stderr.read()}"
            yield process
        finally:
            process.kill()


def _finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, out, err


def _python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


WAIT_FOR_SIGNAL = """
import signal, sys
numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1]
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print("up")
got = [signal.sigwait(numbers)]
# A second one would be one too many.
while (more := signal.sigtimedwait(numbers, 0.3)) is not None:
    got.append(more.si_signo)
print("got", *[signal.Signals(number).name for number in got])
sys.exit(9)
"""


def test_input_output_arguments_and_exit_code_are_the_programs(run_in_child: list[str]) -> None:
    code = "import sys; print(sys.stdin.read().upper(), sys.argv[1:]); print('to err', file=sys.stderr); sys.exit(7)"
    done = _run([*run_in_child, *_python(code), "--epochs", "3", "-q"], input="in")
    assert done.returncode == 7
    assert done.stdout == "IN ['--epochs', '3', '-q']\n"
    assert done.stderr.splitlines()[-1] == "to err"
    assert "2 devices ready in" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_a_signal_is_passed_on_once(run_in_child: list[str], number: signal.Signals) -> None:
    with _running([*run_in_child, *_python(WAIT_FOR_SIGNAL)]) as process:
        process.send_signal(number)
        code, out, _ = _finish(process)
    assert (code, out) == (9, f"got {number.name}\n")


def test_a_program_killed_by_a_signal_gives_128_and_its_number(run_in_child: list[str]) -> None:
    done = _run([*run_in_child, "sh", "-c", "kill -SEGV $$"])
    assert done.returncode == 128 + signal.SIGSEGV


def test_the_programs_signal_settings_are_as_a_shell_gives_them(run_in_child: list[str]) -> None:
    show = ["grep", "-E", "^Sig(Blk|Ign):", "/proc/self/status"]

    def settings(shown: str) -> dict[str, int]:
        # 32 and 33 are the C library's own; its posix_spawn leaves them ignored.
        libc_own = 1 << 31 | 1 << 32
        return {line.split()[0]: int(line.split()[1], 16) & ~libc_own for line in shown.splitlines()}

    without, within = settings(_run(show).stdout), settings(_run([*run_in_child, *show]).stdout)
    assert len(without) == 2
    assert within == without


def test_descriptors_of_the_caller_reach_the_program_and_ours_do_not(run_in_child: list[str], tmp_path: Path) -> None:
    (tmp_path / "three").write_text("from descriptor 3")
    script = f'exec 3<{tmp_path}/three; exec "$@"'
    code = "import os; print(os.read(3, 99).decode(), sorted(os.listdir('/proc/self/fd'), key=int)[:-1])"
    done = _run(["sh", "-c", script, "sh", *run_in_child, *_python(code)])
    # 4 is that of listing itself... which has been cut off, whatever its number.
    assert done.stdout == "from descriptor 3 ['0', '1', '2', '3']\n"


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("no-such-program", 127, "no-such-program: program not found"),
        ("./no-such-program", 127, "program not found"),
        ("train.py", 127, "did you mean python train.py?"),
        ("./train.py", 126, "not executable; did you mean python ./train.py?"),
        ("/tmp", 126, "is a folder"),
        ("./bad-interpreter", 127, "its interpreter (the first line of ./bad-interpreter) is missing"),
    ],
)
def test_programs_that_cannot_be_run(
    run_in_child: list[str], tmp_path: Path, program: str, code: int, words: str
) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    (tmp_path / "bad-interpreter").write_text("#!/no/such/python\n")
    (tmp_path / "bad-interpreter").chmod(0o755)
    done = _run([*run_in_child, program], cwd=tmp_path)
    assert done.returncode == code
    assert words in done.stderr


def test_a_script_without_interpreter_line_is_run_by_sh(run_in_child: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('echo "from sh: $1"; exit 4\n')
    script.chmod(0o755)
    done = _run([*run_in_child, str(script), "argument"])
    assert (done.returncode, done.stdout) == (4, "from sh: argument\n")


def test_a_failed_start_says_why_at_once(run_in_child: list[str], runs_root: Path) -> None:
    done = _run([*run_in_child, "true"], env={**os.environ, "FAKE_CONTROLLER": "exit:5"})
    assert done.returncode == 125
    assert "controller ended with exit code 5" in done.stderr
    assert "| controller cannot go on: the reason is written here" in done.stderr
    assert _kept_logs(done.stderr, runs_root).joinpath("controller.log").exists()


def test_a_signal_during_the_start_ends_it(run_in_child: list[str], runs_root: Path) -> None:
    environ = {**os.environ, "FAKE_CONTROLLER": "mute"}
    with subprocess.Popen([*run_in_child, "true"], stderr=subprocess.PIPE, text=True, env=environ) as process:
        until(
            lambda: len(live_runs(runs_root)) == 1 and len(live_runs(runs_root)[0][1].components) == 4,
            "start",
            DEADLINE_S,
        )
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "interrupted by SIGTERM" in err


@pytest.mark.parametrize("victim", ["controller", "proxy-0"])
def test_without_its_runtime_the_program_is_told_to_end_and_then_killed(
    run_in_child: list[str], runs_root: Path, victim: str
) -> None:
    environ = {**os.environ, "SLURM_PATHWAYS_FAILURE_GRACE_S": "0.3", "SLURM_PATHWAYS_KILL_AFTER_S": "0.3"}
    code = "import signal, time; signal.signal(15, lambda *_: print('told')); print('up'); time.sleep(600)"
    with _running([*run_in_child, *_python(code)], env=environ) as process:
        os.kill(_pid(runs_root, victim), signal.SIGKILL)
        code, out, err = _finish(process)
    assert code == 128 + signal.SIGKILL
    assert out == "told\n"
    assert f"{victim} was killed by signal 9 (SIGKILL)" in err
    assert "sending it SIGTERM" in err
    assert "sending it SIGKILL" in err
    _kept_logs(err, runs_root)


def test_the_program_survives_the_loss_of_a_host(run_in_child: list[str], runs_root: Path) -> None:
    environ = {**os.environ, "SLURM_PATHWAYS_FAILURE_GRACE_S": "0"}
    code = "import sys; print('up'); sys.stdin.read(); print('went on')"
    with _running([*run_in_child, *_python(code)], env=environ, stdin=subprocess.PIPE) as process:
        os.kill(_pid(runs_root, "worker-1"), signal.SIGKILL)
        assert process.stderr is not None
        said = ""
        while "what its devices held is lost" not in said:
            said += process.stderr.readline()
        code, out, err = _finish(process)
    assert (code, out) == (0, "went on\n")
    _kept_logs(err, runs_root)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_launcher_leaves_nothing(run_in_child: list[str], runs_root: Path, number: signal.Signals) -> None:
    code = "import signal, time; signal.signal(15, lambda *_: exit(0)); print('up'); time.sleep(600)"
    with _running([*run_in_child, *_python(code)]) as process:
        path, record = _recorded(runs_root)
        assert record.program is not None
        program, components = psutil.Process(record.program.pid), [psutil.Process(c.pid) for c in record.components]
        if number is signal.SIGSTOP:
            # The program is stopped, as by Ctrl-Z: SIGTERM alone would wait for ever.
            program.suspend()
        process.kill()
        process.wait(timeout=DEADLINE_S)
        _, alive = psutil.wait_procs([*components, program], timeout=DEADLINE_S)
        assert not alive
        until(lambda: not path.exists(), "the folder to be removed", DEADLINE_S)


def test_what_two_kills_left_is_removed_by_the_next_run(run_in_child: list[str], runs_root: Path) -> None:
    with _running([*run_in_child, *_python("import time; print('up'); time.sleep(600)")]) as process:
        path, record = _recorded(runs_root)
        caretakers = [p for p in psutil.Process(process.pid).children() if "caretaker.py" in " ".join(p.cmdline())]
        assert record.program is not None
        program = psutil.Process(record.program.pid)
        for victim in (*caretakers, psutil.Process(process.pid), program):
            victim.kill()
        process.wait(timeout=DEADLINE_S)
    assert read_record(path) is not None
    old_s = time.time() - 3600
    os.utime(path, (old_s, old_s))
    assert _run([*run_in_child, "true"]).returncode == 0
    assert not path.exists()


#: JAX, where another test has imported it here, warns of every fork; these children call exec at once.
_forks = pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning")


@_forks
def test_ctrl_c_at_a_terminal_reaches_the_program_once(run_in_child: list[str], runs_root: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        command = [*run_in_child, *_python(WAIT_FOR_SIGNAL)]
        os.execv(command[0], command)
    shown = ""
    try:
        shown = _read_until(terminal, "up")
        os.write(terminal, b"\x03")
        shown += _read_until(terminal, "got SIGINT")
        assert os.waitstatus_to_exitcode(_wait_pid(pid)) == 9
        assert "got SIGINT SIGINT" not in shown + _read_rest(terminal)
        assert "\x1b[K" in shown, "on a terminal, progress is updated in place"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(terminal)


@_forks
def test_ctrl_z_stops_and_continues_both(run_in_child: list[str]) -> None:
    """A shell sees the run stop, and continues it with its program."""
    code = "print('u' + 'p'); print('read', input())"
    pid, terminal = pty.fork()
    if pid == 0:
        shell = [sys.executable, str(Path(__file__).parent / "fakes" / "job_shell.py")]
        os.execv(shell[0], [*shell, *run_in_child, sys.executable, "-u", "-c", code])
    try:
        _read_until(terminal, "up\r\n")
        os.write(terminal, b"\x1a")
        _read_until(terminal, "job stopped by SIGTSTP")
        os.write(terminal, b"fg\n")
        _read_until(terminal, "fg")
        os.write(terminal, b"a line\n")
        _read_until(terminal, "read a line")
        _read_until(terminal, "job ended with 0")
        _wait_pid(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(terminal)


def _recorded(runs_root: Path) -> tuple[Path, RunRecord]:
    """The only run, once it has written down its program, which may have begun a little earlier."""
    until(lambda: live_runs(runs_root)[0][1].program is not None, "the record of the program", DEADLINE_S)
    [(path, record)] = live_runs(runs_root)
    return path, record


def _pid(runs_root: Path, component: str) -> int:
    [(_, record)] = live_runs(runs_root)
    return next(process.pid for process in record.components if process.name == component)


def _kept_logs(err: str, runs_root: Path) -> Path:
    """The folder of kept logs that a run names; it is removed after the test, and nothing else may be there."""
    match = re.search(r"the logs are in (\S+)", err)
    assert match is not None, err
    logs = Path(match[1])
    assert [path.name for path in logs.parent.iterdir()] == ["logs"]
    kept = {path.name: path.read_text() for path in logs.iterdir()}
    assert "controller.log" in kept
    moved = runs_root.parent / f"kept-logs-of-{logs.parent.name}"
    shutil.move(logs, moved)
    logs.parent.rmdir()
    return moved


def _wait_pid(pid: int) -> int:
    status: list[int] = []

    def has_ended() -> bool:
        ended, code = os.waitpid(pid, os.WNOHANG)
        status.append(code)
        return ended == pid

    until(has_ended, "the process to end", DEADLINE_S)
    return status[-1]


def _read_until(terminal: int, words: str) -> str:
    shown = ""
    deadline_s = time.monotonic() + DEADLINE_S
    while words not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline_s - time.monotonic()))
        assert ready, f"waited {DEADLINE_S:g} s for {words!r}; there is {shown!r}"
        shown += os.read(terminal, 4096).decode()
    return shown


def _read_rest(terminal: int) -> str:
    shown = ""
    # The other side is gone: reading gives what is left, then EIO.
    with contextlib.suppress(OSError):
        while chunk := os.read(terminal, 4096):
            shown += chunk.decode()
    return shown
