"""Small real workloads of libraries: each check is a function that gives values, the same on every runtime.

    python -m checks flax optax …

runs the checks of these modules and prints one JSON object: per check its values, or how it failed.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: ``() -> values``: a tree of numbers, arrays, strings and lists.
Check = Callable[[], Any]


def devices(num_devices: int = 8) -> Any:
    """The first devices, as an array; with 8 of them the last 4 are the second slice."""
    import jax
    import numpy as np

    return np.array(jax.devices()[:num_devices])


def mesh(*shape: int, names: tuple[str, ...] = ("data", "model")) -> Any:
    """A mesh over the first devices."""
    import math

    from jax.sharding import Mesh

    return Mesh(devices(math.prod(shape)).reshape(shape), names[: len(shape)])


@contextmanager
def folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)
