from pathlib import Path

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch import event_log
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent
from slurm_pathways.launch.history import History
from slurm_pathways.launch.records import Record, SlurmPlace, events_file_name


def _record(slurm: SlurmPlace | None = None, record_id: str = "ab12cd34", started_s: float = 1000.0) -> Record:
    history = History(
        record_id=record_id,
        spec=RuntimeSpec(),
        argv=("python", "train.py"),
        launcher_host="node0",
        launcher_pid=1,
        slurm=slurm,
        started_at_unix_s=started_s,
    )
    history.ended(3, None, started_s + 20)
    return history.record(started_s + 20)


def test_a_loss_and_its_mend_say_who_what_when_why_and_how_long() -> None:
    lost = {
        "host": 1,
        "worker": 1,
        "name": "node1",
        "reason": "host 1 (node1) was lost at …",
        "cause": "its executor has been silent for 8.1 s",
        "found_after_s": 8.1,
        "log_tail": "secrets",
    }
    back = {"host": 1, "worker": 4, "name": "node4", "lost_worker": 1, "took_s": 0.7}
    assert [
        event_log.entry(ComponentEvent("controller", name, fields), "r", 1010.0004, 10.0)
        for name, fields in (("host_lost", lost), ("host_back", back), ("ready", {}))
    ] == [
        {
            "at_unix_s": 1010.0,
            "run": "r",
            "what": "host_lost",
            "who": "node1",
            "host": 1,
            "worker": 1,
            "cause": "its executor has been silent for 8.1 s",
            "took_s": 8.1,
        },
        {"at_unix_s": 1010.0, "run": "r", "what": "host_back", "who": "node4", "host": 1, "worker": 4, "took_s": 0.7},
        {"at_unix_s": 1010.0, "run": "r", "what": "ready", "who": "controller", "took_s": 10.0},
    ]


def test_a_process_that_ends_unasked_is_written_down_and_others_are_not() -> None:
    ended = event_log.entry(ComponentEnded("worker-1", 3, was_asked=False, will_restart=True), "r", 5.0, 1.0)
    assert ended == {
        "at_unix_s": 5.0,
        "run": "r",
        "what": "process_ended",
        "who": "worker-1",
        "cause": "ended with exit code 3; it is started again",
    }
    assert event_log.entry(ComponentEnded("worker-1", 0, was_asked=True), "r", 5.0, 1.0) is None
    assert event_log.entry(ComponentEvent("proxy-0", "ready"), "r", 5.0, 1.0) is None
    assert event_log.entry(ComponentEvent("controller", "listening"), "r", 5.0, 1.0) is None


def test_runs_of_a_job_share_a_log_and_others_have_their_own(tmp_path: Path) -> None:
    job = SlurmPlace(job_id=9, nodes=("node0",), cluster="big one")
    first, requeued = _record(job), _record(job, "ff000000", 2000.0)
    local, other = _record(), _record(record_id="ff000000")
    assert events_file_name(first) == events_file_name(requeued) == "big_one.9.events.jsonl"
    assert events_file_name(local) == "local.19700101T001640.ab12cd34.events.jsonl"
    for record in (first, requeued, local):
        event_log.append(tmp_path, record, [event_log.of_run(record, "run_started", record.started_at_unix_s)])
    event_log.append(tmp_path, first, [event_log.of_run(first, "run_ended", 1020.0)])
    assert event_log.read(tmp_path, requeued) == [
        {
            "at_unix_s": at_s,
            "run": run,
            "what": "run_started",
            "who": "run",
            "argv": ["python", "train.py"],
        }
        for at_s, run in ((1000.0, "ab12cd34"), (2000.0, "ff000000"))
    ] + [{"at_unix_s": 1020.0, "run": "ab12cd34", "what": "run_ended", "who": "run", "exit_code": 3, "took_s": 20.0}]
    assert len(event_log.read(tmp_path, local)) == 1
    assert event_log.read(tmp_path, other) == []
