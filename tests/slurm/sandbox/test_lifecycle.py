"""Small clusters that are brought up and down, or crash on the way: whatever happens, ``down`` leaves nothing."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_pathways.sandbox.cluster import Sandbox
from slurm_pathways.sandbox.errors import SandboxError
from slurm_pathways.sandbox.spec import SandboxSpec
from tests.waiting import until

SandboxCommand = Callable[..., subprocess.CompletedProcess[str]]

UP_TIMEOUT_S = 90.0
NOBODY = 65534
#: Where the system's own Slurm, munge and MariaDB live.
SYSTEM_FOLDERS = [
    *("/etc/slurm", "/etc/munge", "/etc/mysql", "/run/munge", "/run/mysqld", "/var/lib/slurm", "/var/lib/munge"),
    *("/var/lib/mysql", "/var/log/slurm", "/var/log/munge", "/var/spool/slurm", "/var/spool/slurmd", "/run/netns"),
]


@pytest.fixture
def root() -> Iterator[Path]:
    """A short folder that other users can enter."""
    folder = Path(tempfile.mkdtemp(prefix="sandbox-", dir="/tmp"))
    yield folder
    Sandbox(folder).down()
    shutil.rmtree(folder, ignore_errors=True)


def traces(root: Path) -> list[str]:
    """Processes and mounts on this machine that have anything to do with a folder, and the folder."""
    found = [f"folder {root}"] if root.exists() else []
    own = os.getpid()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == own:
            continue
        try:
            texts = [(entry / name).read_bytes() for name in ("cmdline", "environ", "mountinfo")]
            texts.append(os.fsencode((entry / "cwd").readlink()))
        except OSError:
            continue
        if any(os.fsencode(root) in text for text in texts):
            found.append(f"process {entry.name}: {texts[0]!r}")
    return found


def devices() -> set[str]:
    """The machine's network devices that are named as a sandbox's are."""
    names = [path.name for path in Path("/sys/class/net").iterdir()]
    return {name for name in names if name in ("lan", "cut") or name.startswith("port")}


def system_files() -> dict[str, float]:
    """What is in the system's own folders, with times of change."""
    return {
        str(path): path.lstat().st_mtime
        for folder in [*SYSTEM_FOLDERS, "/etc/hosts"]
        if Path(folder).exists()
        for path in [Path(folder), *Path(folder).rglob("*")]
    }


def escaped() -> list[str]:
    """Process ids of what the test lets loose."""
    return subprocess.run(["pgrep", "-x", "-f", "sleep 4711"], capture_output=True, text=True).stdout.split()


def start_up(root: Path, *options: str) -> subprocess.Popen[str]:
    """``up`` of two nodes, under way."""
    return subprocess.Popen(
        [Path(sys.executable).with_name("slurm-pathways"), "sandbox", "up", "--nodes", "2", "--dir", root, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def await_file(pattern: str, root: Path, up: subprocess.Popen[str]) -> None:
    """Wait until ``up`` has come so far that there is a file of this name."""

    def is_there() -> bool:
        assert up.poll() is None, f"up ended without {pattern}: {up.communicate()}"
        return bool(list(root.glob(pattern)))

    until(is_there, f"no {pattern}", UP_TIMEOUT_S)


def test_beside_another_cluster_and_gone_without_a_trace(
    sandbox: Sandbox, sandbox_command: SandboxCommand, root: Path
) -> None:
    before = system_files()
    with start_up(root) as up:
        out, errors = up.communicate(timeout=UP_TIMEOUT_S)
    assert up.returncode == 0, errors
    assert out.startswith("2 nodes are idle after ")
    assert f"slurm-pathways sandbox exec --dir {root} -- sinfo" in out
    small = Sandbox(root)
    assert sorted(small.run(["srun", "-N2", "hostname"], 30).stdout.split()) == ["node0", "node1"]
    assert len(sandbox.run(["srun", "-N8", "hostname"], 30).stdout.split()) == 8
    again = sandbox_command("up", "--dir", str(root))
    assert (again.returncode, "take it down first" in again.stderr) == (1, True)
    with pytest.raises(SandboxError, match="only one of up --netns can be cut"):
        small.partition([0])

    # Processes that do what they can to get away: from a job, of another user, and from the login.
    escape = f"env -i setpriv --reuid={NOBODY} --clear-groups setsid --fork sleep 4711 >/dev/null 2>&1"
    assert small.run(["srun", "-n1", "sh", "-c", escape], 30).returncode == 0
    assert small.run(["sh", "-c", escape], 30).returncode == 0
    assert small.run(["sbatch", "-o", "/dev/null", "--wrap", "sleep 300"], 30).returncode == 0
    assert len(escaped()) == 2

    assert sandbox_command("down", "--dir", str(root)).returncode == 0
    assert traces(root) == []
    assert escaped() == []
    assert system_files() == before
    assert devices() == set()
    assert sandbox.status().is_up
    nothing = sandbox_command("down", "--dir", str(root))
    assert (nothing.returncode, nothing.stderr) == (0, f"there is no sandbox in {root}\n")


@pytest.mark.parametrize(("reached", "options"), [("sandbox.json", ()), ("log/slurmdbd.out", ("--netns",))])
def test_down_after_up_was_killed(root: Path, reached: str, options: tuple[str, ...]) -> None:
    with start_up(root, *options) as up:
        await_file(reached, root, up)
        up.kill()
    assert Sandbox(root).down()
    assert traces(root) == []
    assert devices() == set()


def test_up_that_is_ended_leaves_nothing(root: Path) -> None:
    with start_up(root) as up:
        await_file("log/mariadbd.out", root, up)
        up.send_signal(signal.SIGTERM)
        assert up.wait(30) == 128 + signal.SIGTERM
    assert traces(root) == []


def test_up_that_fails_leaves_nothing_and_says_why(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # MariaDB refuses to run as root unless its options say so.
    monkeypatch.setattr("slurm_pathways.sandbox.render.my_cnf", lambda layout: f"[mariadbd]\ndatadir={layout.data}\n")
    with pytest.raises(SandboxError, match=r"mariadbd ended; the end of .*/mariadbd\.out:\n(.|\n)* as root!"):
        Sandbox(root).up(SandboxSpec(num_nodes=1))
    assert traces(root) == []


def test_folders_that_are_not_a_sandboxes(root: Path) -> None:
    (root / "thesis.tex").touch()
    with pytest.raises(SandboxError, match="has other things in it"):
        Sandbox(root).up(SandboxSpec())
    with pytest.raises(SandboxError, match="is no sandbox"):
        Sandbox(root).down()
    assert (root / "thesis.tex").exists()
    (root / "thesis.tex").unlink()
    with pytest.raises(SandboxError, match=f"there is no sandbox in {root}"):
        Sandbox(root).status()
    for name, words in (("x" * 80, "is too deep"), ("a b", "has characters"), ("no/parent", "there is no folder")):
        with pytest.raises(SandboxError, match=words):
            Sandbox(root / name).up(SandboxSpec())
    (root / "link").symlink_to("/var/lib")
    with pytest.raises(SandboxError, match="is not a folder"):
        Sandbox(root / "link").up(SandboxSpec())
    (root / "link").unlink()
