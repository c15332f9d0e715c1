"""How ``make`` finds a Python, on machines that have none: played by stand-ins for the system's commands."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "find-python"
TOO_OLD = "#!/bin/bash\nexit 1\n"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A PATH with only stand-ins: a Python that is too old, a user that may not install."""
    folder = tmp_path / "bin"
    folder.mkdir()
    _add(folder, "python3", TOO_OLD)
    _add(folder, "id", "#!/bin/bash\necho 1000\n")
    _add(folder, "apt-cache", "#!/bin/bash\nexit 0\n")
    _add(folder, "apt-get", "#!/bin/bash\nexit 1\n")
    return folder


def _add(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def _find(commands: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", str(SCRIPT)], env={"PATH": str(commands), **environ}, capture_output=True, text=True, timeout=60
    )


def test_the_first_that_is_new_enough(commands: Path) -> None:
    (commands / "python3.12").symlink_to(sys.executable)
    found = _find(commands)
    assert (found.returncode, found.stdout) == (0, f"{commands}/python3.12\n")


def test_the_one_that_is_asked_for(commands: Path) -> None:
    (commands / "python3.12").symlink_to(sys.executable)
    assert _find(commands, PYTHON=sys.executable).stdout == f"{sys.executable}\n"


def test_who_may_not_install_is_told_what_to_install(commands: Path) -> None:
    found = _find(commands)
    assert found.returncode == 1
    assert "sudo apt-get install python3" in found.stderr
    assert found.stdout == ""


def test_root_gets_it_installed(commands: Path) -> None:
    _add(commands, "id", "#!/bin/bash\necho 0\n")
    _add(
        commands,
        "apt-get",
        f'#!/bin/bash\n[ "$1" = install ] && /bin/ln -s {sys.executable} {commands}/python3.13\nexit 0\n',
    )
    found = _find(commands)
    assert (found.returncode, found.stdout) == (0, f"{commands}/python3.13\n")
    assert "installing python3" in found.stderr


def test_without_apt(commands: Path) -> None:
    (commands / "apt-get").unlink()
    found = _find(commands)
    assert found.returncode == 1
    assert "install one, or name it with PYTHON=..." in found.stderr
