"""The commands and pyslurm on what both said of one cluster at one moment."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_pathways.slurm import queries
from slurm_pathways.slurm.commands import CommandFailed, CommandMissing, Slurm
from slurm_pathways.slurm.pyslurm_queries import PyslurmQueries
from slurm_pathways.slurm.queue import Job, Node, parse_nodes, parse_squeue_json

SAMPLES = Path(__file__).parent / "samples" / "pyslurm"
NODES = ("node0", "node1", "node2", "node3")
#: Jobs 3 (two nodes), 7 (has lost one of two) and 11 (a task of an array) run.
RUNNING = (3, 7, 11)
OTHERS = (4, 5, 6, 8, 9, 10)


class RPCError(Exception):
    def __init__(self, errno: int) -> None:
        super().__init__(f"error {errno}")
        self.errno = errno


def stand_in(sample: Mapping[str, Any]) -> Any:
    """A module with what we use of pyslurm, made of what it said."""

    def load_job(job_id: int) -> Any:
        if str(job_id) not in sample["jobs"]:
            raise RPCError(sample["missing"]["errno"])
        return SimpleNamespace(**sample["jobs"][str(job_id)])

    def load_nodes() -> dict[str, Any]:
        return {name: SimpleNamespace(**node) for name, node in sample["nodes"].items()}

    return SimpleNamespace(
        RPCError=RPCError, Job=SimpleNamespace(load=load_job), Nodes=SimpleNamespace(load=load_nodes)
    )


@pytest.fixture(params=["22.05", "25.11"])
def sample(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SAMPLES / f"pyslurm_{request.param}.json").read_text())
    return loaded


def command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def no_commands(tmp_path: Path) -> Slurm:
    """Whatever is asked of it fails."""
    return Slurm({"PATH": str(tmp_path)})


@pytest.fixture
def commands(no_commands: Slurm, tmp_path: Path) -> Slurm:
    """The cluster of the samples."""
    command(tmp_path, "squeue", f"cat {SAMPLES}/squeue_22.05.json")
    command(tmp_path, "scontrol", f"[ $2 = node ] && cat {SAMPLES}/scontrol_node_22.05.txt")
    command(tmp_path, "sinfo", "echo slurm-wlm 22.05.8")
    return no_commands


def said_by_commands() -> tuple[dict[int, Job], tuple[Node, ...]]:
    jobs = parse_squeue_json((SAMPLES / "squeue_22.05.json").read_text())
    return {job.job_id: job for job in jobs}, parse_nodes((SAMPLES / "scontrol_node_22.05.txt").read_text())


@pytest.mark.parametrize("job_id", RUNNING)
def test_a_job_that_runs_is_the_same(sample: dict[str, Any], no_commands: Slurm, job_id: int) -> None:
    expected = said_by_commands()[0][job_id]
    job = PyslurmQueries(stand_in(sample), no_commands).job(job_id)
    assert job is not None
    assert job == replace(expected, tres={name: expected.tres[name] for name in ("cpu", "node")})


def test_what_the_samples_say(sample: dict[str, Any], no_commands: Slurm) -> None:
    asked = PyslurmQueries(stand_in(sample), no_commands)
    pair, shrunk, task = (asked.job(job_id) for job_id in RUNNING)
    assert pair is not None and shrunk is not None and task is not None
    assert (pair.nodes, pair.comment, pair.time_limit_min) == (("node0", "node1"), "state=running|step=3", 30)
    assert shrunk.nodes == ("node2",)
    assert (task.array_job_id, task.array_task_id) == (6, 1)


@pytest.mark.parametrize("job_id", OTHERS)
def test_of_a_job_that_does_not_run_the_commands_are_asked(
    sample: dict[str, Any], commands: Slurm, job_id: int
) -> None:
    assert PyslurmQueries(stand_in(sample), commands).job(job_id) == said_by_commands()[0][job_id]


def test_an_exit_code_that_pyslurm_would_change(sample: dict[str, Any], commands: Slurm) -> None:
    assert sample["jobs"]["5"]["exit_code"] == 2
    job = PyslurmQueries(stand_in(sample), commands).job(5)
    assert job is not None
    assert job.exit_status.code == 130


def test_task_0_of_an_array(sample: dict[str, Any], no_commands: Slurm) -> None:
    sample["jobs"]["10"]["state"] = "RUNNING"
    job = PyslurmQueries(stand_in(sample), no_commands).job(10)
    assert job is not None
    assert (job.array_job_id, job.array_task_id) == (6, 0)


def test_an_array_that_answers_with_another_task(sample: dict[str, Any], commands: Slurm) -> None:
    sample["jobs"]["6"] = sample["jobs"]["11"]
    job = PyslurmQueries(stand_in(sample), commands).job(6)
    assert job is not None
    assert (job.job_id, job.array_task_id) == (6, 2)


def test_a_job_that_is_not_there(sample: dict[str, Any], no_commands: Slurm) -> None:
    assert PyslurmQueries(stand_in(sample), no_commands).job(4711) is None


def test_other_failures_are_the_commands_to_explain(sample: dict[str, Any], tmp_path: Path) -> None:
    sample["missing"]["errno"] = 1800
    command(tmp_path, "squeue", "echo Unable to contact slurm controller >&2; exit 1")
    with pytest.raises(CommandFailed, match="Unable to contact slurm controller"):
        PyslurmQueries(stand_in(sample), Slurm({"PATH": str(tmp_path)})).job(4711)


def test_nodes_are_the_same(sample: dict[str, Any], no_commands: Slurm) -> None:
    nodes = PyslurmQueries(stand_in(sample), no_commands).nodes(NODES)
    assert nodes == said_by_commands()[1]
    assert [node.states for node in nodes] == [
        *[("ALLOCATED",)] * 2,
        ("MIXED", "DRAIN"),
        ("DOWN", "NOT_RESPONDING"),
    ]
    assert [node.is_responding for node in nodes] == [True, True, True, False]
    assert nodes[2].reason == "bad disk = replace it"
    assert PyslurmQueries(stand_in(sample), no_commands).nodes(["node3"]) == nodes[3:]


def test_nodes_that_pyslurm_does_not_know_or_cannot_read(sample: dict[str, Any], commands: Slurm) -> None:
    class Unreadable(SimpleNamespace):
        @property
        def configured_gres(self) -> dict[str, int]:
            raise IndexError("list index out of range")

    module = stand_in(sample)
    for node in ("node3", "elsewhere"):
        module.Nodes.load = lambda node=node: {
            **{name: SimpleNamespace(**sample["nodes"][name]) for name in NODES[:3]},
            node: Unreadable(**{k: v for k, v in sample["nodes"]["node3"].items() if k != "configured_gres"}),
        }
        assert PyslurmQueries(module, commands).nodes(NODES) == said_by_commands()[1]


def test_topology_and_accounting_are_the_commands_to_say(sample: dict[str, Any], no_commands: Slurm) -> None:
    asked = PyslurmQueries(stand_in(sample), no_commands)
    with pytest.raises(CommandMissing, match="scontrol is not found"):
        asked.topology()
    with pytest.raises(CommandMissing, match="sacct is not found"):
        asked.records(3)


# Who answers


def chosen(commands: Slurm, version: str | None, load: Any = None) -> queries.Choice:
    return queries.choose(commands, lambda: version, load or (lambda: SimpleNamespace()))


def must_not_load() -> Any:
    raise AssertionError("pyslurm is imported")


@pytest.fixture
def same_configuration(commands: Slurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return commands


def test_pyslurm_where_it_matches(same_configuration: Slurm) -> None:
    choice = chosen(same_configuration, "22.5.3")
    assert isinstance(choice.queries, PyslurmQueries)
    assert (choice.name, choice.reason) == ("pyslurm", "pyslurm 22.5.3 is made for the Slurm 22.05.8 here")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "pyslurm is not installed"),
        ("25.11.2", "pyslurm 25.11.2 is made for another Slurm than 22.05.8, which is here"),
        ("devel", "pyslurm devel is made for another Slurm than 22.05.8, which is here"),
        ("22.11.0", "pyslurm 22.11.0 is made for another Slurm than 22.05.8, which is here"),
    ],
)
def test_the_commands_elsewhere(same_configuration: Slurm, version: str | None, reason: str) -> None:
    choice = chosen(same_configuration, version, must_not_load)
    assert (choice.queries, choice.name, choice.reason) == (same_configuration, "commands", reason)


def test_pyslurm_is_not_imported_where_there_is_no_slurm(no_commands: Slurm) -> None:
    choice = chosen(no_commands, "22.5.3", must_not_load)
    assert choice.name == "commands"
    assert choice.reason.startswith("Slurm's version is not known: sinfo is not found in PATH=")


def test_pyslurm_would_read_another_configuration(same_configuration: Slurm) -> None:
    elsewhere = Slurm({**same_configuration.environ, "SLURM_CONF": "/there/slurm.conf"})
    choice = chosen(elsewhere, "22.5.3", must_not_load)
    assert choice.reason == "SLURM_CONF is /there/slurm.conf, and pyslurm reads this process's own, which is None"


def test_a_pyslurm_that_cannot_be_imported(same_configuration: Slurm) -> None:
    def load() -> Any:
        raise ImportError("libslurm.so.38: cannot open shared object file")

    choice = chosen(same_configuration, "22.5.3", load)
    assert (choice.name, choice.reason) == (
        "commands",
        "pyslurm 22.5.3 cannot be imported: libslurm.so.38: cannot open shared object file",
    )


def test_the_import_leaves_the_linker_as_it_was(
    same_configuration: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyslurm.py").write_text("import os, sys\nsys.setdlopenflags(sys.getdlopenflags() | os.RTLD_GLOBAL)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pyslurm", raising=False)
    flags = sys.getdlopenflags()
    assert not flags & os.RTLD_GLOBAL
    assert queries.choose(same_configuration, lambda: "22.5.3").name == "pyslurm"
    assert sys.getdlopenflags() == flags
    monkeypatch.delitem(sys.modules, "pyslurm")


@pytest.mark.parametrize(
    ("version", "expected"), [("22.05.8", (22, 5)), ("22.5.3", (22, 5)), ("25.11.0-1", (25, 11)), ("unknown", None)]
)
def test_releases(version: str, expected: tuple[int, int] | None) -> None:
    assert queries.release(version) == expected
