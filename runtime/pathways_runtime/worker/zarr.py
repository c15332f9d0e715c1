"""Zarr arrays (format 2) on a file system: what TensorStore, zarr-python and orbax read and write too.

An array is a folder with ``.zarray`` and one file per chunk, ``0.0``, ``0.1``, …: the elements of the chunk, row-major,
padded to the full chunk at the array's end. Written here, a chunk is a shard, uncompressed. Files appear whole or not
at all, and are on the disk when a call returns. Compressed arrays of others are read through TensorStore if it is
installed.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.sharding import Box, Shape, box_shape, intersect, relative
from pathways_runtime.core.status import Code, error
from pathways_runtime.core.stored import TileIndex, covering_tiles
from pathways_runtime.worker import pjrt
from pathways_runtime.worker.buffers import HostArray, section, zeros

_METADATA_FILE = ".zarray"


class Layout(NamedTuple):
    """What ``.zarray`` says.

    Attributes:
        chunks: the shape of every chunk.
        fill_value: of a chunk that has no file; None if every chunk has one.
        separator: between the numbers in the names of chunks.
        is_plain: neither compressed nor filtered, row-major.
    """

    shape: Shape
    chunks: Shape
    dtype: np.dtype[Any]
    fill_value: Any = None
    separator: str = "."
    is_plain: bool = True


def layout_of(shape: Shape, chunks: Shape, kind: DType) -> Layout:
    """The layout of an array of ours."""
    return Layout(shape, tuple(max(1, size) for size in chunks), pjrt.dtype_of(kind))


def write_layout(folder: Path, layout: Layout) -> None:
    """Write ``.zarray``, and make the folder if it is not there.

    Raises:
        OSError: the file system does not let us.
    """
    content = {
        "zarr_format": 2,
        "shape": layout.shape,
        "chunks": layout.chunks,
        "dtype": _name_of(layout.dtype),
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "dimension_separator": layout.separator,
    }
    with _new_file(folder, _METADATA_FILE) as file:
        file.write(json.dumps(content).encode())


def write_chunk(folder: Path, layout: Layout, chunk: TileIndex, content: HostArray) -> None:
    """Write one chunk, padding included.

    Raises:
        OSError: the file system does not let us.
    """
    assert content.shape == layout.chunks and content.dtype == layout.dtype
    with _new_file(folder, _chunk_name(chunk, layout)) as file:
        file.write(np.ascontiguousarray(content).reshape(-1).view(np.uint8).data)


def read_layout(folder: Path) -> Layout:
    """Read ``.zarray``.

    Raises:
        StatusError: FAILED_PRECONDITION if there is no array, or none that we take. OSError: it cannot be read.
    """
    try:
        content = json.loads((folder / _METADATA_FILE).read_bytes())
    except FileNotFoundError:
        raise error(Code.FAILED_PRECONDITION, f"there is no Zarr array in {folder}") from None
    except ValueError as failure:
        raise error(Code.FAILED_PRECONDITION, f"{folder / _METADATA_FILE} is not JSON: {failure}") from failure
    try:
        is_plain = content["compressor"] is None and not content["filters"] and content["order"] == "C"
        dtype = np.dtype(content["dtype"])
        return Layout(
            tuple(content["shape"]),
            tuple(content["chunks"]),
            dtype,
            content["fill_value"],
            content.get("dimension_separator", "."),
            is_plain and dtype.newbyteorder("=") == dtype,
        )
    except (KeyError, TypeError) as failure:
        raise error(
            Code.FAILED_PRECONDITION, f"{folder / _METADATA_FILE} does not describe an array: {failure!r}"
        ) from failure


def read_box(folder: Path, layout: Layout, box: Box, shape: Shape) -> HostArray:
    """A part of an array, zeros behind it up to ``shape``, in memory that XLA can use in place.

    Raises:
        StatusError: a chunk is missing or has another size. OSError: one cannot be read.
    """
    made = zeros(layout.dtype, shape)
    if not layout.is_plain:
        section(made, _at_origin(box))[...] = _read_by_tensorstore(folder, box, layout.dtype)
        return made
    for chunk in covering_tiles(box, layout.chunks):
        start = tuple((index * size, (index + 1) * size) for index, size in zip(chunk, layout.chunks, strict=True))
        part = intersect(start, box)
        assert part is not None
        target = section(made, relative(part, box))
        _read_chunk(folder / _chunk_name(chunk, layout), layout, relative(part, start), target)
    return made


def _read_chunk(path: Path, layout: Layout, box: Box, target: HostArray) -> None:
    wanted = int(np.prod(layout.chunks, dtype=np.int64)) * layout.dtype.itemsize
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != wanted:
                raise error(
                    Code.FAILED_PRECONDITION, f"{path} has {size} bytes, a chunk of {layout.chunks} has {wanted}"
                )
            if box_shape(box) == layout.chunks and target.flags.c_contiguous:
                view = target.reshape(-1).view(np.uint8).data
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise error(Code.FAILED_PRECONDITION, f"{path} has become shorter while it was read")
                    view = view[count:]
                return
            chunk = np.memmap(file, layout.dtype, "r", shape=layout.chunks)
            target[...] = section(chunk, box)
    except FileNotFoundError:
        if layout.fill_value is None:
            raise error(Code.FAILED_PRECONDITION, f"the chunk {path} is missing") from None
        target[...] = layout.fill_value


def _read_by_tensorstore(folder: Path, box: Box, dtype: np.dtype[Any]) -> HostArray:
    try:
        import tensorstore
    except ImportError:
        raise error(
            Code.UNIMPLEMENTED,
            f"{folder} is compressed: to read it, workers need the package tensorstore (pip install tensorstore)",
        ) from None
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    try:
        store = tensorstore.open(spec, open=True, read=True).result()
        content: HostArray = store[tuple(slice(start, stop) for start, stop in box)].read().result()
    except ValueError as failure:
        raise error(Code.FAILED_PRECONDITION, f"{folder} cannot be read: {failure}") from failure
    return content.astype(dtype, copy=False)


def _at_origin(box: Box) -> Box:
    return tuple((0, stop - start) for start, stop in box)


def _chunk_name(chunk: TileIndex, layout: Layout) -> str:
    return layout.separator.join(map(str, chunk)) if chunk else "0"


def _name_of(dtype: np.dtype[Any]) -> str:
    """As TensorStore writes it: numpy's own types with their byte order, ml_dtypes' by name."""
    return dtype.str if dtype.isbuiltin == 1 else dtype.name


@contextlib.contextmanager
def _new_file(folder: Path, name: str) -> Iterator[BinaryIO]:
    """A file that is there under its name, whole and on the disk, once the block has been left."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
