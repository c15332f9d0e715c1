"""Orbax's handlers for Pathways in their other form: orbax itself runs on the hosts, by colocated Python."""

from typing import Any

import jax
import orbax.checkpoint as ocp

from checks import folder, mesh
from checks.orbax import _compared, _like, _state

if jax.devices()[0].client.runtime_type.startswith("proxy/"):
    ocp.pathways.register_type_handlers(checkpointing_impl=ocp.pathways.CheckpointingImpl.COLOCATED_PYTHON)


def orbax_runs_on_hosts() -> Any:
    values = {}
    with folder() as path, ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path / "one", args=ocp.args.PyTreeSave(_state(mesh(4, 2))))
        checkpointer.wait_until_finished()
        for shape in ((4, 2), (8,), (2, 2)):
            on = mesh(*shape)
            like = _like(on)
            arguments = ocp.args.PyTreeRestore(
                item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like)
            )
            values[str(shape)] = _compared(checkpointer.restore(path / "one", args=arguments), on)
    return values


CHECKS = (orbax_runs_on_hosts,)
