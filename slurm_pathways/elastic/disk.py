"""A snapshot on disk: one file, whole or not there.

The program fetches the state and writes it.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAME = re.compile(r"snapshot-(\d+)\.npz")
#: In the file beside the arrays: the names of their types, of which numpy keeps only its own.
_TYPES = "types"


def save(folder: Path, step: int, state: Any) -> Path:
    """Write the state of a step, and remove those of others.

    Raises:
        OSError: it cannot be written. TypeError: part of it is neither array, number nor string.
        jax.errors.JaxRuntimeError: a value is lost.
    """
    import jax
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    values, types = {}, {}
    for name, leaf in _leaves(state).items():
        is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        value = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        types[name] = str(leaf.dtype) if is_key else value.dtype.name
        if value.dtype.hasobject:
            raise TypeError(f"{name} of the state is {leaf!r}: only arrays, numbers and strings are kept on disk")
        is_numpys = value.dtype.type.__module__ == "numpy"
        values[name] = value if is_numpys else value.view(np.dtype((np.void, value.dtype.itemsize)))
    members: dict[str, Any] = {f"value {name}": value for name, value in values.items()}
    members[_TYPES] = np.array(json.dumps(types))
    path = folder / f"snapshot-{step}.npz"
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        np.savez(file, allow_pickle=False, **members)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    remove(folder, but=path)
    return path


def remove(folder: Path, but: Path | None = None) -> None:
    """Remove the snapshots of a folder."""
    for path in _snapshots(folder).values():
        if path != but:
            path.unlink()


def newest_step(folder: Path) -> int | None:
    """The step of the newest snapshot; None if there is none."""
    return max(_snapshots(folder), default=None)


def load(folder: Path, step: int, like: Any) -> Any:
    """The state of a step, with structure and shardings of ``like``.

    Raises:
        ValueError: it is the state of something else.
    """
    import jax
    import numpy as np

    path = folder / f"snapshot-{step}.npz"
    with np.load(path) as file:
        types = json.loads(str(file[_TYPES]))
        saved = {name: file[f"value {name}"] for name in types}
    wanted = _leaves(like)
    if saved.keys() != wanted.keys():
        different = ", ".join(sorted(saved.keys() ^ wanted.keys()))
        raise ValueError(f"{path} is no snapshot of this program's state: only one of them has {different}; remove it")
    leaves = []
    for name, leaf in wanted.items():
        value = saved[name]
        if not isinstance(leaf, jax.Array):
            leaves.append(value.item() if value.ndim == 0 and not isinstance(leaf, np.ndarray) else value)
            continue
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))
            leaves.append(jax.device_put(key, leaf.sharding))
            continue
        array = value.view(jax.numpy.dtype(types[name]))
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(
                f"{path} is no snapshot of this program's state: {name} is {array.dtype}{list(array.shape)} there and "
                f"{leaf.dtype}{list(leaf.shape)} here; remove it"
            )
        leaves.append(jax.device_put(array, leaf.sharding))
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), leaves)


def _leaves(state: Any) -> Mapping[str, Any]:
    import jax

    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


def _snapshots(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    return {int(found[1]): path for path in folder.iterdir() if (found := _NAME.fullmatch(path.name))}
