"""Credentials of two jobs, and data planes that leave neither thread nor descriptor nor socket."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pathways_runtime.transport.credentials import Credentials
from pathways_runtime.transport.dataplane import DataPlane

from .dataplane_ends import MakePlane, num_descriptors


@pytest.fixture(scope="module")
def ours() -> Credentials:
    return Credentials.make()


@pytest.fixture(scope="module")
def of_another_job() -> Credentials:
    return Credentials.make()


@pytest.fixture
def make_plane(tmp_path: Path) -> Iterator[MakePlane]:
    """Makes data planes ``0, 1, …`` that know all made before them, and the other way round; closed after the test."""
    threads, fds = threading.active_count(), num_descriptors()
    planes: list[DataPlane] = []

    def make(host_key: str = "here", force_sockets: bool = False, **options: int) -> DataPlane:
        plane = DataPlane(f"unix:{tmp_path}/{len(planes)}", host_key, force_sockets, **options)
        planes.append(plane)
        for host, other in enumerate(planes):
            plane.connect(host, other.address, other.host_key)
            other.connect(len(planes) - 1, plane.address, plane.host_key)
        return plane

    yield make
    for plane in planes:
        plane.close()
    assert threading.active_count() == threads, f"threads left: {threading.enumerate()}"
    assert num_descriptors() == fds, "descriptors left"
    assert list(tmp_path.glob("[0-9]*")) == [], "sockets left"
