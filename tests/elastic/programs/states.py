"""States of all kinds come back as they were: from host memory after a loss, and from disk. ``states.py FOLDER``.

The loss is pretended: what counts here is what the library makes of it.
"""

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from slurm_pathways import elastic


def init(mesh: Mesh) -> dict[str, Any]:
    """Partitioned over slices, within slices, over both, over nothing; a key, a short type, and what is no array."""
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    return {
        "over slices": jax.device_put(values, NamedSharding(mesh, P("slice"))),
        "within": jax.device_put(values, NamedSharding(mesh, P(None, "data"))),
        "both": jax.device_put(values, NamedSharding(mesh, P(("slice", "data"), "model"))),
        "same": jax.device_put(values.astype(jnp.bfloat16), NamedSharding(mesh, P())),
        "key": jax.device_put(jax.random.key(7), NamedSharding(mesh, P())),
        "keys": jax.device_put(jax.random.split(jax.random.key(1, impl="rbg"), 4), NamedSharding(mesh, P("slice"))),
        "short": jax.device_put(np.arange(8).astype(jnp.int4), NamedSharding(mesh, P("data"))),
        "nothing": jax.device_put(np.zeros((0, 4), bool), NamedSharding(mesh, P())),
        "unplaced": jnp.int32(3),
        "numpy": np.float32(0.5),
        "plain": [5, "words"],
    }


def described(state: dict[str, Any]) -> list[str]:
    """Everything about it."""
    lines = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if isinstance(leaf, jax.Array):
            data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            where = f"{tuple(leaf.sharding.spec)} of {dict(leaf.sharding.mesh.shape)} in {leaf.sharding.memory_kind}"
            lines.append(f"{jax.tree_util.keystr(path)} {leaf.dtype} {np.asarray(data).tolist()} {where}")
        else:
            lines.append(f"{jax.tree_util.keystr(path)} {leaf!r}")
    return lines


def main() -> None:
    """Prints what each attempt began with."""
    settings = elastic.Snapshots(every_steps=5)
    seen: list[tuple[int, list[str]]] = []

    def train(attempt: elastic.Attempt) -> int:
        state = attempt.start(init)
        seen.append((attempt.step, described(state)))
        step = attempt.step + 5
        while attempt.newest_snapshot != step:
            attempt.done(step, {**state, "plain": [step, "words"]})
        if attempt.number < 2:
            raise jax.errors.JaxRuntimeError("DATA_LOSS: as if")
        return attempt.number

    axes = {"data": 2, "model": 1}
    answers = {"number": elastic.run(train, snapshots=settings, axes=axes), "seen": seen}

    # On the warning, to disk and back.
    folder = Path(sys.argv[1])
    preemption = elastic.Preemption(folder)

    def until_warned(attempt: elastic.Attempt) -> None:
        state = attempt.start(init)
        signal.raise_signal(signal.SIGUSR1)
        attempt.done(7, state)

    try:
        elastic.run(until_warned, axes=axes, preemption=preemption)
    except elastic.Preempted as preempted:
        answers["preempted"] = [preempted.step, preempted.path.name if preempted.path else None]
    saved = folder / "snapshot-7"
    arrays = json.loads((saved / "state.json").read_text())["arrays"]
    answers["parts"] = {
        name: sorted(path.name for path in (saved / "arrays" / array["number"]).iterdir())
        for name, array in arrays.items()
    }
    copies = [shutil.copytree(folder, folder.with_name(name)) for name in ("for fewer", "damaged")]

    def from_disk(attempt: elastic.Attempt) -> list[str]:
        state = attempt.start(init)
        return [str(attempt.step), *described(state)]

    answers["from_disk"] = elastic.run(from_disk, axes=axes, preemption=preemption)
    devices = [device for device in jax.devices() if device.slice_index == 0]
    answers["on_fewer"] = elastic.run(from_disk, axes=axes, devices=devices, preemption=elastic.Preemption(copies[0]))
    (copies[1] / "snapshot-7" / "arrays" / arrays["['both']"]["number"] / "1.0").unlink()
    try:
        elastic.run(from_disk, axes=axes, preemption=elastic.Preemption(copies[1]))
    except OSError as error:
        answers["damaged"] = str(error)

    # What cannot go on, and what is not ours.
    def lost(attempt: elastic.Attempt) -> None:
        attempt.start(init)
        raise jax.errors.JaxRuntimeError(f"DATA_LOSS: number {attempt.number}")

    def mistaken(attempt: elastic.Attempt) -> None:
        raise ValueError("a mistake of the program")

    for name, train_badly in (("gave up", lost), ("mistake", mistaken)):
        try:
            elastic.run(train_badly, policy=elastic.Policy(max_losses_at_one_step=3), axes=axes)
        except (elastic.GaveUp, ValueError) as error:
            answers[name] = [type(error).__name__, str(error), str(error.__cause__)]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
