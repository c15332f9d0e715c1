"""``submit`` without a cluster: scripts that are made, and waiting with a slurmctld that is told what to say."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slurm_pathways.cli.main import main
from slurm_pathways.config import ConfigurationError
from slurm_pathways.launch import submit
from slurm_pathways.launch.submit import Request, make_script, read_template, template_names, wait
from slurm_pathways.slurm.accounting import DELIMITER, FIELDS, parse
from slurm_pathways.slurm.commands import CommandError
from slurm_pathways.slurm.outcome import Outcome
from slurm_pathways.slurm.sbatch import Option
from slurm_pathways.slurm.states import ExitStatus

LOGS = '--log-dir "$SLURM_JOB_NAME-$SLURM_JOB_ID.logs"'


def script_of(
    template: str = "run",
    values: dict[str, Any] | None = None,
    options: Sequence[Option] = (),
    program: Sequence[str] = ("python", "train.py"),
) -> tuple[str, tuple[Option, ...]]:
    return make_script(Request(template, values or {}, tuple(options), tuple(program)), "/opt/my env/slurm-pathways")


def last_line(script: str) -> str:
    return script.splitlines()[-1]


@pytest.mark.parametrize("name", template_names())
def test_every_template_can_be_submitted(name: str) -> None:
    """And a script without any wishes is the template, but for the path of the command and the program."""
    template = read_template(name)
    program = ("python", "any.py") if template.takes_program else ()
    script, options = script_of(name, program=program)
    assert options == ()
    undone = script.replace("'/opt/my env/slurm-pathways'", "slurm-pathways").replace("-- python any.py", '-- "$@"')
    assert tuple(undone.splitlines()) == template.lines
    assert len(template.lines) <= 25
    assert all(len(line) <= 120 for line in template.lines)
    assert {"--job-name", "--nodes", "--time", "--output", "--exclusive"} <= set(template.directives)
    assert LOGS in script


@pytest.mark.parametrize(
    ("template", "values", "given", "nodes"),
    [
        ("run", {}, None, None),
        ("run", {"num_slices": 2}, None, "2"),
        ("run", {"num_slices": 2, "hosts_per_slice": 3, "num_spares": 1}, None, "7"),
        ("run", {"hosts_per_slice": 3}, None, "3"),
        ("run", {"devices_per_host": 3}, None, None),
        ("train", {}, None, None),
        ("train", {"hosts_per_slice": 3}, None, "7"),
        ("train", {"num_spares": 0, "hosts_per_slice": 3}, None, "6"),
        ("train", {"num_slices": 4}, None, "5"),
        ("train", {"num_slices": 4}, "9", "9"),
        ("train", {"num_slices": 4}, "4-9", "4-9"),
        ("rl", {}, "8", "8"),
    ],
)
def test_how_many_nodes_are_asked_for(
    template: str, values: dict[str, int], given: str | None, nodes: str | None
) -> None:
    script, options = script_of(template, values, [Option("--nodes", given)] if given else [])
    assert [option.value for option in options] == ([nodes] if nodes else [])
    standing = read_template(template).directives["--nodes"]
    assert f"#SBATCH --nodes={nodes or standing}\n" in script


def test_fewer_nodes_than_the_run_needs() -> None:
    with pytest.raises(ConfigurationError, match=r"--nodes 3: 2 slices .* 3 hosts"):
        script_of("run", {"num_slices": 2, "hosts_per_slice": 2}, [Option("--nodes", "3")])


def test_settings_are_written_into_the_script() -> None:
    values = {
        "num_slices": 4,
        "devices_per_host": 2,
        "keep_logs": False,
        "compile_cache_dir": Path("/home/ada/my cache"),
        "startup_timeout_s": 90.0,
    }
    script, _ = script_of("train", values)
    assert last_line(script) == (
        f"exec '/opt/my env/slurm-pathways' run --spares 1 {LOGS} --slices 4 --devices-per-host 2 "
        "--compile-cache '/home/ada/my cache' --no-keep-logs --startup-timeout-s 90.0 -- python train.py"
    )


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    own = tmp_path / "it's mine.sbatch"
    own.write_text('#!/bin/bash\n#SBATCH -A lab\nmodule load cuda\nsrun_prolog\nslurm-pathways run -q -- "$@"\n')
    script, _ = script_of(str(own), {"num_slices": 2})
    assert script == (
        "#!/bin/bash\n#SBATCH -A lab\n#SBATCH --nodes=2\nmodule load cuda\nsrun_prolog\n"
        "'/opt/my env/slurm-pathways' run -q --slices 2 -- python train.py\n"
    )
    own.write_text('#!/bin/bash\nslurm-pathways run --slices "$N" --spares 2 -- "$@"\n')
    assert script_of(str(own), {"hosts_per_slice": 3})[1] == (Option("--nodes", "5"),)
    own.write_text("#!/bin/bash\npython train.py\n")
    with pytest.raises(ConfigurationError, match=r"mine.sbatch cannot be used: a template has one line that does the"):
        script_of(str(own))
    with pytest.raises(ConfigurationError, match=r"nonsuch.sbatch cannot be read: No such file"):
        script_of(str(tmp_path / "nonsuch.sbatch"))
    with pytest.raises(ConfigurationError, match=r"no template 'trian'; there are .*train, or give the path"):
        script_of("trian")


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["submit", *arguments])
    return result.exit_code, result.output


def test_a_dry_run_prints_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_PATHWAYS_SPARES", "2")
    (tmp_path / "run.yaml").write_text("devices_per_host: 3\n")
    monkeypatch.setattr("sys.argv", ["/opt/it's $HOME/slurm-pathways", "submit"])
    code, script = invoke(
        *("--dry-run", "--slices", "2", "--config", str(tmp_path / "run.yaml"), "--time", "1-0", "--qos", "a b"),
        *("--sbatch", "--reservation=may", "--sbatch", "-Cv5p", "--mem", "1G"),
        *("--", "python", "train.py", "--epochs", "3", "it's"),
    )
    assert code == 0, script
    assert script.splitlines()[3:] == [
        *("#SBATCH --job-name=pathways", "#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=1", "#SBATCH --exclusive"),
        *("#SBATCH --no-kill", "#SBATCH --time=1-0", "#SBATCH --output=%x-%j.out", '#SBATCH --qos="a b"'),
        *("#SBATCH --mem=1G", "#SBATCH --reservation=may", "#SBATCH -C v5p"),
        *("# Your site's: partition, account, devices.", "##SBATCH --partition=tpu", "##SBATCH --account=lab"),
        *("##SBATCH --gres=tpu:4", ""),
        f"exec {shlex.quote(chr(47) + 'opt/it' + chr(39) + 's $HOME/slurm-pathways')} run {LOGS} --slices 2 "
        "--devices-per-host 3 --spares 2 -- python train.py --epochs 3 'it'\"'\"'s'",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "there is nothing to run; give a program"),
        (("--template", "nonsuch", "true"), "there is no template 'nonsuch'"),
        (("--slices", "0", "true"), "slices must be a whole number from 1"),
        (("--sbatch", "qos=high", "true"), "'qos=high' is no sbatch option"),
        (("--sbatch", "--wait", "true"), "--sbatch --wait: give submit --wait instead"),
        (("--sbatch", "-W", "true"), "--sbatch -W: give submit --wait instead"),
        (("--wait", "--sbatch", "-Mother", "true"), "on another cluster cannot be waited for"),
        (("--job-name", "a\nb", "true"), "has a control character"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], words: str) -> None:
    code, output = invoke(*arguments)
    assert (code, words in output) == (2, True), output


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, output = invoke("true")
    assert (code, "sbatch is not found in PATH" in output) == (1, True), output


class Clock:
    """Time passes in sleeps only."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


#: Job, state and exit code.
Ends = list[tuple[str, str, str]]


class FakeSlurm:
    """Says how the job stands, by the time on a clock."""

    def __init__(self, clock: Clock, says: Callable[[float], Any], accounting: Callable[[float], Ends]) -> None:
        self._clock = clock
        self._says = says
        self._accounting = accounting

    def outcomes(self, job_id: int) -> Any:
        assert job_id == 7
        said = self._says(self._clock.now_s)
        if isinstance(said, Exception):
            raise said
        return said

    def records(self, job_id: int) -> Any:
        lines = [DELIMITER.join(FIELDS)]
        for job, state, exit_code in self._accounting(self._clock.now_s):
            values = {"JobID": job, "State": state, "ExitCode": exit_code}
            lines.append(DELIMITER.join(values.get(field, "") for field in FIELDS))
        return parse("\n".join(lines))


def standing(state: str, exit_status: str = "0:0", job: str = "7") -> Outcome:
    return Outcome(job, state, ExitStatus.parse(exit_status), "/home/ada/7.out")


def waited(
    says: Callable[[float], Any], accounting: Callable[[float], Ends] = lambda now_s: []
) -> tuple[int, list[str], Clock]:
    clock, said = Clock(), list[str]()
    slurm: Any = FakeSlurm(clock, says, accounting)
    code = wait(7, slurm, said.append, now_s=lambda: clock.now_s, sleep=clock.sleep)
    return code, said, clock


def test_waiting_looks_less_and_less_often() -> None:
    code, said, clock = waited(lambda now_s: [standing("COMPLETED" if now_s > 3600 else "RUNNING")])
    assert (code, said) == (0, [])
    assert clock.slept[0] == submit.MIN_POLL_S
    assert max(clock.slept) == submit.MAX_POLL_S
    assert len(clock.slept) < 200
    assert sorted(clock.slept) == clock.slept


def test_how_it_ended_is_said_when_the_code_does_not_say_it() -> None:
    code, said, _ = waited(lambda now_s: [standing("FAILED", "3:0")])
    assert (code, said) == (3, ["its output is in /home/ada/7.out"])
    code, said, _ = waited(lambda now_s: [standing("TIMEOUT", "0:15")])
    assert (code, said[0]) == (124, "job 7 reached its time limit (TIMEOUT)")


def test_a_job_that_is_queued_again_is_waited_for() -> None:
    states = {0: "RUNNING", 1: "COMPLETING", 2: "PENDING", 3: "RUNNING"}
    code, _, clock = waited(lambda now_s: [standing(states.get(int(now_s), "COMPLETED"))])
    assert (code, clock.now_s) == (0, 4.0)


def test_slurmctld_may_be_away_for_a_while() -> None:
    def says(now_s: float) -> Any:
        if 10 < now_s < 2000:
            return CommandError("slurmctld does not answer")
        return [standing("COMPLETED" if now_s > 2000 else "RUNNING")]

    code, said, _ = waited(says)
    assert (code, said) == (0, ["job 7: trying again for 60 min: slurmctld does not answer"])


def test_a_slurmctld_that_stays_away_is_given_up() -> None:
    code, said, clock = waited(lambda now_s: CommandError("slurmctld does not answer"))
    assert (code, len(said)) == (125, 2)
    assert said[1] == "how job 7 ends, or has ended, cannot be known: slurmctld does not answer"
    assert submit.AWAY_TIMEOUT_S <= clock.now_s < submit.AWAY_TIMEOUT_S + 2 * submit.MAX_POLL_S


def test_accounting_knows_a_job_that_slurmctld_has_forgotten() -> None:
    code, said, _ = waited(
        lambda now_s: [standing("RUNNING")] if now_s < 5 else None,
        lambda now_s: [("7", "FAILED" if now_s > 8 else "RUNNING", "3:0")],
    )
    assert code == 3
    assert said == [
        "job 7: trying again for 1 min: slurmctld has forgotten it, and accounting (sacct) does not have its end yet"
    ]
    code, said, clock = waited(lambda now_s: None)
    assert code == 125
    assert said[1].startswith("how job 7 ends, or has ended, cannot be known: slurmctld has forgotten it")
    assert clock.now_s < 2 * submit.ACCOUNTING_TIMEOUT_S


def test_the_code_of_an_array_is_its_highest() -> None:
    def says(now_s: float) -> Any:
        first = [standing("FAILED", "3:0", "7_1")] if now_s < 3 else []
        return [*first, standing("COMPLETED" if now_s > 6 else "RUNNING", "0:0", "7_0")]

    assert waited(says)[0] == 3


@pytest.mark.parametrize("before", ["7_1", "7_[1%1]", "7_[1-1,...]"])
def test_accounting_knows_tasks_that_were_forgotten_between_two_looks(before: str) -> None:
    def says(now_s: float) -> Any:
        first = [standing("PENDING", "0:0", before)] if now_s < 3 else []
        return [*first, standing("COMPLETED" if now_s > 6 else "RUNNING", "0:0", "7_0")]

    def accounting(now_s: float) -> list[tuple[str, str, str]]:
        ends = [("7_0", "COMPLETED", "0:0"), ("7_1", "FAILED", "4:0")]
        # It lags.
        return ends if now_s > 9 else []

    code, said, clock = waited(says, accounting)
    assert (code, len(said)) == (4, 1)
    assert said[0].startswith("job 7: trying again for 1 min: slurmctld has forgotten it")
    assert 9 < clock.now_s < 15


def test_without_accounting_what_was_forgotten_is_not_known() -> None:
    def says(now_s: float) -> Any:
        first = [standing("RUNNING", "0:0", "7_1")] if now_s < 3 else []
        return [*first, standing("COMPLETED" if now_s > 6 else "RUNNING", "0:0", "7_0")]

    code, said, _ = waited(says, lambda now_s: [("7_0", "COMPLETED", "0:0")])
    assert code == 125
    assert said[1].startswith("how job 7 ends, or has ended, cannot be known: slurmctld has forgotten it")
