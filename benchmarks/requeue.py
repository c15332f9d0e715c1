"""A node is lost in the midst of a training: a spare takes over, or the job is queued again and restores from disk."""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import PROJECT, Figure, Figures, Row, clean_environment, rows, workload, workload_command
from benchmarks.slurm import COMMAND, sandbox_of

_NUM_NODES = 4
#: The second of the allocation: not that of the batch script.
_VICTIM = 1
_KILLS = 3
_SAVE_EVERY = 5
_TIMEOUT_S = 300.0
#: So long that both programs have saved something.
_GOOD_STEPS = 20


@workload
def elastic_until_recovered() -> Figures:
    """Says "up" after some steps, and trains until a loss is over; seconds from the last good step before it."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from slurm_pathways import elastic

    step_of = jax.jit(lambda x: 0.5 * x + 0.5 * x.mean() + 1)
    good_s = 0.0

    def init(mesh: Any) -> Any:
        return jax.device_put(np.arange(mesh.size, dtype=np.float32), NamedSharding(mesh, P(mesh.axis_names)))

    def train(attempt: elastic.Attempt) -> tuple[float, int]:
        nonlocal good_s
        state = attempt.start(init)
        for step in itertools.count(attempt.step):
            state = step_of(state)
            jax.block_until_ready(state)
            now_s = time.monotonic()
            if attempt.number > 0:
                return now_s - good_s, step
            good_s = now_s
            attempt.done(step + 1, state)
            if step + 1 == _GOOD_STEPS:
                print("up", flush=True)
            time.sleep(0.05)
        raise AssertionError("the count has ended")

    again_s, _ = elastic.run(train, snapshots=elastic.Snapshots(every_steps=_SAVE_EVERY))
    return {"again_s": again_s}


def _with_spare() -> float:
    """In an allocation of one node more, of which Slurm takes none away; seconds to the next good step."""
    shape = ["--slices", "2", "--hosts-per-slice", "2", "--devices-per-host", "2", "--spares", "1"]
    run = [COMMAND, "run", "-q", *shape, "--", *workload_command("elastic_until_recovered")]
    with sandbox_of(_NUM_NODES + 1) as sandbox:
        program = subprocess.Popen(
            sandbox.command(["salloc", "--quiet", "--exclusive", "--no-kill", f"--nodes={_NUM_NODES + 1}", *run]),
            env=sandbox.environ(clean_environment()),
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            text=True,
        )
        with program:
            assert program.stdout is not None and program.stdout.readline() == "up\n"
            sandbox.kill_node(_VICTIM)
            figures: Figures = json.loads(program.stdout.read().splitlines()[-1])
        return figures["again_s"]


def _with_requeue() -> Figures:
    """A job of multi-process JAX; Slurm is told at once of the loss, and that the job need not wait."""
    with sandbox_of(_NUM_NODES + 1) as sandbox, tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as name:
        folder = Path(name)
        script = folder / "job.sbatch"
        script.write_text(
            "#!/bin/bash\n"
            f"#SBATCH --nodes={_NUM_NODES} --ntasks-per-node=1 --exclusive --requeue --output={folder}/job.out\n"
            # As in plain_multiprocess: with fewer threads two devices of a process deadlock in gloo on small machines.
            "export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 NPROC=16\n"
            f"exec srun {sys.executable} -m benchmarks.requeue_program {folder} {_SAVE_EVERY}\n"
        )
        job_id = _on_login(sandbox, "sbatch", "--parsable", "--open-mode=append", str(script)).strip()
        _until(lambda: int((_read(folder / "good") or "0 0").split()[1]) >= _GOOD_STEPS, folder)
        sandbox.kill_node(_VICTIM, tells_slurm=True)
        _until(lambda: "JobState=PENDING" in _on_login(sandbox, "scontrol", "show", "job", job_id), folder)
        pending_s = time.monotonic()
        # It would wait for two minutes. Nodes refuse a job in the second in which they were told to end it.
        _on_login(sandbox, "scontrol", "update", f"jobid={job_id}", "starttime=now+2")
        _until(lambda: bool(_read(folder / "again")), folder)
        good_s = float(_read(folder / "good").split()[0])
        began_s, again_s = map(float, _read(folder / "again").split()[:2])
        return {"again_s": again_s - good_s, "pending_s": pending_s - good_s, "began_s": began_s - good_s}


def _on_login(sandbox: Any, *argv: str) -> str:
    return subprocess.run(
        sandbox.command(list(argv)),
        env=sandbox.environ(clean_environment()),
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TIMEOUT_S,
        check=True,
    ).stdout


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _until(is_so: Any, folder: Path) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(
                f"nothing has come of the job in {_TIMEOUT_S:g} s; it said:\n{_read(folder / 'job.out')}"
            )
        time.sleep(0.05)


@rows(27)
def recovery_or_requeue() -> Iterator[Row]:
    """4 nodes of 2 devices, one program over all; 5 nodes in the cluster."""
    spare, requeue = [], []
    for _ in range(_KILLS):
        spare.append(_with_spare())
        requeue.append(_with_requeue())

    def median(name: str) -> float:
        return statistics.median(figures[name] for figures in requeue)

    yield Row(
        f"Slurm: a node is killed in a training, to the next good step, with a spare: median of {_KILLS}",
        "s",
        statistics.median(spare),
        smaller_is_better=True,
        compared=(Figure("requeued, restored from disk", median("again_s")),),
        remarks=f"requeued: queued after {median('pending_s'):.1f} s, Python starts after {median('began_s'):.1f} s",
    )
