"""The runtime on one accelerator beside plain JAX on it and on CPU; prints a section of docs/hardware.md.

Started by ``gpu.sh``. Everything runs one after another, each in a process of its own, as they share one device.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent
PROJECT = HERE.parent.parent
#: Of one step; all of them together take about three minutes on a machine with a GPU.
STEP_TIMEOUT_S = 240
EPOCHS = 3
MIN_ACCURACY = 0.8
#: Of a loss. Over some epochs differences of rounding grow.
SAME_DEVICE_LOSS_TOLERANCE = 1e-4
LOSS_TOLERANCE = 2e-2
#: Relative to the largest value of an array: sums of another order, and another device's functions.
VALUE_TOLERANCE = 2e-4
#: bfloat16 has 8 bits; a product's rounding may fall either way.
COARSE_TOLERANCE = 1e-2
COARSE = frozenset({"matmul_bfloat16"})
#: Beside the values that ``checks.py`` writes: what the device is.
KIND = "device_kind"
#: Products of float32 are in float32: on GPUs, XLA's default has 10 bits.
PRECISION = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
_CHOOSING = ("JAX_PLATFORMS", "JAX_BACKEND_TARGET", "XLA_FLAGS")
_RUN_WORKLOADS = """
import json, sys
import benchmarks.workloads
from benchmarks.measure import WORKLOADS
print(json.dumps({name: WORKLOADS[name](**arguments) for name, arguments in json.loads(sys.argv[1]).items()}))
"""

Environment = Mapping[str, str]
Values = Mapping[str, np.ndarray]


class Figure(NamedTuple):
    """A row of the table: a workload of ``benchmarks``, which of its figures, and in what."""

    title: str
    workload: str
    arguments: dict[str, Any]
    key: str
    scale: float
    unit: str


def figures(is_quick: bool) -> list[Figure]:
    """What is measured."""
    num_bytes, num_calls, repeats = (4 << 20, 20, 1) if is_quick else (256 << 20, 1000, 5)
    size = f"{num_bytes >> 20} MiB"
    transfers = {"num_bytes": num_bytes, "repeats": repeats}
    chain = {"num_calls": num_calls, "repeats": repeats}
    return [
        Figure("dependent calls", "chain_of_calls", chain, "calls_per_s", 1.0, "1/s"),
        Figure("a call that is waited for", "blocking_round_trip", {"num_calls": num_calls}, "ms", 1.0, "ms"),
        Figure(f"{size} to the device", "client_and_back", transfers, "there_bytes_per_s", 1e-9, "GB/s"),
        Figure(f"{size} back", "client_and_back", transfers, "back_bytes_per_s", 1e-9, "GB/s"),
    ]


def main() -> int:
    """Measure and print; exit code 1 when something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="too little for figures that mean something")
    parser.add_argument("--output", type=Path, help="write the section here too")
    options = parser.parse_args()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lines, problems = measure(options.platform, Path(folder), options.quick)
    section = "\n".join([*lines, f"It took {time.monotonic() - started_s:.0f} s.", ""])
    print(section)
    if options.output is not None:
        options.output.write_text(section)
    for problem in problems:
        print(f"gpu.sh: {problem}", file=sys.stderr)
    return 1 if problems else 0


def measure(name: str, folder: Path, is_quick: bool) -> tuple[list[str], list[str]]:
    """The section's lines, and what is wrong."""
    from slurm_pathways.config import RuntimeSpec
    from slurm_pathways.launch.local import LocalRuntime

    wanted, epochs = figures(is_quick), 1 if is_quick else EPOCHS
    for place in dict.fromkeys(("cpu", name)):
        run_all(plain_environment(place), epochs, folder / place)
    plain_figures = run_figures(wanted, plain_environment(name))
    with LocalRuntime(RuntimeSpec(platform=name), environ=plain_environment(None)) as runtime:
        environ = runtime.environment()
        run_all(environ, epochs, folder / "here")
        our_figures = run_figures(wanted, environ)
    return judge(name, folder, epochs, list(zip(wanted, plain_figures, our_figures, strict=True)))


def judge(
    name: str, folder: Path, epochs: int, measured: Sequence[tuple[Figure, float, float]]
) -> tuple[list[str], list[str]]:
    """See ``measure``; what ran has left its results in the folder."""
    losses = {place: json.loads((folder / f"{place}.json").read_text()) for place in {name, "cpu", "here"}}
    accuracy = losses["here"]["accuracies"][-1]
    problems = [] if accuracy >= MIN_ACCURACY else [f"the example learned too little: {accuracy:.1%} held out"]
    differences = []
    for place in dict.fromkeys((name, "cpu")):
        difference = float(np.abs(np.array(losses["here"]["losses"]) - losses[place]["losses"]).max())
        differences.append(f"differ from those of plain JAX on {where(place)} by {difference:.1e} at most")
        tolerance = SAME_DEVICE_LOSS_TOLERANCE if place == name else LOSS_TOLERANCE
        if not difference <= tolerance:
            problems.append(f"losses {differences[-1]}; {tolerance:g} is allowed")
    values = np.load(folder / "here.npz")
    found = compare(values, np.load(folder / "cpu.npz"))
    checks = sorted({key.partition(".")[0] for key in values.files} - {KIND})
    bad = {difference.partition(".")[0] for difference in found}
    lines = [
        f"### {values[KIND]}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "",
        f"{describe_machine(name)}. One slice, one host, one device.",
        "",
        f"* The digits example, {epochs} epoch(s): {accuracy:.1%} held out. Its losses {', and '.join(differences)}.",
        f"* Values against plain JAX on CPU: {len(checks) - len(bad)} of {len(checks)} checks agree "
        f"({', '.join(check.replace('_', ' ') for check in checks)}).",
        "",
        f"| | plain JAX on {where(name)} | here |",
        "|---|---|---|",
    ]
    lines += [
        f"| {figure.title} | {number(theirs)} {figure.unit} | {number(mine)} {figure.unit} |"
        for figure, theirs, mine in measured
    ]
    return [*lines, ""], [*problems, *found]


def where(place: str) -> str:
    """What a place is called in the text."""
    return "CPU" if place == "cpu" else "the same device"


def plain_environment(name: str | None) -> dict[str, str]:
    """Plain JAX on a platform; None: whatever a runtime chooses."""
    environ = {key: value for key, value in os.environ.items() if key not in _CHOOSING}
    environ |= {"SLURM_PATHWAYS_RECORDS": "none", **PRECISION}
    return environ if name is None else {**environ, "JAX_PLATFORMS": name}


def run(environ: Environment, *arguments: object) -> str:
    """Run Python in the project's folder; its output.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, *map(str, arguments)]
    print("gpu.sh:", *(word for word in command[1:] if "\n" not in word), file=sys.stderr, flush=True)
    done = subprocess.run(
        command, env=dict(environ), cwd=PROJECT, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        said = f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
        raise SystemExit(f"gpu.sh: {command} ended with {done.returncode}:\n{said}")
    return done.stdout


def run_all(environ: Environment, epochs: int, results: Path) -> None:
    """The example and the checks; what they give goes to ``<results>.json`` and ``<results>.npz``."""
    run(environ, "examples/digits/train.py", "--epochs", epochs, "--losses", results.with_suffix(".json"))
    run(environ, HERE / "checks.py", results.with_suffix(".npz"))


def run_figures(wanted: Sequence[Figure], environ: Environment) -> list[float]:
    """The figures in order; each workload is run once, all in one process."""
    calls = {figure.workload: figure.arguments for figure in wanted}
    made = json.loads(run(environ, "-c", _RUN_WORKLOADS, json.dumps(calls)).splitlines()[-1])
    return [made[figure.workload][figure.key] * figure.scale for figure in wanted]


def compare(mine: Values, theirs: Values) -> list[str]:
    """What differs, in words; each begins with the name of the check."""
    if set(mine) != set(theirs):
        return [f"the checks gave {sorted(mine)} here and {sorted(theirs)} on CPU"]
    found = []
    for key in sorted(set(theirs) - {KIND}):
        a, b = mine[key], theirs[key]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            found.append(f"{key}: {a.dtype}{a.shape} here, {b.dtype}{b.shape} on CPU")
        elif b.dtype.kind in "fc":
            tolerance = COARSE_TOLERANCE if key.partition(".")[0] in COARSE else VALUE_TOLERANCE
            difference, scale = float(np.abs(a - b).max()), max(1.0, float(np.abs(b).max()))
            if not difference <= tolerance * scale:
                found.append(f"{key}: differs by {difference:g}, of {scale:g}")
        elif not np.array_equal(a, b):
            found.append(f"{key}: differs")
    return found


def number(value: float) -> str:
    """Three digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def describe_machine(name: str) -> str:
    """Versions and cores."""
    packages = ["jax", "jaxlib", "slurm-pathways"]
    if name == "cuda":
        packages += ["jax-cuda12-plugin", "jax-cuda13-plugin"]
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        words = driver.read_text().splitlines()[0].split()
        found += [f"driver {word}" for word in words if word[:1].isdigit()][:1]
    return f"{', '.join(found)}, Python {platform.python_version()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
