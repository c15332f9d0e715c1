"""Snapshots on disk: each a folder, whole or not there.

Hosts write and read the arrays, each the shards that it holds (``client.storage``). The program writes the rest: what
the state is made of, and the leaves that are no arrays. A folder has its name once all of it is on the disk.
"""

import dataclasses
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_pathways.elastic.losses import loss_of

_NAME = re.compile(r"snapshot-(\d+)")
#: What is being written or removed; also what one that was killed has left.
_UNFINISHED = re.compile(r"snapshot-\d+\.(new|old)-\w+")
#: Where hosts read into; arrays that belong in other memories are moved there afterwards.
_DEVICE = "device"
_ARRAYS = "arrays"
_STATE = "state.json"
_VALUES = "values.npz"
#: After which a host begins no further file.
_TIMEOUT_S = 600.0
#: Leaves that JSON gives back as they were.
_PLAIN = (bool, int, float, str)


@dataclasses.dataclass
class _Contents:
    """What a snapshot holds, by leaf.

    Attributes:
        arrays: ``{"number", "dtype", "shape", "key"}`` of what hosts have written; of a key its data's, and its kind.
        values: ``{"number", "dtype", "is_array"}`` of what numpy has written.
        plain: the rest, as it is.
    """

    arrays: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    values: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    plain: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return self.arrays.keys() | self.values.keys() | self.plain.keys()


def save(folder: Path, step: int, state: Any) -> Path:
    """Write the state of a step, and remove those of others; the folder it is in.

    Raises:
        OSError: it cannot be written, or not all hosts see the folder. TypeError: part of it is neither array, number
            nor string. ValueError: see ``client.storage``. jax.errors.JaxRuntimeError: a value is lost.
    """
    path = _absolute(folder) / f"snapshot-{step}"
    if not path.exists():
        _written(path, state).rename(path)
        _sync(path.parent)
    remove(path.parent, but=path)
    return path


def check(folder: Path, mesh: Any) -> None:
    """Have every host write something, so that a folder that does not do is found out when training begins.

    Raises:
        OSError, ValueError, jax.errors.JaxRuntimeError: as ``save``.
    """
    import jax
    import numpy as np

    partition = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
    trial = jax.device_put(np.zeros(mesh.size, np.int8), partition)
    shutil.rmtree(_written(_absolute(folder) / "snapshot-0", {"trial": trial}))


def remove(folder: Path, but: Path | None = None) -> None:
    """Remove the snapshots of a folder, and what was left by one that was killed."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path)
        elif _NAME.fullmatch(path.name) and path.name != (but.name if but else None):
            # Half of one must not be found.
            doomed = path.rename(path.with_name(f"{path.name}.old-{uuid.uuid4().hex}"))
            shutil.rmtree(doomed)


def newest_step(folder: Path) -> int | None:
    """The step of the newest snapshot; None if there is none."""
    if not folder.is_dir():
        return None
    return max((int(found[1]) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name))), default=None)


def load(folder: Path, step: int, like: Any, mesh: Any) -> Any:
    """The state of a step.

    Args:
        like: a state of this structure, whose arrays have the shardings that are wanted.
        mesh: where arrays are to be that ``like`` has no array for: the same on all its devices.

    Raises:
        ValueError: it is the state of something else. OSError: a host cannot read it.
        jax.errors.JaxRuntimeError: a host is lost.
    """
    import jax
    import numpy as np

    path = _absolute(folder) / f"snapshot-{step}"
    contents = _Contents(**json.loads((path / _STATE).read_text(encoding="utf-8")))
    wanted = _leaves(like)
    if contents.names != wanted.keys():
        different = ", ".join(sorted(contents.names ^ wanted.keys()))
        raise ValueError(f"{path} is no snapshot of this program's state: only one of them has {different}; remove it")
    arrays = _read_arrays(path, contents, wanted, mesh)
    values = {}
    with np.load(path / _VALUES) as file:
        for name, each in contents.values.items():
            value = file[each["number"]].view(jax.numpy.dtype(each["dtype"]))
            values[name] = value if each["is_array"] else value[()]
    found = {**arrays, **values, **contents.plain}
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), [found[name] for name in wanted])


def _absolute(folder: Path) -> Path:
    return Path(os.path.abspath(folder))  # noqa: PTH100 (links stay, as hosts may see them otherwise)


def _written(path: Path, state: Any) -> Path:
    """The folder in which a snapshot has been written that is to be ``path``."""
    fresh = path.with_name(f"{path.name}.new-{uuid.uuid4().hex}")
    fresh.mkdir(parents=True)
    try:
        _write(fresh, state)
    except BaseException:
        # Hosts may still write there; what they leave goes with the next snapshot.
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return fresh


def _write(folder: Path, state: Any) -> None:
    import numpy as np

    contents, arrays, values = _taken_apart(state)
    _write_arrays(folder, contents, arrays)
    with (folder / _VALUES).open("xb") as file:
        np.savez(file, allow_pickle=False, **values)
        file.flush()
        os.fsync(file.fileno())
    with (folder / _STATE).open("x", encoding="utf-8") as text:
        json.dump(dataclasses.asdict(contents), text)
        text.flush()
        os.fsync(text.fileno())
    _sync(folder)


def _taken_apart(state: Any) -> tuple[_Contents, dict[str, Any], dict[str, Any]]:
    """What there is, and by number what hosts are to write, and what numpy is to."""
    import jax
    import numpy as np

    contents = _Contents()
    arrays: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, leaf in _leaves(state).items():
        if isinstance(leaf, jax.Array):
            number = str(len(arrays))
            arrays[number], key = _without_key(leaf)
            shape, dtype = arrays[number].shape, arrays[number].dtype.name
            contents.arrays[name] = {"number": number, "dtype": dtype, "shape": shape, "key": key}
        elif type(leaf) in _PLAIN:
            contents.plain[name] = leaf
        else:
            value = np.asarray(leaf)
            if value.dtype.hasobject:
                raise TypeError(f"{name} of the state is {leaf!r}: only arrays, numbers and strings are kept on disk")
            # Of types of other packages numpy keeps the sizes alone.
            is_numpys = value.dtype.type.__module__ == "numpy"
            dtype = value.dtype.str if is_numpys else value.dtype.name
            number = str(len(values))
            values[number] = value if is_numpys else value.view(np.dtype((np.void, value.dtype.itemsize)))
            contents.values[name] = {"number": number, "dtype": dtype, "is_array": isinstance(leaf, np.ndarray)}
    return contents, arrays, values


def _without_key(leaf: Any) -> tuple[Any, str | None]:
    """An array, or the numbers that a key is made of, and the kind of the key."""
    import jax

    if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf, None
    return jax.random.key_data(leaf), str(jax.random.key_impl(leaf))


def _write_arrays(folder: Path, contents: _Contents, arrays: Mapping[str, Any]) -> None:
    import jax

    from slurm_pathways.client import storage

    (folder / _ARRAYS).mkdir()
    try:
        storage.start_writing(folder / _ARRAYS, arrays, _TIMEOUT_S)()
    except jax.errors.JaxRuntimeError as error:
        if loss_of(error) is not None:
            raise
        raise OSError(
            f"a host could not write its part of a snapshot into {folder.parent}: {error}\nGive a folder that every "
            "host sees and may write to"
        ) from error
    for name, each in contents.arrays.items():
        part = storage.missing_part(folder / _ARRAYS / each["number"])
        if part is not None:
            raise OSError(
                f"{folder.parent} is not the same folder on all hosts: a host has written {part} of {name}, and on "
                f"{os.uname().nodename}, where the program runs, it is not to be seen. Give a folder on a file system "
                "that all hosts share"
            )
        _sync(folder / _ARRAYS / each["number"])
    _sync(folder / _ARRAYS)


def _read_arrays(path: Path, contents: _Contents, wanted: Mapping[str, Any], mesh: Any) -> dict[str, Any]:
    import jax

    from slurm_pathways.client import storage

    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sources, shardings = {}, {}
    for name, each in contents.arrays.items():
        saved = (each["dtype"], tuple(each["shape"]), each["key"])
        sharding = shardings[name] = everywhere
        if isinstance(wanted[name], jax.Array):
            like, key = _without_key(wanted[name])
            if (here := (like.dtype.name, like.shape, key)) != saved:
                raise ValueError(
                    f"{path} is no snapshot of this program's state: {name} is {_described(saved)} there and "
                    f"{_described(here)} here; remove it"
                )
            sharding, shardings[name] = like.sharding, wanted[name].sharding
        dtype = jax.numpy.dtype(each["dtype"])
        on_devices = sharding.with_memory_kind(_DEVICE)
        sources[name] = jax.ShapeDtypeStruct(tuple(each["shape"]), dtype, sharding=on_devices)
    numbers = {name: each["number"] for name, each in contents.arrays.items()}
    try:
        read, wait = storage.start_reading(
            path / _ARRAYS, {numbers[name]: source for name, source in sources.items()}, _TIMEOUT_S
        )
        wait()
    except jax.errors.JaxRuntimeError as error:
        if loss_of(error) is not None:
            raise
        raise OSError(f"a host cannot read its part of {path}: {error}\nAll hosts must see this folder") from error
    arrays = {}
    for name, each in contents.arrays.items():
        array = read[each["number"]]
        if each["key"] is not None:
            array = jax.random.wrap_key_data(array, impl=each["key"])
        arrays[name] = jax.device_put(array, shardings[name])
    return arrays


def _described(kind: tuple[str, tuple[int, ...], str | None]) -> str:
    dtype, shape, key = kind
    return f"{dtype}{list(shape)}" + (f" of a key ({key})" if key else "")


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _leaves(state: Any) -> Mapping[str, Any]:
    import jax

    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
