"""A real Slurm for the tests: one cluster per session, which every test gets whole and idle."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from slurm_pathways.sandbox.cluster import Sandbox
from slurm_pathways.sandbox.configuration import PARTITION, PREEMPTIBLE

from .jobs import COMMAND, COMMAND_TIMEOUT_S, PSUM, Job, Submit

SPANK = Path(__file__).parents[2] / "spank"

NUM_NODES = 8
UP_TIMEOUT_S = 120.0

SandboxCommand = Callable[..., subprocess.CompletedProcess[str]]
Slurm = Callable[..., str]


def _sandbox_command(*arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("slurm-pathways"), "sandbox", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture(scope="session")
def sandbox_command() -> SandboxCommand:
    """Runs ``slurm-pathways sandbox`` with these arguments, as a user does."""
    return _sandbox_command


@pytest.fixture(scope="session")
def session_sandbox_root() -> Iterator[Path]:
    """A short folder that other users can enter; pytest's own are neither."""
    root = Path(tempfile.mkdtemp(prefix="sandbox-", dir="/tmp"))
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def sandbox(session_sandbox_root: Path) -> Iterator[Sandbox]:
    """The session's cluster: ``NUM_NODES`` nodes with networks of their own.

    Tests that leave jobs or broken nodes behind use ``mended_sandbox``.
    """
    up = _sandbox_command(
        *("up", "--netns", "--nodes", str(NUM_NODES), "--dir", str(session_sandbox_root)), timeout_s=UP_TIMEOUT_S
    )
    assert up.returncode == 0, up.stderr
    there = Sandbox(session_sandbox_root)
    yield there
    there.down()


@pytest.fixture
def mended_sandbox(sandbox: Sandbox) -> Iterator[Sandbox]:
    """The session's cluster; after the test its jobs are cancelled, and its nodes mended until all are idle."""
    yield sandbox
    sandbox.heal()
    for partition in (PARTITION, PREEMPTIBLE):
        sandbox.run(["scancel", f"--partition={partition}"], COMMAND_TIMEOUT_S)
    for index, node in enumerate(sandbox.status().nodes):
        if not node.is_running or (node.slurm_state or "").startswith(("down", "drain")):
            sandbox.return_node(index)
    sandbox.await_idle()


@pytest.fixture(scope="session")
def built_spank(sandbox: Sandbox) -> Path:
    """The plugin, built and installed in the sandbox's folder; no plugstack.conf names it yet."""
    folder = sandbox.directory / "spank"
    source = shutil.copytree(SPANK, folder / "source", ignore=shutil.ignore_patterns("build"))
    made = subprocess.run(
        ["make", "-s", "install", f"PREFIX={folder}", f"SYSCONFDIR={folder}/etc"],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture
def slurm(sandbox: Sandbox) -> Slurm:
    """Runs a command in the session's cluster that has to succeed; what it prints."""

    def run(*argv: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        done = sandbox.run(argv, timeout_s)
        assert done.returncode == 0, f"{' '.join(argv)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def submit(sandbox: Sandbox, tmp_path: Path) -> Submit:
    """Submits a batch script of these lines, from ``folder``, with more options of sbatch."""

    def submit(num_nodes: int, *lines: str, options: Sequence[str] = (), folder: Path = tmp_path) -> Job:
        number = len(list(tmp_path.glob("*.sbatch")))
        script, output = tmp_path / f"{number}.sbatch", tmp_path / f"{number}.out"
        script.write_text("\n".join(["#!/bin/bash", *lines, ""]))
        usual = [f"--nodes={num_nodes}", "--exclusive", "--no-kill", "--gres=tpu:4", f"--output={output}"]
        done = sandbox.run(
            ["env", "-C", str(folder), "sbatch", "--parsable", *usual, *options, str(script)], COMMAND_TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
        return Job(sandbox, int(done.stdout), output)

    return submit


@pytest.fixture
def plugin(sandbox: Sandbox, built_spank: Path) -> Iterator[None]:
    """Commands and nodes have the plugin."""
    drop_in = sandbox.plugstack_dir / "pathways.conf"
    drop_in.write_text(f"optional {built_spank}/lib/slurm-pathways/pathways.so command={COMMAND}\n")
    yield
    drop_in.unlink()


@pytest.fixture
def psum(tmp_path: Path) -> Path:
    """A program that sums 1, 2, … over all devices and ends with the exit code that it is given."""
    program = tmp_path / "psum.py"
    program.write_text(PSUM)
    return program
