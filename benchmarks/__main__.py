"""``python -m benchmarks``: measures the rows and prints the table."""

import sys
from pathlib import Path

import click

from benchmarks import peers, recovery_simulation, simulation
from benchmarks.measure import Row, ordered_rows, table
from benchmarks.workloads import TOPICS

assert TOPICS, "importing the topics registers their rows"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar="[ROWS]...")
@click.option("--list", "only_list", is_flag=True, help="List the names of rows.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the table to this file, too.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the simulated clusters' curve into this SVG file.")
@click.option("--peers/--no-peers", "with_peers", default=True, help="Measure Ray, Monarch and Dask where installed.")
def main(names: tuple[str, ...], only_list: bool, output: Path | None, plot: Path | None, with_peers: bool) -> None:
    """Measure ROWS, each side by side with what a user would run instead, and print a table.

    Without names, all are measured but those that take long: soak and simulated_recovery.
    """
    by_name = ordered_rows()
    if only_list:
        for name, row in by_name.items():
            click.echo(f"{name}{' (only when named)' if row.only_when_named else ''}")
        return
    if unknown := sorted(set(names) - set(by_name)):
        raise click.UsageError(f"no rows called {', '.join(unknown)}; there are {', '.join(by_name)}")
    chosen = names or tuple(name for name, row in by_name.items() if not row.only_when_named)
    measured: list[Row] = []
    failed: list[str] = []
    for name in chosen:
        click.echo(f"measuring {name} ...", err=True)
        try:
            measured.extend(by_name[name].measure())
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            click.echo(failed[-1], err=True)
    text = table(measured)
    if with_peers and not names:
        text += "\n\n" + peers.table()
    if "simulated_dispatch" in chosen:
        text += "\n\n" + simulation.table(simulation.costs())
        text += "\n\nWithout relays:\n\n" + simulation.table(simulation.direct_costs())
        if plot is not None:
            simulation.plot(simulation.costs(), simulation.direct_costs(), plot)
    if "simulated_recovery" in chosen:
        text += "\n\n" + recovery_simulation.table(recovery_simulation.summaries())
    if failed:
        text += "\n\nNot measured:\n\n" + "\n".join(f"* {line}" for line in failed)
    click.echo(text)
    if output is not None:
        output.write_text(text + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
