"""Whether all that hosts have written is to be seen from here."""

import json
from pathlib import Path

import pytest

from slurm_pathways.client.storage import missing_part


@pytest.mark.parametrize(
    ("shape", "chunks", "written", "missing"),
    [
        ([8, 5], [4, 3], ["0.0", "0.1", "1.0", "1.1"], None),
        ([8, 5], [4, 3], ["0.0", "0.1", "1.1"], "1.0"),
        ([], [], ["0"], None),
        ([], [], [], "0"),
        ([0, 4], [1, 4], [], None),
    ],
)
def test_every_part_is_looked_for(
    tmp_path: Path, shape: list[int], chunks: list[int], written: list[str], missing: str | None
) -> None:
    (tmp_path / ".zarray").write_text(json.dumps({"shape": shape, "chunks": chunks}))
    for name in written:
        (tmp_path / name).touch()
    assert missing_part(tmp_path) == missing


def test_nothing_at_all(tmp_path: Path) -> None:
    assert missing_part(tmp_path / "elsewhere") == ".zarray"
