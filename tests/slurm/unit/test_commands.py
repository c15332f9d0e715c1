import json
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slurm_pathways.slurm.commands import CommandError, CommandFailed, CommandMissing, CommandTimedOut, Slurm
from tests.waiting import until

SAMPLES = Path(__file__).parent / "samples"
Fake = Callable[[str, str], None]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """Commands that are all missing until ``fake`` makes one: those of this machine are not in the PATH."""
    environ = {"PATH": str(tmp_path), "SQUEUE_FORMAT": "%i", "SLURM_CONF": "/c", "LC_TIME": "de_DE"}
    return Slurm(environ, timeout_s=20)


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    """A program that does what the shell script says; it fails when called with other arguments than ``wanted``."""

    def make(call: str, script: str) -> None:
        name, _, wanted = call.partition(" ")
        path = tmp_path / name
        refuse = '{ echo "called with: $*" >&2; exit 99; }'
        path.write_text(f'#!/bin/sh\nPATH=/usr/bin:/bin\n[ "$*" = {shlex.quote(wanted)} ] || {refuse}\n{script}\n')
        path.chmod(0o755)

    return make


def test_a_missing_program(tmp_path: Path) -> None:
    with pytest.raises(CommandMissing, match=rf"squeue is not found in PATH={tmp_path}: Slurm's client commands"):
        Slurm({"PATH": str(tmp_path)}).job(5)


def test_a_program_that_cannot_run(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "scancel").write_text("")
    with pytest.raises(CommandMissing, match="scancel cannot be executed: Permission denied"):
        slurm.cancel(5)


def test_a_failure_says_what_the_program_said(slurm: Slurm, fake: Fake) -> None:
    fake("scancel 5", "echo no such luck >&2; exit 3")
    with pytest.raises(CommandFailed, match="scancel 5 ended with exit code 3 and said: no such luck") as caught:
        slurm.cancel(5)
    assert (caught.value.returncode, caught.value.stderr) == (3, "no such luck\n")


def test_the_fake_refuses_other_calls(slurm: Slurm, fake: Fake) -> None:
    fake("scancel 5", "")
    slurm.cancel(5)
    with pytest.raises(CommandFailed, match="called with: 6"):
        slurm.cancel(6)


def test_a_deadline_ends_the_program_and_its_children(fake: Fake, slurm: Slurm, tmp_path: Path) -> None:
    fake("scancel 5", f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    begun_s = time.monotonic()
    with pytest.raises(CommandTimedOut, match=r"scancel 5 did not answer in 1 s: .* scontrol ping"):
        Slurm(slurm.environ, timeout_s=1).cancel(5)
    assert time.monotonic() - begun_s < 15
    pid = int((tmp_path / "pid").read_text())
    until(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE,
        f"the child {pid} of the killed program still runs",
        10,
    )


def test_the_environment_that_programs_see(slurm: Slurm, fake: Fake) -> None:
    fake("env-probe", "env")
    seen = dict(line.split("=", 1) for line in slurm.run(["env-probe"]).splitlines())
    assert (seen["SLURM_CONF"], seen["LC_ALL"], seen["SLURM_TIME_FORMAT"]) == ("/c", "C.UTF-8", "%s")
    assert not {"SQUEUE_FORMAT", "LC_TIME"} & set(seen)


def test_submit(slurm: Slurm, fake: Fake, tmp_path: Path) -> None:
    fake("sbatch --parsable", f"cat > {tmp_path}/script; echo '12;cluster2'")
    assert slurm.submit("#!/bin/sh\necho é\n") == (12, "")
    assert (tmp_path / "script").read_text() == "#!/bin/sh\necho é\n"
    fake("sbatch --parsable --qos=a b", f"env > {tmp_path}/env; cat > /dev/null; echo 'a warning' >&2; echo 13")
    of_the_user = {"SBATCH_ACCOUNT": "lab", "SBATCH_WAIT": "1"}
    assert Slurm({**slurm.environ, **of_the_user}, 20).submit("#!/bin/sh\n", ["--qos=a b"]) == (13, "a warning\n")
    seen = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    # The job gets the user's own environment, with nothing of ours.
    assert (seen["SBATCH_ACCOUNT"], seen["LC_TIME"], seen["SQUEUE_FORMAT"]) == ("lab", "de_DE", "%i")
    assert not {"SBATCH_WAIT", "LC_ALL", "SLURM_TIME_FORMAT"} & set(seen)
    fake("sbatch --parsable", "cat > /dev/null; echo 'Submitted'")
    with pytest.raises(CommandError, match=r"sbatch printed no job id, but 'Submitted\\n'"):
        slurm.submit("#!/bin/sh\n")


def test_a_script_that_nobody_reads(slurm: Slurm, fake: Fake) -> None:
    fake("sbatch --parsable", "echo bad option >&2; exit 1")
    with pytest.raises(CommandFailed, match="bad option"):
        slurm.submit("x" * (1 << 20))


def test_job(slurm: Slurm, fake: Fake) -> None:
    fake("squeue --json --jobs=9", f"cat {SAMPLES}/squeue_22.05.json")
    job = slurm.job(9)
    assert job is not None
    assert job.nodes == ("node0", "node1", "node2", "node3")
    # 22.05 prints all jobs, whatever was asked for.
    fake("squeue --json --jobs=99", f"cat {SAMPLES}/squeue_22.05.json")
    assert slurm.job(99) is None
    fake("squeue --json --jobs=98", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.job(98) is None
    fake("squeue --json --jobs=97", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(CommandFailed, match="Unable to contact"):
        slurm.job(97)


def test_a_step_that_has_ended_is_no_error(slurm: Slurm, fake: Fake) -> None:
    for said in ("", "scancel: error: Kill job error on job step id 9.2: Invalid job id specified"):
        fake("scancel --quiet --signal=TERM 9.2", f"echo -n '{said}' >&2; exit 1")
        slurm.signal_step(9, 2, "TERM")
    fake("scancel --quiet --signal=TERM 9.2", "echo 'Access/permission denied' >&2; exit 1")
    with pytest.raises(CommandFailed, match="permission denied"):
        slurm.signal_step(9, 2, "TERM")


def test_outcomes(slurm: Slurm, fake: Fake) -> None:
    fake("scontrol show job 9", f"cat {SAMPLES}/scontrol_job_22.05.txt")
    outcomes = slurm.outcomes(9)
    assert outcomes is not None
    assert outcomes[0].job == "9"
    fake("scontrol show job 98", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.outcomes(98) is None
    fake("scontrol show job 97", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(CommandFailed, match="Unable to contact"):
        slurm.outcomes(97)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("n2 n[2-4] me", ("n2", "me")),
        # A job of salloc: the machine on which that was called.
        ("login n[2-4] me", ("n2", "me")),
        ("", None),
    ],
)
def test_where_a_job_runs(line: str, found: tuple[str, str] | None, slurm: Slurm, fake: Fake) -> None:
    fake("squeue --noheader --jobs=7 --states=RUNNING --format=%B %N %u", f"echo '{line}'")
    assert slurm.running_job(7) == found
    assert slurm.first_node(7) == (found[0] if found else None)


def test_what_else_is_asked(slurm: Slurm, fake: Fake) -> None:
    fake("scontrol show topology", f"cat {SAMPLES}/scontrol_topology_22.05.txt")
    assert [switch.name for switch in slurm.topology()] == ["s0", "s1", "top"]
    fake("scontrol show node node0,rack0n08,rack1n09", f"cat {SAMPLES}/scontrol_node_22.05.txt")
    assert [node.name for node in slurm.nodes(["node0", "rack0n08", "rack1n09"])] == ["node0", "rack0n08", "rack1n09"]
    fake("scontrol update jobid=9 comment=a 'b' \"c\"", "")
    slurm.set_comment(9, "a 'b' \"c\"")
    fake("squeue --noheader --jobs=9_3 --format=%k", "echo 'a  b'")
    assert slurm.comment("9_3") == "a  b"
    fake("squeue --noheader --jobs=9 --format=%k", "echo '(null)'")
    assert slurm.comment(9) == ""


def test_records(slurm: Slurm, fake: Fake, tmp_path: Path) -> None:
    script = tmp_path / "sacct"
    script.write_text(f'#!/bin/sh\nPATH=/usr/bin:/bin\n[ "$1" = --jobs=9 ] && cat {SAMPLES}/sacct_22.05.txt\n')
    script.chmod(0o755)
    assert [record.name for record in slurm.records(9) if record.job == "9"][2:4] == ["worker-2", "controller"]


def test_version(slurm: Slurm, fake: Fake) -> None:
    fake("sinfo --version", "echo slurm-wlm 22.05.8")
    assert slurm.version() == "22.05.8"
    fake("sinfo --version", "echo slurm")
    with pytest.raises(CommandError, match=r"sinfo --version printed no version, but 'slurm\\n'"):
        slurm.version()


def test_bytes_that_are_no_text_come_back_as_they_are(slurm: Slurm, fake: Fake) -> None:
    fake("probe", "printf 'a\\377b'")
    assert os.fsencode(slurm.run(["probe"])) == b"a\xffb"
    assert json.dumps(slurm.run(["probe"])) == '"a\\udcffb"'
