"""What is kept of a state, wherever it is kept."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_pathways.launch.local import LocalRuntime

PROGRAM = Path(__file__).parent / "programs" / "states.py"


@pytest.mark.timeout(300)
def test_states_come_back_as_they_were(start_dying: Callable[..., LocalRuntime], tmp_path: Path) -> None:
    runtime = start_dying(num_spares=0)
    result = subprocess.run(
        [sys.executable, PROGRAM, tmp_path / "checkpoints"],
        env=runtime.environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answers = json.loads(result.stdout.splitlines()[-1])
    assert answers["number"] == 2
    (first_step, first), *others = answers["seen"]
    assert first_step == 0
    (over_slices,) = [line for line in first if "over slices" in line]
    assert over_slices.endswith("('slice',) of {'slice': 2, 'data': 2, 'model': 1} in device")
    assert [step for step, _ in others] == [5, 10]
    for step, state in others:
        assert state == [line if line != "['plain'][0] 5" else f"['plain'][0] {step}" for line in first]
    assert answers["preempted"] == [7, "snapshot-7"]
    assert answers["parts"]["['over slices']"] == [".zarray", "0.0", "1.0"]
    assert answers["parts"]["['both']"] == [".zarray", "0.0", "1.0", "2.0", "3.0"]
    assert answers["parts"]["['same']"] == [".zarray", "0.0"]
    assert answers["parts"]["['nothing']"] == [".zarray"]
    assert answers["from_disk"] == ["7", *first]
    assert answers["on_fewer"] == ["7", *(line.replace("{'slice': 2", "{'slice': 1") for line in first)]
    assert "/1.0 is missing" in answers["damaged"] and "All hosts must see this folder" in answers["damaged"]
    assert list((tmp_path / "checkpoints").iterdir()) == []
    kind, message, cause = answers["gave up"]
    assert (kind, cause) == ("GaveUp", "DATA_LOSS: number 2")
    assert "3 times in a row after step 0" in message
    assert answers["mistake"] == ["ValueError", "a mistake of the program", "None"]
