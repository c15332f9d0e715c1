import json
from pathlib import Path

import pytest

from slurm_pathways.slurm.quantities import Gres
from slurm_pathways.slurm.queue import (
    Node,
    QueueError,
    Switch,
    parse_nodes,
    parse_scontrol,
    parse_squeue_json,
    parse_topology,
)
from slurm_pathways.slurm.states import ExitStatus

SAMPLES = Path(__file__).parent / "samples"
VERSIONS = ("22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_form_of_squeue_says_the_same(version: str) -> None:
    jobs = {job.job_id: job for job in parse_squeue_json((SAMPLES / f"squeue_{version}.json").read_text())}
    running = jobs[9]
    assert (running.state, running.is_ended) == ("RUNNING", False)
    assert running.nodes == ("node0", "node1", "node2", "node3")
    assert (running.name, running.user, running.comment) == ("workers", "ada", "state=running|step=3")
    assert (running.started_at_unix_s, running.ends_at_unix_s) == (1795976878, 1795977478)
    assert running.time_limit_min == 10
    assert (running.array_job_id, running.array_task_id, running.het_job_id) == (None, None, None)
    assert running.tres["gres/tpu:v5p"] == 16

    assert (jobs[5].exit_status, jobs[5].name) == (ExitStatus(3, 0), "name with spaces")
    assert jobs[5].is_ended
    assert (jobs[11].array_job_id, jobs[11].array_task_id) == (10, 1)
    assert jobs[15].het_job_id == 14

    waiting = jobs[21]
    assert (waiting.state, waiting.reason, waiting.nodes) == ("PENDING", "BeginTime", ())
    assert (waiting.array_job_id, waiting.array_task_id) == (21, None)
    assert (waiting.tres, waiting.exit_status) == ({}, ExitStatus(0, 0))


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_killed_jobs_and_jobs_without_a_limit(version: str) -> None:
    jobs = {job.job_id: job for job in parse_squeue_json((SAMPLES / f"squeue_{version}.json").read_text())}
    assert (jobs[16].exit_status, jobs[16].exit_status.shell_code) == (ExitStatus(0, 9), 137)
    assert jobs[16].time_limit_min is None


def test_a_job_out_of_time() -> None:
    jobs = {job.job_id: job for job in parse_squeue_json((SAMPLES / "squeue_22.05.json").read_text())}
    assert (jobs[8].state, jobs[8].reason, jobs[8].exit_status) == ("TIMEOUT", "TimeLimit", ExitStatus(0, 15))


def test_the_base_state_comes_first() -> None:
    text = (SAMPLES / "squeue_25.11.json").read_text().replace('"RUNNING"', '"COMPLETING",\n"RUNNING"')
    job = next(job for job in parse_squeue_json(text) if job.job_id == 9)
    assert job.states == ("RUNNING", "COMPLETING")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "this is not squeue's JSON: ''"),
        ("slurm_load_jobs error", "this is not squeue's JSON"),
        ("[]", "this is not squeue's JSON"),
        ('{"jobs": [], "errors": [{"error": "down"}]}', "squeue reports errors: .*down"),
        ('{"jobs": [{"job_id": 4}]}', "job 4: unknown form of 'name'"),
    ],
)
def test_what_is_not_squeue(text: str, words: str) -> None:
    with pytest.raises(QueueError, match=words):
        parse_squeue_json(text)


def test_a_form_that_is_not_known_names_the_job() -> None:
    document = json.loads((SAMPLES / "squeue_25.11.json").read_text())
    document["jobs"][0]["start_time"] = {"seconds": 5}
    with pytest.raises(QueueError, match="job 9: unknown form of 'set'"):
        parse_squeue_json(json.dumps(document))


def test_scontrol_show_job() -> None:
    (job,) = parse_scontrol((SAMPLES / "scontrol_job_22.05.txt").read_text())
    assert (job["JobId"], job["JobName"], job["JobState"]) == ("9", "workers", "RUNNING")
    assert job["Comment"] == "state=running|step=3"
    assert (job["NodeList"], job["ReqNodeList"], job["BatchHost"]) == ("node[0-3]", "node[0-3]", "node0")
    assert job["TRES"] == "cpu=32,mem=16000M,node=4,billing=32,gres/tpu=16,gres/tpu:v5p=16"
    assert job["CPUs/Task"] == "1"
    assert job["Command"] == "(null)"


def test_free_text_takes_its_line_and_overwrites_nothing() -> None:
    (job,) = parse_scontrol("JobId=1 JobName=x NodeList=evil\n   NodeList=node1\n   Comment=JobId=2 b\n   JobId=3\n")
    assert job == {"JobId": "1", "JobName": "x NodeList=evil", "NodeList": "node1", "Comment": "JobId=2 b"}


def test_nodes() -> None:
    nodes = parse_nodes((SAMPLES / "scontrol_node_22.05.txt").read_text())
    assert nodes[0] == Node(
        name="node0",
        states=("ALLOCATED",),
        is_responding=True,
        features=("v5p",),
        gres=(Gres("tpu", "v5p", 4),),
        num_cpus=8,
        memory_mib=8000,
        address="127.0.2.1",
        partitions=("tpu",),
        reason="",
    )
    assert (nodes[1].name, nodes[1].gres) == ("rack0n08", ())
    assert (nodes[2].name, nodes[2].states) == ("rack1n09", ("IDLE", "DRAIN"))
    assert nodes[2].reason == "bad disk = replace it"


@pytest.mark.parametrize(
    ("state", "states", "is_responding"),
    [
        ("DOWN*", ("DOWN",), False),
        ("ALLOCATED*", ("ALLOCATED",), False),
        ("DOWN*+DRAIN", ("DOWN", "DRAIN"), False),
        ("DOWN+NOT_RESPONDING", ("DOWN", "NOT_RESPONDING"), False),
        ("IDLE+CLOUD+POWERED_DOWN", ("IDLE", "CLOUD", "POWERED_DOWN"), True),
        ("MIXED", ("MIXED",), True),
    ],
)
def test_node_states(state: str, states: tuple[str, ...], is_responding: bool) -> None:
    text = (SAMPLES / "scontrol_node_22.05.txt").read_text().replace("State=ALLOCATED", f"State={state}")
    node = parse_nodes(text)[0]
    assert (node.states, node.is_responding) == (states, is_responding)


def test_a_record_that_is_no_node() -> None:
    with pytest.raises(QueueError, match=r"node \?: unknown form of 'State'"):
        parse_nodes("JobId=1 JobName=x\n")


def test_a_tree_of_switches() -> None:
    switches = parse_topology((SAMPLES / "scontrol_topology_22.05.txt").read_text())
    assert switches[0] == Switch("s0", 0, ("node0", "node1", "rack0n08", "rack0n09"), ())
    assert switches[2].children == ("s0", "s1")
    assert (switches[2].level, len(switches[2].nodes)) == (1, 8)


def test_blocks_are_switches_of_level_0() -> None:
    block = "BlockName=b1 BlockIndex=0 Nodes=node[01-02] BlockSize=2\n"
    text = block + "AggregatedBlock=b[1-2] BlockIndex=2 Nodes=node[01-04]\n"
    assert parse_topology(text) == (Switch("b1", 0, ("node01", "node02"), ()),)


def test_no_topology() -> None:
    assert parse_topology("") == ()
    assert parse_topology("No topology information available\n") == ()
    with pytest.raises(QueueError, match="is no switch and no block"):
        parse_topology("Router=r1 Nodes=a\n")
