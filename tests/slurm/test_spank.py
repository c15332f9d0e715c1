"""The SPANK plugin on a real cluster: who is started, what fails whom, what is left on nodes."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_pathways.sandbox.cluster import Sandbox

SPANK = Path(__file__).parents[2] / "spank"
TIMEOUT_S = 30.0

Run = Callable[..., subprocess.CompletedProcess[str]]
Configure = Callable[[str], None]

#: Stands in for slurm-pathways: says how it was called, and is the program on the first node.
COMMAND = """#!/bin/bash
printf 'task %s %s:' "$SLURM_PROCID" "$SLURMD_NODENAME"; printf ' <%s>' "$@"
echo " slices=$SLURM_PATHWAYS_SLICES spares=$SLURM_PATHWAYS_SPARES"
while [ "$1" != -- ]; do shift; done; shift
[ "$SLURM_PROCID" != 0 ] || exec "$@"
"""


@pytest.fixture(scope="module")
def installed(built_spank: Path) -> Path:
    """The plugin beside a hook and a stand-in for slurm-pathways."""
    folder = built_spank
    for name, text in {
        "slurm-pathways": COMMAND,
        "hook": f'#!/bin/sh\nexec {sys.executable} -I -m slurm_pathways.slurm.hook "$@"\n',
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def configure(sandbox: Sandbox, installed: Path) -> Iterator[Configure]:
    """Sets the plugin's arguments in plugstack.conf; until then it has its command and no hook."""
    drop_in = sandbox.plugstack_dir / "pathways.conf"

    def write(arguments: str) -> None:
        drop_in.write_text(f"optional {installed}/lib/slurm-pathways/pathways.so {arguments}\n")

    write(f"command={installed}/slurm-pathways")
    yield write
    drop_in.unlink()


@pytest.fixture
def run(sandbox: Sandbox, configure: Configure) -> Run:
    """Runs a command on the login, to its end."""

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        done = sandbox.run(argv, TIMEOUT_S)
        return subprocess.CompletedProcess(argv, done.returncode, done.stdout, done.stderr)

    return run


def _no_node_is_drained(run: Run) -> None:
    listed = run("sinfo", "-h", "-N", "-o", "%N %T")
    assert listed.returncode == 0, listed.stderr
    assert not re.search("drain|down|fail", listed.stdout), listed.stdout


def test_a_step_that_asks_starts_slurm_pathways_on_each_node(run: Run) -> None:
    done = run(
        "srun", "-N2", "--pathways=slices=2,spares=1", "bash", "-c", 'echo "program: $0 $1"; exit 3', "a  b", "it's"
    )
    assert done.returncode == 3, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines[0] == "program: a  b it's"
    for rank, line in enumerate(lines[1:]):
        assert re.fullmatch(
            rf"task {rank} node\d: <srun-task> <--> <\S*bash> <-c> <.*> <a  b> <it's> slices=2 spares=1", line
        ), line


def test_a_step_that_does_not_ask_is_as_ever(run: Run) -> None:
    done = run("srun", "-N2", "echo", "plain")
    assert (done.returncode, done.stdout) == (0, "plain\nplain\n")


def test_a_jax_program_cannot_mistake_a_node_without_the_plugin_for_the_runtime(run: Run) -> None:
    probe = ("sh", "-c", "echo platforms=$JAX_PLATFORMS")
    assert "\nplatforms=proxy\n" in run("srun", "-N1", "--pathways", *probe).stdout
    assert (
        "\nplatforms=proxy,cpu\n" in run("env", "JAX_PLATFORMS=proxy,cpu", "srun", "-N1", "--pathways", *probe).stdout
    )
    assert run("srun", "-N1", *probe).stdout == "platforms=\n"
    assert run("srun", "-N1", "--pathways=off", *probe).stdout == "platforms=\n"


def test_a_wrong_value_is_refused_before_anything_starts(run: Run) -> None:
    for argv in (
        ("srun", "-N1", "--pathways=slice=2", "echo", "ran"),
        ("sbatch", "--pathways=slice=2", "--wrap", "true"),
    ):
        done = run(*argv)
        assert done.returncode != 0
        assert "pathways: --pathways: unknown key 'slice'; allowed are slices, hosts-per-slice," in done.stderr
        assert "ran" not in done.stdout
    _no_node_is_drained(run)


def test_two_tasks_on_a_node_are_refused_there(run: Run) -> None:
    done = run("srun", "-N1", "-n2", "--pathways", "echo", "ran")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(
        r"pathways: node node\d: .* one task on each node, .* has 2 here; give --ntasks-per-node=1", done.stderr
    )
    _no_node_is_drained(run)


def test_in_a_batch_script_every_srun_asks_and_the_script_does_not(run: Run, sandbox: Sandbox) -> None:
    script = sandbox.directory / "spank" / "job.sbatch"
    output = sandbox.directory / "spank" / "job.out"
    script.write_text(
        "#!/bin/bash\n#SBATCH --pathways=spares=1\n#SBATCH -N2\n"
        f"#SBATCH -o {output}\n"
        "echo script\nsrun --overlap -N2 -n2 bash -c 'srun --overlap -N1 -n1 echo its own step'\n"
        "srun --overlap -N1 -n1 --pathways=off echo off\nexit 5\n"
    )
    done = run("sbatch", "-W", str(script))
    assert done.returncode == 5, done.stderr
    said = output.read_text()
    assert said.startswith("script\n")
    assert len(re.findall(r"^task [01] node\d: <srun-task> <--> .* spares=1$", said, re.MULTILINE)) == 2, said
    assert "\nits own step\n" in said
    assert "\noff\n" in said
    assert "<echo>" not in said.replace("<srun-task> <--> ", "")


def test_what_is_wrong_on_a_node_is_said_by_the_task(run: Run, configure: Configure, installed: Path) -> None:
    for arguments, code, words in (
        ("hook=/bin/false", 2, "node setup: /bin/false ended with exit code 1"),
        ("hook=/nonexistent/hook", 2, "node setup: /nonexistent/hook could not be started: No such file or directory"),
        ("task=/nonexistent/task", 127, "couldn't execute /nonexistent/task: No such file or directory"),
        ("command=/nonexistent/slurm-pathways", 127, "/nonexistent/slurm-pathways is not found here"),
    ):
        configure(arguments)
        done = run("srun", "-N1", "--pathways", "echo", "ran")
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert re.search(rf"pathways: node node\d: .*{re.escape(words)}", done.stderr), done.stderr
    _no_node_is_drained(run)


def test_a_wrong_plugstack_line_concerns_only_jobs_that_ask(run: Run, configure: Configure) -> None:
    configure("hok=/x")
    done = run("srun", "-N1", "--pathways", "echo", "ran")
    assert done.returncode != 0
    assert "the administrator's plugstack.conf: unknown argument 'hok=/x'; allowed are task=" in done.stderr
    done = run("srun", "-N1", "echo", "plain")
    assert (done.returncode, done.stdout, done.stderr) == (0, "plain\n", "")


def test_the_node_is_set_up_before_and_clean_after(
    run: Run, configure: Configure, installed: Path, mended_sandbox: Sandbox
) -> None:
    state = mended_sandbox.local_dir / "sp"
    configure(f"command={installed}/slurm-pathways hook={installed}/hook state={state}")
    # slurmd looks for epilogs in plugins when it starts.
    mended_sandbox.reboot(0, is_unnoticed=True)
    mended_sandbox.await_idle([0])
    program = "setsid sleep 987654 >/dev/null 2>&1 </dev/null & echo left=$!; stat -c 'folder %a %U' $0/$SLURM_JOB_ID/*"
    done = run("srun", "-N1", "-w", "node0", "--pathways", "bash", "-c", program, str(state))
    assert done.returncode == 0, done.stderr
    assert re.search(rf"<srun-task> <--node-dir> <{state}/\d+/node0> <--> ", done.stdout), done.stdout
    assert "\nfolder 700 " in done.stdout
    mended_sandbox.await_idle([0])
    probe = f"ls {state}; pgrep -fc '^sleep 987654'"
    deadline_s = time.monotonic() + 10
    while (left := run("srun", "-N1", "-w", "node0", "bash", "-c", probe).stdout) != "0\n":
        assert time.monotonic() < deadline_s, f"10 s after the job there is still on node0:\n{left}"
