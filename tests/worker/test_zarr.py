"""Zarr arrays as workers write and read them, and as TensorStore does."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - its types by name
import numpy as np
import pytest
import tensorstore

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.sharding import Box, Shape
from pathways_runtime.core.status import Code, StatusError
from pathways_runtime.worker import zarr

KINDS = [DType.F32, DType.BF16, DType.S8, DType.PRED, DType.C64, DType.F8E4M3FN, DType.U64]


def ramp(shape: Shape, kind: DType) -> np.ndarray[Any, Any]:
    return (
        (np.arange(np.prod(shape, dtype=int)) % 2 if kind is DType.PRED else np.arange(np.prod(shape, dtype=int)))
        .astype(kind.numpy_name)
        .reshape(shape)
    )


def write(folder: Path, values: np.ndarray[Any, Any], chunks: Shape, kind: DType) -> zarr.Layout:
    """All chunks, padded as shards are."""
    layout = zarr.layout_of(values.shape, chunks, kind)
    zarr.write_layout(folder, layout)
    padded = np.zeros([-(-dim // size) * size for dim, size in zip(values.shape, chunks, strict=True)], values.dtype)
    padded[tuple(slice(dim) for dim in values.shape)] = values
    for chunk in np.ndindex(*[-(-dim // size) for dim, size in zip(values.shape, chunks, strict=True)]):
        part = tuple(slice(i * size, (i + 1) * size) for i, size in zip(chunk, chunks, strict=True))
        zarr.write_chunk(folder, layout, chunk, padded[(*part, ...)])
    return layout


def opened(folder: Path) -> Any:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    return tensorstore.open(spec, open=True).result()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tensorstore_reads_what_is_written(tmp_path: Path, kind: DType) -> None:
    values = ramp((5, 6), kind)
    write(tmp_path / "a", values, (2, 3), kind)
    np.testing.assert_array_equal(opened(tmp_path / "a").read().result(), values)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        ".zarray", "0.0", "0.1", "1.0", "1.1", "2.0", "2.1"
    ]  # fmt: skip


@pytest.mark.parametrize("box", [((0, 5), (0, 6)), ((1, 4), (2, 5)), ((2, 4), (0, 3)), ((3, 3), (0, 6))])
def test_any_part_is_read(tmp_path: Path, box: Box) -> None:
    values = ramp((5, 6), DType.F32)
    write(tmp_path, values, (2, 3), DType.F32)
    layout = zarr.read_layout(tmp_path)
    (top, bottom), (left, right) = box
    read = zarr.read_box(tmp_path, layout, box, (6, 6))
    np.testing.assert_array_equal(read[: bottom - top, : right - left], values[top:bottom, left:right])
    assert read.sum() == values[top:bottom, left:right].sum()


def test_what_has_no_dimension(tmp_path: Path) -> None:
    values = np.array(7, np.int32)
    write(tmp_path / "a", values, (), DType.S32)
    assert opened(tmp_path / "a").read().result() == 7
    assert zarr.read_box(tmp_path / "a", zarr.read_layout(tmp_path / "a"), (), ()) == 7


@pytest.mark.parametrize("compressor", [None, {"id": "zstd", "level": 1}, {"id": "blosc"}])
def test_what_others_write_is_read(tmp_path: Path, compressor: Any) -> None:
    values = ramp((5, 6), DType.BF16)
    metadata = {"shape": [5, 6], "chunks": [2, 4], "dtype": "bfloat16", "compressor": compressor}
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/a/"}, "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(values).result()
    layout = zarr.read_layout(tmp_path / "a")
    assert layout.is_plain == (compressor is None)
    np.testing.assert_array_equal(zarr.read_box(tmp_path / "a", layout, ((1, 5), (3, 6)), (4, 3)), values[1:5, 3:6])


def test_chunks_without_a_file(tmp_path: Path) -> None:
    values = ramp((4,), DType.F32)
    layout = write(tmp_path, values, (2,), DType.F32)
    (tmp_path / "1").unlink()
    with pytest.raises(StatusError, match=f"the chunk {tmp_path}/1 is missing"):
        zarr.read_box(tmp_path, layout, ((0, 4),), (4,))
    content = json.loads((tmp_path / ".zarray").read_text())
    (tmp_path / ".zarray").write_text(json.dumps({**content, "fill_value": 9.0}))
    read = zarr.read_box(tmp_path, zarr.read_layout(tmp_path), ((0, 4),), (4,))
    np.testing.assert_array_equal(read, [0, 1, 9, 9])


def test_files_that_are_wrong(tmp_path: Path) -> None:
    layout = write(tmp_path, ramp((4,), DType.F32), (2,), DType.F32)
    (tmp_path / "0").write_bytes(b"short")
    with pytest.raises(StatusError, match=r"0 has 5 bytes, a chunk of \(2,\) has 8"):
        zarr.read_box(tmp_path, layout, ((0, 2),), (2,))
    for content, says in (("{", "is not JSON"), ("{}", "does not describe an array")):
        (tmp_path / ".zarray").write_text(content)
        with pytest.raises(StatusError, match=says) as refused:
            zarr.read_layout(tmp_path)
        assert refused.value.status.code is Code.FAILED_PRECONDITION


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    layout = zarr.layout_of((2,), (2,), DType.F32)
    (tmp_path / "a" / "0").mkdir(parents=True)
    with pytest.raises(OSError):
        zarr.write_chunk(tmp_path / "a", layout, (0,), np.zeros(2, np.float32))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["0"]
