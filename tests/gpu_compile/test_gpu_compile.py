"""Programs of a client that believes in GPUs, compiled for them by XLA on a host without any."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).parent / "slurm-pathways")
PROGRAM = Path(__file__).parent / "program.py"
DEADLINE_S = 240.0
ROWS, WIDTH = 256, 512

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("topology", "num_slices", "kind", "num_devices"),
    [
        ("h100:2x2", 1, "NVIDIA H100 80GB HBM3", 4),
        ("h200:1x2", 2, "NVIDIA H200", 4),
        ("a100:1", 1, "NVIDIA A100-SXM4-80GB", 1),
    ],
)
def test_a_training_step_compiles(tmp_path: Path, topology: str, num_slices: int, kind: str, num_devices: int) -> None:
    report_path = tmp_path / "report.json"
    options = ["--topology", topology, "--slices", str(num_slices), "--json", report_path]
    done = subprocess.run(
        [COMMAND, "compile", *options, "--", sys.executable, PROGRAM, "huge"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout, done.stderr
    seen, report = json.loads(done.stdout), json.loads(report_path.read_text())
    assert (seen["platform"], seen["kind"], seen["loss"]) == ("gpu", kind, 0.0)
    assert len(seen["devices"]) == num_devices
    assert seen["devices"][-1][1] == num_slices - 1
    assert seen["reduces"] == (num_devices > 1)
    assert seen["solver"], "linear algebra is not lowered as for GPUs"
    # Nothing is called back where nothing is executed.
    assert seen["called"] == [0.0] * 4

    programs = {program["name"]: program for program in report["programs"]}
    step = programs["jit_train_step"]
    weight_bytes = 4 * WIDTH * WIDTH
    assert (step["devices"], step["launches"]) == (num_devices, 1)
    assert step["argument_bytes"] == weight_bytes + 2 * ROWS * WIDTH // num_devices
    assert step["alias_bytes"] == weight_bytes
    assert "jit_calling" in programs

    # 2 x 53.6 GiB: more than 80 GiB, less than 141 GiB.
    if topology.startswith("h200"):
        assert (done.returncode, seen["refused"], report["failed"]) == (0, None, []), done.stderr
    else:
        assert done.returncode == 1
        expected = f"RESOURCE_EXHAUSTED: it needs 107.3 GiB, and {kind} has 80.0 GiB"
        assert seen["refused"].startswith(expected)
        assert [(failed["name"], failed["code"]) for failed in report["failed"]] == [("jit_huge", "RESOURCE_EXHAUSTED")]


def test_a_worker_finds_jaxs_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it goes without a GPU: the plugin is loaded, and says that there is none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    done = subprocess.run(
        [COMMAND, "run", "--local", "--platform", "cuda", "--log-dir", tmp_path, "--", "true"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 125
    assert "No visible GPU devices" in done.stderr
