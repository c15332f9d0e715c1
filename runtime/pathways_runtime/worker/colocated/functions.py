"""Functions in a Python process: unpickled, called with arrays of the shards that are here, and their results taken
apart again."""

import contextlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.colocated_python import serialization

from pathways_runtime.core import strings
from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.status import Code, Status
from pathways_runtime.transport.dataplane.memory import Bytes
from pathways_runtime.worker import pjrt
from pathways_runtime.worker.buffers import HostArray

_THIS_FOLDER = Path(__file__).parent
#: The bytes of an array's shards here.
Shards = Sequence[tuple[DeviceId, Bytes]]


class BadResult(Exception):
    """A function gave something else than it was specialized for."""


class Function:
    """An unpickled function.

    Args:
        devices: JAX's by the client's numbers.

    Raises:
        Exception: whatever unpickling it raises.
    """

    def __init__(self, name: str, pickled: bytes, enable_x64: bool, devices: Mapping[DeviceId, Any]) -> None:
        self.name = name
        self._enable_x64 = enable_x64
        self._devices = devices
        with self._precision():
            (
                self._call,
                self._argument_tree,
                self._argument_specs,
                self._result_tree,
                self._result_specs,
                _,
            ) = serialization._deserialize(pickled)

    def call(self, arguments: Sequence[Shards], wanted: Sequence[Sequence[DeviceId]]) -> list[list[HostArray]]:
        """Call it.

        Args:
            wanted: of which devices' shards of each result are wanted.

        Returns:
            The shards, dense; strings as bytes of a host buffer.

        Raises:
            BadResult: see there. Exception: whatever it raises.
        """
        with self._precision():
            leaves = [self._array(spec, shards) for spec, shards in zip(self._argument_specs, arguments, strict=True)]
            args, kwargs = jax.tree.unflatten(self._argument_tree, leaves)
            del leaves
            result = self._call(*args, **kwargs)
            del args, kwargs
            return self._taken_apart(result, wanted)

    def _precision(self) -> contextlib.AbstractContextManager[None]:
        """Functions compute with 64 bits if their client does."""
        enable: contextlib.AbstractContextManager[None] = jax.enable_x64(self._enable_x64)
        return enable

    def _array(self, spec: Any, shards: Shards) -> Any:
        sharding = spec.sharding
        shape = sharding.shard_shape(spec.shape)
        pieces = []
        for number, content in shards:
            device = self._devices[number]
            if _is_string(spec.dtype):
                texts = [text.decode("utf-8", "surrogateescape") for text in strings.decode(content.data)]
                pieces.append(jax.device_put(np.array(texts, spec.dtype).reshape(shape), device))
            else:
                value = content.view(spec.dtype).reshape(shape)
                pieces.append(pjrt.put([value], pjrt.single(device, sharding.memory_kind), [device]))
        return jax.make_array_from_single_device_arrays(spec.shape, sharding, pieces, dtype=spec.dtype)

    def _taken_apart(self, result: Any, wanted: Sequence[Sequence[DeviceId]]) -> list[list[HostArray]]:
        leaves, tree = jax.tree.flatten(result)
        if tree != self._result_tree:
            raise BadResult(f"{self.name} gave {tree}, but it was specialized to give {self._result_tree}")
        taken = []
        for index, (leaf, spec, numbers) in enumerate(zip(leaves, self._result_specs, wanted, strict=True)):
            what = f"result {index} of {self.name}"
            if not isinstance(leaf, jax.Array):
                raise BadResult(f"{what} must be a jax.Array, and is {type(leaf)}")
            if leaf.shape != spec.shape or leaf.dtype != spec.dtype:
                raise BadResult(
                    f"{what} is {leaf.dtype}{list(leaf.shape)}, but it was specialized to give "
                    f"{spec.dtype}{list(spec.shape)}"
                )
            here = {shard.device: shard.data for shard in leaf.addressable_shards}
            missing = [number for number in numbers if self._devices[number] not in here]
            if missing:
                raise BadResult(
                    f"{what} lies on {leaf.sharding}, but it was specialized to lie on {spec.sharding}: it has no "
                    f"shard on device {missing[0]}. Put it there with jax.device_put"
                )
            taken.append([_contents(here[self._devices[number]]) for number in numbers])
        return taken


def _contents(shard: Any) -> HostArray:
    value = np.asarray(shard)
    if _is_string(value.dtype):
        texts = [str(text).encode("utf-8", "surrogateescape") for text in value.reshape(-1)]
        return np.frombuffer(strings.encode(texts), np.uint8)
    return np.ascontiguousarray(value)


def _is_string(dtype: Any) -> bool:
    return isinstance(dtype, np.dtypes.StringDType)


def extend_module_path(folders: Sequence[str]) -> None:
    """Look for modules in these too, behind this process's own, as far as they are here."""
    for folder in folders:
        if folder not in sys.path and os.path.exists(folder):  # noqa: PTH110 - it may be an archive's name
            sys.path.append(folder)


def describe_failure(name: str, host: str, failure: BaseException) -> Status:
    """What a client is told of an exception: its text first, then where it was raised."""
    if isinstance(failure, BadResult):
        return Status(Code.INVALID_ARGUMENT, f"{failure} (colocated Python on {host})")
    text = "".join(traceback.format_exception_only(failure)).strip()
    frames = [
        frame for frame in traceback.extract_tb(failure.__traceback__) if Path(frame.filename).parent != _THIS_FOLDER
    ]
    where = "".join(traceback.format_list(frames)).rstrip()
    # Not INTERNAL, which elastic training takes for the loss of a host, to try again.
    return Status(Code.UNKNOWN, f"{text} (colocated Python function {name} on {host})\n{where}".rstrip())
