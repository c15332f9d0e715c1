"""What can be compiled for: the names of topologies and what they say. Imports nothing of JAX."""

import math
import re
from typing import NamedTuple

from pathways_runtime.worker import gpu
from pathways_runtime.worker.aot.gpus import GPUS, Gpu

#: What slices of two-dimensional tori may be, and the smaller ones of three dimensions: x by y (by z) chips.
_PLANES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL_BLOCKS = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
#: Larger blocks are made of cubes of this edge.
_CUBE_EDGE = 4
_MAX_EDGE = 64
#: A host has 2 x 2 chips of a slice that is as large.
_CHIPS_PER_HOST = 4

#: Of what is said as hosts and devices.
MAX_HOSTS = 4096
MAX_DEVICES_PER_HOST = 128


class TargetError(ValueError):
    """No topology of this name. The message says what was given and what is allowed."""


class _Kind(NamedTuple):
    """A generation of TPU. ``has_planes``: its tori have two dimensions, not three."""

    has_planes: bool
    devices_per_chip: int


#: By the name that libtpu gives them. v4 is left out: libtpu describes two devices per chip, and its hosts show one.
_KINDS = {
    "v5e": _Kind(True, 1),
    "v5p": _Kind(False, 1),
    "v6e": _Kind(True, 1),
    "tpu7x": _Kind(False, 2),
}

ALLOWED = (
    f"v5e:XxY and v6e:XxY with XxY one of {', '.join(_PLANES)}; v5p:XxYxZ and tpu7x:XxYxZ with XxYxZ one of "
    f"{', '.join(_SMALL_BLOCKS)} or three multiples of {_CUBE_EDGE}; cpu:N for one host with N devices, "
    f"cpu:HxN for H hosts with N devices each, and the same for the GPUs {', '.join(GPUS)}"
)


class Target(NamedTuple):
    """One slice of what programs are compiled for.

    Attributes:
        name: as libtpu takes it, for TPU.
        platform: tpu, cuda or cpu.
    """

    name: str
    platform: str
    hosts_per_slice: int
    devices_per_host: int

    @property
    def gpu(self) -> Gpu:
        """The model, where ``platform`` is cuda."""
        return GPUS[self.name.partition(":")[0]]


def parse(text: str) -> Target:
    """The topology of a name like ``v5e:4x4``.

    Raises:
        TargetError: see the class.
    """
    kind, _, shape = text.strip().lower().partition(":")
    found = re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*", shape)
    edges = [int(edge) for edge in shape.split("x")] if found else []
    target = _hosts(kind, edges) if kind == "cpu" or kind in GPUS else _tpu(kind, edges)
    if target is None:
        raise TargetError(f"{text}: no such topology. Allowed are {ALLOWED}")
    return target


def _hosts(kind: str, edges: list[int]) -> Target | None:
    if len(edges) not in (1, 2):
        return None
    num_hosts, num_devices = edges if len(edges) == 2 else (1, edges[0])
    if num_hosts > MAX_HOSTS or num_devices > MAX_DEVICES_PER_HOST:
        return None
    platform = "cpu" if kind == "cpu" else gpu.PLATFORM
    return Target(f"{kind}:{num_hosts}x{num_devices}", platform, num_hosts, num_devices)


def _tpu(name: str, edges: list[int]) -> Target | None:
    kind = _KINDS.get(name)
    if kind is None:
        return None
    shape = "x".join(map(str, edges))
    if kind.has_planes:
        is_allowed = shape in _PLANES
    else:
        is_large = len(edges) == 3 and all(edge % _CUBE_EDGE == 0 and edge <= _MAX_EDGE for edge in edges)
        is_allowed = is_large or shape in _SMALL_BLOCKS
    if not is_allowed:
        return None
    num_chips = math.prod(edges)
    chips_per_host = min(num_chips, _CHIPS_PER_HOST)
    return Target(f"{name}:{shape}", "tpu", num_chips // chips_per_host, chips_per_host * kind.devices_per_chip)
