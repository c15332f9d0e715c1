"""Trains on data that every host reads for itself: no batch passes through this program.

An ordinary JAX program; see README.md beside it.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import colocated_python

NUM_FEATURES = 32
ROWS_PER_SHARD = 512


def write_shards(folder: Path, num_shards: int) -> None:
    """Files ``shard-NNN.npy`` of rows ``(features..., target)``; in life they are there already."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = np.random.default_rng(0).normal(size=NUM_FEATURES)
    for number in range(num_shards):
        features = np.random.default_rng(number + 1).normal(size=(ROWS_PER_SHARD, NUM_FEATURES))
        rows = np.column_stack([features, features @ weights]).astype(np.float32)
        np.save(folder / f"shard-{number:03d}.npy", rows)


def numpy_batches(files: list[str], rows: int, seed: int) -> Iterator[np.ndarray]:
    """Batches of the shards' rows, for ever: each epoch in an order of its own."""
    order = np.random.default_rng(seed)
    content = np.concatenate([np.load(file) for file in files])
    while True:
        shuffled = order.permutation(len(content))
        for start in range(0, len(content) - rows + 1, rows):
            yield content[shuffled[start : start + rows]]


def grain_batches(files: list[str], rows: int, seed: int) -> Iterator[np.ndarray]:
    """The same with grain, which can also read, decode and augment in threads and processes of the host."""
    import grain

    content = np.concatenate([np.load(file) for file in files])
    return iter(grain.MapDataset.source(content).shuffle(seed=seed).repeat().batch(rows, drop_remainder=True))


@colocated_python.colocated_python_class
class Loader:
    """One on each host, made there at the first call: it reads the shards of the host's own devices.

    A device has a stream of its own, so what it sees does not depend on how devices are spread over hosts.
    """

    def __init__(self, folder: str, rows_per_device: int, use_grain: bool) -> None:
        self.folder = folder
        self.rows = rows_per_device
        self.batches = grain_batches if use_grain else numpy_batches
        self.streams: dict[int, Iterator[np.ndarray]] = {}

    def next(self, like: jax.Array) -> jax.Array:
        """The next batch, its rows over the devices of ``like``, whose contents do not matter."""
        devices = like.sharding.mesh.devices.reshape(-1).tolist()
        parts = []
        for shard in like.addressable_shards:
            place = devices.index(shard.device)
            if place not in self.streams:
                files = sorted(str(file) for file in Path(self.folder).glob("shard-*.npy"))
                self.streams[place] = self.batches(files[place :: len(devices)], self.rows, seed=place)
            parts.append(jax.device_put(next(self.streams[place]), shard.device))
        shape = (self.rows * len(devices), NUM_FEATURES + 1)
        sharding = jax.NamedSharding(like.sharding.mesh, jax.P("rows", None))
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def loss(weights: jax.Array, batch: jax.Array) -> jax.Array:
    """Mean squared error of a linear model."""
    return jnp.mean((batch[:, :-1] @ weights - batch[:, -1]) ** 2)


@jax.jit
def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of gradient descent."""
    value, gradient = jax.value_and_grad(loss)(weights, batch)
    return weights - 0.05 * gradient, value


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of shards that every host can read")
    parser.add_argument("--make-data", action="store_true", help="write random shards there first")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows-per-device", type=int, default=64)
    parser.add_argument("--grain", action="store_true", help="read with grain, which must be installed on the hosts")
    parser.add_argument("--losses", type=Path, help="write all losses there, as JSON")
    options = parser.parse_args()
    devices = jax.devices()
    if options.make_data:
        write_shards(options.data, 2 * len(devices))

    mesh = jax.sharding.Mesh(np.array(devices), ("rows",))
    # The CPUs beside the devices: where functions run, and where batches are made.
    cpu_mesh = colocated_python.colocated_cpu_devices(mesh)
    like = jax.device_put(np.zeros(len(devices), np.int32), jax.NamedSharding(cpu_mesh, jax.P("rows")))
    loader = Loader(str(options.data.absolute()), options.rows_per_device, options.grain)
    weights = jax.device_put(jnp.zeros(NUM_FEATURES), jax.NamedSharding(mesh, jax.P()))
    rows = jax.NamedSharding(mesh, jax.P("rows", None))

    losses = []
    batch: Any = loader.next(like)
    for _ in range(options.steps):
        # The hosts read the next batch while the devices compute with this one: both calls return at once.
        here, batch = jax.device_put(batch, rows), loader.next(like)
        weights, value = step(weights, here)
        losses.append(value)
    losses = [float(value) for value in losses]
    print(f"{len(devices)} devices, {options.steps} steps: loss {losses[0]:.3f} -> {losses[-1]:.3g}")
    if options.losses:
        options.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
