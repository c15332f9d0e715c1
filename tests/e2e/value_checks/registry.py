"""The list of checks, and how what they return is turned into text that two runs can be compared by."""

import base64
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Returned = Any

#: What may be compared bit for bit and what may not: XLA splits sums differently on threads of another number.
EXACT = 0.0
FLOAT32 = 1e-5


@dataclasses.dataclass(frozen=True)
class Check:
    """One named check.

    Attributes:
        run: plain JAX; returns a tree.
        tolerance: relative, and a tenth of it absolute, for inexact leaves; integers and text are compared exactly.
        needs_x64: only run with 64-bit types on.
    """

    name: str
    run: Callable[[], Returned]
    tolerance: float
    needs_x64: bool


CHECKS: dict[str, Check] = {}


def check(tolerance: float = FLOAT32, *, needs_x64: bool = False) -> Callable[[Callable[[], Returned]], Any]:
    """Register a function under its own name."""

    def register(function: Callable[[], Returned]) -> Callable[[], Returned]:
        add(function.__name__, function, tolerance, needs_x64=needs_x64)
        return function

    return register


def add(name: str, run: Callable[[], Returned], tolerance: float = FLOAT32, *, needs_x64: bool = False) -> None:
    """Register a function under a given name, for checks that are made in a loop."""
    if name in CHECKS:
        raise ValueError(f"two checks are called {name}")
    CHECKS[name] = Check(name, run, tolerance, needs_x64)


def run_check(one: Check) -> dict[str, Any]:
    """Run a check; ``{"leaves": {path: leaf}}`` or, when it raised, ``{"error": text}``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            returned = one.run()
            leaves = {
                jax.tree_util.keystr(path): encode(leaf)
                for path, leaf in jax.tree_util.tree_flatten_with_path(returned)[0]
            }
    except Exception as error:  # whatever a check raises is a result of this run
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    return {"leaves": leaves}


def encode(leaf: Any) -> dict[str, Any]:
    """A leaf as JSON: its kind, its value, and for a ``jax.Array`` where it lies."""
    if isinstance(leaf, jax.Array):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return {"key": str(leaf.dtype), "shape": list(leaf.shape), "data": encode(jax.random.key_data(leaf))}
        shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
        return {
            "placement": {
                "weak_type": leaf.weak_type,
                "committed": leaf.committed,
                "memory_kind": leaf.sharding.memory_kind,
                "shards": [f"{shard.device.id}: {shard.index}" for shard in shards],
            },
            "value": encode_numpy(np.asarray(leaf)),
            # One shard is the value; several may disagree with it when they should not.
            "shards": [encode_numpy(np.asarray(shard.data)) for shard in shards] if len(shards) > 1 else [],
        }
    if isinstance(leaf, bool | str):
        return {"text": str(leaf)}
    return {"value": encode_numpy(np.asarray(leaf))}


def encode_numpy(array: np.ndarray) -> dict[str, Any]:
    """dtype, shape and bytes; types that numpy itself does not have are kept as float32 or int8, which hold them."""
    name = array.dtype.name
    if array.dtype.isbuiltin != 1:
        array = array.astype(np.int8 if "int" in name else np.float32)
    return {
        "dtype": name,
        "kept_as": array.dtype.name,
        "shape": list(array.shape),
        "bytes": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
    }


def decode_numpy(value: dict[str, Any]) -> np.ndarray:
    """The inverse of ``encode_numpy``, in the type that it was kept as."""
    return np.frombuffer(base64.b64decode(value["bytes"]), dtype=value["kept_as"]).reshape(value["shape"])


def differences(one: Check, expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """What differs between two runs of a check, in words; empty when nothing does."""
    if "error" in expected or "error" in actual:
        return [f"plain JAX: {expected.get('error', 'no error')}", f"here: {actual.get('error', 'no error')}"]
    if expected["leaves"].keys() != actual["leaves"].keys():
        return [f"plain JAX returned {sorted(expected['leaves'])}, here {sorted(actual['leaves'])}"]
    found: list[str] = []
    for path, leaf in expected["leaves"].items():
        _compare(path or "result", leaf, actual["leaves"][path], one.tolerance, found)
    return found


def _compare(path: str, expected: Any, actual: Any, tolerance: float, found: list[str]) -> None:
    if isinstance(expected, dict) and "bytes" in expected and isinstance(actual, dict) and "bytes" in actual:
        for what in ("dtype", "shape"):
            if expected[what] != actual[what]:
                found.append(f"{path}: {what} {actual[what]}, plain JAX has {expected[what]}")
                return
        a, b = decode_numpy(expected), decode_numpy(actual)
        if a.dtype.kind in "fc" and tolerance:
            equal = np.allclose(a, b, rtol=tolerance, atol=tolerance / 10, equal_nan=True)
        else:
            equal = a.tobytes() == b.tobytes()
        if not equal:
            found.append(f"{path}: {b.tolist()!r:.300}, plain JAX has {a.tolist()!r:.300}")
    elif isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        for key in expected:
            _compare(f"{path}.{key}", expected[key], actual[key], tolerance, found)
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for index, (a, b) in enumerate(zip(expected, actual, strict=True)):
            _compare(f"{path}[{index}]", a, b, tolerance, found)
    elif expected != actual:
        found.append(f"{path}: {actual!r:.300}, plain JAX has {expected!r:.300}")
