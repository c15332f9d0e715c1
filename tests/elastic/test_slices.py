"""How a copy of an array is shared out among the devices of one slice."""

import pytest

from slurm_pathways.elastic.slices import spread

SIZES = {"slice": 1, "data": 2, "model": 4}


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((), (), ()),
        ((8,), (), (("data", "model"),)),
        ((8, 16), ("model",), ("model", "data")),
        ((3, 5), (), (None, None)),
        ((2, 3), (None, None), ("data", None)),
        ((8,), (("slice", "data"),), (("slice", "data", "model"),)),
        ((12, 4), ("data", "model"), ("data", "model")),
        ((0, 4), (), (None, "data")),
        ((6, 4), (("slice", "data"), None), (("slice", "data"), "model")),
    ],
)
def test_spread(shape: tuple[int, ...], spec: tuple[object, ...], expected: tuple[object, ...]) -> None:
    assert spread(shape, spec, SIZES) == expected
