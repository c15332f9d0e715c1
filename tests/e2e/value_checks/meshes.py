"""Meshes and inputs that the checks share. Nothing here touches a device before a check runs."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

#: Eight devices: two slices of two hosts of two devices in the runtime, one process in plain JAX.
NUM_DEVICES = 8
FIRST_SLICE = (0, 1, 2, 3)
SECOND_SLICE = (4, 5, 6, 7)
#: Another order of all of them, and parts of hosts in an order of no system.
SHUFFLED = (3, 6, 0, 5, 7, 1, 4, 2)
ONE_PER_HOST = (1, 2, 5, 6)
ODD = (6, 1, 3)


def mesh_of(ids: tuple[int, ...], shape: tuple[int, ...] | None = None, names: tuple[str, ...] = ("x",)) -> Mesh:
    """A mesh over devices named by id."""
    by_id = {device.id: device for device in jax.devices()}
    return Mesh(np.array([by_id[i] for i in ids]).reshape(shape or (len(ids),)), names)


def mesh_1d() -> Mesh:
    """All devices along ``x``."""
    return mesh_of(tuple(range(NUM_DEVICES)))


def mesh_2d() -> Mesh:
    """All devices as (4, 2) along ``x`` and ``y``."""
    return mesh_of(tuple(range(NUM_DEVICES)), (4, 2), ("x", "y"))


def sharded(mesh: Mesh, *spec: object, memory_kind: str | None = None) -> NamedSharding:
    """Shorthand."""
    return NamedSharding(mesh, P(*spec), memory_kind=memory_kind)


def ramp(*shape: int, dtype: object = np.float32) -> np.ndarray:
    """0, 1, 2 … in a shape: every element tells where it came from."""
    return np.arange(np.prod(shape, dtype=np.int64)).reshape(shape).astype(dtype)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal values, ``float32``."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
