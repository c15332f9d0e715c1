"""The SPANK plugin without a cluster: it builds, its tests pass, it exports its hooks, its keys are the settings."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_pathways.config import SETTINGS, Kind

ROOT = Path(__file__).parents[2]
SPANK = ROOT / "spank"
HEADER = Path("/usr/include/slurm/spank.h")


def _make(folder: Path, *arguments: str) -> str:
    ran = subprocess.run(["make", "-s", *arguments], cwd=folder, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that nothing is built in the tree."""
    assert shutil.which("gcc"), "gcc is missing: apt-get install gcc"
    return Path(
        shutil.copytree(SPANK, tmp_path_factory.mktemp("spank") / "source", ignore=shutil.ignore_patterns("build"))
    )


@pytest.fixture(scope="module")
def plugin(source: Path) -> Path:
    assert HEADER.exists(), f"{HEADER} is missing: apt-get install libslurm-dev"
    _make(source)
    return source / "build" / "pathways.so"


def test_parsing_and_running_hooks_under_sanitizers(source: Path) -> None:
    assert _make(source, "check").splitlines()[-1] == "task script: ok"


def test_it_exports_its_hooks_and_nothing_else(plugin: Path) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", plugin], capture_output=True, text=True, check=True, timeout=20
    )
    assert sorted(line.split()[-1] for line in listed.stdout.splitlines()) == [
        "plugin_name",
        "plugin_type",
        "plugin_version",
        "slurm_spank_init",
        "slurm_spank_init_post_opt",
        "slurm_spank_job_epilog",
        "slurm_spank_task_init",
        "spank_plugin_version",
    ]


def test_it_needs_only_what_spank_h_declares(plugin: Path) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", plugin], capture_output=True, text=True, check=True, timeout=20
    )
    needed = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert {name for name in needed if name.startswith(("slurm", "spank"))} <= set(
        re.findall(r"\w+", HEADER.read_text())
    )


def test_it_says_which_slurm_it_was_built_for(plugin: Path, source: Path) -> None:
    version = _make(source, "version").strip()
    number = re.search(r"SLURM_VERSION_NUMBER 0x(\w\w)(\w\w)(\w\w)", HEADER.with_name("slurm_version.h").read_text())
    assert number is not None
    major, minor, micro = (int(part, 16) for part in number.groups())
    assert version == f"{major}.{minor:02d}.{micro}"
    assert f"slurm-pathways SPANK plugin for Slurm {version}".encode() in plugin.read_bytes()


def test_without_headers_it_says_what_to_install(source: Path) -> None:
    ran = subprocess.run(
        ["make", "-s", "SLURM_INCLUDE_DIR=/nonexistent", "BUILD=other"],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode != 0
    assert "no Slurm headers in /nonexistent/slurm: install Slurm's development files" in ran.stderr


def test_install(plugin: Path, source: Path, tmp_path: Path) -> None:
    _make(source, "install", f"DESTDIR={tmp_path}")
    installed = {
        str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()
    }
    assert installed == {
        "usr/lib/slurm-pathways/pathways.so": 0o755,
        "usr/libexec/slurm-pathways/slurm-pathways-task": 0o755,
        "etc/slurm/plugstack.conf.d/pathways.conf": 0o644,
    }
    drop_in = (tmp_path / "etc/slurm/plugstack.conf.d/pathways.conf").read_text()
    lines = [line for line in drop_in.splitlines() if not line.startswith("#")]
    assert lines == ["optional /usr/lib/slurm-pathways/pathways.so"]
    assert "@" not in drop_in


def test_the_keys_are_the_settings() -> None:
    table = re.findall(
        r'\{"([a-z-]+)", VARIABLE\("([A-Z_]+)"\), PATHWAYS_([A-Z]+), (\d+), (\d+)\}', (SPANK / "options.c").read_text()
    )
    kinds = dict.fromkeys(Kind, "TEXT") | {kind: kind.name for kind in (Kind.COUNT, Kind.SECONDS, Kind.FLAG)}
    wanted = {
        setting.option.removeprefix("--"): (setting.variable, kinds[setting.kind])
        for setting in SETTINGS
        if setting.variable is not None
    }
    assert {name: (f"SLURM_PATHWAYS_{variable}", kind) for name, variable, kind, _, _ in table} == wanted
    # The plugin may allow more, as it does not know where the run is; it must not refuse what a setting allows.
    for setting in SETTINGS:
        for name, _, kind, minimum, maximum in table:
            if name == setting.option.removeprefix("--") and kind in ("COUNT", "SECONDS"):
                assert int(minimum) <= setting.minimum
                assert int(maximum) >= setting.maximum
