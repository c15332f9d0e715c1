"""Who may lend a run nodes, and what becomes of them: the rules, without processes."""

import dataclasses
import os
import pwd
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from slurm_pathways.cli.main import main
from slurm_pathways.config import RUNS_VARIABLE, RuntimeSpec
from slurm_pathways.launch.components import ComponentEnded, ComponentEvent
from slurm_pathways.launch.growth.companions import Companions
from slurm_pathways.launch.growth.door import Came, Visitor, Went
from slurm_pathways.launch.growth.messages import (
    Answer,
    Await,
    Facts,
    Inquire,
    Joined,
    Lend,
    News,
    Over,
    Refused,
    StillThere,
    Taken,
)
from slurm_pathways.launch.news import AGENT_FAILED_EVENT
from slurm_pathways.slurm.quantities import Gres

TPU = (Gres("tpu", "", 4),)


@dataclasses.dataclass
class FakeRuntime:
    """One in job 7 with two workers of its own."""

    job_id: int | None = 7
    spec: RuntimeSpec = dataclasses.field(default_factory=lambda: RuntimeSpec(hosts_per_slice=2, devices_per_host=4))
    run_dir: Path = Path("/nonexistent")
    gres_per_node: tuple[Gres, ...] = TPU
    given_back: list[str] = dataclasses.field(default_factory=list)
    num_workers: int = 2
    failure: OSError | None = None

    def take(self, lend: Lend) -> tuple[str, ...]:
        if self.failure is not None:
            raise self.failure
        names = tuple(f"worker-{self.num_workers + place}" for place in range(len(lend.nodes)))
        self.num_workers += len(names)
        return names

    def give_back(self, names: Sequence[str]) -> None:
        self.given_back += names

    def describe_component(self, name: str) -> str:
        return name

    def record(self, **changes: object) -> None:
        raise AssertionError("nothing is recorded but the door's address")


class Caller:
    """The other end of a visitor's connection."""

    def __init__(self) -> None:
        ours, self._socket = socket.socketpair()
        self._socket.settimeout(10)
        self.visitor = Visitor(ours)
        self._rest = b""

    def heard(self) -> list[Answer]:
        """All that was said so far."""
        self.visitor.send(StillThere())
        answers: list[Answer] = []
        while True:
            line, found, rest = self._rest.partition(b"\n")
            if found:
                self._rest = rest
                answer: Answer = msgspec.json.decode(line, type=Answer)
                if isinstance(answer, StillThere):
                    return answers
                answers.append(answer)
            elif chunk := self._socket.recv(1 << 16):
                self._rest += chunk
            else:
                return answers

    def close(self) -> None:
        self._socket.close()
        self.visitor.close()


@pytest.fixture
def call() -> Iterator[Callable[[], Caller]]:
    callers: list[Caller] = []

    def one() -> Caller:
        callers.append(Caller())
        return callers[-1]

    yield one
    for caller in callers:
        caller.close()


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def companions(runtime: FakeRuntime, said: list[str]) -> Companions:
    return Companions(runtime, said.append)


def lend(job_id: int | None = 8, nodes: tuple[str, ...] = ("n3", "n4")) -> Lend:
    return Lend(f"job {job_id}", nodes, job_id)


def ready(worker: int) -> ComponentEvent:
    return ComponentEvent("controller", "host_ready", {"worker": worker, "name": "n"})


def test_a_worker_that_joins_twice_is_one(companions: Companions, call: Callable[[], Caller]) -> None:
    waiting, lending = call(), call()
    companions.handle(Came(waiting.visitor, Await("job 8", 60.0)))
    companions.handle(Came(lending.visitor, lend()))
    companions.note(ready(2))
    companions.note(ready(2))
    assert waiting.heard() == []
    companions.note(ready(3))
    assert waiting.heard() == [Joined()]


def test_nodes_join_and_go(
    companions: Companions, runtime: FakeRuntime, said: list[str], call: Callable[[], Caller]
) -> None:
    asking, waiting, lending = call(), call(), call()
    companions.handle(Came(asking.visitor, Inquire()))
    assert asking.heard() == [Facts(7, 4, "cpu", TPU)]
    companions.handle(Came(waiting.visitor, Await("job 8", 60.0)))
    companions.handle(Came(lending.visitor, lend()))
    assert lending.heard() == [Taken(("worker-2", "worker-3"))]
    companions.note(ready(0))
    companions.note(ready(2))
    assert (lending.heard(), waiting.heard()) == ([News("worker-2 has joined the run", 1)], [])
    companions.note(ready(3))
    assert (lending.heard(), waiting.heard()) == ([News("worker-3 has joined the run", 2)], [Joined()])
    companions.note(ComponentEnded("worker-2", -9, False, will_restart=True))
    assert lending.heard() == []
    # It joins again, which makes it no third one.
    companions.note(ready(2))
    assert (lending.heard(), waiting.heard()) == ([News("worker-2 has joined the run", 2)], [])
    companions.handle(Went(lending.visitor))
    assert runtime.given_back == ["worker-2", "worker-3"]
    assert said == ["starting worker-2, worker-3", "job 8 takes its 2 nodes back"]


def test_the_end_of_the_run_is_that_of_its_companions(companions: Companions, call: Callable[[], Caller]) -> None:
    lending = call()
    companions.handle(Came(lending.visitor, lend()))
    companions.close()
    assert lending.heard() == [Taken(("worker-2", "worker-3")), Over("the run has ended")]


@pytest.mark.parametrize(
    ("job_id", "given", "reason"),
    [
        (7, lend(7), "job 7 is the run's own: its nodes take part from the start"),
        (7, lend(8, ()), "a companion lends its nodes once, and at least one"),
        (7, lend(None), "a run in a job takes nodes of jobs, and one on a single machine workers there"),
        (None, lend(8), "a run in a job takes nodes of jobs, and one on a single machine workers there"),
    ],
)
def test_what_is_not_taken(job_id: int | None, given: Lend, reason: str, call: Callable[[], Caller]) -> None:
    runtime, lending = FakeRuntime(job_id), call()
    Companions(runtime, print).handle(Came(lending.visitor, given))
    assert lending.heard() == [Refused(reason)]
    assert runtime.num_workers == 2


def test_workers_that_cannot_be_started(
    companions: Companions, runtime: FakeRuntime, call: Callable[[], Caller]
) -> None:
    runtime.failure = OSError("no more processes")
    lending = call()
    companions.handle(Came(lending.visitor, lend()))
    assert lending.heard() == [Refused("no worker could be started: no more processes")]


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (
            ComponentEvent("controller", "worker_refused", {"worker": 2, "reason": "n3 has 8 devices"}),
            "worker-2: n3 has 8 devices",
        ),
        (ComponentEvent("worker-2", AGENT_FAILED_EVENT, {"reason": "n3: no /home"}), "worker-2: n3: no /home"),
        (
            ComponentEvent("controller", "worker_given_up", {"worker": 2, "name": "n3", "num_executors": 5}),
            "worker-2: its executors end before they serve; its log says why",
        ),
    ],
)
def test_a_companion_whose_workers_are_of_no_use_is_let_go(
    event: ComponentEvent, problem: str, companions: Companions, runtime: FakeRuntime, call: Callable[[], Caller]
) -> None:
    lending = call()
    companions.handle(Came(lending.visitor, lend(nodes=("n3",))))
    companions.note(event)
    assert runtime.given_back == ["worker-2"]
    companions.note(ComponentEnded("worker-2", 0, True))
    assert lending.heard() == [
        Taken(("worker-2",)),
        News(problem, 0),
        News("worker-2 ended with exit code 0", 0),
        Over(problem, has_failed=True),
    ]
    # Its next one is another companion.
    again = call()
    companions.handle(Came(again.visitor, lend(nodes=("n3",))))
    assert again.heard() == [Taken(("worker-3",))]


# The command

OWN = pwd.getpwuid(os.getuid()).pw_name


def program(folder: Path, name: str, lines: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands: job 7 runs on n1 and is ours, job 8 does not run, job 9 is another's; no other is known."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program(
        folder,
        "squeue",
        f"""case "$*" in
*--jobs=7\\ *) echo n1 n[1-2] {OWN} ;;
*--jobs=8\\ *) ;;
*--jobs=9\\ *) echo n1 n1 somebody ;;
*) echo slurm_load_jobs error: Invalid job id specified >&2; exit 1 ;;
esac""",
    )
    answer = msgspec.json.encode(Facts(7, 4, "cpu", TPU)).decode()
    program(folder, "srun", f"echo '{answer}'")
    program(folder, "sbatch", f"/bin/cat > {tmp_path}/script; echo \"$@\" > {tmp_path}/options; echo '78;cluster'")
    monkeypatch.setenv("PATH", str(folder))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path))
    return folder


def test_a_companion_is_submitted(slurm: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        main, ["grow", "7", "--nodes", "2", "--time", "10", "--partition", "spare", "--sbatch", "--qos=low"]
    )
    assert (done.exit_code, done.stdout) == (0, "78\n"), done.output
    script = (tmp_path / "script").read_text().splitlines()
    assert script[0] == "#!/bin/bash"
    assert {
        "#SBATCH --nodes=2",
        "#SBATCH --time=10",
        "#SBATCH --partition=spare",
        "#SBATCH --qos=low",
        "#SBATCH --gres=tpu:4",
        "#SBATCH --exclusive",
        "#SBATCH --no-kill",
    } <= set(script)
    assert script[-1].startswith("exec ") and script[-1].endswith(" lend --job 7")
    # They count more than the user's SBATCH_* variables.
    assert (tmp_path / "options").read_text().split()[1:] == [
        "--nodes=2",
        "--time=10",
        "--partition=spare",
        "--qos=low",
        "--gres=tpu:4",
    ]
    shown = CliRunner().invoke(main, ["grow", "7", "--nodes", "1", "--gres", "tpu:v5:4", "--dry-run"])
    assert "#SBATCH --gres=tpu:v5:4\n" in shown.stdout and "--gres=tpu:4" not in shown.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--nodes", "2"], "which run is to grow? Give the id of its job, as squeue --me shows it, or its folder"),
        (["7"], "Missing option '--nodes'"),
        (["7", "--nodes", "0"], "0 is not in the range 1<=x<=4096"),
        (["seven", "--nodes", "1"], "'seven' is not a valid integer"),
        (["6", "--nodes", "1"], "job 6: squeue"),
        (["8", "--nodes", "1"], "job 8 does not run now (squeue --jobs=8 shows what it does)"),
        (["9", "--nodes", "1"], "job 9 is somebody's, and Slurm lets only its user start workers for it"),
        (["7", "--nodes", "1", "--sbatch", "--nodes=3"], "the number of nodes is grow's own --nodes"),
        (["7", "--nodes", "1", "--sbatch", "--wrap=x"], "--sbatch --wrap=x: the script is the template's"),
        (["7", "--nodes", "1", "--sbatch", "x"], "'x' is no sbatch option"),
        (["--nodes", "1", "--run", "/nonsuch"], "--run /nonsuch: this is not the folder of a run that runs now"),
    ],
)
def test_wrong_use(words: list[str], reason: str, slurm: Path) -> None:
    done = CliRunner().invoke(main, ["grow", *words])
    assert done.exit_code == 2
    assert reason in " ".join(done.output.split()), done.output


def test_a_job_without_a_run_that_grows(slurm: Path) -> None:
    refused = msgspec.json.encode(Refused("no run of slurm-pathways runs in job 7 on its first node")).decode()
    program(slurm, "srun", f"echo '{refused}'")
    done = CliRunner().invoke(main, ["grow", "7", "--nodes", "1"])
    assert done.exit_code == 2
    assert "job 7 cannot grow: no run of slurm-pathways runs in job 7" in " ".join(done.output.split())
