"""What a run on Slurm is made of, from the allocation: pure. The runs themselves are in tests/slurm."""

import pytest

from slurm_pathways.config import ConfigurationError
from slurm_pathways.launch.node_address import own_address
from slurm_pathways.launch.placement import Placement, find_allocation, plan
from slurm_pathways.launch.steps import StepOptions, srun_argv, step_environment
from slurm_pathways.slurm.environment import Allocation
from slurm_pathways.slurm.quantities import Gres

NODES = ("n1", "n2", "n3", "n4", "n5")


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
    spec, placement = plan({**values, "devices_per_host": 3}, NODES)
    assert (spec.num_slices, spec.hosts_per_slice, spec.num_spares, spec.devices_per_host) == (*shape, 3)
    assert placement == Placement("n1", NODES)


def test_more_than_there_is() -> None:
    with pytest.raises(ConfigurationError, match=r"3 slices of 2 hosts .* 5 hosts.*\(the nodes are n1, n2, n3, n4, n5"):
        plan({"num_slices": 3, "hosts_per_slice": 2}, NODES)


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
        "SLURM_EXPORT_ENV": "NONE",
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
