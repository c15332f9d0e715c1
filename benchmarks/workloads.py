"""Runs one workload in this process: ``python -m benchmarks.workloads NAME JSON-ARGUMENTS``; prints figures as JSON."""

import json
import sys

from benchmarks import (
    callbacks,
    checkpoints,
    collectives,
    colocated,
    dispatch,
    memory,
    recovery,
    requeue,
    simulation,
    slurm,
    snapshots,
    soak,
    startup,
    transfers,
)
from benchmarks.measure import WORKLOADS

#: Importing a topic registers its workloads.
TOPICS = (
    dispatch,
    callbacks,
    colocated,
    checkpoints,
    collectives,
    transfers,
    startup,
    memory,
    simulation,
    slurm,
    snapshots,
    soak,
    recovery,
    requeue,
)

if __name__ == "__main__":
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps(WORKLOADS[name](**arguments)))
