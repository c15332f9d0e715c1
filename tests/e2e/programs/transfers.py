"""Moves an array along many ways and says how many bytes the runtime moved by which means, as status counts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def bytes_moved() -> dict[str, int]:
    """The counters, when everything asked for so far is done."""
    command = [str(Path(sys.executable).parent / "slurm-pathways"), "status", "--json"]
    command += ["--run", os.environ["SLURM_PATHWAYS_RUN_DIR"]]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    counters: dict[str, int] = json.loads(result.stdout)["bytes_moved"]
    return counters


def main() -> None:
    """Prints the counters before and after every move."""
    devices = np.array(jax.devices())
    first, second, all_devices = (Mesh(part, ("x",)) for part in (devices[:4], devices[4:], devices))
    rows = NamedSharding(all_devices, P("x"))
    host = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    x = jax.block_until_ready(jax.jit(lambda x: x + 0)(jax.device_put(host, rows)))
    targets = {
        "columns": NamedSharding(all_devices, P(None, "x")),
        "everywhere": NamedSharding(all_devices, P()),
        "first_slice": NamedSharding(first, P("x")),
        "second_slice": NamedSharding(second, P(None, "x")),
        "reversed": NamedSharding(Mesh(devices[::-1], ("x",)), P("x")),
        "one_device": jax.sharding.SingleDeviceSharding(devices[5]),
        "pinned_host": NamedSharding(second, P("x"), memory_kind="pinned_host"),
    }
    moved = {}
    arrays = {}
    for name, target in targets.items():
        before = bytes_moved()
        arrays[name] = jax.block_until_ready(jax.device_put(x, target))
        after = bytes_moved()
        moved[name] = {kind: after[kind] - before[kind] for kind in before}
    # Fetched only now: this is what goes by way of host buffers.
    before = bytes_moved()
    right = {name: bool((np.asarray(array) == host).all()) for name, array in arrays.items()}
    fetched = bytes_moved()["host_buffers"] - before["host_buffers"]
    print(json.dumps({"moved": moved, "right": right, "fetched_bytes": fetched}))


if __name__ == "__main__":
    main()
