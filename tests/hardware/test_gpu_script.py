"""``gpu.sh`` itself, on CPU: that it runs, what it prints, and that it sees what is wrong."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
SCRIPT = HERE / "gpu.sh"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("hardware_measure", HERE / "measure.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A NamedTuple's annotations are looked up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


measure = _load()


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.timeout(400)
def test_it_runs_and_prints_a_section(tmp_path: Path) -> None:
    output = tmp_path / "section.md"
    command = [SCRIPT, "--platform", "cpu", "--quick", "--python", sys.executable, "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == output.read_text().strip()
    lines = done.stdout.splitlines()
    assert lines[0].startswith("### cpu, 20")
    assert "One slice, one host, one device." in lines[2]
    (values,) = [line for line in lines if line.startswith("* Values against plain JAX on CPU: ")]
    num_agree, _, num_checks = values.partition(" checks agree")[0].rpartition("CPU: ")[2].split()
    assert num_agree == num_checks and int(num_checks) >= 15
    rows = [line for line in lines if line.startswith("| ") and line.endswith(("1/s |", "ms |", "GB/s |"))]
    assert [row.split(" | ")[0] for row in rows] == [
        "| dependent calls",
        "| a call that is waited for",
        "| 4 MiB to the device",
        "| 4 MiB back",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--platform", "tpu"], "gpu.sh: --platform tpu: allowed are cuda and cpu"),
        (["--cuda", "11"], "gpu.sh: --cuda 11: allowed are 12 and 13"),
        (["--speed"], "gpu.sh: unknown option --speed; --help lists them"),
        (["--python"], "gpu.sh: --python needs a value"),
    ],
)
def test_wrong_use(arguments: list[str], words: str) -> None:
    done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert words in done.stderr


def test_help() -> None:
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert done.stdout.startswith("Checks the runtime on this machine's first GPU")


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., tuple[list[str], list[str]]]:
    """Judges what a run on cuda has left; arguments replace what went well."""

    def judge(
        accuracy: float = 0.97, loss: float = 1.0, **values: np.ndarray | list[float]
    ) -> tuple[list[str], list[str]]:
        good: dict[str, Any] = {"matmul.0": [1.0, 1000.0], "matmul_bfloat16.0": [1.0], "bits.0": np.arange(3)}
        for place in ("cpu", "cuda", "here"):
            written = {"losses": [2.0, loss if place == "here" else 1.0], "accuracies": [accuracy]}
            (tmp_path / f"{place}.json").write_text(json.dumps(written))
            changed = values if place == "here" else {}
            arrays = {**good, **{key.replace("__", "."): value for key, value in changed.items()}}
            np.savez(tmp_path / f"{place}.npz", device_kind=np.array(f"device of {place}"), **arrays)
        figure = measure.Figure("calls", "chain_of_calls", {}, "calls_per_s", 1.0, "1/s")
        lines, problems = measure.judge("cuda", tmp_path, 3, [(figure, 54321.0, 1.23456)])
        return lines, problems

    return judge


def test_what_goes_well(results: Callable[..., tuple[list[str], list[str]]]) -> None:
    lines, problems = results(loss=1.00005, matmul__0=[1.1, 1000.1], matmul_bfloat16__0=[1.009])
    assert problems == []
    assert lines[0].startswith("### device of here, ")
    assert lines[4] == (
        "* The digits example, 3 epoch(s): 97.0% held out. Its losses differ from those of plain JAX on the same "
        "device by 5.0e-05 at most, and differ from those of plain JAX on CPU by 5.0e-05 at most."
    )
    assert lines[5] == ("* Values against plain JAX on CPU: 3 of 3 checks agree (bits, matmul, matmul bfloat16).")
    assert lines[-2] == "| calls | 54,321 1/s | 1.23 1/s |"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"accuracy": 0.5}, "the example learned too little: 50.0% held out"),
        (
            {"loss": 1.01},
            "losses differ from those of plain JAX on the same device by 1.0e-02 at most; 0.0001 is allowed",
        ),
        ({"loss": float("nan")}, "losses differ from those of plain JAX on CPU by nan at most; 0.02 is allowed"),
        ({"matmul__0": [1.0, 1000.3]}, "matmul.0: differs by 0.3, of 1000"),
        ({"matmul__0": [1.0, float("nan")]}, "matmul.0: differs by nan, of 1000"),
        ({"matmul_bfloat16__0": [1.02]}, "matmul_bfloat16.0: differs by 0.02, of 1"),
        ({"bits__0": np.array([0, 1, 3])}, "bits.0: differs"),
        ({"bits__0": np.arange(4)}, "bits.0: int64(4,) here, int64(3,) on CPU"),
        ({"more__0": [1.0]}, "the checks gave "),
    ],
)
def test_what_does_not(
    results: Callable[..., tuple[list[str], list[str]]], changes: dict[str, Any], problem: str
) -> None:
    _, problems = results(**changes)
    assert [found for found in problems if found.startswith(problem)], problems
