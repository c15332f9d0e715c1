"""What a run on Slurm is made of, from the allocation: pure. The runs themselves are in tests/slurm."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_pathways.config import ConfigurationError
from slurm_pathways.launch.node_address import (
    Place,
    choose,
    explain_unreachable,
    own_address,
    own_interfaces,
    own_machine,
)
from slurm_pathways.launch.placement import Placement, find_allocation, plan
from slurm_pathways.launch.steps import StepOptions, srun_argv, step_environment
from slurm_pathways.slurm.commands import Slurm
from slurm_pathways.slurm.environment import Allocation
from slurm_pathways.slurm.quantities import Gres

NODES = ("n1", "n2", "n3", "n4", "n5")
NO_SLURM = Slurm({"PATH": "/nonexistent"})


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ({}, (1, 5, 0)),
        ({"num_spares": 1}, (1, 4, 1)),
        ({"num_slices": 2}, (2, 2, 1)),
        ({"hosts_per_slice": 1}, (5, 1, 0)),
        ({"num_slices": 2, "hosts_per_slice": 1}, (2, 1, 3)),
    ],
)
def test_nodes_become_slices_and_what_is_left_over_are_spares(
    values: dict[str, int], shape: tuple[int, int, int]
) -> None:
    spec, placement = plan({**values, "devices_per_host": 3}, NODES, NO_SLURM)
    assert (spec.num_slices, spec.hosts_per_slice, spec.num_spares, spec.devices_per_host) == (*shape, 3)
    assert placement == Placement("n1", NODES)


def test_more_than_there_is() -> None:
    with pytest.raises(ConfigurationError, match=r"3 slices of 2 hosts .* 5 hosts.*\(the nodes are n\[1-5\]"):
        plan({"num_slices": 3, "hosts_per_slice": 2}, NODES, NO_SLURM)


def _slurm(folder: Path, printed: str) -> Slurm:
    """A scontrol that prints this, whatever it is asked."""
    (folder / "printed").write_text(printed)
    (folder / "scontrol").write_text(f"#!/bin/sh\nexec /bin/cat {folder}/printed\n")
    (folder / "scontrol").chmod(0o755)
    return Slurm({"PATH": str(folder)})


TOPOLOGY = """\
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-5] Switches=left,right
SwitchName=left Level=0 LinkSpeed=1 Nodes=n[1,3,5]
SwitchName=right Level=0 LinkSpeed=1 Nodes=n[2,4]
"""


def test_slices_by_switch(tmp_path: Path) -> None:
    slurm = _slurm(tmp_path, TOPOLOGY)
    spec, placement = plan({"slice_by": "topology"}, NODES, slurm)
    assert (spec.num_slices, spec.hosts_per_slice, spec.num_spares) == (2, 2, 1)
    assert placement == Placement("n1", ("n1", "n3", "n2", "n4", "n5"))
    spec, placement = plan({"slice_by": "topology", "num_slices": 1}, NODES, slurm)
    assert (spec.hosts_per_slice, placement.workers) == (5, ("n1", "n3", "n5", "n2", "n4"))


@pytest.mark.parametrize("slice_by", ["feature", "gres"])
def test_slices_by_what_nodes_have(slice_by: str, tmp_path: Path) -> None:
    record = "NodeName={} ActiveFeatures=x,{} Gres={} NodeAddr=a CPUTot=8 State=IDLE RealMemory=1\n"
    kinds = {"n1": ("a", "tpu:v5p:4"), "n2": ("b", "tpu:v6e:8")}
    nodes = "\n".join(record.format(node, *kinds["n1" if node in ("n1", "n4") else "n2"]) for node in NODES)
    spec, placement = plan({"slice_by": slice_by, "num_spares": 1}, NODES, _slurm(tmp_path, nodes))
    assert (spec.num_slices, spec.hosts_per_slice, spec.num_spares) == (2, 2, 1)
    assert placement.workers == ("n1", "n4", "n2", "n3", "n5")


def test_what_slurm_does_not_say_is_no_slice(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--slice-by topology needs .*: scontrol is not found .* In a "):
        plan({"slice_by": "topology"}, NODES, NO_SLURM)
    with pytest.raises(ConfigurationError, match=r"knows of no switches here .* use feature, gres or order"):
        plan({"slice_by": "topology"}, NODES, _slurm(tmp_path, ""))
    with pytest.raises(ConfigurationError, match=r"--slice-by gres needs .*: node n1: unknown form of 'State'"):
        plan({"slice_by": "gres"}, NODES, _slurm(tmp_path, "NodeName=n1 Gres=tpu:4"))


INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["fe80::1%eth0", "fd00::5", "10.1.0.5"],
    "ib0": ["192.168.7.5"],
    "v": [],
}


@pytest.mark.parametrize(
    ("interface", "address"),
    [
        ("eth0", "10.1.0.5"),
        ("ib0", "192.168.7.5"),
        ("10.0.0.0/8", "10.1.0.5"),
        ("192.168.7.9/24", "192.168.7.5"),
        ("fd00::/8", "fd00::5"),
    ],
)
def test_an_interface_is_chosen(interface: str, address: str) -> None:
    assert choose(interface, INTERFACES) == address


@pytest.mark.parametrize(
    ("interface", "words"),
    [
        ("ib1", r"--interface ib1: this node has no ib1; it has eth0 \(fe80::1%eth0, fd00::5, 10.1.0.5\), ib0 \(192.1"),
        ("v", "this node has no interface v with an address; it has eth0 .* Name one that all nodes"),
        ("172.16.0.0/12", "has no address in the network 172.16.0.0/12; it has eth0"),
        ("fe80::/10", "has no address in the network fe80::/10"),
        ("lo", "127.0.0.1 is a loopback address, which other nodes cannot reach; this node has eth0"),
        ("127.0.0.0/8", "127.0.0.1 is a loopback address"),
    ],
)
def test_an_interface_that_will_not_do(interface: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        choose(interface, INTERFACES)


def test_this_machine_has_interfaces() -> None:
    assert "127.0.0.1" in own_interfaces()["lo"]


def test_loopback_will_do_on_one_machine_only() -> None:
    here, there = Place("n1", "127.0.1.1", "A"), Place("n2", "10.0.0.2", "B")
    assert explain_unreachable([here, Place("n2", "127.0.1.2", "A")]) is None
    assert explain_unreachable([there, Place("n1", "10.0.0.1", "A")]) is None
    reason = explain_unreachable([there, here])
    assert reason is not None
    assert re.search(r"others cannot reach them: n1 \(127.0.1.1\)\. Say which network .* /etc/hosts", reason)


def test_heterogeneous_jobs_are_refused() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_HET_SIZE": "2"}
    with pytest.raises(ConfigurationError, match="job 7 is a heterogeneous job of 2 components"):
        find_allocation(environ)


def test_a_worker_has_the_devices_and_others_have_none() -> None:
    allocation = Allocation(7, NODES, cpus_per_node=(8, 8, 16, 8, 8), gres_per_node=(Gres("tpu", "v5p", 4),))
    worker = srun_argv(allocation, StepOptions("pathways-worker-2", "n3", has_devices=True), ["true"])
    assert worker[-1] == "true"
    assert {"--nodelist=n3", "--cpus-per-task=16", "--gres=tpu:v5p:4", "--mem=0", "--overlap"} < set(worker)
    assert "--pty" not in worker
    client = srun_argv(allocation, StepOptions("pathways-client", "n1", has_terminal=True), ["--", "x"])
    assert {"--gres=none", "--cpus-per-task=8", "--pty", "--job-name=pathways-client"} < set(client)


def test_options_of_the_job_do_not_become_options_of_our_steps() -> None:
    kept = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/x", "PATH": "/bin", "SLURM_SUBMIT_DIR": "/home"}
    dropped = {
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_DEBUG": "1",
        "SLURM_EXPORT_ENV": "NONE",
        "SLURM_GPUS": "16",
        "SLURM_MEM_PER_CPU": "100",
        "SLURM_NTASKS": "4",
        "SLURM_LABELIO": "1",
        "SLURM_SPANK__SLURM_SPANK_OPTION_pathways_pathways": "",
        "_SLURM_SPANK_OPTION_pathways_pathways": "",
        "SRUN_CPUS_PER_TASK": "2",
    }
    assert step_environment({**kept, **dropped}) == kept


def test_a_nodes_address_is_that_of_the_interface_towards_the_launcher() -> None:
    assert own_address({"SLURM_SRUN_COMM_HOST": "127.0.0.1", "SLURMD_NODENAME": "203.0.113.9"}) == "203.0.113.9"
    assert own_address({"SLURMD_NODENAME": "203.0.113.9"}) == "203.0.113.9"


def test_who_shares_a_loopback_interface_is_one_machine() -> None:
    told = [sys.executable, "-c", "from slurm_pathways.launch.node_address import own_machine; print(own_machine())"]
    beside = subprocess.run(told, capture_output=True, text=True, timeout=30, check=True)
    assert beside.stdout.strip() == own_machine()
    apart = subprocess.run(["unshare", "--net", *told], capture_output=True, text=True, timeout=30, check=True)
    assert apart.stdout.strip() != own_machine()
