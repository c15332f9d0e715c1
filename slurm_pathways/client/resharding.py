"""Array moves without a detour: what JAX would do by way of the program's own memory, the runtime does by itself.

JAX puts arrays where they belong in three places, for ``device_put`` and the arguments of ``jit`` and ``pmap`` alike:

* the handler of arrays in its registry of argument handlers. Unless source and target hold the same parts on as many
  devices, JAX cuts the array up, if need be in the client's memory. Ours asks the server instead (ReshardArrays).
* ``_different_device_order_reshard``, when only the order of the devices differs: JAX compiles and runs a program over
  all of them. Ours asks the server.
* ``batched_device_put`` for shards. The proxy's client refuses devices that are not its own, such as the program's own
  CPU devices: ours goes by the values. It also refuses host arrays that run backwards or repeat: ours makes them dense.

Everything else stays JAX's. What the user sees of an array (values, type, placement, committed or not) is put together
by JAX around these calls, and stays the same.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slurm_pathways.client.jax_adapter import (
    JaxInternals,
    ShardArgHandler,
    is_proxy,
    is_replaced,
    original_of,
    replacing,
)


class Way(enum.Enum):
    """Who moves an array."""

    #: The runtime, from worker to worker.
    SERVER = enum.auto()
    #: The program, by the array's values: between devices of different clients.
    VALUES = enum.auto()
    #: JAX as ever.
    JAX = enum.auto()


class Resharder:
    """Decides for each array whether the server moves it, and asks it to.

    Attributes:
        is_ours: whether a client's devices belong to a runtime that can move arrays by itself.
    """

    def __init__(self, internals: JaxInternals, is_ours: Callable[[Any], bool] = is_proxy) -> None:
        self._jax = internals
        self.is_ours = is_ours

    def install(self) -> None:
        """Take JAX's places over. Once only; again does nothing."""
        handler = self._jax.handlers[self._jax.array_type]
        if is_replaced(handler):
            return
        self._jax.handlers[self._jax.array_type] = replacing(handler)(functools.partial(self.shard_arrays, handler))
        reorder = self._jax.dispatch._different_device_order_reshard
        self._jax.dispatch._different_device_order_reshard = replacing(reorder)(
            functools.partial(self.reorder, reorder)
        )
        put = self._jax.xla_client.batched_device_put
        self._jax.xla_client.batched_device_put = replacing(put)(functools.partial(self.put_shards, put))

    def uninstall(self) -> None:
        """Give JAX's places back."""
        handler = self._jax.handlers[self._jax.array_type]
        self._jax.handlers[self._jax.array_type] = original_of(handler)
        for module, name in (
            (self._jax.dispatch, "_different_device_order_reshard"),
            (self._jax.xla_client, "batched_device_put"),
        ):
            setattr(module, name, original_of(getattr(module, name)))

    def shard_arrays(
        self,
        original: ShardArgHandler,
        arrays: Sequence[Any],
        shardings: Sequence[Any],
        layouts: Sequence[Any],
        copy_semantics: Sequence[Any],
    ) -> Sequence[Any]:
        """JAX's argument handler for arrays; see ``ShardArgHandler``. Arrays with equal sources move in one request."""
        results: list[Any] = [None] * len(arrays)
        left: list[int] = []
        moves: dict[tuple[Any, bool], list[int]] = {}
        for i, (array, sharding) in enumerate(zip(arrays, shardings, strict=True)):
            way = self._way(array, sharding, layouts[i])
            if way is Way.SERVER:
                donates = copy_semantics[i] == self._jax.donate
                moves.setdefault((self._jax.device_list(array.sharding), donates), []).append(i)
            elif way is Way.VALUES:
                value = self._jax.host_value(array)
                results[i] = self._jax.handlers[type(value)]([value], [sharding], [layouts[i]], [copy_semantics[i]])[0]
            else:
                left.append(i)
        for (_, donates), places in moves.items():
            moved = self._jax.transfer([arrays[i] for i in places], [shardings[i] for i in places], donates)
            for i, array in zip(places, moved, strict=True):
                results[i] = array
        if len(left) == len(arrays):
            return original(arrays, shardings, layouts, copy_semantics)
        if left:
            kept = original(*([column[i] for i in left] for column in (arrays, shardings, layouts, copy_semantics)))
            for i, array in zip(left, kept, strict=True):
                results[i] = array
        return results

    def _way(self, array: Any, sharding: Any, layout: Any) -> Way:
        array._check_if_deleted()
        source, target = self._jax.client_of(array.sharding), self._jax.client_of(sharding)
        if source is not target:
            return Way.VALUES if self.is_ours(source) or self.is_ours(target) else Way.JAX
        if not self.is_ours(source) or (layout is not None and array.format.layout != layout):
            return Way.JAX
        try:
            same = self._jax.holds_the_same(array.sharding, sharding, len(array.shape))
        except NotImplementedError:  # a sharding that cannot be said in HLO: JAX compares indices
            return Way.JAX
        if same:
            return Way.JAX
        # Strings (numpy's kind T) are cut where their values are.
        return Way.VALUES if array.dtype.kind == "T" else Way.SERVER

    def reorder(self, original: Callable[..., Any], array: Any, sharding: Any, copy_semantics: Any) -> Any:
        """``_different_device_order_reshard``: the same devices in another order."""
        if not self.is_ours(self._jax.client_of(sharding)):
            return original(array, sharding, copy_semantics)
        array._check_if_deleted()
        return self._jax.transfer([array], [sharding], copy_semantics == self._jax.donate)[0]

    def put_shards(
        self,
        original: Callable[..., Any],
        aval: Any,
        sharding: Any,
        shards: Sequence[Any],
        devices: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """``batched_device_put``; see ``_presentable``."""
        target = devices[0].client if devices else None
        ready = [self._presentable(shard, target) for shard in shards]
        return original(aval, sharding, ready, devices, *args, **kwargs)

    def _presentable(self, shard: Any, target: Any) -> Any:
        """A shard in a form that the target's client takes."""
        if isinstance(shard, self._jax.array_type):
            source = self._jax.client_of(shard.sharding)
            if source is not target and (self.is_ours(source) or self.is_ours(target)):
                return self._jax.host_value(shard)
        elif isinstance(shard, np.ndarray) and not shard.flags.forc and self.is_ours(target):
            return shard.copy() if min(shard.strides) <= 0 else shard
        return shard
