"""Simulated clusters that lose hosts while clients work: seeds, faults, recoveries, and whether all of it was right."""

import concurrent.futures
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from benchmarks.measure import Figure, Row, rows
from pathways_runtime.testing.simulated_recovery import Shape, play

#: How many seeds, and the shapes that they take in turns.
SEEDS_AND_SHAPES = (
    (1000, (Shape(2, 4, 2, 64, 8), Shape(2, 4, 1, 2, 8))),
    (100, (Shape(16, 16, 4, 64, 10, check_every=2_000),)),
    (1000, (Shape(32, 64, 8, 32, 10, check_every=20_000),)),
)
_COUNTS = ("faults", "losses", "recoveries", "checks", "values", "failures", "dispatched")


class Outcome(msgspec.Struct):
    """What one seed gave.

    Attributes:
        counts: of what happened. violation: what was not right; empty if all was.
    """

    num_hosts: int
    seed: int
    counts: dict[str, int]
    violation: str = ""


class Summary(msgspec.Struct):
    """All seeds of one size.

    Attributes:
        violations: per seed that was not right, what was wrong.
    """

    num_hosts: int
    num_seeds: int
    counts: Counter[str]
    violations: dict[int, str]


@functools.cache
def summaries() -> tuple[Summary, ...]:
    """One per size."""
    return tuple(summarise(range(num_seeds), shapes) for num_seeds, shapes in SEEDS_AND_SHAPES)


def summarise(
    seeds: Sequence[int], shapes: Sequence[Shape], num_processes: int | None = None, log: Path | None = None
) -> Summary:
    """Play these seeds, each on the next of the shapes.

    Args:
        log: keeps the outcome of each seed; those whose outcome is there already are not played again.
    """
    num_hosts = shapes[0].num_hosts
    logged = {} if log is None else {o.seed: o for o in _read(log) if o.num_hosts == num_hosts and o.seed in seeds}
    left = [seed for seed in seeds if seed not in logged]
    summary = Summary(num_hosts, len(seeds), Counter(), {})
    with concurrent.futures.ProcessPoolExecutor(num_processes) as pool:
        played = pool.map(_play, left, [shapes[seed % len(shapes)] for seed in left])
        for outcome in (*logged.values(), *_logging(played, log)):
            summary.counts.update(outcome.counts)
            if outcome.violation:
                summary.violations[outcome.seed] = outcome.violation
    return summary


def _read(log: Path) -> list[Outcome]:
    lines = log.read_bytes().splitlines() if log.exists() else []
    return [msgspec.json.decode(line, type=Outcome) for line in lines]


def _logging(played: Iterator[Outcome], log: Path | None) -> Iterator[Outcome]:
    for outcome in played:
        if log is not None:
            with log.open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
        yield outcome


def _play(seed: int, shape: Shape) -> Outcome:
    try:
        played = play(seed, shape)
    # Whatever a seed raises, a broken invariant above all, is what the table says of it.
    except Exception as failure:
        return Outcome(shape.num_hosts, seed, {}, f"{type(failure).__name__}: {failure}")
    counts = {name: getattr(played, f"num_{name}") for name in _COUNTS}
    return Outcome(shape.num_hosts, seed, {**counts, "at a stage": played.stages.total()})


@rows(12, only_when_named=True)
def simulated_recovery() -> Iterator[Row]:
    """Every seed plays a cluster that loses workers at random moments, also during recovery."""
    measured = summaries()
    right = [summary.num_seeds - len(summary.violations) for summary in measured]
    yield Row(
        f"simulated: seeds of which each invariant held and each value was right, {measured[0].num_hosts} hosts",
        "seeds",
        right[0],
        at_least=measured[0].num_seeds,
        aim=measured[0].num_seeds,
        compared=tuple(
            Figure(f"{summary.num_hosts:,} hosts, of {summary.num_seeds}", ok)
            for summary, ok in zip(measured[1:], right[1:], strict=True)
        ),
        remarks="workers are lost at random moments, also during recovery",
    )


def table(measured: Sequence[Summary]) -> str:
    """One line per size, and the violations."""
    names = (
        "hosts",
        "seeds",
        "faults",
        "of them at a stage of a recovery",
        "workers lost",
        "hosts served again",
        "operations",
        "values compared",
        "answers that were a loss",
        "checks of all invariants",
        "violations",
    )
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for summary in measured:
        counts = summary.counts
        figures = [counts[key] for key in ("faults", "at a stage", "losses", "recoveries", "dispatched")]
        figures += [counts[key] for key in ("values", "failures", "checks")]
        cells = [summary.num_hosts, summary.num_seeds, *figures, len(summary.violations)]
        lines.append("| " + " | ".join(f"{cell:,}" for cell in cells) + " |")
    for summary in measured:
        for seed, violation in summary.violations.items():
            lines.append(f"\n{summary.num_hosts:,} hosts, seed {seed}: {violation[:500]}")
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hosts", type=click.Choice(["8", "256", "2048"]), multiple=True, help="Only these sizes.")
@click.option("--seeds", type=click.IntRange(1), help="How many seeds of each size.")
@click.option("--first-seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--processes", type=click.IntRange(1), help="How many at a time; default: one per core.")
@click.option(
    "--log",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep what each seed gave in this file, and do not play again what is there.",
)
def main(hosts: tuple[str, ...], seeds: int | None, first_seed: int, processes: int | None, log: Path | None) -> None:
    """Print the table of the simulated recoveries alone."""
    measured = []
    for num_seeds, shapes in SEEDS_AND_SHAPES:
        if not hosts or str(shapes[0].num_hosts) in hosts:
            chosen = range(first_seed, first_seed + (seeds or num_seeds))
            measured.append(summarise(chosen, shapes, processes, log))
    click.echo(table(measured))


if __name__ == "__main__":
    main()
