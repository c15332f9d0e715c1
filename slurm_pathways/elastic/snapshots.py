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
        self._replicas = settings.replicas
        self._changed = threading.Condition()
        self._ledger = Ledger(settings.replicas, settings.keep)
        #: By snapshot and slice: the copies, and by snapshot what the state was like.
        self._copies: dict[tuple[int, int], SliceCopy] = {}
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
        # What is missing for want of slices, neighbours hold.
        num_neighbours = min(self._replicas - len(snapshot.copies), self._slices.hosts_per_slice - 1)
        for place in list(snapshot.copies):
            try:
                copies = SliceCopy(form, self._slices, place, num_neighbours)
            except jax.errors.JaxRuntimeError as error:
                if loss_of(error) is None:
                    raise
                self._settle(snapshot.number, place, is_complete=False)
            else:
                with self._changed:
                    self._copies[snapshot.number, place] = copies
                self._under_way.put((snapshot.number, place))
            num_neighbours = 0
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
                arrays = jax.device_put(copies.arrays(), form.shardings_of(mesh))
                jax.block_until_ready(arrays)
            except jax.errors.JaxRuntimeError as error:
                if loss_of(error) is None:
                    raise
                if not copies.mend():
                    self._settle(snapshot.number, place, is_complete=False)
                    continue
                if not copies.has_changed:
                    raise  # the copy is there; it is the target that is lost
                continue
            return snapshot.step, form.with_arrays(arrays)

    def _follow(self) -> None:
        import jax

        while (copy := self._under_way.get()) is not None:
            is_complete = True
            try:
                with self._changed:
                    pieces = self._copies[copy].pieces()
                jax.block_until_ready(pieces)
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


class SliceCopy:
    """A copy of a state in the memory of one slice's hosts; with neighbours, of each shard on the next hosts, too.

    A host that is lost takes its shards with it, and an array that misses a shard is lost as a whole. So with
    neighbours the copy is kept as arrays of one device each.

    Raises:
        jax.errors.JaxRuntimeError: a loss.
    """

    def __init__(self, form: "_Form", slices: Slices, place: int, num_neighbours: int) -> None:
        import jax

        self._shardings = form.shardings_on(slices.mesh((place,)))
        self._shapes = form.shapes
        #: Whether the latest ``mend`` has found other shards to read.
        self.has_changed = False
        whole = jax.device_put(form.arrays, self._shardings)
        self._whole: list[Any] | None = whole
        #: By array and place on the slice: the shard and its copies. Which of them is read, by place.
        self._shards: list[list[list[Any]]] = []
        self._chosen: list[int] = []
        if num_neighbours:
            copies = [whole]
            for distance in range(1, num_neighbours + 1):
                mesh = slices.mesh_of_neighbours(place, distance)
                copies.append(jax.device_put(whole, form.shardings_on(mesh)))
            pieces = [[_by_place(array) for array in copy] for copy in copies]
            self._shards = [[list(piece) for piece in zip(*leaf, strict=True)] for leaf in zip(*pieces, strict=True)]
            self._chosen = [0] * len(slices.mesh((place,)).devices.flat)
            self._whole = None

    def pieces(self) -> list[Any]:
        """All that must be there for the copy to be complete."""
        if self._whole is not None:
            return self._whole
        return [copy for leaf in self._shards for shard in leaf for copy in shard]

    def arrays(self) -> list[Any]:
        """The copy, of shards that were readable at the latest ``mend``."""
        import jax

        if self._whole is not None:
            return self._whole
        arrays = []
        for leaf, shape, sharding in zip(self._shards, self._shapes, self._shardings, strict=True):
            here = [
                shard[chosen] if chosen == 0 else jax.device_put(shard[chosen], _on_one(device, sharding.memory_kind))
                for shard, chosen, device in zip(leaf, self._chosen, sharding.mesh.devices.flat, strict=True)
            ]
            arrays.append(jax.make_array_from_single_device_arrays(shape, sharding, here))
        return arrays

    def mend(self) -> bool:
        """Look which shards can be read, and read those from now on; False: one cannot be read from anywhere."""
        if self._whole is not None:
            self.has_changed = False
            return _are_readable(self._whole)
        found = []
        for place in range(len(self._chosen)):
            copies = zip(*(leaf[place] for leaf in self._shards), strict=True)
            readable = (number for number, shards in enumerate(copies) if _are_readable(list(shards)))
            if (first := next(readable, None)) is None:
                return False
            found.append(first)
        self.has_changed = found != self._chosen
        self._chosen = found
        return True


def _by_place(array: Any) -> list[Any]:
    """An array's shards in the order of its mesh."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    return [shards[device] for device in array.sharding.mesh.devices.flat]


def _are_readable(arrays: list[Any]) -> bool:
    """Whether arrays in host memory are there, by reading them."""
    import jax

    try:
        jax.block_until_ready(jax.device_put(arrays, [array.sharding.with_memory_kind("device") for array in arrays]))
    except jax.errors.JaxRuntimeError as error:
        if loss_of(error) is None:
            raise
        return False
    return True


def _on_one(device: Any, memory_kind: str) -> Any:
    import jax

    return jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)


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
        self.shapes = [array.shape for array in self.arrays]

    def shardings_of(self, mesh: Any) -> list[Any]:
        """Of the arrays on a mesh that training uses."""
        import jax

        return [jax.sharding.NamedSharding(mesh, spec) for spec in self._specs]

    def shardings_on(self, mesh: Any) -> list[Any]:
        """Of a copy on one slice."""
        import jax

        spreads = [spread(shape, spec, dict(mesh.shape)) for shape, spec in zip(self.shapes, self._specs, strict=True)]
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
