"""``slurm-pathways compile`` for CPU devices, with the real processes; tests/tpu_compile has the same for TPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from client_programs import HERE, answer_of, plain_environment

from slurm_pathways.cli.main import main

COMMAND = str(Path(sys.executable).parent / "slurm-pathways")
DEADLINE_S = 120.0

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.timeout(300)]


def run(command: str, *arguments: object, steps: int = 3, fails: bool = False) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "programs.compiling", str(steps), str(int(fails))]
    return subprocess.run(
        [COMMAND, command, *map(str, arguments), "--", *program],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def entries(cache: Path) -> dict[str, tuple[int, int]]:
    """What lies in a compile cache, and what changes when it is written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in cache.iterdir()}


def test_what_was_compiled_without_devices_is_what_workers_load(tmp_path: Path) -> None:
    cache, report_path = tmp_path / "cache", tmp_path / "report.json"
    options = ["--topology", "cpu:2x2", "--slices", 2, "--compile-cache", cache, "--json", report_path]
    done = run("compile", *options)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["devices"] == [[i, i // 4, i // 2] for i in range(8)]
    # Nothing is executed, and nothing called back; what was put in small pieces is there.
    assert (seen["losses"], seen["told"], seen["batch"], seen["count"]) == ([0.0] * 3, [0.0] * 3, 255.5, 41)
    assert seen["topology"] == "cpu:2x2"
    assert "called back" not in done.stdout

    report: dict[str, Any] = json.loads(report_path.read_text())
    assert (report["topology"], report["devices"], report["failed"]) == ("cpu:2x2", 8, [])
    programs = {program["name"]: program for program in report["programs"]}
    step = programs["jit_train_step"]
    # One row of eight and the weights; the weights and a scalar.
    assert (step["argument_bytes"], step["output_bytes"]) == (64 * 4 + 64 * 64 * 4, 64 * 64 * 4 + 4 + 16)
    assert (step["devices"], step["slices"], step["launches"]) == (8, [0, 1], 3)
    assert step["flops"] >= 2 * 2 * 64 * 64
    assert programs["jit_tell"]["devices"] == 1
    assert {f"{program['key']}.program" for program in report["programs"]} == set(entries(cache))
    assert "  jit_train_step " in done.stderr

    made = entries(cache)
    shape = ["--slices", "2", "--hosts-per-slice", "2", "--devices-per-host", "2"]
    done = run("run", "--local", *shape, "--compile-cache", cache)
    assert done.returncode == 0, done.stderr
    assert entries(cache) == made, "workers compiled what was compiled before, or something else"
    seen, plain = json.loads(done.stdout.splitlines()[-1]), answer_of(plain_environment(8), "compiling", 3, 0)
    np.testing.assert_allclose(seen["losses"], plain["losses"], rtol=1e-5)
    assert (seen["told"], seen["count"], seen["topology"]) == ([2.0] * 3, 41, None)
    assert seen["batch"] == plain["batch"]


def test_what_does_not_compile_is_named_and_makes_the_exit_code(tmp_path: Path) -> None:
    """The program goes on, and is ended when it compiles nothing new. What was in the cache counts as compiled."""
    cache, report_path = tmp_path / "cache", tmp_path / "report.json"
    options = ["--topology", "cpu:2", "--compile-cache", cache, "--json", report_path]
    done = run("compile", *options, "--stop-when-idle", 20, steps=10**9, fails=True)
    assert done.returncode == 1, done.stderr
    report = json.loads(report_path.read_text())
    assert [(failed["name"], failed["code"], failed["devices"]) for failed in report["failed"]] == [
        ("jit__lambda", "NOT_FOUND", 1)
    ]
    assert report["ended_when_idle"]
    assert "jit__lambda on 1 device did not compile: NOT_FOUND: " in done.stderr
    assert "nobody_has_this" in report["failed"][0]["message"]
    made = entries(cache)

    done = run("compile", *options, "--stop-when-idle", 20, "-q", steps=10**9)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert entries(cache) == made
    programs = json.loads(report_path.read_text())["programs"]
    assert {program["name"] for program in programs} == {"jit_train_step"}
    assert all(program["is_from_cache"] for program in programs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "true"], "Missing option '--topology'"),
        (["--topology", "v5e:3x3", "--", "true"], "--topology v5e:3x3: no such topology. Allowed are v5e:XxY"),
        (["--topology", "cpu:2", "--slices", "0", "--", "true"], "0 is not in the range 1<=x<=4096"),
        (["--topology", "cpu:4096x1", "--slices", "2", "--", "true"], "are 8192 hosts; at most 4096 are allowed"),
        (["--topology", "cpu:2", "--compile-cache", "/proc/no", "--", "true"], "the compile cache /proc/no cannot be"),
        (["--topology", "cpu:2"], "Missing argument"),
    ],
)
def test_wrong_use_is_said_before_anything_starts(runs_root: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, ["compile", *arguments], catch_exceptions=False)
    assert result.exit_code == 2
    assert words in result.output.replace("\n", " ")
    assert list(runs_root.iterdir()) == []


@pytest.mark.parametrize(("topology", "extra"), [("v5e:2x2", "tpu"), ("h100:8", "cuda")])
def test_without_the_compiler(runs_root: Path, monkeypatch: pytest.MonkeyPatch, topology: str, extra: str) -> None:
    monkeypatch.setattr("slurm_pathways.launch.compiling.command.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["compile", "--topology", topology, "--", "true"], catch_exceptions=False)
    assert result.exit_code == 2
    assert f"is not installed here: pip install 'slurm-pathways[{extra}]'" in result.output.replace("\n", " ")


def test_a_program_that_is_not_there(runs_root: Path) -> None:
    arguments = ["compile", "--topology", "cpu:2", "--", "/no/such/program"]
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 127
    assert "/no/such/program" in done.stderr
