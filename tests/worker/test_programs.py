"""Which devices a program is loaded on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pathways_runtime.core.ids import DeviceId, HostIndex, WorldId
from pathways_runtime.core.topology import Topology
from pathways_runtime.worker import programs, worlds
from pathways_runtime.worker.compile_cache import CompileCache

THEIRS = (DeviceId(3), DeviceId(2))
STAND_INS = (DeviceId(0), DeviceId(1))


@pytest.fixture
def options(lower: Callable[..., Any], sharded: Callable[..., Any]) -> tuple[bytes, bytes]:
    """A program for devices 3 and 2, and its options, which name them."""
    artifact, options = lower(lambda x: x + 1, sharded((4,), np.float32, 2, "x"), devices=THEIRS)
    return artifact, options


def test_the_devices_that_the_options_name(options: tuple[bytes, bytes]) -> None:
    assert programs.assignment(options[1], THEIRS) == [[DeviceId(3), DeviceId(2)]]
    assert programs.assignment(options[1], THEIRS[::-1]) == [[DeviceId(3), DeviceId(2)]]
    assert programs.assignment(b"", THEIRS) == [[DeviceId(3), DeviceId(2)]]


def test_devices_stand_in_for_those_of_a_slice_that_is_down(options: tuple[bytes, bytes], tmp_path: Path) -> None:
    """The compiling host is in no world with the devices that the program names."""
    assert programs.assignment(options[1], STAND_INS) == [[DeviceId(0), DeviceId(1)]]
    topology = Topology(num_slices=2, hosts_per_slice=1, devices_per_host=2, platform="cpu")
    world = worlds.form(WorldId(1), topology, "cpu", (HostIndex(0),), 0, "")
    loaded = programs.load(world, STAND_INS, *options, CompileCache(tmp_path))
    assert (loaded.program.devices, loaded.compiled.metadata.output_shapes) == (STAND_INS, ((4,),))
