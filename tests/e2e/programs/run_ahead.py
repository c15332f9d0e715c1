"""Dispatches calls faster than the workers can keep up with, and looks at the memory of the processes named by pid."""

import json
import sys
from pathlib import Path

import jax
import numpy as np


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    """``run_ahead NUM_CALLS PID...``; prints the final value, and per process its memory before and at most."""
    num_calls, pids = int(sys.argv[1]), [int(pid) for pid in sys.argv[2:]]
    step = jax.jit(lambda x: x + 1)
    x = jax.device_put(np.int32(0), jax.devices()[0])
    for _ in range(2000):
        x = step(x)
    jax.block_until_ready(x)
    before = [resident_bytes(pid) for pid in pids]
    most = list(before)
    for call in range(num_calls):
        x = step(x)
        if call % 1000 == 0:
            most = [max(a, resident_bytes(pid)) for a, pid in zip(most, pids, strict=True)]
    print(json.dumps({"value": int(x), "before": before, "most": most}))


if __name__ == "__main__":
    main()
