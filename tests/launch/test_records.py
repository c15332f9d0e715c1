"""Records on disk: where, which, and by whom they can be read."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch import records
from slurm_pathways.launch.history import History
from slurm_pathways.launch.records import Record, SlurmPlace

START_S = 1_800_000_000.0


def _record(record_id: str, *, job: int | None = None, task: int | None = None, start_s: float = START_S) -> Record:
    place = None
    if job is not None:
        place = SlurmPlace(job + (task or 0), ("n1",), "c", array_job_id=job if task else None, array_task_id=task)
    history = History(
        record_id=record_id,
        spec=RuntimeSpec(),
        argv=("true",),
        launcher_host="h",
        launcher_pid=1,
        slurm=place,
        started_at_unix_s=start_s,
    )
    history.runtime_id = f"run-{record_id}"
    return history.record(start_s)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HOME": "/home/ada"}, "/home/ada/.local/state/slurm-pathways/records"),
        ({"HOME": "/home/ada", "XDG_STATE_HOME": "/state"}, "/state/slurm-pathways/records"),
        ({"HOME": "/home/ada", "XDG_STATE_HOME": "state"}, "/home/ada/.local/state/slurm-pathways/records"),
        ({"HOME": "/home/ada", "SLURM_PATHWAYS_RECORDS": "/mine"}, "/mine"),
        ({"HOME": "/home/ada", "SLURM_PATHWAYS_RECORDS": "none"}, None),
        ({"HOME": "/home/ada", "SLURM_PATHWAYS_RECORDS": ""}, None),
    ],
)
def test_where_they_lie(environ: dict[str, str], folder: str | None) -> None:
    assert records.records_folder(environ) == (None if folder is None else Path(folder))


def test_without_a_home_in_the_environment_the_user_database_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    found = records.records_folder({})
    assert found is not None and found.parts[-4:] == (".local", "state", "slurm-pathways", "records")

    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(records.NoHome, match="set SLURM_PATHWAYS_RECORDS to a folder, or none"):
        records.records_folder({})


def test_written_and_read_again_by_job_task_and_id(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "records"
    written = [
        _record("a1", job=9, start_s=START_S + 5),
        _record("a2", job=9),
        _record("a3", job=19),
        _record("b1", job=30, task=1),
        _record("b2", job=30, task=2),
        _record("c1", start_s=START_S + 9),
    ]
    for record in written:
        records.write(folder, record)
    assert (folder.stat().st_mode & 0o777, {path.stat().st_mode & 0o777 for path in folder.iterdir()}) == (
        0o700,
        {0o600},
    )

    def found(label: str) -> list[str]:
        return [record.id for record in records.of_job(folder, label)]

    assert found("9") == ["a2", "a1"]
    assert found("30_2") == ["b2"]
    assert sorted(found("30")) == ["b1", "b2"]
    assert found("1") == found("*") == found("30_3") == []
    assert records.by_id(folder, "a3") == written[2]
    assert records.by_id(folder, "run-b2") == written[4]
    assert records.by_id(folder, "*") is None
    assert records.newest(folder) == written[5]


def test_a_record_is_replaced_as_a_whole(tmp_path: Path) -> None:
    record = _record("a1")
    records.write(tmp_path, record)
    later = msgspec.structs.replace(record, exit_code=3)
    records.write(tmp_path, later)
    assert [path.name for path in tmp_path.iterdir()] == [record.file_name]
    assert records.newest(tmp_path) == later


def test_what_others_left_in_the_folder_is_passed_over(tmp_path: Path) -> None:
    records.write(tmp_path, _record("a1", job=9))
    (tmp_path / "c.9.20270115T080000.zz.json").write_text("{")
    later = msgspec.json.decode(msgspec.json.encode(_record("a2", job=9)))
    (tmp_path / "c.9.20270116T080000.a2.json").write_bytes(msgspec.json.encode({**later, "schema_version": 2}))
    assert [record.id for record in records.of_job(tmp_path, "9")] == ["a1"]
    assert records.newest(tmp_path / "nowhere") is None


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = _record("a1")
    records.write(tmp_path, record)

    def full(*_: Any) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("msgspec.json.format", full)
    with pytest.raises(OSError, match="No space left"):
        records.write(tmp_path, msgspec.structs.replace(record, exit_code=1))
    assert [path.name for path in tmp_path.iterdir()] == [record.file_name]
