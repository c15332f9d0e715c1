from pathlib import Path

import pytest

from slurm_pathways.slurm.accounting import ARGUMENTS, DELIMITER, FIELDS, AccountingError, Record, parse
from slurm_pathways.slurm.states import ExitStatus

SAMPLE = (Path(__file__).parent / "samples" / "sacct_22.05.txt").read_text()


@pytest.fixture(scope="module")
def records() -> dict[tuple[str, str], Record]:
    return {(record.job, record.step): record for record in parse(SAMPLE)}


def test_a_job_and_its_steps(records: dict[tuple[str, str], Record]) -> None:
    assert records["9", "4"] == Record(
        job="9",
        step="4",
        name="worker-1",
        state="CANCELLED",
        state_detail="",
        exit_status=ExitStatus(0, 15),
        derived_exit_status=None,
        submitted_at_unix_s=1795976879,
        started_at_unix_s=1795976879,
        ended_at_unix_s=1795976993,
        elapsed_s=114,
        cpu_s=0.001,
        max_rss_bytes=1624 << 10,
        nodes=("node1",),
        tres={"cpu": 8, "gres/tpu:v5p": 4, "gres/tpu": 4, "mem": 4000 << 20, "node": 1},
        comment="",
    )
    assert [step for job, step in records if job == "9"] == ["", "batch", "0", "1", "2", "3", "4"]
    job = records["9", ""]
    assert (job.state, job.state_detail) == ("CANCELLED", "by 0")
    assert job.comment == "state=running|step=3"
    assert "gres/tpu" not in records["9", "1"].tres


@pytest.mark.parametrize(
    ("job", "step", "state", "status", "derived", "shell_code"),
    [
        ("1", "", "COMPLETED", (0, 0), (0, 0), 0),
        ("8", "", "TIMEOUT", (0, 0), (0, 0), 0),
        ("8", "batch", "CANCELLED", (0, 15), None, 143),
        ("16", "", "FAILED", (0, 9), (0, 0), 137),
        ("17", "", "FAILED", (3, 0), (7, 0), 3),
        ("17", "0", "FAILED", (7, 0), None, 7),
        ("18", "", "FAILED", (127, 0), (0, 0), 127),
        ("10_3", "batch", "COMPLETED", (0, 0), None, 0),
        ("14+1", "", "COMPLETED", (0, 0), (0, 0), 0),
    ],
)
def test_how_it_ended(
    records: dict[tuple[str, str], Record],
    job: str,
    step: str,
    state: str,
    status: tuple[int, int],
    derived: tuple[int, int] | None,
    shell_code: int,
) -> None:
    record = records[job, step]
    assert (record.state, record.exit_status) == (state, ExitStatus(*status))
    assert record.derived_exit_status == (None if derived is None else ExitStatus(*derived))
    assert record.exit_status.shell_code == shell_code
    assert record.is_ended
    assert record.is_conclusive


def _text(**fields: str) -> str:
    usual = {
        "JobID": "3",
        "State": "RUNNING",
        "ExitCode": "0:0",
        "Submit": "5",
        "ElapsedRaw": "1",
        "NodeList": "None assigned",
        "Start": "Unknown",
    }
    rows = [FIELDS, [{**usual, **fields}.get(name, "") for name in FIELDS]]
    return "".join(DELIMITER.join(row) + "\n" for row in rows)


def test_while_it_waits() -> None:
    (record,) = parse(_text(State="PENDING"))
    assert (record.nodes, record.started_at_unix_s, record.ended_at_unix_s, record.max_rss_bytes) == (
        (),
        None,
        None,
        None,
    )
    assert not record.is_ended


def test_a_row_that_a_lost_node_has_cut_off_says_nothing_of_the_end() -> None:
    (record,) = parse(_text(State="RESIZING", End="9", NodeList="node[0-4]"))
    assert record.exit_status == ExitStatus(0, 0)
    assert not record.is_conclusive


@pytest.mark.parametrize(
    ("printed", "state", "status"),
    [
        ("0:0", "FAILED", (128, 0)),  # 128, of which sacct takes 128
        ("2:0", "FAILED", (2, 0)),  # 2 or 130
        ("0:9", "FAILED", (0, 9)),
        ("0:0", "COMPLETED", (0, 0)),
    ],
)
def test_what_has_failed_never_looks_well(printed: str, state: str, status: tuple[int, int]) -> None:
    (record,) = parse(_text(State=state, ExitCode=printed))
    assert record.exit_status == ExitStatus(*status)


def test_names_and_comments_of_any_kind() -> None:
    (record,) = parse(_text(JobName="a|b\nc\n", Comment="x|y\n3"))
    assert (record.name, record.comment) == ("a|b\nc\n", "x|y\n3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the first line is ''"),
        ("JobID|State\n1|RUNNING\n", "not sacct's header JobID, JobName"),
        (_text(ExitCode="zero"), "the record '3': 'zero' is no exit status"),
        (_text(Start="2026-11-29T18:26:18"), "SLURM_TIME_FORMAT=%s"),
        (_text() + "4" + DELIMITER + "x\n", "has 2 fields, not 14"),
        (_text() + DELIMITER * 20 + "\n", "has 21 fields, not 14"),
    ],
)
def test_what_is_not_sacct(text: str, words: str) -> None:
    with pytest.raises(AccountingError, match=words):
        parse(text)


def test_the_arguments_ask_for_what_is_parsed() -> None:
    assert SAMPLE.splitlines()[0].split(DELIMITER) == list(FIELDS)
    assert f"--delimiter={DELIMITER}" in ARGUMENTS
