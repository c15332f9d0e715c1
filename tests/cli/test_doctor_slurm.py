"""What ``doctor`` says of Slurm, by stand-ins for its commands."""

import os
import sys
from pathlib import Path

import pytest

from slurm_pathways import doctor
from slurm_pathways.doctor import Finding, Level, check_nodes, check_plugin, check_slurm
from slurm_pathways.slurm.environment import read_allocation

SAMPLES = Path(__file__).parents[1] / "slurm" / "unit" / "samples" / "pyslurm"
#: Job 3 of the samples.
JOB = {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2"}
#: What an srun with the plugin does when it is asked for help.
HELP = '[ "$1" != --help ] || { echo "      --pathways[=OPTIONS]"; exit; }\n'
#: node0 and node1.
JOBS_NODES = (SAMPLES / "scontrol_node_22.05.txt").read_text().partition("NodeName=node2")[0]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in PATH, with stand-ins that know the cluster of the samples; both nodes are as they should be."""
    monkeypatch.delenv("SLURM_CONF", raising=False)
    stand_in(tmp_path, "sinfo", "echo slurm-wlm 22.05.8")
    stand_in(tmp_path, "squeue", f"cat {SAMPLES}/squeue_22.05.json")
    (tmp_path / "nodes").write_text(JOBS_NODES)
    stand_in(tmp_path, "scontrol", f"cat {tmp_path}/nodes")
    stand_in(tmp_path, "srun", f"{HELP}echo node1 yes yes yes; echo node0 yes yes yes")
    return tmp_path


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    path.chmod(0o755)


def examine(commands: Path, job: dict[str, str]) -> dict[str, Finding]:
    findings = check_slurm({"PATH": str(commands), **job})
    by_subject = {finding.subject: finding for finding in findings}
    assert len(by_subject) == len(findings)
    return by_subject


def test_in_an_allocation(commands: Path) -> None:
    found = examine(commands, JOB)
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert found["Slurm"].found == "22.05.8, tested"
    assert found["Slurm is asked by"].found.startswith("commands: pyslurm ")
    assert found["allocation"].found == "job 3 on 2 nodes, node[0-1]"
    assert found["nodes"].found == f"all 2 start steps, and see {sys.executable} and {os.getcwd()}"  # noqa: PTH109
    assert found["SPANK plugin"].found == "loaded: srun --pathways works (here and on node[0-1])"


def test_outside_of_a_job(commands: Path) -> None:
    found = examine(commands, {})
    assert set(found) == {"Slurm", "Slurm is asked by", "allocation", "SPANK plugin"}
    assert found["SPANK plugin"].found == "loaded: srun --pathways works (here)"
    assert found["allocation"].level is Level.OK
    assert found["allocation"].found.startswith("none: this is not inside a job; start one with salloc")


def test_without_slurm(tmp_path: Path) -> None:
    assert examine(tmp_path, {})["Slurm"] == Finding("Slurm", Level.OK, "not here; run --local needs none")
    inside = examine(tmp_path, JOB)["Slurm"]
    assert (inside.level, inside.remedy) == (Level.ERROR, "start slurm-pathways where srun is")
    assert inside.found.startswith("sinfo is not found in PATH=")


def test_commands_without_a_cluster(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_FIRST_TIMEOUT_S", 0.2)
    stand_in(commands, "sinfo", "sleep 60")
    assert (examine(commands, {})["Slurm"].level, examine(commands, JOB)["Slurm"].level) == (
        Level.WARNING,
        Level.ERROR,
    )


def test_another_slurm(commands: Path) -> None:
    stand_in(commands, "sinfo", "echo slurm 25.11.2")
    found = examine(commands, JOB)["Slurm"]
    assert (found.level, found.found) == (Level.WARNING, "25.11.2, not tested (tested: 22.05)")


def test_an_environment_that_was_cut_down(commands: Path) -> None:
    found = examine(commands, {"SLURM_JOB_ID": "3"})["allocation"]
    assert found.level is Level.ERROR
    assert "SLURM_JOB_NODELIST is missing" in found.found


@pytest.mark.parametrize(("job_id", "state"), [("4", "FAILED"), ("4711", "gone")])
def test_a_job_that_does_not_run(commands: Path, job_id: str, state: str) -> None:
    found = examine(commands, {**JOB, "SLURM_JOB_ID": job_id})["allocation"]
    assert (found.level, found.found) == (Level.ERROR, f"job {job_id} on 2 nodes, node[0-1], which is {state}")


def test_a_job_that_has_lost_a_node(commands: Path) -> None:
    lossy = {**JOB, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[2-3]", "SLURM_JOB_CPUS_PER_NODE": "1(x2)"}
    found = examine(commands, lossy)["allocation"]
    assert (found.level, found.found) == (Level.ERROR, "job 7 on 2 nodes, node[2-3], of which it has lost node3")
    assert found.remedy == "export SLURM_JOB_NODELIST=node2 SLURM_JOB_NUM_NODES=1; unset SLURM_JOB_CPUS_PER_NODE"
    mended = {**lossy, "SLURM_JOB_NODELIST": "node2", "SLURM_JOB_NUM_NODES": "1"}
    del mended["SLURM_JOB_CPUS_PER_NODE"]
    assert read_allocation(mended).nodes == ("node2",)


def test_a_node_that_is_silent(commands: Path) -> None:
    (commands / "nodes").write_text(JOBS_NODES.replace("State=ALLOCATED", "State=ALLOCATED*", 1))
    found = examine(commands, JOB)["nodes"]
    assert (found.level, found.found) == (Level.ERROR, "slurmctld has no answer from node0")


def test_a_step_that_fails(commands: Path) -> None:
    stand_in(commands, "srun", "echo 'srun: error: Unable to create step' >&2; exit 1")
    found = examine(commands, JOB)["nodes"]
    assert found.level is Level.ERROR
    assert "Unable to create step" in found.found


def test_nodes_that_lack_something(commands: Path) -> None:
    stand_in(commands, "srun", f"{HELP}echo node1 yes no no; echo srun: something else")
    findings = check_slurm({"PATH": str(commands), **JOB})[-3:]
    folder = os.getcwd()  # noqa: PTH109
    assert [(finding.subject, finding.level, finding.found) for finding in findings] == [
        ("nodes", Level.ERROR, "no answer from node0"),
        ("nodes", Level.ERROR, f"no folder {folder} on node1"),
        ("SPANK plugin", Level.WARNING, "loaded here, but not on node1"),
    ]


def test_what_nodes_lack() -> None:
    said = {"node0": (True, True), "node1": (False, True), "node2": (False, False)}
    findings = check_nodes(("node0", "node1", "node2", "node3"), said, "/opt/python", "/work")
    assert [(finding.level, finding.found) for finding in findings] == [
        (Level.ERROR, "no answer from node3"),
        (Level.ERROR, "no /opt/python on node[1-2]"),
        (Level.ERROR, "no folder /work on node2"),
    ]


def test_where_the_plugin_is() -> None:
    assert check_plugin({"here": False, "node0": False}).found == "not here; only srun --pathways needs it"
    mixed = check_plugin({"here": False, "node0": True})
    assert (mixed.level, mixed.found) == (Level.WARNING, "loaded on node0, but not here")
