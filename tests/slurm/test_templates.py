"""Every template, submitted with plain sbatch as a user does."""

import importlib.resources
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_pathways.launch.submit import TEMPLATES, template_names
from slurm_pathways.sandbox.cluster import Sandbox
from slurm_pathways.sandbox.configuration import PARTITION, PREEMPTIBLE

from .jobs import COMMAND, COMMAND_TIMEOUT_S, JOB_TIMEOUT_S, Job, until_gone

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Templates by name, and the job that each makes.
JOB_NAMES = {
    "interactive": "notebook",
    "pipeline": "pipeline",
    "requeue": "requeue",
    "rl": "rl",
    "run": "pathways",
    "service": "service",
    "train": "train",
}
#: Between SIGUSR1 and the end of a program that has to save first, and of its job.
SAVE_TIMEOUT_S = 60.0

pytestmark = [pytest.mark.usefixtures("mended_sandbox", "no_leaks"), pytest.mark.timeout(240)]

SubmitTemplate = Callable[..., Job]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where jobs are submitted, with ``slurm-pathways`` and ``python`` in the PATH, as in an activated environment."""
    monkeypatch.setenv("PATH", f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}")
    folder = tmp_path / 'it\'s "my" folder'
    folder.mkdir()
    return folder


@pytest.fixture
def submit_template(sandbox: Sandbox, folder: Path) -> SubmitTemplate:
    """``sbatch -N… TEMPLATE.sbatch PROGRAM…``."""

    def submit(template: str, num_nodes: int, *program: object, partition: str = PARTITION) -> Job:
        with importlib.resources.as_file(importlib.resources.files(TEMPLATES) / f"{template}.sbatch") as script:
            argv = ["sbatch", "--parsable", f"-N{num_nodes}", "-p", partition, str(script), *map(str, program)]
            done = sandbox.run(["env", "-C", str(folder), *argv], COMMAND_TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        job_id = int(done.stdout)
        return Job(sandbox, job_id, folder / f"{JOB_NAMES[template]}-{job_id}.out")

    return submit


def logs_of(job: Job) -> set[str]:
    """The names of its logs, without the numbers of nodes, which Slurm chooses."""
    return {re.sub(r"\.node\d\.", ".NODE.", path.name) for path in job.output.with_suffix(".logs").iterdir()}


def log_names(num_workers: int) -> set[str]:
    parts = ["controller", "proxy-0"]
    parts += [f"{part}-{number}" for part in ("worker", "executor") for number in range(num_workers)]
    return {f"{part}.NODE.log" for part in parts}


def test_all_templates_are_tested_here() -> None:
    assert set(JOB_NAMES) == set(template_names())


def test_train(submit_template: SubmitTemplate, folder: Path) -> None:
    train = EXAMPLES / "digits" / "train.py"
    job = submit_template("train", 3, "python", train, "--epochs", 1, "--losses", "losses.json")
    assert job.wait() == "0:0", job.said()
    assert "2 cpu devices in 2 slice(s), mode data" in job.said()
    assert json.loads((folder / "losses.json").read_text())["accuracies"][-1] >= 0.9
    # The spare's too.
    assert logs_of(job) == log_names(3)


def test_pipeline(submit_template: SubmitTemplate, folder: Path) -> None:
    train = EXAMPLES / "digits" / "train.py"
    job = submit_template(
        "pipeline", 2, "python", train, "--mode", "pipeline", "--epochs", 1, "--losses", "losses.json"
    )
    assert job.wait() == "0:0", job.said()
    assert "2 cpu devices in 2 slice(s), mode pipeline" in job.said()
    assert json.loads((folder / "losses.json").read_text())["accuracies"][-1] >= 0.9


def test_rl(submit_template: SubmitTemplate, folder: Path) -> None:
    job = submit_template("rl", 4, "python", EXAMPLES / "rl" / "train.py", "--rewards", "rewards.json")
    assert job.wait() == "0:0", job.said()
    assert "1 devices sample, 1 reward, 2 train; 4 slice(s)" in job.said()
    rewards = json.loads((folder / "rewards.json").read_text())
    assert rewards[0] < 0.5
    assert min(rewards[-10:]) > 0.85


def undisturbed(folder: Path, *argv: object, platform: str = "proxy") -> str:
    """What a training on this machine says that nobody interrupts."""
    environ = {**os.environ, "JAX_PLATFORMS": platform}
    done = subprocess.run(
        list(map(str, argv)), cwd=folder, env=environ, capture_output=True, text=True, timeout=JOB_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_in(path: Path) -> dict[int, float]:
    """Those that examples/elastic has read, by step."""
    return {int(step): loss for step, loss in json.loads(path.read_text()).items()}


@pytest.mark.timeout(400)
def test_requeue(submit_template: SubmitTemplate, sandbox: Sandbox, folder: Path) -> None:
    """The signal comes, the program saves, the job is queued again, and ends with the values of an undisturbed one.

    Of a program that writes its own checkpoints, as at the time limit, and of one with ``slurm_pathways.elastic``,
    whose two hosts write, and which has to make room for another job: of that, Slurm tells all processes of its steps.
    """
    plain, elastic = EXAMPLES / "requeue" / "train.py", EXAMPLES / "elastic" / "train.py"
    options = "--checkpoints elastic --min-step-s 0.1 --losses losses-${SLURM_RESTART_COUNT:-0}.json"
    scripts = {"plain": f"exec python {plain}", "elastic": f"exec python {elastic} {options}"}
    jobs, saved = {}, {}
    for name, script in scripts.items():
        (folder / f"{name}-steps").write_text("1000000000")
        script += f' --steps "$(cat {name}-steps)"'
        where = (2, PREEMPTIBLE) if name == "elastic" else (1, PARTITION)
        jobs[name] = submit_template("requeue", where[0], "sh", "-c", script, partition=where[1])
    for name, job in jobs.items():
        job.until_said(" step 20 " if name == "elastic" else "step 100 ")
        if name == "elastic":
            nodes = job.fields()["NodeList"]
            argv = ["sbatch", "-p", PARTITION, "-N2", f"--nodelist={nodes}", "--exclusive", "-o", "/dev/null"]
            done = sandbox.run([*argv, "--wrap=true"], COMMAND_TIMEOUT_S)
        else:
            done = sandbox.run(["scancel", "--batch", "--signal=USR1", str(job.job_id)], COMMAND_TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        words = "preempted: after step " if name == "elastic" else "saved at step "
        job.until_said(words)
        [step] = re.findall(rf"{words}(\d+)", job.said())
        saved[name] = int(step)
        assert ("Slurm has sent the job's steps SIGTERM" in job.said()) == (name == "elastic")
        (folder / f"{name}-steps").write_text(str(saved[name] + 20))
    assert [path.name for path in (folder / "elastic").iterdir()] == [f"snapshot-{saved['elastic']}"]
    for job in jobs.values():
        job.until(lambda job=job: job.fields()["Restarts"] == "1", "was not queued again", SAVE_TIMEOUT_S)
        job.until(lambda job=job: job.fields()["JobState"] == "PENDING", "does not wait", SAVE_TIMEOUT_S)
        # Slurm lets a job that was queued again wait for two minutes. In the second in which it has called the nodes
        # off, they refuse it, and it fails.
        update = ["scontrol", "update", f"jobid={job.job_id}", "starttime=now+2"]
        assert sandbox.run(update, COMMAND_TIMEOUT_S).returncode == 0
    for name, job in jobs.items():
        assert job.wait() == "0:0", job.said()
        assert f"from step {saved[name]}" in job.said()
    num_steps = ["--steps", saved["plain"] + 20]
    said = undisturbed(folder, sys.executable, plain, "--checkpoint", "plain.npz", *num_steps, platform="cpu")
    assert jobs["plain"].said().splitlines()[-1] == said.splitlines()[-1]
    num_steps = ["--steps", saved["elastic"] + 20, "--losses", "undisturbed.json"]
    undisturbed(
        folder, COMMAND, "run", "-q", "--local", "--hosts-per-slice", 2, "--", sys.executable, elastic, *num_steps
    )
    expected = losses_in(folder / "undisturbed.json")
    before, after = losses_in(folder / "losses-0.json"), losses_in(folder / "losses-1.json")
    assert sorted(after) == sorted(expected)[-20:]
    assert {**before, **after} == pytest.approx({step: expected[step] for step in {**before, **after}}, rel=1e-5)


def test_requeue_keeps_exit_codes(submit_template: SubmitTemplate, sandbox: Sandbox) -> None:
    """Of programs that end by themselves, that fail when the signal comes, and that do not know of it."""
    failing = "trap 'exit 5' USR1; echo ready; while :; do sleep 0.1; done"
    unknowing = "echo ready; exec sleep 600"
    jobs = [submit_template("requeue", 1, "sh", "-c", script) for script in ("exit 3", failing, unknowing)]
    for job in jobs[1:]:
        job.until_said("ready\n")
        assert sandbox.run(["scancel", "--batch", "--signal=USR1", str(job.job_id)], COMMAND_TIMEOUT_S).returncode == 0
    assert [job.wait() for job in jobs] == ["3:0", "5:0", "138:0"], [job.said() for job in jobs]
    assert [job.fields()["Restarts"] for job in jobs] == ["0", "0", "0"]


def test_service(submit_template: SubmitTemplate, sandbox: Sandbox, runs_root: Path, psum: Path) -> None:
    job = submit_template("service", 2)
    job.until_said("2 devices ready")
    for code in (0, 3):
        run = [COMMAND, "run", "-q", "--job", job.job_id, "--", sys.executable, psum, code]
        done = sandbox.run(list(map(str, run)), JOB_TIMEOUT_S)
        assert (done.returncode, done.stdout) == (code, "slices [0, 0]\npsum 3.0\n"), done.stderr
    # As when the job is preempted: nobody is inside to save.
    assert sandbox.run(["scancel", "--signal=TERM", str(job.job_id)], COMMAND_TIMEOUT_S).returncode == 0
    assert job.wait() == "143:0", job.said()
    assert "ended: the job is about to end, and no program is inside" in job.said()
    until_gone(runs_root)
    assert {"controller.NODE.log", "proxy-0.NODE.log", "proxy-1.NODE.log", "executor-1.NODE.log"} <= logs_of(job)


def test_interactive(submit_template: SubmitTemplate, sandbox: Sandbox, runs_root: Path) -> None:
    job = submit_template("interactive", 2)
    job.until_said("http://localhost:")
    [node] = re.findall(r"ssh -N -L \d+:\S+\.sock \S+@(node\d)\n", job.said())
    assert job.fields()["BatchHost"] == node
    assert "pathways-client" in job.steps()
    assert sandbox.run(["scancel", str(job.job_id)], COMMAND_TIMEOUT_S).returncode == 0
    job.wait()
    until_gone(runs_root)
