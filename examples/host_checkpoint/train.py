"""Writes and reads checkpoints on the hosts, in parallel: no array passes through this program.

An ordinary JAX program; see README.md beside it.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import colocated_python

Tree = Any


def beside(tree: Tree) -> Tree:
    """Where a tree's arrays lie, on the CPUs beside their devices: functions run there."""

    def on_cpu(sharding: jax.NamedSharding) -> jax.NamedSharding:
        return jax.NamedSharding(colocated_python.colocated_cpu_devices(sharding.mesh), sharding.spec)

    return jax.tree.map(lambda leaf: on_cpu(leaf.sharding), tree)


def file_of(folder: Path, path: Any) -> Path:
    """The file of one array of a tree, which ``numpy.load`` reads."""
    return folder / (jax.tree_util.keystr(path, simple=True, separator=".") + ".npy")


def save(folder: Path, tree: Tree) -> int:
    """Write a tree of arrays; returns how many bytes the hosts have written.

    Every array is one file. Each host writes its parts of it at their places, so the file system must be shared.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    unfinished.mkdir(parents=True)
    target = unfinished.absolute()

    @colocated_python.colocated_python
    def write(tree: Tree) -> jax.Array:
        written = 0
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            file = file_of(target, path)
            # Every host does this; it is the same whoever comes first.
            file.touch()
            with file.open("r+b") as opened:
                description = {"descr": leaf.dtype.str, "fortran_order": False, "shape": leaf.shape}
                np.lib.format.write_array_header_1_0(opened, description)
                start = opened.tell()
                if os.fstat(opened.fileno()).st_size < start + leaf.nbytes:
                    os.truncate(opened.fileno(), start + leaf.nbytes)
            content = np.memmap(file, leaf.dtype, "r+", start, leaf.shape)
            for shard in leaf.addressable_shards:
                if shard.replica_id == 0:
                    content[shard.index] = np.asarray(shard.data)
                    written += shard.data.nbytes
            content.flush()
        # A number for each device, from which the program sees that all hosts are done.
        first = leaf.addressable_shards
        parts = [jax.device_put(np.array([written * (i == 0)], np.int64), s.device) for i, s in enumerate(first)]
        mesh = jax.sharding.Mesh(leaf.sharding.mesh.devices.reshape(-1), ("all",))
        return jax.make_array_from_single_device_arrays((mesh.size,), jax.NamedSharding(mesh, jax.P("all")), parts)

    with jax.enable_x64(True):
        written = int(np.asarray(write(jax.device_put(tree, beside(tree)))).sum())
    unfinished.rename(folder)
    return written


def restore(folder: Path, like: Tree) -> Tree:
    """Read a tree of arrays that lie as those of ``like`` say (``jax.ShapeDtypeStruct`` with shardings, or arrays).

    Each host reads the parts that its devices need; the mesh may be another one than that of the saved arrays.
    """
    source = folder.absolute()
    on_cpu = beside(like)

    def spec_of(leaf: Any, sharding: jax.NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    specs = jax.tree.map(spec_of, like, on_cpu)

    @colocated_python.colocated_python
    def read() -> Tree:
        def one(path: Any, spec: jax.ShapeDtypeStruct) -> jax.Array:
            # Types that numpy does not have are kept as bytes.
            content = np.load(file_of(source, path), mmap_mode="r").view(spec.dtype)
            return jax.make_array_from_callback(spec.shape, spec.sharding, lambda index: content[index])

        return jax.tree_util.tree_map_with_path(one, specs)

    meshes = [sharding.mesh for sharding in jax.tree.leaves(on_cpu)]
    read = read.specialize(out_specs_fn=lambda: specs, devices=meshes[0].devices.reshape(-1).tolist())
    return jax.device_put(read(), jax.tree.map(lambda leaf: leaf.sharding, like))


def make_parameters(mesh: jax.sharding.Mesh, size: int) -> Tree:
    """A model of two layers over the mesh's axes ``data`` and ``model``, made on the devices."""
    shardings = {
        "first": {"weights": jax.NamedSharding(mesh, jax.P("data", "model")), "bias": jax.NamedSharding(mesh, jax.P())},
        "second": {"weights": jax.NamedSharding(mesh, jax.P("model", None))},
    }

    def make() -> Tree:
        keys = jax.random.split(jax.random.key(0), 2)
        first = {"weights": jax.random.normal(keys[0], (size, size)), "bias": jnp.arange(size, dtype=jnp.float32)}
        return {"first": first, "second": {"weights": jax.random.normal(keys[1], (size, size), jnp.float32)}}

    return jax.jit(make, out_shardings=shardings)()


def main() -> None:
    """Save, then restore onto the same mesh and onto another one, and compare on the devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints, on a file system of all hosts")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of the weights")
    options = parser.parse_args()
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices.reshape(2, -1), ("data", "model"))
    other = jax.sharding.Mesh(devices[: len(devices) // 2].reshape(-1, 1), ("data", "model"))

    parameters = make_parameters(mesh, options.size)
    written = save(options.folder / "step-0", parameters)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
    assert written == size, f"the hosts wrote {written} bytes of {size}"

    same = jax.jit(lambda a, b: jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda x, y: (x == y).all(), a, b)))
    again = restore(options.folder / "step-0", parameters)
    assert bool(same(again, parameters)), "what was read is not what was written"
    fewer = make_parameters(other, options.size)
    moved = restore(options.folder / "step-0", fewer)
    assert bool(same(moved, fewer)), "what was read onto fewer devices is not what was written"
    assert jax.tree.leaves(moved)[0].sharding.mesh.size == len(devices) // 2
    print(json.dumps({"devices": len(devices), "bytes": written, "files": len(list(options.folder.glob("*/*.npy")))}))


if __name__ == "__main__":
    main()
