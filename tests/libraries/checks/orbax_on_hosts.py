"""Orbax's handlers for Pathways: the hosts write and read checkpoints, and keep snapshots in their memory.

On plain JAX the same checkpoints are written by the process itself, and snapshots are copies.
"""

import json
import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from checks import folder, mesh
from checks.orbax import saved_and_restored

_IS_PROXY = jax.devices()[0].client.runtime_type.startswith("proxy/")


def _handler() -> ocp.PyTreeCheckpointHandler:
    if not _IS_PROXY:
        return ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    os.environ["ENABLE_PATHWAYS_PERSISTENCE"] = "1"
    ocp.pathways.register_type_handlers(checkpointing_impl=ocp.pathways.CheckpointingImpl.PERSISTENCE)
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False)


def hosts_write_and_read() -> Any:
    with folder() as path, ocp.AsyncCheckpointer(_handler()) as checkpointer:
        values = saved_and_restored(checkpointer, path / "one")
        found = _by_tensorstore(path / "one" / "w")
        values["tensorstore"] = bool(np.array_equal(found, np.arange(64.0 * 16).reshape(64, 16)))
        # Of the hosts: one file for each shard, not compressed.
        layout = json.loads((path / "one" / "w" / ".zarray").read_text())
        assert not _IS_PROXY or (layout["chunks"], layout["compressor"]) == ([16, 8], None), layout
    return values


def _by_tensorstore(path: Any) -> Any:
    import tensorstore

    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return tensorstore.open(spec, open=True).result().read().result()


def snapshots_in_host_memory() -> Any:
    on = mesh(2, 4, names=("replica", "model"))
    laid = NamedSharding(on, PartitionSpec(None, "model"))
    state = {
        "w": jax.device_put(np.arange(32.0, dtype=np.float32).reshape(4, 8), laid),
        "key": jax.device_put(jax.random.key(5), NamedSharding(on, PartitionSpec())),
        "name": 3,
    }
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x, state
    )
    if _IS_PROXY:
        from orbax.checkpoint.experimental.v1.training import pathways

        snapshotter = pathways.Snapshotter()
        snapshotter.save(11, state)
        snapshotter.join()
        step = snapshotter.latest.step
        loaded = snapshotter.load(like)
    else:
        step, loaded = 11, state
    return {
        "step": step,
        "w": loaded["w"],
        "kind": [
            loaded["w"].sharding.memory_kind == state["w"].sharding.memory_kind,
            loaded["w"].sharding.spec == laid.spec,
        ],
        "key": jax.random.key_data(loaded["key"]),
        "name": loaded["name"],
    }


CHECKS = (hosts_write_and_read, snapshots_in_host_memory)
