import json
from pathlib import Path

import pytest

from pathways_runtime.worker import private_sockets
from slurm_pathways.doctor import (
    Level,
    as_json,
    as_text,
    check_collectives,
    check_environment,
    check_jax,
    check_open_files,
    check_python,
    check_shared_memory,
    examine,
)


@pytest.mark.parametrize(
    ("version", "level", "words"),
    [
        ("0.10.2", Level.OK, "0.10.2, tested"),
        ("0.10.1", Level.OK, "0.10.1, tested"),
        ("0.12.0.1", Level.OK, "0.12.0.1, tested"),
        ("0.12.0", Level.WARNING, "0.12.0, not tested (tested: 0.10.1, 0.10.2, 0.12.0.1)"),
        ("0.99.0.dev20270101+abc", Level.WARNING, "not tested"),
        ("0.10.0", Level.ERROR, "too old"),
        ("0.4.38", Level.ERROR, "too old"),
        (None, Level.ERROR, "not installed"),
    ],
)
def test_jax(version: str | None, level: Level, words: str) -> None:
    finding = check_jax("jaxlib", version)
    assert (finding.subject, finding.level) == ("jaxlib", level)
    assert words in finding.found
    assert bool(finding.remedy) == (level is not Level.OK)


@pytest.mark.parametrize(
    ("version", "instead"), [("0.11.1", "0.10.2"), ("0.12.0", "0.10.2"), ("0.12.1", "0.12.0.1"), ("0.13.0", "0.12.0.1")]
)
def test_a_jax_that_was_never_tested_names_one_that_was(version: str, instead: str) -> None:
    assert check_jax("jax", version).remedy == f"if it misbehaves: pip install jax=={instead}"


def test_python() -> None:
    for minor in (11, 12, 13):
        assert check_python((3, minor, 7)).level is Level.OK
    assert check_python((3, 99, 0)).level is Level.WARNING


def test_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert private_sockets.LIBRARY.exists(), "install slurm-pathways where there is a C compiler"
    assert check_collectives({}).level is Level.OK
    # Of no machine that there is, then of none at all.
    library = tmp_path / "library.so"
    library.write_bytes(b"noise")
    monkeypatch.setattr(private_sockets, "LIBRARY", library)
    damaged = check_collectives({})
    assert (damaged.level, damaged.found.partition(": ")[0]) == (Level.WARNING, "plain TCP")
    assert f"{library} cannot be preloaded: ERROR: ld.so: object '{library}'" in damaged.found
    library.unlink()
    missing = check_collectives({})
    assert (missing.level, missing.remedy.partition(",")[0]) == (Level.WARNING, "install a C compiler (gcc")
    assert missing.found.startswith(f"plain TCP: {library} is missing: there was no C compiler")


def test_memory_and_files() -> None:
    assert check_shared_memory(True, 32 << 30, 64 << 20).level is Level.OK
    assert check_shared_memory(True, 1 << 30, 64 << 20).level is Level.WARNING
    assert check_shared_memory(False, 32 << 30, 0).level is Level.ERROR
    assert check_open_files(None).level is Level.OK
    assert check_open_files(1 << 20).level is Level.OK
    assert check_open_files(256).level is Level.WARNING


def test_environment() -> None:
    findings = check_environment({"JAX_PLATFORMS": "cpu", "https_proxy": "http://proxy:3128"})
    assert [finding.level for finding in findings] == [Level.ERROR, Level.OK]
    assert "JAX_PLATFORMS=cpu" in findings[0].found
    assert "https_proxy set" in findings[1].found


def test_this_machine(runs_root: Path) -> None:
    findings = examine({"SLURM_PATHWAYS_RUNS": str(runs_root), "PATH": str(runs_root)})
    assert not [finding for finding in findings if finding.level is Level.ERROR]
    report = json.loads(as_json(findings))
    assert (report["schema_version"], report["is_ok"]) == (1, True)
    assert {"python", "jax", "jaxlib", "shared memory", "open files"} <= {f["subject"] for f in report["findings"]}
    assert all(set(f) == {"subject", "level", "found", "remedy"} for f in report["findings"])
    assert as_text(findings).startswith("ok       python: ")


def test_a_folder_of_runs_that_is_open_to_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    [finding] = [f for f in examine({"SLURM_PATHWAYS_RUNS": str(tmp_path), "PATH": ""}) if f.level is Level.ERROR]
    assert finding.subject == "folder of runs"
    assert "open to other users" in finding.found
