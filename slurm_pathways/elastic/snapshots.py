"""Copies of the state in the memory of hosts, made while training goes on."""

import queue
import threading
from typing import Any

from slurm_pathways.elastic.ledger import Ledger
from slurm_pathways.elastic.losses import loss_of
from slurm_pathways.elastic.policy import Snapshots
from slurm_pathways.elastic.slices import Slices, spread

#: Where copies are: memory of hosts, from which devices read directly.
_MEMORY = "pinned_host"


class SnapshotFailed(Exception):
    """A snapshot could not be made, and not because a host was lost; what happened is its cause."""


class HostSnapshots:
    """The snapshots of one training.

    ``take`` starts copies and returns; one thread waits for them. All methods but what it calls are for one thread.
    """

    def __init__(self, settings: Snapshots, slices: Slices) -> None:
        self._slices = slices
        self._changed = threading.Condition()
        self._ledger = Ledger(settings.replicas, settings.keep)
        #: By snapshot and slice: the leaves' copies, and by snapshot what the state was like.
        self._copies: dict[tuple[int, int], list[Any]] = {}
        self._forms: dict[int, _Form] = {}
        self._failure: Exception | None = None
        self._under_way: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="snapshots")
        self._thread.start()

    def close(self) -> None:
        """Wait for copies that are under way, and let all go."""
        self._under_way.put(None)
        self._thread.join()
        self._copies.clear()
        self._forms.clear()

    def take(self, step: int, state: Any, live: tuple[int, ...]) -> bool:
        """Begin a snapshot on some of the slices; returns at once, whether it did: not while another is under way.

        Raises:
            SnapshotFailed: an earlier one could not be made. ValueError: an array cannot be kept (see ``specs_of``).
        """
        import jax

        form = _Form(state)
        with self._changed:
            if self._failure is not None:
                raise SnapshotFailed(
                    f"a snapshot before step {step} could not be made: {self._failure}"
                ) from self._failure
            if self._ledger.is_under_way:
                return False
            snapshot = self._ledger.begin(step, live)
            self._forms[snapshot.number] = form
        for place in list(snapshot.copies):
            try:
                copies = jax.device_put(form.arrays, form.shardings_on(self._slices.mesh((place,))))
            except jax.errors.JaxRuntimeError as error:
                if loss_of(error) is None:
                    raise
                self._settle(snapshot.number, place, is_complete=False)
            else:
                with self._changed:
                    self._copies[snapshot.number, place] = copies
                self._under_way.put((snapshot.number, place))
        form.arrays = []
        return True

    def newest_step(self) -> int | None:
        """The step of the newest snapshot that is complete; None if there is none."""
        with self._changed:
            usable = self._ledger.usable()
        return usable[0][0].step if usable else None

    def newest(self, mesh: Any) -> tuple[int, Any] | None:
        """The step and state of the newest snapshot that can be read, on a mesh; None if there is none.

        Copies that are lost are found here, and are not tried again.
        """
        import jax

        while True:
            with self._changed:
                # A copy that is under way is newer than those that are complete, and takes less than a step repeated.
                self._changed.wait_for(lambda: not self._ledger.is_under_way)
                usable = self._ledger.usable()
                if not usable:
                    return None
                snapshot, place = usable[0]
                copies, form = self._copies[snapshot.number, place], self._forms[snapshot.number]
            try:
                arrays = jax.device_put(copies, form.shardings_of(mesh))
                jax.block_until_ready(arrays)
            except jax.errors.JaxRuntimeError as error:
                if loss_of(error) is None:
                    raise
                if not self._is_readable(copies):
                    self._settle(snapshot.number, place, is_complete=False)
                    continue
                raise  # the copy is there; it is the target that is lost
            return snapshot.step, form.with_arrays(arrays)

    def _is_readable(self, copies: list[Any]) -> bool:
        import jax

        try:
            jax.block_until_ready(jax.device_put(copies, [copy.sharding.with_memory_kind("device") for copy in copies]))
        except jax.errors.JaxRuntimeError as error:
            if loss_of(error) is None:
                raise
            return False
        return True

    def _follow(self) -> None:
        import jax

        while (copy := self._under_way.get()) is not None:
            is_complete = True
            try:
                with self._changed:
                    arrays = self._copies[copy]
                jax.block_until_ready(arrays)
            except Exception as error:
                is_complete = False
                if loss_of(error) is None:
                    with self._changed:
                        self._failure = error
            self._settle(*copy, is_complete=is_complete)

    def _settle(self, number: int, place: int, *, is_complete: bool) -> None:
        with self._changed:
            if is_complete:
                self._ledger.complete(number, place)
            else:
                self._ledger.lose(number, place)
                self._copies.pop((number, place), None)
            kept = self._ledger.numbers()
            self._copies = {key: copies for key, copies in self._copies.items() if key[0] in kept}
            self._forms = {key: form for key, form in self._forms.items() if key in kept}
            self._changed.notify_all()


class _Form:
    """A state taken apart: its arrays, how they are partitioned over a mesh, and the rest.

    Raises:
        ValueError: see ``specs_of``.
    """

    def __init__(self, state: Any) -> None:
        import jax

        leaves, self._structure = jax.tree_util.tree_flatten(state)
        self._rest = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        self._is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
        self.arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        self._specs = specs_of(self.arrays)
        self._shapes = [array.shape for array in self.arrays]

    def shardings_of(self, mesh: Any) -> list[Any]:
        """Of the arrays on a mesh that training uses."""
        import jax

        return [jax.sharding.NamedSharding(mesh, spec) for spec in self._specs]

    def shardings_on(self, mesh: Any) -> list[Any]:
        """Of a copy on one slice."""
        import jax

        spreads = [spread(shape, spec, dict(mesh.shape)) for shape, spec in zip(self._shapes, self._specs, strict=True)]
        return [
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*parts), memory_kind=_MEMORY)
            for parts in spreads
        ]

    def with_arrays(self, arrays: list[Any]) -> Any:
        """The state again, with these arrays."""
        import jax

        rest = iter(arrays)
        pairs = zip(self._is_array, self._rest, strict=True)
        return jax.tree_util.tree_unflatten(
            self._structure, [next(rest) if is_array else leaf for is_array, leaf in pairs]
        )


def specs_of(arrays: list[Any]) -> list[Any]:
    """How arrays are partitioned, in words that hold on a mesh of other slices, too.

    Raises:
        ValueError: one is partitioned in another way than over the axes of a mesh.
    """
    import jax

    specs = []
    for array in arrays:
        sharding = array.sharding
        if isinstance(sharding, jax.sharding.NamedSharding):
            specs.append(sharding.spec)
        elif sharding.is_fully_replicated:
            specs.append(jax.sharding.PartitionSpec())
        else:
            raise ValueError(
                f"an array of shape {array.shape} has {sharding}: the state's arrays must be partitioned over the axes "
                "of the attempt's mesh (jax.sharding.NamedSharding), or be the same on all devices"
            )
    return specs


def move(state: Any, mesh: Any) -> Any:
    """The state on another mesh, with the same partition."""
    import jax

    form = _Form(state)
    return form.with_arrays(jax.device_put(form.arrays, form.shardings_of(mesh)))
