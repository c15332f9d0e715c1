from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pathways.slurm.environment import (
    BadVariable,
    EnvironmentProblem,
    NotInJob,
    PartialEnvironment,
    Step,
    is_in_job,
    read_allocation,
)
from slurm_pathways.slurm.quantities import Gres

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (SAMPLES / name).read_text().splitlines())


BATCH = sample("environ_batch_22.05.txt")
STEP = sample("environ_step_22.05.txt")


def test_batch_script() -> None:
    allocation = read_allocation(BATCH)
    assert allocation.job_id == 5
    assert allocation.nodes == ("node0", "node1", "node2")
    assert allocation.cpus_per_node == (8, 8, 8)
    assert allocation.memory_mib_per_node == 2000
    assert allocation.memory_mib_per_cpu is None
    assert allocation.job_name == "name with spaces"
    assert (allocation.partition, allocation.cluster) == ("tpu", "s2")
    assert (allocation.num_components, allocation.restart_count, allocation.array_task_id) == (1, 0, None)
    assert allocation.step is None


def test_a_step_of_some_of_the_nodes() -> None:
    allocation = read_allocation(STEP)
    # SLURM_NNODES is the step's, and does not contradict the job's list.
    assert STEP["SLURM_NNODES"] == "2"
    assert allocation.nodes == ("node0", "node1", "node2")
    assert allocation.step == Step(
        step_id=0,
        nodes=("node0", "node1"),
        node="node0",
        node_index=0,
        task_index=0,
        local_task_index=0,
        num_tasks=2,
        port_range=(40011, 40012),
    )


def test_the_least_that_is_needed() -> None:
    allocation = read_allocation({"SLURM_JOBID": "7", "SLURM_NODELIST": "a"})
    assert (allocation.job_id, allocation.nodes, allocation.cpus_per_node, allocation.step) == (7, ("a",), None, None)


def test_parts_that_only_some_jobs_have() -> None:
    allocation = read_allocation(
        {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "a[1-4]",
            "SLURM_JOB_CPUS_PER_NODE": "16(x3),8",
            "SLURM_MEM_PER_CPU": "2G",
            "SLURM_TRES_PER_NODE": "gres:tpu:v5p:4",
            "SLURM_HET_SIZE": "2",
            "SLURM_ARRAY_JOB_ID": "6",
            "SLURM_ARRAY_TASK_ID": "0",
            "SLURM_RESTART_COUNT": "3",
        }
    )
    assert allocation.cpus_per_node == (16, 16, 16, 8)
    assert allocation.memory_mib_per_cpu == 2048
    assert allocation.gres_per_node == (Gres("tpu", "v5p", 4),)
    assert (allocation.num_components, allocation.restart_count) == (2, 3)
    assert (allocation.array_job_id, allocation.array_task_id) == (6, 0)


@pytest.mark.parametrize("step_id", ["4294967291", "4294967290", "4294967292"])
def test_batch_and_interactive_steps_are_no_steps(step_id: str) -> None:
    assert read_allocation({**BATCH, "SLURM_STEP_ID": step_id}).step is None


def test_outside() -> None:
    assert not is_in_job({})
    with pytest.raises(
        NotInJob, match=r"not inside a Slurm job: SLURM_JOB_ID is missing\. Start .* salloc or sbatch; or add --local"
    ):
        read_allocation({"PATH": "/bin"})
    with pytest.raises(NotInJob, match=r"only SLURM_CLUSTER_NAME, SLURM_CONF\)"):
        read_allocation({"SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTER_NAME": "c"})


def test_a_shell_that_was_entered_by_ssh() -> None:
    assert is_in_job({"SLURM_JOB_ID": "7"})
    with pytest.raises(PartialEnvironment) as caught:
        read_allocation({"SLURM_JOB_ID": "7"})
    assert caught.value.missing == ("SLURM_JOB_NODELIST",)
    assert "srun --jobid=7 --overlap --pty bash" in str(caught.value)
    assert "squeue -h -j 7 -o %N" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"SLURM_JOB_ID": "five"}, "SLURM_JOB_ID=five cannot be: it must be a whole number"),
        ({"SLURM_JOB_NODELIST": "node[0-"}, r"SLURM_JOB_NODELIST=node\[0- cannot be: .* closing bracket is missing"),
        (
            {"SLURM_JOB_NUM_NODES": "4"},
            r"SLURM_JOB_NUM_NODES=4, and there are 3 nodes, node\[0-2\]: these .* do not belong",
        ),
        ({"SLURM_JOB_CPUS_PER_NODE": "8(x2)"}, r"is for 2 nodes, and the node list node\[0-2\] has 3"),
        ({"SLURM_JOB_CPUS_PER_NODE": "8x2"}, "SLURM_JOB_CPUS_PER_NODE=8x2 cannot be: '8x2' is no list of counts"),
        ({"SLURM_MEM_PER_NODE": "much"}, "SLURM_MEM_PER_NODE=much cannot be"),
        ({"SLURM_STEP_NUM_NODES": "3"}, "SLURM_STEP_NUM_NODES=3, and there are 2 nodes of the step"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID=-1 cannot be"),
    ],
)
def test_what_contradicts_itself(changed: dict[str, str], words: str) -> None:
    with pytest.raises(BadVariable, match=words):
        read_allocation({**STEP, **changed})


@settings(deadline=None)
@given(
    st.sets(st.sampled_from(sorted(STEP))),
    st.dictionaries(st.sampled_from(sorted(STEP)), st.text("a0[-],(x)", max_size=6)),
)
def test_any_part_of_an_environment_is_read_or_explained(kept: set[str], changed: dict[str, str]) -> None:
    environ = {**{name: STEP[name] for name in kept}, **changed}
    try:
        allocation = read_allocation(environ)
    except EnvironmentProblem as problem:
        assert "SLURM_" in str(problem)
    else:
        assert allocation.nodes
