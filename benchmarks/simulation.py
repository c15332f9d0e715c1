"""What a dispatch over all hosts costs proxy and controller, from 8 to 2,048 simulated hosts: rows, a table, a plot."""

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import Figure, Row, rows
from pathways_runtime.testing.dispatch_cost import DispatchCost, measure_dispatch_cost

NUM_HOSTS = (8, 32, 128, 512, 2048)
#: At most this many times the cost at the fewest hosts.
MOST_GROWTH = 4.0


@functools.cache
def costs() -> tuple[DispatchCost, ...]:
    """One measurement per number of hosts; the best of five, as other processes only ever add to it."""
    return tuple(
        min((measure_dispatch_cost(hosts) for _ in range(5)), key=lambda cost: cost.total_us) for hosts in NUM_HOSTS
    )


@functools.cache
def direct_costs() -> tuple[DispatchCost, ...]:
    """The same without relays: every host has a connection of its own."""
    return tuple(
        min(
            (measure_dispatch_cost(hosts, 128, relay_fanout=hosts, num_waits=2) for _ in range(2)),
            key=lambda cost: cost.total_us,
        )
        for hosts in NUM_HOSTS
    )


@rows(11)
def simulated_dispatch() -> Iterator[Row]:
    """Everything that runs in proxy and controller, sockets included."""
    measured = costs()
    fewest, most = measured[0], measured[-1]
    yield Row(
        f"simulated: CPU of proxy and controller per dispatch over {most.num_hosts:,} hosts",
        "us",
        most.total_us,
        at_least=MOST_GROWTH * fewest.total_us,
        aim=1.2 * fewest.total_us,
        smaller_is_better=True,
        compared=(
            *(Figure(f"{cost.num_hosts:,} hosts", cost.total_us) for cost in measured[:-1]),
            Figure(f"{most.num_hosts:,} hosts without relays", direct_costs()[-1].total_us),
        ),
        remarks="the Pathways paper needs 35,000 us at 512 hosts to hide its dispatch",
    )


def table(measured: Sequence[DispatchCost]) -> str:
    """Microseconds per dispatch, part by part; the last column is per wait."""
    parts = ("session", "submit", "order", "stream", "hand_over", "acknowledge", "total", "wait")
    names = ("hosts", "streams", *(part.replace("_", " ") for part in parts))
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for cost in measured:
        cells = " | ".join(f"{getattr(cost, f'{part}_us'):,.1f}" for part in parts)
        lines.append(f"| {cost.num_hosts:,} | {cost.num_streams:,} | {cells} |")
    return "\n".join(lines)


def plot(measured: Sequence[DispatchCost], directly: Sequence[DispatchCost], path: Path) -> None:
    """Draw the curves over hosts, with relays and without, both axes logarithmic, as an SVG file."""
    width, height, left, bottom = 640, 360, 70, 50
    largest = max(cost.total_us for cost in (*measured, *directly))
    decades = range(math.ceil(math.log10(largest)) + 1)

    def x(hosts: float) -> float:
        low, high = math.log2(measured[0].num_hosts), math.log2(measured[-1].num_hosts)
        return left + (math.log2(hosts) - low) / (high - low) * (width - left - 20)

    def y(cost_us: float) -> float:
        return height - bottom - math.log10(max(cost_us, 1)) / decades[-1] * (height - bottom - 20)

    marks = [
        f'<line x1="{left}" x2="{width - 20}" y1="{y(10**d):.1f}" y2="{y(10**d):.1f}" stroke="#ddd"/>'
        f'<text x="{left - 8}" y="{y(10**d) + 4:.1f}" text-anchor="end">{10**d:,} us</text>'
        for d in decades
    ]
    marks += [
        f'<text x="{x(cost.num_hosts):.1f}" y="{height - bottom + 20}" text-anchor="middle">{cost.num_hosts:,}</text>'
        for cost in measured
    ]
    for name, color, below, values in (
        ("every host connected to the controller", "#999", -10, [cost.total_us for cost in directly]),
        ("beyond 32 hosts through relays", "#c33", -10, [cost.total_us for cost in measured]),
        ("of that, without messages per stream", "#36c", 18, [cost.thinking_us for cost in measured]),
    ):
        points = [(x(cost.num_hosts), y(value)) for cost, value in zip(measured, values, strict=True)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        marks.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        end_x, end_y = points[-1]
        marks.append(f'<text x="{end_x:.1f}" y="{end_y + below:.1f}" text-anchor="end" fill="{color}">{name}</text>')
    marks.append(f'<text x="{(left + width) / 2}" y="{height - 8}" text-anchor="middle">hosts</text>')
    style = 'font-family="sans-serif" font-size="12"'
    body = "\n".join(marks)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {style}>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
