"""The soak: hosts die at random moments of random causes while the example of elastic training goes on.

``python -m benchmarks soak`` has 100 deaths; ``python -m benchmarks.soak --deaths 20 --seed 7`` as many as one likes.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.measure import Row, local_runtime, rows, table
from benchmarks.memory import resident_bytes
from tests.elastic.kills import DEATHS, Training

NUM_DEATHS = 100
NUM_SLICES, HOSTS_PER_SLICE, NUM_SPARES = 3, 2, 1
#: A death that has not been recovered from by then ends the soak.
RECOVERY_TIMEOUT_S = 180.0
#: The longest quiet time before a death.
MAX_QUIET_S = 2.0
_LOOK_EVERY_S = 0.1
_REPORT_TIMEOUT_S = 30.0


class Recovery(NamedTuple):
    """What became of one death.

    Attributes:
        good_step_s: from the death to the next step that counts; None if training did not notice (a spare died).
        whole_s: from the death until all hosts and spares are there again.
    """

    death: str
    host: int | None
    good_step_s: float | None
    whole_s: float


class NotRecovered(Exception):
    """Training or hosts did not come back in time; the message says what is seen instead."""


class Soak(NamedTuple):
    """What a whole soak has shown.

    Attributes:
        not_recovered: what ended it early; empty if nothing did.
        worst_difference: between the losses of this training and of one without deaths, relative, over all steps.
        growth_bytes: of controller and proxy, each.
        left: processes that it left, and its folder if there is more in it than logs.
    """

    recoveries: list[Recovery]
    not_recovered: str
    num_steps: int
    worst_difference: float
    growth_bytes: dict[str, int]
    left: list[str]


def measure(num_deaths: int, seed: int) -> Soak:
    """Train on 3 slices x 2 hosts and a spare, and let ``num_deaths`` workers die, each once all are there."""
    chance = random.Random(seed)
    recoveries: list[Recovery] = []
    not_recovered = ""
    with (
        tempfile.TemporaryDirectory() as folder,
        local_runtime(NUM_SLICES, HOSTS_PER_SLICE, 1, num_spares=NUM_SPARES) as runtime,
    ):
        run_dir = str(runtime.run_dir)
        paths = {name: Path(folder) / f"{name}.json" for name in ("deaths", "undisturbed")}
        options = ("examples/elastic/train.py", "--read-every", 1, "--snapshot-every", 10, "--grow", "AT_ONCE")
        training = Training(
            runtime,
            runtime.clients[0],
            *(*options, "--steps", 10_000_000, "--checkpoints", folder, "--losses", paths["deaths"]),
        )
        try:
            training.until("step 20 ")
            before = _held_bytes(runtime)
            for number in range(num_deaths):
                try:
                    recovery = _die(runtime, training, chance)
                except NotRecovered as failure:
                    not_recovered = f"death {number + 1}: {failure}"
                    break
                recoveries.append(recovery)
                print(f"{number + 1}: {recovery}", file=sys.stderr, flush=True)
            growth_bytes = {name: held - before[name] for name, held in _held_bytes(runtime).items()}
            training.process.terminate()
            training.end()
        finally:
            training.close()
        losses = _read(paths["deaths"])
        num_steps = max(losses) + 1
        again = Training(
            runtime, runtime.new_proxy(), *(*options, "--steps", num_steps, "--losses", paths["undisturbed"])
        )
        while again.process.poll() is None:
            time.sleep(_LOOK_EVERY_S)
        again.end()
        expected = _read(paths["undisturbed"])
    left = [f"process {pid}" for pid in _processes_of(run_dir)]
    left += [str(path) for path in sorted(Path(run_dir).rglob("*")) if path.is_file() and path.suffix != ".log"]
    worst = max(abs(losses[step] - expected[step]) / abs(expected[step]) for step in losses)
    return Soak(recoveries, not_recovered, num_steps, worst, growth_bytes, left)


def _die(runtime: Any, training: Training, chance: random.Random) -> Recovery:
    """Let a worker die, and wait for training and for all hosts."""
    time.sleep(chance.uniform(0, MAX_QUIET_S))
    death = chance.choice(sorted(DEATHS))
    report = runtime.status(_REPORT_TIMEOUT_S)
    workers = [worker for worker in report["workers"] if worker["state"] in ("bound", "spare")]
    worker = workers[chance.randrange(len(workers))]
    num_lines, num_failures = len(training.lines), len(report["failures"])
    keys, number = DEATHS[death]
    died_s = time.monotonic()
    for key in keys:
        os.kill(worker[key], number)
    while not _is_whole(report := runtime.status(_REPORT_TIMEOUT_S), num_failures):
        _check(training, died_s, report)
        time.sleep(_LOOK_EVERY_S)
    whole_s = time.monotonic() - died_s
    wanted = len(training.lines)
    while True:
        lines = training.lines[num_lines:]
        lost = [index for index, line in enumerate(lines) if "lost: DATA_LOSS" in line.text]
        after = lines[lost[-1] :] if lost else training.lines[wanted:]
        good = [line for line in after if "loss" in line.text and " step " in line.text and "lost" not in line.text]
        if good:
            return Recovery(death, worker["host"], good[0].at_s - died_s if lost else None, whole_s)
        _check(training, died_s, report)
        time.sleep(_LOOK_EVERY_S)


def _is_whole(report: Any, num_failures: int) -> bool:
    """Whether one more was lost than before, and all are there again, spares too."""
    states = [worker["state"] for worker in report["workers"]]
    return (
        len(report["failures"]) > num_failures
        and states.count("bound") == NUM_SLICES * HOSTS_PER_SLICE
        and states.count("spare") == NUM_SPARES
        and all(device["state"] in ("idle", "running") for device in report["devices"])
    )


def _check(training: Training, died_s: float, report: Any) -> None:
    if training.process.poll() is not None:
        raise NotRecovered(f"training has ended: {training.lines[-1].text}")
    if time.monotonic() - died_s > RECOVERY_TIMEOUT_S:
        states = {worker["name"]: worker["state"] for worker in report["workers"]}
        raise NotRecovered(
            f"after {RECOVERY_TIMEOUT_S:g} s workers are {states}, the last line {training.lines[-1].text}"
        )


def _held_bytes(runtime: Any) -> dict[str, int]:
    return {name: resident_bytes(runtime.pids()[name]) for name in ("controller", "proxy-0")}


def _read(path: Path) -> dict[int, float]:
    return {int(step): loss for step, loss in json.loads(path.read_text()).items()}


def _processes_of(run_dir: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if run_dir.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def rows_of(result: Soak, num_deaths: int) -> Iterator[Row]:
    """The rows of a soak."""
    causes = ", ".join(sorted(DEATHS))
    yield Row(
        f"soak: deaths recovered from, of {num_deaths} (3 slices x 2 hosts and a spare; {causes})",
        "deaths",
        len(result.recoveries),
        at_least=num_deaths,
        remarks=result.not_recovered or f"{result.num_steps:,} steps",
    )
    noticed = [recovery.good_step_s for recovery in result.recoveries if recovery.good_step_s is not None]
    if noticed:
        yield Row(
            "soak: from a death to the next good step, median of all that training noticed",
            "s",
            statistics.median(noticed),
            smaller_is_better=True,
            remarks=f"{len(noticed)} times, worst {max(noticed):.2f} s",
        )
    by_death = {
        death: [r.good_step_s for r in result.recoveries if r.death == death and r.good_step_s is not None]
        for death in sorted(DEATHS)
    }
    for death, seconds in by_death.items():
        if seconds:
            yield Row(
                f"soak: {death}, to the next good step, median",
                "s",
                statistics.median(seconds),
                at_least=10 if "stopped" in death else 2,
                smaller_is_better=True,
                remarks=f"{len(seconds)} times, worst {max(seconds):.2f} s",
            )
    yield Row(
        "soak: the largest difference of a loss to training without deaths, relative",
        "x 1e-5",
        result.worst_difference * 1e5,
        at_least=1,
        smaller_is_better=True,
    )
    growth = ", ".join(f"{name} {grown / 1e6:.1f} MB" for name, grown in result.growth_bytes.items())
    yield Row(
        "soak: growth of controller and proxy",
        "MB",
        sum(result.growth_bytes.values()) / 1e6,
        at_least=50,
        smaller_is_better=True,
        remarks=f"{growth}; left behind: {', '.join(result.left) or 'nothing'}",
    )


@rows(11, only_when_named=True)
def soak() -> Iterator[Row]:
    """100 deaths; takes 10 minutes and more."""
    yield from rows_of(measure(NUM_DEATHS, seed=1), NUM_DEATHS)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--deaths", default=NUM_DEATHS, type=click.IntRange(1), help="How many.")
@click.option("--seed", default=1, help="Chooses who dies, of what and when.")
def main(deaths: int, seed: int) -> None:
    """Let hosts die while the example of elastic training goes on, and print what was seen."""
    result = measure(deaths, seed)
    click.echo(table(list(rows_of(result, deaths))))
    sys.exit(0 if len(result.recoveries) == deaths and not result.left else 1)


if __name__ == "__main__":
    main()
