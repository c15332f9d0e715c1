"""pathwaysutils as users have it: initialized before or after a look at the devices, resharding, slice health."""

import json
import sys

import jax
import numpy as np
import pathwaysutils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def main() -> None:
    """``with_pathwaysutils before|after``; prints what each function gave."""
    if sys.argv[1] == "before":
        pathwaysutils.initialize()
    devices = np.array(jax.devices())
    if sys.argv[1] == "after":
        pathwaysutils.initialize()
    from pathwaysutils import reshard
    from pathwaysutils.elastic import elastic
    from pathwaysutils.experimental import concatenate_by_mesh_axis, split_by_mesh_axis

    host = np.arange(64, dtype=np.float32).reshape(8, 8)
    mesh = Mesh(devices.reshape(2, 4), ("replica", "x"))
    x = jax.device_put(host, NamedSharding(mesh, P("replica", "x")))
    second = NamedSharding(Mesh(devices[4:], ("x",)), P(None, "x"))
    moved = reshard.reshard(x, second)
    halves = split_by_mesh_axis.split_by_mesh_axis(x, "replica")
    half_devices = [sorted(d.id for d in half.devices()) for half in halves]
    right_halves = [np.array_equal(half, part) for half, part in zip(halves, np.split(host, 2), strict=True)]
    # Takes the halves.
    whole = concatenate_by_mesh_axis.concatenate_by_mesh_axis(halves, "replica")
    slices = elastic.get_slice_to_devices(jax.devices())
    print(
        json.dumps(
            {
                "is_pathways": bool(pathwaysutils.is_pathways_backend_used()),
                "num_devices": len(devices),
                "moved": np.array_equal(moved, host) and moved.sharding == second,
                "donated": np.array_equal(reshard.reshard(moved, x.sharding, donate=True), host),
                "halves": right_halves,
                "half_devices": half_devices,
                "whole": np.array_equal(whole, host),
                "slices": {str(index): [d.id for d in devices] for index, devices in slices.items()},
                "active": sorted(elastic.get_active_slice_indices(slices)),
            }
        )
    )


if __name__ == "__main__":
    main()
