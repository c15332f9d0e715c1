"""Hosts die at random moments of random causes while the example of elastic training goes on: what a test and
``benchmarks/soak.py`` measure."""

import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from pathways_runtime.core.controller import workers
from pathways_runtime.core.defaults import HEARTBEAT_TIMEOUT_S
from slurm_pathways.launch import restarts
from tests.elastic.kills import DEATHS, Training

#: A death that has not been recovered from by then ends the soak.
RECOVERY_TIMEOUT_S = 180.0
#: How long the training without deaths may take, and how long for each of its steps.
UNDISTURBED_TIMEOUT_S, UNDISTURBED_STEP_TIMEOUT_S = 120.0, 0.5
_LOOK_EVERY_S = 0.1
#: A worker that dies so often in a row, each time soon after its start, is given up; here that is no fault of its own.
_MAX_SHORT_LIVES = min(workers.MAX_SHORT_LIVES, restarts.MAX_SHORT_LIVES)
#: So many short lives, with the starts between them, do not last longer.
_SHORT_LIVES_S = _MAX_SHORT_LIVES * 1.5 * max(workers.LONG_LIFE_NS / 1e9, restarts.LONG_LIFE_S)
_REPORT_TIMEOUT_S = 30.0
_STEP = re.compile(r" step (\d+)  loss")


class Plan(NamedTuple):
    """Who trains where, and who dies of what.

    Attributes:
        deaths: of ``DEATHS``, in this order.
        max_quiet_steps: of training before each, by chance. Counted in steps, as on a slow machine training would else
            never get as far as its next snapshot.
        awaits_spares: the next comes only when the spares are there again; else as soon as all hosts are served.
        min_step_s: steps take at least so long.
    """

    deaths: tuple[str, ...]
    num_slices: int = 3
    hosts_per_slice: int = 2
    num_spares: int = 1
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    max_quiet_steps: int = 60
    awaits_spares: bool = True
    min_step_s: float = 0.0


class Recovery(NamedTuple):
    """What became of one death.

    Attributes:
        died_s: when, on ``time.monotonic``.
        worker: who died; ``host`` is where it stood then, None for a spare.
        good_step_s: from the death to the next step that counts; None if training did not notice (a spare died).
        whole_s: from the death until all hosts and spares are there again.
        num_failures: that there were before.
    """

    death: str
    died_s: float
    worker: str
    host: int | None
    good_step_s: float | None
    whole_s: float
    num_failures: int


class NotRecovered(Exception):
    """Training or hosts did not come back in time; the message says what is seen instead."""


class Soak(NamedTuple):
    """What a whole soak has shown.

    Attributes:
        not_recovered: what ended it early; empty if nothing did.
        worst_difference: between the losses of this training and of one without deaths, relative, over all steps;
            infinite if it was not recovered from all deaths.
        num_others_lost: hosts that were lost although nobody let them die, beside one that died.
        growth_bytes: of controller and proxy, each.
        left: processes that it left, and its folder if there is more in it than logs.
    """

    recoveries: list[Recovery]
    not_recovered: str
    num_steps: int
    worst_difference: float
    num_others_lost: int
    growth_bytes: dict[str, int]
    left: list[str]


def measure(start: Callable[..., AbstractContextManager[Any]], plan: Plan, seed: int) -> Soak:
    """Train, and let workers die, one after the other; then train without that.

    Args:
        start: a runtime (``LocalRuntime``), given the fields of its ``RuntimeSpec``.

    Raises:
        TimeoutError: the training without deaths does not end.
    """
    chance = random.Random(seed)
    recoveries: list[Recovery] = []
    not_recovered = ""
    worst = math.inf
    spec = {
        "num_slices": plan.num_slices,
        "hosts_per_slice": plan.hosts_per_slice,
        "devices_per_host": 1,
        "num_spares": plan.num_spares,
        "heartbeat_timeout_s": plan.heartbeat_timeout_s,
    }
    with tempfile.TemporaryDirectory() as folder, start(**spec) as runtime:
        run_dir = str(runtime.run_dir)
        paths = {name: Path(folder) / f"{name}.json" for name in ("deaths", "undisturbed")}
        options = ("examples/elastic/train.py", "--read-every", 1, "--snapshot-every", 10, "--grow", "AT_ONCE")
        endless = ("--steps", 10_000_000, "--checkpoints", folder, "--min-step-s", plan.min_step_s)
        training = Training(runtime, runtime.clients[0], *options, *endless, "--losses", paths["deaths"])
        try:
            training.until("step 20 ")
            before = _held_bytes(runtime)
            for number, death in enumerate(plan.deaths, 1):
                try:
                    recovery = _die(runtime, training, plan, death, recoveries, chance)
                    if number == len(plan.deaths):
                        _await(runtime, training, lambda report: _is_whole(report, plan))
                except NotRecovered as failure:
                    not_recovered = f"death {number}: {failure}"
                    break
                recoveries.append(recovery)
                print(f"{number}: {recovery}", file=sys.stderr, flush=True)
            num_others_lost = _num_others_lost(runtime.status(_REPORT_TIMEOUT_S)["failures"], recoveries)
            growth_bytes = {name: held - before[name] for name, held in _held_bytes(runtime).items()}
            if not not_recovered:
                training.process.terminate()
                training.end()
        finally:
            training.close()
        num_steps = max(int(found[1]) for line in training.lines if (found := _STEP.search(line.text)))
        if not not_recovered:
            losses = _read(paths["deaths"])
            num_steps = max(losses) + 1
            last = ("--steps", num_steps, "--losses", paths["undisturbed"])
            _end_undisturbed(Training(runtime, runtime.new_proxy(), *options, *last), num_steps)
            expected = _read(paths["undisturbed"])
            worst = max(abs(losses[step] - expected[step]) / abs(expected[step]) for step in expected)
    left = [f"process {pid}" for pid in _processes_of(run_dir)]
    left += [str(path) for path in sorted(Path(run_dir).rglob("*")) if path.is_file() and path.suffix != ".log"]
    return Soak(recoveries, not_recovered, num_steps, worst, num_others_lost, growth_bytes, left)


def _end_undisturbed(training: Training, num_steps: int) -> None:
    timeout_s = UNDISTURBED_TIMEOUT_S + num_steps * UNDISTURBED_STEP_TIMEOUT_S
    try:
        training.process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        training.close()
        raise TimeoutError(
            f"the {num_steps} steps without deaths have not ended within {timeout_s:.0f} s; the last line is "
            f"{training.last_line()!r}"
        ) from None
    training.end()


def _die(
    runtime: Any, training: Training, plan: Plan, death: str, before: list[Recovery], chance: random.Random
) -> Recovery:
    """Let a worker die, and wait for training and for all hosts."""
    num_steps = _num_steps(training) + chance.randint(0, plan.max_quiet_steps)
    report = _await(runtime, training, lambda seen: _num_steps(training) >= num_steps and _mortals(seen, before))
    worker = chance.choice(_mortals(report, before))
    num_lines, num_failures = len(training.lines), len(report["failures"])
    keys, number = DEATHS[death]
    died_s = time.monotonic()
    for key in keys:
        os.kill(worker[key], number)
    is_mended = _is_whole if plan.awaits_spares else _is_served
    report = _await(
        runtime, training, lambda seen: len(seen["failures"]) > num_failures and is_mended(seen, plan), died_s
    )
    whole_s = time.monotonic() - died_s
    wanted = len(training.lines)
    while True:
        lines = training.lines[num_lines:]
        lost = [index for index, line in enumerate(lines) if "lost: DATA_LOSS" in line.text]
        after = lines[lost[-1] :] if lost else training.lines[wanted:]
        good = [line for line in after if _STEP.search(line.text)]
        if good:
            good_step_s = good[0].at_s - died_s if lost else None
            return Recovery(death, died_s, worker["name"], worker["host"], good_step_s, whole_s, num_failures)
        _check(training, died_s, report)
        time.sleep(_LOOK_EVERY_S)


def _mortals(report: Any, before: list[Recovery]) -> list[Any]:
    """The workers that may die next."""
    num_deaths = Counter(recovery.worker for recovery in before if recovery.died_s > time.monotonic() - _SHORT_LIVES_S)
    return [
        worker
        for worker in report["workers"]
        if worker["state"] in ("bound", "spare") and num_deaths[worker["name"]] < _MAX_SHORT_LIVES - 1
    ]


def _num_steps(training: Training) -> int:
    """That it has printed so far, some of them more than once."""
    return sum(_STEP.search(line.text) is not None for line in list(training.lines))


def _await(runtime: Any, training: Training, is_so: Callable[[Any], bool], since_s: float | None = None) -> Any:
    """The first report of which that holds."""
    since_s = time.monotonic() if since_s is None else since_s
    while not is_so(report := runtime.status(_REPORT_TIMEOUT_S)):
        _check(training, since_s, report)
        time.sleep(_LOOK_EVERY_S)
    return report


def _is_served(report: Any, plan: Plan) -> bool:
    """Whether there is somebody behind every host."""
    states = [worker["state"] for worker in report["workers"]]
    return states.count("bound") == plan.num_slices * plan.hosts_per_slice and all(
        device["state"] in ("idle", "running") for device in report["devices"]
    )


def _is_whole(report: Any, plan: Plan) -> bool:
    """The same, and the spares are there too."""
    states = [worker["state"] for worker in report["workers"]]
    return _is_served(report, plan) and states.count("spare") == plan.num_spares


def _check(training: Training, died_s: float, report: Any) -> None:
    if training.process.poll() is not None:
        raise NotRecovered(f"training has ended: {training.last_line()}")
    if time.monotonic() - died_s > RECOVERY_TIMEOUT_S:
        states = {worker["name"]: worker["state"] for worker in report["workers"]}
        raise NotRecovered(f"after {RECOVERY_TIMEOUT_S:g} s workers are {states}, the last line {training.last_line()}")


def _num_others_lost(failures: list[Any], recoveries: list[Recovery]) -> int:
    """Of a worker that is stopped, its executor is found silent first, and then its supervisor: that is one loss."""
    ends = [recovery.num_failures for recovery in recoveries[1:]] + [len(failures)]
    return sum(
        failure["name"] != recovery.worker
        for recovery, end in zip(recoveries, ends, strict=True)
        for failure in failures[recovery.num_failures : end]
    )


def _held_bytes(runtime: Any) -> dict[str, int]:
    return {name: _resident_bytes(runtime.pids()[name]) for name in ("controller", "proxy-0")}


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


def _resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)
