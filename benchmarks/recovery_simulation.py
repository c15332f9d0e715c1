"""Simulated clusters that lose hosts while clients work: seeds, faults, recoveries, and whether all of it was right."""

import concurrent.futures
import functools
from collections import Counter
from collections.abc import Iterator, Sequence

import click
import msgspec

from benchmarks.measure import Figure, Row, rows
from pathways_runtime.testing.simulated_recovery import Played, Shape, play

#: How many seeds, and the shapes that they take in turns.
SEEDS_AND_SHAPES = (
    (1000, (Shape(2, 4, 2, 64, 8), Shape(2, 4, 1, 2, 8))),
    (100, (Shape(16, 16, 4, 64, 10, check_every=2_000),)),
    (20, (Shape(32, 64, 8, 32, 10, check_every=20_000),)),
)
_COUNTS = ("faults", "losses", "recoveries", "checks", "values", "failures", "dispatched")


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


def summarise(seeds: Sequence[int], shapes: Sequence[Shape], num_processes: int | None = None) -> Summary:
    """Play these seeds, each on the next of the shapes."""
    summary = Summary(shapes[0].num_hosts, len(seeds), Counter(), {})
    with concurrent.futures.ProcessPoolExecutor(num_processes) as pool:
        played = pool.map(_play, seeds, [shapes[seed % len(shapes)] for seed in seeds])
        for seed, outcome in zip(seeds, played, strict=True):
            if isinstance(outcome, str):
                summary.violations[seed] = outcome
            else:
                summary.counts.update({name: getattr(outcome, f"num_{name}") for name in _COUNTS})
                summary.counts["at a stage"] += outcome.stages.total()
    return summary


def _play(seed: int, shape: Shape) -> Played | str:
    try:
        return play(seed, shape)
    # Whatever a seed raises, a broken invariant above all, is what the table says of it.
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"


@rows(12)
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
def main(hosts: tuple[str, ...], seeds: int | None, first_seed: int, processes: int | None) -> None:
    """Print the table of the simulated recoveries alone."""
    measured = []
    for num_seeds, shapes in SEEDS_AND_SHAPES:
        if not hosts or str(shapes[0].num_hosts) in hosts:
            chosen = range(first_seed, first_seed + (seeds or num_seeds))
            measured.append(summarise(chosen, shapes, processes))
    click.echo(table(measured))


if __name__ == "__main__":
    main()
