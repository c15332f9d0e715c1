"""The soak: hosts die at random moments of random causes while the example of elastic training goes on.

``python -m benchmarks soak`` has 100 deaths; ``python -m benchmarks.soak --deaths 20 --seed 7`` as many as one likes.
``tests/elastic/test_soak.py`` has 20 of them in a minute or so.
"""

import random
import statistics
import sys
from collections.abc import Iterator

import click

from benchmarks.measure import Row, local_runtime, rows, table
from tests.elastic.kills import DEATHS
from tests.elastic.soak import Plan, Soak, measure

NUM_DEATHS = 100


def drawn(num_deaths: int, seed: int) -> Plan:
    """Deaths of all kinds alike."""
    chance = random.Random(seed)
    return Plan(tuple(chance.choice(sorted(DEATHS)) for _ in range(num_deaths)))


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
    yield Row(
        "soak: hosts that ended beside one that died, of themselves",
        "hosts",
        result.num_others_lost,
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
    yield from rows_of(measure(local_runtime, drawn(NUM_DEATHS, seed=1), seed=1), NUM_DEATHS)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--deaths", default=NUM_DEATHS, type=click.IntRange(1), help="How many.")
@click.option("--seed", default=1, help="Chooses who dies, of what and when.")
def main(deaths: int, seed: int) -> None:
    """Let hosts die while the example of elastic training goes on, and print what was seen."""
    result = measure(local_runtime, drawn(deaths, seed), seed)
    click.echo(table(list(rows_of(result, deaths))))
    sys.exit(0 if len(result.recoveries) == deaths and not result.left else 1)


if __name__ == "__main__":
    main()
