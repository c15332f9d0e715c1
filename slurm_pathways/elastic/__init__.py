"""Training that goes on when hosts are lost: in fewer slices or with a spare, from snapshots in host memory.

    from slurm_pathways import elastic

    def train(attempt):
        state = attempt.start(init)                       # init(mesh) makes the state of step 0
        for step in range(attempt.step, NUM_STEPS):
            state = train_step(state, batch(step, attempt.mesh))
            attempt.done(step + 1, state)                 # a snapshot is begun here now and then
        return state

    elastic.run(train, policy=elastic.Policy(wait_s=10), snapshots=elastic.Snapshots(every_steps=20))

``train`` is called again after each loss, with a mesh of the slices that are there, and its state where the newest
complete snapshot is. docs/elastic.md is the guide. Importing this imports no JAX.
"""

from slurm_pathways.elastic.policy import Grow, Policy, Snapshots
from slurm_pathways.elastic.preemption import Preempted, Preemption
from slurm_pathways.elastic.training import Attempt, Event, EventKind, GaveUp, SnapshotFailed, run

__all__ = [
    "Attempt",
    "Event",
    "EventKind",
    "GaveUp",
    "Grow",
    "Policy",
    "Preempted",
    "Preemption",
    "SnapshotFailed",
    "Snapshots",
    "run",
]
