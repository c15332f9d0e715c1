"""What arrays of the runtime can do besides, by a copy in the program's memory; a part of ``jax_adapter``.

jaxlib gives the memory of arrays of its own process only. Whoever asks for an array's values gets a copy here, as from
``numpy.asarray``: arrays never change, so only its address tells a copy from the array's memory. Whoever asks for the
memory itself (``unsafe_buffer_pointer``, ``copy=False``) is refused as ever.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from slurm_pathways.client.jax_adapter import is_proxy, is_replaced, own_cpu_device, private_names, replacing

#: DLPack's number for the memory of a CPU, and which of them.
_CPU_MEMORY = (1, 0)


def serve_copies() -> None:
    """Let arrays of the proxy be read by DLPack and, from Python 3.12 on, as buffers; and let them say their size.

    Earlier Pythons have no way to give a type written in C a buffer. Again does nothing.

    Raises:
        PrivateNamesChangedError: this version of JAX does it in another way.
    """
    with private_names():
        from jax._src.array import ArrayImpl

        replacements = [
            (name, replacement, getattr(ArrayImpl, name))
            for name, replacement in _REPLACEMENTS.items()
            if name != "__buffer__" or sys.version_info >= (3, 12)
        ]
    for name, replacement, original in replacements:
        if is_replaced(original.fget if isinstance(original, property) else original):
            continue
        if name == "__cuda_array_interface__":
            setattr(ArrayImpl, name, property(_for_ours(replacement, original.__get__)))
        else:
            setattr(ArrayImpl, name, _for_ours(replacement, original))


def _for_ours(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is ``replacement`` for arrays of the proxy on one device, and ``original`` for others."""

    @replacing(original)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        devices = self.sharding._internal_device_list
        # What is said of several devices is right of ours too.
        if is_proxy(devices[0].client) and (len(devices) == 1 or replacement is _on_device_size_in_bytes):
            return replacement(self, *args, **options)
        return original(self, *args, **options)

    return method


def _dlpack(
    array: Any,
    *,
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[Any, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """``__dlpack__``: of a new array on a CPU device of the program's own. ``stream`` means nothing on CPU."""
    if copy is False:
        raise BufferError(
            "the array lies in the memory of a worker: it can be given as a copy only, not with copy=False"
        )
    # A copy in any case: DLPack cannot say that nobody may write, and JAX keeps the host's value of an array.
    own = jax.device_put(array._value, own_cpu_device(), may_alias=False)
    return own.__dlpack__(max_version=max_version, dl_device=dl_device)


def _dlpack_device(array: Any) -> tuple[int, int]:
    return _CPU_MEMORY


def _buffer(array: Any, flags: int) -> memoryview:
    value = array._value
    try:
        view = memoryview(value)
    except (BufferError, ValueError) as error:
        # As jaxlib has it; numpy does not know of these types that it could be a buffer of bytes.
        raise BufferError(f"{array.dtype} is not supported by the Python buffer protocol") from error
    return view


def _on_device_size_in_bytes(array: Any) -> int:
    """Of all shards, dense, a byte for types of less than one: how it is laid out is known to the worker only."""
    array._check_if_deleted()
    shard = array.sharding.shard_shape(array.shape)
    return int(math.prod(shard) * np.dtype(array.dtype).itemsize * len(array.sharding._internal_device_list))


def _cuda_array_interface(array: Any) -> Any:
    # What looks for it must find that it is not there; jaxlib's client fails in another way.
    raise AttributeError("__cuda_array_interface__ is only defined for GPU buffers of the program's own process.")


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "__dlpack__": _dlpack,
    "__dlpack_device__": _dlpack_device,
    "__buffer__": _buffer,
    "__cuda_array_interface__": _cuda_array_interface,
    "on_device_size_in_bytes": _on_device_size_in_bytes,
}
