"""Checkpoints by orbax, and a small value that every step fetches."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    Figure,
    Figures,
    Row,
    local_runtime,
    median_of,
    plain_environment,
    rows,
    run_workload,
    seconds,
    workload,
)

NUM_BYTES = 1 << 30
NUM_ARRAYS = 8
MIB = 1 << 20


@workload
def orbax_checkpoint(folder: str, on_hosts: bool, num_bytes: int = NUM_BYTES, repeats: int = 1) -> Figures:
    """Save and restore of float32 arrays, each cut over all devices; bytes per second each way.

    Args:
        on_hosts: by orbax's handlers for Pathways; else as orbax is.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    if on_hosts:
        os.environ["ENABLE_PATHWAYS_PERSISTENCE"] = "1"
        ocp.pathways.register_type_handlers(checkpointing_impl=ocp.pathways.CheckpointingImpl.PERSISTENCE)
    on = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    num_columns = num_bytes // NUM_ARRAYS // 4 // 1024
    # Random numbers: orbax as it is compresses, and a ramp would become nothing.
    make = jax.jit(
        lambda: {f"w{i}": jax.random.normal(jax.random.key(i), (1024, num_columns)) for i in range(NUM_ARRAYS)},
        out_shardings=on,
    )
    state = jax.block_until_ready(make())
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    restore = ocp.args.PyTreeRestore(item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
    equal = jax.jit(lambda a, b: jnp.stack([jnp.array_equal(a[name], b[name]) for name in a]).all())
    number = 0
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=not on_hosts)) as checkpointer:

        def save() -> float:
            nonlocal number
            number += 1

            def run() -> None:
                checkpointer.save(Path(folder, str(number)), args=ocp.args.PyTreeSave(state))
                checkpointer.wait_until_finished()

            return seconds(run)

        def load() -> float:
            read: list[Any] = []
            duration_s = seconds(
                lambda: read.append(
                    jax.block_until_ready(checkpointer.restore(Path(folder, str(number)), args=restore))
                )
            )
            assert bool(equal(read[0], state))
            return duration_s

        save_s = median_of(repeats, save)
        return {"save_bytes_per_s": num_bytes / save_s, "restore_bytes_per_s": num_bytes / median_of(repeats, load)}


@workload
def fetch_each_step(num_steps: int = 200, repeats: int = 5) -> Figures:
    """A step over all devices, and ``jax.device_get`` of its loss; seconds per step, with the fetch and without."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("x",))
    start = jax.device_put(np.zeros((len(jax.devices()), 8), np.float32), NamedSharding(mesh, P("x")))
    everywhere = NamedSharding(mesh, P())
    step = jax.jit(lambda x: (x + 1, x[0, 0]), out_shardings=(start.sharding, everywhere))

    def per_step(fetches: bool) -> float:
        def once() -> float:
            def run() -> None:
                x = start
                for number in range(num_steps):
                    x, loss = step(x)
                    if fetches:
                        assert float(jax.device_get(loss)) == number
                    else:
                        # One at a time all the same: what is compared is the fetch.
                        loss.block_until_ready()
                assert float(jnp.max(x)) == num_steps

            return seconds(run) / num_steps

        return median_of(repeats, once)

    return {"fetched_s": per_step(True), "waited_s": per_step(False)}


@rows(14)
def checkpoints() -> Iterator[Row]:
    """To a folder beside the temporary files: the disk is in all of the figures."""
    figures: dict[str, Figures] = {}
    for name, on_hosts in (("on the hosts", True), ("as orbax is", False)):
        with local_runtime(2, 2, 1) as runtime, tempfile.TemporaryDirectory() as folder:
            figures[name] = run_workload("orbax_checkpoint", runtime.environment(), folder=folder, on_hosts=on_hosts)
    with tempfile.TemporaryDirectory() as folder:
        plain = run_workload("orbax_checkpoint", plain_environment(4), folder=folder, on_hosts=False)
    for what in ("save", "restore"):
        figure = f"{what}_bytes_per_s"
        yield Row(
            f"orbax {what}, 1 GiB cut over 4 hosts, written and read by the hosts",
            "MiB/s",
            figures["on the hosts"][figure] / MIB,
            compared=(
                Figure("plain JAX in one process", plain[figure] / MIB),
                Figure("by the program, as orbax is", figures["as orbax is"][figure] / MIB),
            ),
        )


@rows(15)
def small_fetches() -> Iterator[Row]:
    """Above plain JAX: what a loop that looks at its loss pays."""
    with local_runtime(1, 1, 4) as runtime:
        ours = run_workload("fetch_each_step", runtime.environment())
    plain = run_workload("fetch_each_step", plain_environment(4))
    yield Row(
        "device_get of a scalar in every step, above plain JAX, 4 devices",
        "ms",
        1e3 * (ours["fetched_s"] - plain["fetched_s"]),
        at_least=1.5,
        smaller_is_better=True,
        compared=(Figure("a step of plain JAX with it", 1e3 * plain["fetched_s"]),),
        remarks=f"a step with it {1e3 * ours['fetched_s']:.2f} ms, without it {1e3 * ours['waited_s']:.2f} ms",
    )
