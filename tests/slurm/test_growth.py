"""A run gets nodes of other jobs, survives by them, and outlives these jobs."""

import json
import re
import sys
from pathlib import Path

import pytest

from slurm_pathways.sandbox.cluster import Sandbox
from slurm_pathways.sandbox.configuration import PARTITION, PREEMPTIBLE

from .jobs import COMMAND, COMMAND_TIMEOUT_S, JOB_TIMEOUT_S, Job, Submit, commands, remove_kept_logs, until_gone

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(300)]

#: Computes on slice 1 until that was lost and there again, twice; slice 0 has to compute throughout.
PROGRAM = """
import os, time, jax, numpy as np
step = jax.jit(lambda x: x + x.sum())
where = {device.slice_index: device for device in jax.devices()}
compute = lambda i: np.asarray(step(jax.device_put(np.arange(4.0), where[i]))).tolist()
num_lost, is_down, deadline_s = 0, False, time.monotonic() + 200
assert compute(0) == compute(1) == [6.0, 7.0, 8.0, 9.0]
print("up", flush=True)
while num_lost < 2 or is_down:
    assert time.monotonic() < deadline_s
    assert compute(0) == [6.0, 7.0, 8.0, 9.0]
    try:
        assert compute(1) == [6.0, 7.0, 8.0, 9.0]
        is_down = False
    except jax.errors.JaxRuntimeError as failure:
        if not is_down:
            print("lost", failure, flush=True)
            num_lost, is_down = num_lost + 1, True
    time.sleep(0.05)
# Not by way of jaxlib's threads, which may crash while the interpreter ends.
os._exit(5)
"""


def test_nodes_of_other_jobs_come_serve_and_go(
    submit: Submit, sandbox: Sandbox, runs_root: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = submit(2, f"{COMMAND} run --slices 2 -- {sys.executable} {program}")
    job.until_said("up\n")

    def grow(*options: str) -> Job:
        output = f"--output={tmp_path}/companion-%j.out"
        argv = [str(COMMAND), "grow", str(job.job_id), "--nodes", "1", "--sbatch", output, *options]
        done = sandbox.run(argv, JOB_TIMEOUT_S)
        assert done.returncode == 0, done.stderr + job.said()
        return Job(sandbox, int(done.stdout), tmp_path / f"companion-{int(done.stdout)}.out")

    first = grow("--wait", f"--partition={PREEMPTIBLE}")
    [lent] = first.nodes()
    place = f"{lent} of job {first.job_id}"
    assert f"worker 2 ({place}) has joined" in job.said()
    status = sandbox.run([str(COMMAND), "status", "--job", str(job.job_id), "--json"], COMMAND_TIMEOUT_S)
    workers = json.loads(status.stdout)["workers"]
    assert [(w["state"], w["companion"]) for w in workers] == [
        ("bound", None),
        ("bound", None),
        ("spare", f"job {first.job_id}"),
    ]

    gone = job.nodes()[1]
    sandbox.kill_node(int(gone.removeprefix("node")))
    job.until_said(f"host 1 is served again by {place} after")

    second, third = grow(), grow()
    for companion in (second, third):
        job.until_said(f"of job {companion.job_id}) has joined")
    sandbox.run(["scancel", str(third.job_id)], COMMAND_TIMEOUT_S)
    job.until_said(f"of job {third.job_id}) has left: ")
    [other] = second.nodes()
    # It makes room for another job. Slurm tells its steps, which are workers, and not its script.
    argv = ["sbatch", f"--partition={PARTITION}", f"--nodelist={lent}", "--exclusive", "--output=/dev/null"]
    assert sandbox.run([*argv, "--wrap=true"], COMMAND_TIMEOUT_S).returncode == 0
    job.until_said(f"host 1 is served again by {other} of job {second.job_id} after")

    assert job.wait() == "5:0", job.said()
    lost = re.findall(r"^lost .*DATA_LOSS: host 1 \((.*?)\) was lost at .*?: (.*)$", job.said(), re.MULTILINE)
    assert [who for who, _ in lost] == [gone, place], job.said()
    assert lost[1][1].startswith(f"job {first.job_id} takes it back: "), lost
    assert second.wait() == "0:0", second.said()
    assert second.fields()["JobState"] == "COMPLETED"
    first.until(lambda: first.fields()["Restarts"] == "1", "is not queued again", JOB_TIMEOUT_S)
    assert f"job {first.job_id} makes room for another one, and is queued again" in first.said()
    sandbox.run(["scancel", str(first.job_id)], COMMAND_TIMEOUT_S)
    for companion in (first, third):
        assert companion.wait() and companion.fields()["JobState"] == "CANCELLED"
    for companion in (first, second, third):
        companion.until_without_steps()
    assert [argv for _, argv in commands(sandbox) if "pathways_runtime.worker" in argv] == []
    until_gone(runs_root)
    remove_kept_logs(runs_root)
