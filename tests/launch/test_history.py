"""What happens in a run as its record: events, answers and times in, values out."""

from typing import Any

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent
from slurm_pathways.launch.history import History, used_since
from slurm_pathways.launch.records import (
    MAX_PROGRAMS_KEPT,
    RUNTIME,
    Component,
    Failure,
    Host,
    ProgramUsage,
    Record,
    SlurmPlace,
)

START_S = 1_800_000_000.0
SPEC = RuntimeSpec(num_slices=2, devices_per_host=2, num_spares=1)


def _history(**changes: Any) -> History:
    usual: dict[str, Any] = {
        "record_id": "ab12",
        "spec": SPEC,
        "argv": ("python", "train.py"),
        "launcher_host": "node0",
        "launcher_pid": 7,
        "slurm": None,
        "started_at_unix_s": START_S,
    }
    return History(**{**usual, **changes})


def _ready(history: History) -> None:
    """Three hosts on node0 to node2; the last one is a spare."""
    for worker in range(3):
        fields = {"worker": worker, "name": f"node{worker}"}
        place = {"step_id": str(worker + 1), "place": {"node": f"node{worker}", "address": "", "machine": ""}}
        history.note(ComponentEvent(f"worker-{worker}", "node_ready", place), START_S + 0.5)
        history.note(ComponentEvent("controller", "host_ready", fields), START_S + 1 + worker)
    for worker in range(2):
        fields = {"worker": worker, "name": f"node{worker}", "host": worker}
        history.note(ComponentEvent("controller", "bound", fields), START_S + 4)
    history.ready(START_S + 5)


def _worker(worker: int, busy_s: float, executions: int, moved: int = 100) -> dict[str, Any]:
    first = 2 * worker
    devices = [{"id": first + n, "busy_s": busy_s / 2, "waiting_s": 0.0} for n in range(2)]
    program = {"name": "step", "devices": "0-3", "executions": executions, "busy_s": busy_s, "waiting_s": 0.0}
    usage = {"elapsed_s": 1.0, "busy_s": busy_s, "waiting_s": 0.0, "devices": devices, "programs": [program]}
    place = {"id": worker, "name": f"node{worker}", "host": worker, "slice_index": worker}
    return {**place, "usage": usage, "bytes_moved": {"socket": moved}}


def _report(*workers: dict[str, Any]) -> dict[str, Any]:
    return {"workers": list(workers), "did_not_answer": []}


def _component(record: Record, name: str) -> Component:
    (found,) = (component for component in record.components if component.name == name)
    return found


def test_before_anything_is_known() -> None:
    record = _history().record(START_S + 1)
    assert (record.schema_version, record.id, record.kind, record.argv) == (1, "ab12", "run", ("python", "train.py"))
    assert (record.ready_at_unix_s, record.ended_at_unix_s, record.exit_code, record.hosts) == (None, None, None, ())
    assert record.settings["num_slices"] == 2
    assert record.usage.slices == ()


def test_hosts_and_when_they_were_ready() -> None:
    history = _history()
    _ready(history)
    record = history.record(START_S + 6)
    assert record.hosts == (
        Host(0, "node0", 0, 1.0),
        Host(1, "node1", 1, 2.0),
        Host(2, "node2", None, 3.0),
    )
    assert record.ready_at_unix_s == START_S + 5
    assert (_component(record, "worker-1").node, _component(record, "worker-1").step_id) == ("node1", 2)


def test_device_seconds_of_a_slice_are_busy_or_idle() -> None:
    history = _history()
    _ready(history)
    history.answered(_report(_worker(0, 6.0, 3), _worker(1, 2.0, 3)), START_S + 15)
    usage = history.record(START_S + 15).usage
    assert [(s.index, s.nodes, s.num_devices) for s in usage.slices] == [(0, ("node0",), 2), (1, ("node1",), 2)]
    assert [(s.device_s, s.busy_s, s.idle_s) for s in usage.slices] == [(20.0, 6.0, 14.0), (20.0, 2.0, 18.0)]
    assert usage.programs == (ProgramUsage("step", "0-3", 3, 8.0, 0.0),)
    assert usage.bytes_moved == {"socket": 200}
    assert (usage.as_of_unix_s, usage.problem) == (START_S + 15, None)


def test_of_very_many_programs_the_busiest_are_kept() -> None:
    history = _history()
    _ready(history)
    worker = _worker(0, 1000.0, 3)
    (row,) = worker["usage"]["programs"]
    worker["usage"]["programs"] = [{**row, "name": f"p{n}", "busy_s": float(n)} for n in range(MAX_PROGRAMS_KEPT + 7)]
    history.answered(_report(worker), START_S + 15)
    usage = history.usage()
    for part in (usage, usage.slices[0]):
        assert (len(part.programs), part.programs_left_out) == (MAX_PROGRAMS_KEPT, 7)
        assert min(program.busy_s for program in part.programs) == 7.0


def test_a_lost_host_keeps_its_last_words_and_its_slice_stands_still_from_then_on() -> None:
    history = _history()
    _ready(history)
    history.answered(_report(_worker(0, 6.0, 3), _worker(1, 2.0, 3)), START_S + 15)
    lost = {"worker": 1, "name": "node1", "host": 1, "reason": "long", "cause": "silent for 30.0 s"}
    lost |= {"found_after_s": 30.0}
    history.note(ComponentEvent("controller", "host_lost", lost), START_S + 16)
    history.note(ComponentEnded("worker-1", 137, was_asked=False), START_S + 17)
    silent = {key: value for key, value in _worker(1, 0, 0).items() if key != "usage"}
    history.answered(_report(_worker(0, 9.0, 5), silent), START_S + 25)
    record = history.record(START_S + 26)
    assert [(part.device_s, part.busy_s) for part in record.usage.slices] == [(40.0, 9.0), (20.0, 2.0)]
    assert record.failures == (
        Failure(
            START_S + 16,
            1,
            "node1",
            1,
            "silent for 30.0 s; its supervisor was killed by signal 9 (SIGKILL), perhaps by the kernel for want of "
            "memory",
            host=1,
            found_after_s=30.0,
        ),
    )
    part = _component(record, "worker-1")
    assert (part.signal, part.exit_code, part.was_asked, part.node) == (9, None, False, "node1")
    assert part.ended_at_unix_s == START_S + 17


def test_what_a_lost_executor_has_used_stays_and_the_next_one_counts_from_when_it_served() -> None:
    history = _history()
    _ready(history)
    first = {**_worker(1, 2.0, 3), "executor_pid": 10}
    history.answered(_report(_worker(0, 6.0, 3), first), START_S + 15)
    back = {"host": 1, "worker": 1, "name": "node1", "lost_worker": 1, "took_s": 1.0}
    history.note(ComponentEvent("controller", "host_back", back), START_S + 20)
    history.answered(_report(_worker(0, 6.0, 3), {**_worker(1, 0.5, 1, 7), "executor_pid": 11}), START_S + 25)
    usage = history.usage()
    # 2 devices for 10 s until it was last heard of, and for 5 s afterwards.
    assert [(part.device_s, part.busy_s) for part in usage.slices] == [(40.0, 6.0), (30.0, 2.5)]
    assert usage.bytes_moved == {"socket": 207}


def test_losses_are_joined_with_what_mended_them() -> None:
    """The executor of worker 1, then the supervisor of worker 2, which stands in its place, and is started again."""
    history = _history()
    _ready(history)

    def lose(worker: int, cause: str, at_s: float) -> None:
        lost = {"worker": worker, "name": f"node{worker}", "host": 1, "reason": "long", "cause": cause}
        history.note(ComponentEvent("controller", "host_lost", {**lost, "found_after_s": 0.5}), START_S + at_s)

    def mend(worker: int, at_s: float) -> None:
        back = {"host": 1, "worker": worker, "name": f"node{worker}", "lost_worker": 0, "took_s": 0.0}
        history.note(ComponentEvent("controller", "host_back", back), START_S + at_s)

    lose(1, "its executor ended with exit code 1", 20)
    history.note(ComponentEvent("controller", "bound", {"host": 1, "worker": 2, "name": "node2"}), START_S + 20)
    mend(2, 20.75)
    history.note(ComponentEnded("worker-2", -9, was_asked=False, will_restart=True), START_S + 29.9)
    lose(2, "its supervisor's connection is gone (closed)", 30)
    lose(1, "its executor ended with exit code 2", 30.5)
    record = history.record(START_S + 31)
    supervisor = "; its supervisor was killed by signal 9 (SIGKILL), perhaps by the kernel for want of memory"
    assert [(one.cause, one.served_again_after_s, one.served_again_by) for one in record.failures] == [
        ("its executor ended with exit code 1", 0.75, "node2"),
        ("its supervisor's connection is gone (closed)" + supervisor, None, None),
        ("its executor ended with exit code 2", None, None),
    ]
    assert [(one.host, one.found_after_s, one.slice_index) for one in record.failures] == [(1, 0.5, 1)] * 3
    part = _component(record, "worker-2")
    assert (part.restarts, part.ended_at_unix_s, part.signal, part.was_asked) == (1, None, None, None)
    mend(1, 32)
    assert [one.served_again_after_s for one in history.record(START_S + 33).failures] == [0.75, 2.0, 1.5]
    history.program_ended(0, START_S + 40)
    # On the way out the first host goes before the others, and a spare takes its place.
    lose(0, "its executor's connection is gone (closed)", 40.5)
    history.note(ComponentEvent("controller", "bound", {"host": 0, "worker": 2, "name": "node2"}), START_S + 40.5)
    history.note(ComponentEnded("worker-2", 0, was_asked=True), START_S + 41)
    record = history.record(START_S + 42)
    assert ([host.slice_index for host in record.hosts], len(record.failures)) == ([0, 1, 1], 3)
    part = _component(record, "worker-2")
    assert (part.exit_code, part.signal, part.was_asked, part.restarts) == (0, None, True, 1)


def test_a_host_that_never_said_anything_is_named_and_counts_for_nothing() -> None:
    history = _history()
    _ready(history)
    history.answered(_report(_worker(0, 6.0, 3), {"id": 1, "name": "node1", "host": 1, "slice_index": 1}), START_S + 15)
    (first,) = history.record(START_S + 16).usage.slices
    assert (first.index, first.without_usage) == (0, ())


def test_srun_ends_with_0_when_slurm_gives_a_node_up_and_the_record_says_why() -> None:
    history = _history()
    _ready(history)
    lost = {
        "worker": 1,
        "name": "node1",
        "host": 1,
        "reason": "long",
        "cause": "its executor has been silent for 30.0 s",
    }
    history.note(ComponentEvent("controller", "host_lost", lost), START_S + 16)
    history.note(ComponentEnded("worker-1", 0, was_asked=False), START_S + 40)
    part = _component(history.record(START_S + 41), "worker-1")
    assert (part.exit_code, part.cause) == (0, "its executor has been silent for 30.0 s")


def test_what_ends_after_the_program_was_asked_to() -> None:
    history = _history()
    _ready(history)
    history.program_ended(3, START_S + 20)
    lost = {"worker": 1, "name": "node1", "host": 1, "reason": "closing", "cause": "closing"}
    history.note(ComponentEvent("controller", "host_lost", lost), START_S + 20.5)
    history.note(ComponentEnded("worker-0", 0, was_asked=False), START_S + 21)
    history.ended(3, None, START_S + 22)
    record = history.record(START_S + 22)
    assert (record.exit_code, record.problem, record.failures) == (3, None, ())
    assert (record.program_ended_at_unix_s, record.ended_at_unix_s) == (START_S + 20, START_S + 22)
    assert _component(record, "worker-0").was_asked is True
    assert (_component(record, "client").exit_code, _component(record, "client").signal) == (3, None)


def test_a_local_process_that_a_signal_killed() -> None:
    history = _history()
    history.note(ComponentEnded("controller", -11, was_asked=False), START_S + 1)
    history.ended(125, "the runtime did not start", START_S + 2)
    record = history.record(START_S + 2)
    part = _component(record, "controller")
    assert (part.signal, part.exit_code, part.cause) == (11, None, "was killed by signal 11 (SIGSEGV)")
    assert (record.exit_code, record.problem) == (125, "the runtime did not start")


def test_an_answer_that_does_not_come_leaves_the_last_one_and_says_so() -> None:
    history = _history()
    _ready(history)
    history.answered(_report(_worker(0, 6.0, 3)), START_S + 15)
    history.not_answered("the controller has ended")
    usage = history.record(START_S + 30).usage
    assert (usage.as_of_unix_s, usage.problem) == (START_S + 15, "the controller has ended")
    assert usage.slices[0].busy_s == 6.0
    history.answered(_report(_worker(0, 7.0, 3)), START_S + 31)
    assert history.usage().problem is None


def test_on_a_warm_runtime_only_what_was_used_since_counts() -> None:
    history = _history(is_warm=True)
    history.answered(_report(_worker(0, 6.0, 3), _worker(1, 1.0, 3)), START_S + 0.1)
    history.ready(START_S + 0.2)
    history.answered(_report(_worker(0, 7.5, 8, 150), _worker(1, 1.0, 3, 100)), START_S + 10.2)
    usage = history.record(START_S + 11).usage
    assert [(part.device_s, part.busy_s) for part in usage.slices] == [(20.0, 1.5), (20.0, 0.0)]
    assert usage.programs == (ProgramUsage("step", "0-3", 5, 1.5, 0.0),)
    assert usage.bytes_moved == {"socket": 50}


def test_a_warm_runtime_that_did_not_say_what_it_had_used_before() -> None:
    history = _history(is_warm=True)
    history.not_answered("the controller does not answer")
    history.ready(START_S + 3)
    history.answered(_report(_worker(0, 7.5, 8)), START_S + 10)
    usage = history.record(START_S + 11).usage
    assert usage.slices == ()
    assert usage.problem is not None and "unknown" in usage.problem


def test_the_kind_of_a_record_and_its_files_name() -> None:
    place = SlurmPlace(12, ("node0",), cluster="my.cluster", array_job_id=9, array_task_id=3)
    record = _history(kind=RUNTIME, argv=(), slurm=place).record(START_S)
    assert (record.kind, record.file_name) == ("runtime", "my_cluster.9_3.20270115T080000.ab12.json")
    assert _history().record(START_S).file_name == "local.20270115T080000.ab12.json"


def test_used_since_leaves_out_programs_that_did_nothing() -> None:
    before, after = _worker(0, 1.0, 2)["usage"], _worker(0, 1.0, 2)["usage"]
    after["programs"].append({**after["programs"][0], "name": "new", "executions": 1, "busy_s": 0.25})
    since = used_since(before, after)
    assert [(row["name"], row["executions"], row["busy_s"]) for row in since["programs"]] == [("new", 1, 0.25)]
    assert since["busy_s"] == 0.0
