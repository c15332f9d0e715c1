"""Programs of a client that believes in TPU devices, compiled by libtpu for real topologies, on a host without any."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = str(Path(sys.executable).parent / "slurm-pathways")
PROGRAM = Path(__file__).parent / "program.py"
DEADLINE_S = 240.0
ROWS, WIDTH = 256, 512

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.timeout(600)]


def compile_for(
    topology: str, folder: Path, *arguments: str, num_slices: int = 1
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run the program, and the report."""
    report = folder / "report.json"
    options = ["--topology", topology, "--slices", str(num_slices), "--json", str(report)]
    done = subprocess.run(
        [
            COMMAND,
            "compile",
            *options,
            "--compile-cache",
            str(folder / "cache"),
            "--",
            sys.executable,
            PROGRAM,
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return done, json.loads(report.read_text())


def places(shape: tuple[int, int, int], num_slices: int, cores: int) -> set[tuple[int, ...]]:
    x, y, z = map(range, shape)
    return {(s, a, b, c, core) for s in range(num_slices) for a in x for b in y for c in z for core in range(cores)}


@pytest.mark.parametrize(
    ("topology", "num_slices", "kind", "shape", "cores"),
    [
        ("v5e:2x2", 1, "TPU v5 lite", (2, 2, 1), 1),
        ("v5e:4x4", 1, "TPU v5 lite", (4, 4, 1), 1),
        ("v5p:2x2x2", 1, "TPU v5", (2, 2, 2), 1),
        ("v6e:2x4", 1, "TPU v6 lite", (2, 4, 1), 1),
        ("tpu7x:2x2x1", 1, "TPU7x", (2, 2, 1), 2),
        ("v5e:2x2", 2, "TPU v5 lite", (2, 2, 1), 1),
    ],
)
def test_a_training_step_compiles(
    tmp_path: Path, topology: str, num_slices: int, kind: str, shape: tuple[int, int, int], cores: int
) -> None:
    done, report = compile_for(topology, tmp_path, num_slices=num_slices)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["platform"], seen["kind"], seen["loss"]) == ("tpu", kind, 0.0)
    assert seen["narrow"] == [[128, 10], 0.0]
    assert {tuple(place) for place in seen["places"]} == places(shape, num_slices, cores)
    # The second axis of the mesh is between neighbours, or between the cores of a chip.
    if num_slices == 1:
        for one, other in seen["torus"]:
            assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) == (0 if cores == 2 else 1)
    assert seen["reduces"], "no collective in a program over all devices"
    assert seen["has_kernel"], "Pallas's kernel was not compiled by Mosaic"

    (step,) = [program for program in report["programs"] if program["name"] == "jit_train_step"]
    num_devices = len(seen["places"])
    per_slice = num_devices // num_slices
    batch_bytes, weight_bytes = 2 * ROWS * WIDTH // num_devices, 4 * WIDTH * WIDTH // per_slice
    assert (step["devices"], step["slices"]) == (num_devices, list(range(num_slices)))
    assert step["argument_bytes"] == batch_bytes + weight_bytes
    assert step["alias_bytes"] == weight_bytes
    # Two products of matrices on each device, whatever XLA adds.
    assert step["flops"] >= 2 * 2 * ROWS * WIDTH * WIDTH / num_devices
    assert step["generated_code_bytes"] > 0
    assert step["launches"] == 1
    assert not report["failed"]


def test_what_does_not_fit_is_named_and_what_was_compiled_is_found_again(tmp_path: Path) -> None:
    done, report = compile_for("v5e:2x2", tmp_path, "huge")
    assert done.returncode == 1, "a program that goes on after it ran out of memory ended well"
    assert "RESOURCE_EXHAUSTED" in json.loads(done.stdout)["refused"]
    ((name, code, message),) = [(each["name"], each["code"], each["message"]) for each in report["failed"]]
    assert (name, code) == ("jit_huge", "RESOURCE_EXHAUSTED")
    assert "15.75G" in message
    assert "jit_huge on 1 device does not fit into the memory of a device: RESOURCE_EXHAUSTED: " in done.stderr

    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    done, report = compile_for("v5e:2x2", tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(program["is_from_cache"] for program in report["programs"])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == made
    # A slice of many is compiled for as one that is alone.
    done, report = compile_for("v5e:2x2", tmp_path, num_slices=2)
    assert done.returncode == 0, done.stderr
    found = {program["name"] for program in report["programs"] if program["is_from_cache"]}
    assert "jit_twice" in found
    assert "jit_train_step" not in found
