"""Orbax: checkpoints saved at once and beside the training, restored onto other meshes and numbers of slices."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import checkpoint_managers

from checks import folder, mesh


def _laid(on: Mesh) -> dict[str, Any]:
    """Shardings of ``_state`` for a mesh of one axis or two."""
    names = on.axis_names
    grid = NamedSharding(on, PartitionSpec(names[0], names[1] if len(names) > 1 else None))
    everywhere = NamedSharding(on, PartitionSpec())
    return {"w": grid, "half": grid, "b": everywhere, "key": everywhere, "step": everywhere}


def _state(on: Mesh) -> dict[str, Any]:
    values = {
        "w": jnp.arange(64.0 * 16).reshape(64, 16),
        "half": jnp.arange(32, dtype=jnp.bfloat16).reshape(8, 4),
        "b": jnp.arange(5),
        "key": jax.random.key_data(jax.random.key(3)),
        "step": jnp.int32(7),
    }
    return jax.device_put(values, _laid(on))


def _like(on: Mesh) -> dict[str, Any]:
    shapes = jax.eval_shape(lambda: _state(mesh(8)))
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes, _laid(on)
    )


def _compared(restored: Any, on: Mesh) -> Any:
    wanted = _state(on)
    return {
        name: [
            bool(np.array_equal(np.asarray(restored[name], np.float64), np.asarray(wanted[name], np.float64))),
            restored[name].sharding == wanted[name].sharding,
            str(restored[name].dtype),
        ]
        for name in wanted
    }


def saved_and_restored(checkpointer: ocp.AsyncCheckpointer, path: Path) -> dict[str, Any]:
    """The state, saved as a tree and restored onto other meshes; for the modules that have other handlers."""
    checkpointer.save(path, args=ocp.args.PyTreeSave(_state(mesh(4, 2))))
    checkpointer.wait_until_finished()
    values = {}
    for shape in ((4, 2), (8,), (2, 2)):
        on = mesh(*shape)
        like = _like(on)
        arguments = ocp.args.PyTreeRestore(item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
        values[str(shape)] = _compared(checkpointer.restore(path, args=arguments), on)
    return values


def restores_onto_other_meshes() -> Any:
    values = {}
    with folder() as path, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "two_slices", _state(mesh(4, 2)))
        checkpointer.save(path / "one_slice", _state(mesh(2, 2)))
        checkpointer.wait_until_finished()
        for source in ("two_slices", "one_slice"):
            for shape in ((4, 2), (2, 4), (8,), (2, 2), (1,)):
                on = mesh(*shape)
                values[f"{source} {shape}"] = _compared(checkpointer.restore(path / source, _like(on)), on)
    return values


def saves_beside_the_training() -> Any:
    on = mesh(4, 2)
    step = jax.jit(lambda s: {**s, "w": s["w"] * 0.5 + 1, "step": s["step"] + 1}, donate_argnums=0)
    state = _state(on)
    options = ocp.CheckpointManagerOptions(
        save_decision_policy=checkpoint_managers.FixedIntervalPolicy(2),
        preservation_policy=checkpoint_managers.LatestN(2),
        enable_async_checkpointing=True,
    )
    with folder() as path, ocp.CheckpointManager(path, options=options) as manager:
        for number in range(6):
            manager.save(number, args=ocp.args.StandardSave(state))
            state = step(state)
        manager.wait_until_finished()
        last = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(_like(on)))
        return {"steps": manager.all_steps(), "step": last["step"], "w": last["w"]}


def metadata_tells_shapes() -> Any:
    with folder() as path, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "one", _state(mesh(4, 2)))
        checkpointer.wait_until_finished()
        found = checkpointer.metadata(path / "one").item_metadata
        return {name: [list(each.shape), str(each.dtype)] for name, each in found.items()}


CHECKS = (restores_onto_other_meshes, saves_beside_the_training, metadata_tells_shapes)
