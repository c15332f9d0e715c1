"""Other systems doing the same work on the same machine. Each script prints figures as JSON, where it is installed."""

import importlib.util
import json
import subprocess
import sys

from benchmarks.measure import PROJECT, WORKLOAD_TIMEOUT_S, Figures, plain_environment

#: Name, the package that must be importable, the script.
PEERS = (
    ("Ray", "ray", "benchmarks.peers.ray_peer"),
    ("Monarch", "monarch", "benchmarks.peers.monarch_peer"),
    ("Dask", "distributed", "benchmarks.peers.dask_peer"),
)

COLUMNS = {
    "calls_per_s": "2,000 dependent calls/s",
    "round_trip_ms": "one call, blocking ms",
    "rounds_per_s": "one call on each of 4, pipelined rounds/s",
    "worker_to_worker_gb_per_s": "worker to worker, 256 MiB, GB/s",
}


def table() -> str:
    """A Markdown table of the peers that are installed, and a line that names those that are not."""
    lines = [f"| peer | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    missing = []
    for name, package, module in PEERS:
        if importlib.util.find_spec(package) is None:
            missing.append(name)
            continue
        figures = _run(module)
        if isinstance(figures, str):
            lines.append(f"| {name} | {figures} |" + " |" * (len(COLUMNS) - 1))
        else:
            cells = [f"{figures[column]:.3g}" if column in figures else "-" for column in COLUMNS]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    if missing:
        lines += ["", f"Not installed: {', '.join(missing)} (pip install ray distributed torchmonarch)."]
    return "\n".join(lines)


def _run(module: str) -> Figures | str:
    """The figures of a peer's script, or why there are none."""
    result = subprocess.run(
        [sys.executable, "-m", module],
        env=plain_environment(),
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=WORKLOAD_TIMEOUT_S,
        check=False,
    )
    if result.returncode != 0:
        return f"failed: {(result.stderr.splitlines() or ['without a word'])[-1]}"
    figures: Figures = json.loads(result.stdout.splitlines()[-1])
    return figures
