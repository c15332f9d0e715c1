"""The slices as a program sees them: their devices, meshes over them, and which of them are alive."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurm_pathways.elastic.losses import is_absence, loss_of

#: The first axis of every mesh here.
SLICE_AXIS = "slice"
_DEVICE_AXIS = "device"


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What a look at some slices has found: those that are alive, and those that have not been there yet."""

    live: frozenset[int]
    absent: frozenset[int]


class Slices:
    """Devices by slice. Safe for use from several threads.

    Args:
        devices: all devices of some slices; default: all devices.
        axes: names and sizes of a mesh's axes within a slice, in order; default: one, ``device``.

    Raises:
        ValueError: the sizes do not fit the slices, or devices say nothing of slices.
    """

    def __init__(self, devices: Sequence[Any] | None = None, axes: Mapping[str, int] | None = None) -> None:
        import jax

        self._devices: dict[int, list[Any]] = {}
        self._meshes: dict[tuple[int, ...], Any] = {}
        for device in jax.devices() if devices is None else devices:
            slice_index = getattr(device, "slice_index", None)
            if slice_index is None:
                raise ValueError(
                    f"{device} is in no slice: elastic training needs the devices of a run (slurm-pathways run)"
                )
            self._devices.setdefault(slice_index, []).append(device)
        sizes = {len(devices) for devices in self._devices.values()}
        if len(sizes) != 1:
            raise ValueError(f"slices must be of one size; here they have {sorted(sizes)} devices")
        (self._size,) = sizes
        self._axes = dict(axes) if axes is not None else {_DEVICE_AXIS: self._size}
        if math.prod(self._axes.values()) != self._size or SLICE_AXIS in self._axes:
            raise ValueError(
                f"axes {self._axes} do not fit: their product must be the {self._size} devices of a slice, and "
                f"{SLICE_AXIS} is the name of the axis over slices"
            )

    @property
    def all(self) -> frozenset[int]:
        """The indices of all slices, whether alive or not."""
        return frozenset(self._devices)

    def mesh(self, slices: Iterable[int]) -> Any:
        """A ``jax.sharding.Mesh`` over slices: the axis ``slice``, then those within a slice."""
        import jax
        import numpy as np

        chosen = tuple(sorted(slices))
        if chosen not in self._meshes:
            devices = np.array([self._devices[index] for index in chosen], dtype=object)
            shape = (len(chosen), *self._axes.values())
            self._meshes[chosen] = jax.sharding.Mesh(devices.reshape(shape), (SLICE_AXIS, *self._axes))
        return self._meshes[chosen]

    @property
    def hosts_per_slice(self) -> int:
        """How many hosts the devices of a slice are on."""
        return len({_host_of(device) for device in next(iter(self._devices.values()))})

    def mesh_of_neighbours(self, index: int, distance: int) -> Any:
        """The mesh of one slice with each device replaced by one ``distance`` hosts further, around the slice."""
        import jax
        import numpy as np

        mesh = self.mesh((index,))
        by_host: dict[int, list[Any]] = {}
        for device in mesh.devices.flat:
            by_host.setdefault(_host_of(device), []).append(device)
        hosts = sorted(by_host)
        neighbour = {
            device: by_host[hosts[(place + distance) % len(hosts)]][number]
            for place, host in enumerate(hosts)
            for number, device in enumerate(by_host[host])
        }
        devices = np.array([neighbour[device] for device in mesh.devices.flat], dtype=object)
        return jax.sharding.Mesh(devices.reshape(mesh.devices.shape), mesh.axis_names)

    def live(self, among: Iterable[int]) -> frozenset[int]:
        """The slices whose devices compute together, tried by a program on each, all at once.

        Blocks until each has answered or its loss is known. What else goes wrong is raised as it is.
        """
        return self.look(among).live

    def look(self, among: Iterable[int]) -> Seen:
        """``live``, and which of the others have not been there yet."""
        answers = {index: self._ask((index,)) for index in among}
        losses = {index: self._loss_in(answer, 1) for index, answer in answers.items()}
        return Seen(
            frozenset(index for index, loss in losses.items() if loss is None),
            frozenset(index for index, loss in losses.items() if loss is not None and is_absence(loss)),
        )

    def work_together(self, slices: tuple[int, ...]) -> bool:
        """The same for one program over several slices: after a loss, that takes longer to be mended."""
        return self._loss_in(self._ask(slices), len(slices)) is None

    def _ask(self, slices: tuple[int, ...]) -> Any:
        """The sum that is to come, or the text of a loss."""
        import jax
        import numpy as np

        mesh = self.mesh(slices)
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
        try:
            return _total()(jax.device_put(np.ones(self._size * len(slices), np.float32), everywhere))
        except jax.errors.JaxRuntimeError as error:
            if (loss := loss_of(error)) is None:
                raise
            return loss

    def _loss_in(self, answer: Any, num_slices: int) -> str | None:
        import jax

        if isinstance(answer, str):
            return answer
        try:
            total = float(answer)
        except jax.errors.JaxRuntimeError as error:
            if (loss := loss_of(error)) is None:
                raise
            return loss
        if total != self._size * num_slices:
            raise RuntimeError(
                f"the sum of {self._size * num_slices} ones over {num_slices} slices is {total}: they cannot be trusted"
            )
        return None


def _host_of(device: Any) -> int:
    # The runtime's devices say which host they are on; the process that drives them is the client's.
    return int(device.virtual_task_index)


@functools.cache
def _total() -> Any:
    import jax

    # One function for all slices and looks, so that it is compiled once for each slice. Hosts of a slice must answer
    # one another for it.
    return jax.jit(lambda ones: ones.sum())


def spread(shape: tuple[int, ...], spec: Sequence[Any], sizes: Mapping[str, int]) -> tuple[Any, ...]:
    """The partition of a copy on one slice: as ``spec`` says, and over what it leaves of the slice, so that devices do
    not hold the same.

    Args:
        spec: for each dimension an axis, several, or None; may be shorter than ``shape``.
        sizes: of the axes of the copy's mesh.
    """
    parts = [list(_names(entry)) for entry in spec] + [[] for _ in range(len(shape) - len(spec))]
    used = {name for part in parts for name in part}
    for axis, size in sizes.items():
        if axis in used or size == 1:
            continue
        for length, part in sorted(zip(shape, parts, strict=True), key=lambda pair: -pair[0]):
            if length % (size * math.prod(sizes[name] for name in part)) == 0 and length:
                part.append(axis)
                break
    return tuple(tuple(part) if len(part) > 1 else part[0] if part else None for part in parts)


def _names(entry: Any) -> Sequence[str]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
