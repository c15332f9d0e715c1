"""Orbax's handlers for Pathways in their other form: orbax itself runs on the hosts, by colocated Python."""

from typing import Any

import jax
import orbax.checkpoint as ocp

from checks import folder
from checks.orbax import saved_and_restored

if jax.devices()[0].client.runtime_type.startswith("proxy/"):
    ocp.pathways.register_type_handlers(checkpointing_impl=ocp.pathways.CheckpointingImpl.COLOCATED_PYTHON)


def orbax_runs_on_hosts() -> Any:
    with folder() as path, ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return saved_and_restored(checkpointer, path / "one")


CHECKS = (orbax_runs_on_hosts,)
