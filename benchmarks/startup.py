"""From the command to the first look at the devices."""

import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import (
    Figure,
    Figures,
    Row,
    clean_environment,
    median_of,
    plain_environment,
    rows,
    run_workload,
    seconds,
    workload,
)

_LOOK = "import jax; print(len(jax.devices()))"


@workload
def look_at_devices(command: list[str], num_devices: int, repeats: int = 3) -> Figures:
    """How long a command takes that starts Python, imports JAX and looks at its devices; seconds."""
    import subprocess

    argv = [*command, sys.executable, "-c", _LOOK]

    def look() -> None:
        seen = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
        assert seen == f"{num_devices}\n", f"saw {seen}"

    return {"seconds": median_of(repeats, lambda: seconds(look))}


@rows(10)
def start_of_four_hosts() -> Iterator[Row]:
    """The end of the run, when everything is taken down, is in it."""
    command = [str(Path(sys.executable).parent / "slurm-pathways"), "run", "--local", "-q", "--slices", "1"]
    command += ["--hosts-per-slice", "4", "--devices-per-host", "1", "--"]
    ours = run_workload("look_at_devices", clean_environment(), command=command, num_devices=4)
    plain = run_workload("look_at_devices", plain_environment(4), command=[], num_devices=4)
    yield Row(
        "start of 4 hosts to jax.devices(), and their end",
        "s",
        ours["seconds"],
        at_least=6,
        aim=3,
        smaller_is_better=True,
        compared=(Figure("a JAX process of 4 devices", plain["seconds"]),),
    )
