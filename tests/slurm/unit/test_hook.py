import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_pathways.slurm import hook
from slurm_pathways.slurm.hook import NodeProblem, clean_up, main, node_dir, set_up

ME = os.getuid()
MY_GROUP = os.getgid()
JOB = 987654321


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A short path: sockets lie below it."""
    path = Path(f"/tmp/sp-hook-{os.getpid()}")
    yield path
    if path.exists():
        subprocess.run(["rm", "-rf", str(path)], check=True, timeout=20)


def _task(job_id: int = JOB, node: str = "n1", **variables: str) -> subprocess.Popen[bytes]:
    environ = {"SLURM_JOB_ID": str(job_id), "SLURM_PROCID": "0", "SLURMD_NODENAME": node, **variables}
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "print(flush=True); import time; time.sleep(600)"],
        env={name: value for name, value in environ.items() if value},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    # Its environment is in /proc once it has begun.
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_set_up_makes_a_private_folder(state: Path) -> None:
    folder = set_up(state, JOB, ME, MY_GROUP, "n1")
    assert folder == state / str(JOB) / "n1"
    assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, ME)
    assert stat.S_IMODE(state.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o711
    (folder / "kept").touch()
    # The next step of the job finds it as it is.
    assert set_up(state, JOB, ME, MY_GROUP, "n1") == folder
    assert (folder / "kept").exists()


def test_node_names_of_any_kind_stay_below_the_job(state: Path) -> None:
    for name in ("../../etc", "a/b", "", ".", "..", "é", "n" * 60):
        folder = node_dir(state, JOB, name)
        assert folder.parent == state / str(JOB)
        assert len(folder.name) == 8
    assert node_dir(state, JOB, "rack0-n08.example").name == "rack0-n08.example"


def test_a_path_that_is_too_long_for_sockets() -> None:
    with pytest.raises(NodeProblem, match="too long for sockets"):
        set_up(Path("/tmp/" + "x" * 60), JOB, ME, MY_GROUP, "n1")


def test_a_link_in_place_of_the_folder_is_refused(state: Path, tmp_path: Path) -> None:
    (state / str(JOB)).mkdir(parents=True, mode=0o711)
    state.chmod(0o711)
    (state / str(JOB)).chmod(0o711)
    (state / str(JOB) / "n1").symlink_to(tmp_path)
    with pytest.raises(NodeProblem, match="is there already and not a folder of user id"):
        set_up(state, JOB, ME, MY_GROUP, "n1")


def test_a_state_folder_that_others_may_write_is_refused(state: Path) -> None:
    state.mkdir()
    state.chmod(0o777)
    with pytest.raises(NodeProblem, match="that no other may write"):
        set_up(state, JOB, ME, MY_GROUP, "n1")


def test_a_full_disk_is_said(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook, "MIN_FREE_BYTES", 1 << 62)
    with pytest.raises(NodeProblem, match=r"MiB are free in .*: make room on this node"):
        set_up(state, JOB, ME, MY_GROUP, "n1")


def test_clean_up_kills_what_is_left_of_the_job_on_the_node(state: Path) -> None:
    folder = set_up(state, JOB, ME, MY_GROUP, "n1")
    (folder / "sub").mkdir()
    (folder / "sub" / "socket").touch()
    left = _task()
    component = _task(job_id=1, SLURM_JOB_ID_HET_GROUP_1=str(JOB))
    others = {
        "another job": _task(job_id=JOB + 1),
        "another node": _task(node="n2"),
        "no task": _task(SLURM_PROCID=""),
    }
    names = {process.pid: Path(f"/proc/{process.pid}/comm").read_text().strip() for process in (left, component)}
    try:
        told = clean_up(state, JOB, ME, "n1")
        assert sorted(told) == sorted(
            f"killed process {pid} ({name}), which had outlived the job" for pid, name in names.items()
        )
        assert (left.wait(10), component.wait(10)) == (-9, -9)
        assert {name: process.poll() for name, process in others.items()} == dict.fromkeys(others)
        assert not folder.parent.exists()
        # Again, and for a job that never was: nothing to do.
        assert clean_up(state, JOB, ME, "n1") == []
        assert clean_up(state, JOB + 7, ME, "n1") == []
    finally:
        for process in (left, component, *others.values()):
            process.kill()
            process.communicate(timeout=10)


def test_another_user_s_processes_are_not_ours(state: Path) -> None:
    process = _task()
    try:
        assert clean_up(state, JOB, ME + 1, "n1") == []
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_clean_up_spares_whoever_called_it(state: Path) -> None:
    """As root, the epilog itself looks like a process of root's job."""
    environ = {"SLURM_JOB_ID": str(JOB), "SLURM_PROCID": "0", "SLURMD_NODENAME": "n1", "PATH": os.environ["PATH"]}
    script = f"import sys; from slurm_pathways.slurm.hook import main; sys.exit(main({_argv('cleanup', state)!r}))"
    ran = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -c "$1"; echo survived', "sh", script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.stdout, ran.returncode, ran.stderr) == ("survived\n", 0, "")


def test_clean_up_leaves_the_nodes_that_share_the_machine(state: Path) -> None:
    first = set_up(state, JOB, ME, MY_GROUP, "n1")
    second = set_up(state, JOB, ME, MY_GROUP, "n2")
    clean_up(state, JOB, ME, "n1")
    assert not first.exists()
    assert second.exists()
    clean_up(state, JOB, ME, "n2")
    assert not first.parent.exists()


def _argv(context: str, state: Path) -> list[str]:
    return [
        context,
        "--state",
        str(state),
        "--job-id",
        str(JOB),
        "--uid",
        str(ME),
        "--gid",
        str(MY_GROUP),
        "--node",
        "n1",
    ]


def test_the_command(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_argv("setup", state)) == 0
    assert capsys.readouterr().out == f"{state}/{JOB}/n1\n"
    state.chmod(0o777)
    assert main(_argv("setup", state)) == 1
    assert "that no other may write" in capsys.readouterr().err
    assert main(_argv("cleanup", state)) == 0
    assert capsys.readouterr() == ("", "")
    assert not (state / str(JOB)).exists()


def test_it_imports_the_standard_library_only() -> None:
    """It runs as root, in seconds that a step's launch waits for."""
    script = "import sys; import slurm_pathways.slurm.hook; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    begun_s = time.monotonic()
    ran = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(ran.stdout.split())
    assert not loaded & {"jax", "numpy", "msgspec", "click", "yaml", "psutil"}
    assert "slurm_pathways" in loaded
    assert time.monotonic() - begun_s < 30
