import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_pathways.slurm.quantities import Gres, QuantityError, duration_s, expand_counts, gres_list, size_bytes, tres


@pytest.mark.parametrize(("text", "counts"), [("8", (8,)), ("16(x3),8", (16, 16, 16, 8)), ("0,1(x1)", (0, 1))])
def test_counts(text: str, counts: tuple[int, ...]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "8(x0)", "8(3)", "a", "8,", "8(x99999999)", "-1"])
def test_no_counts(text: str) -> None:
    with pytest.raises(QuantityError, match="is no list of counts"):
        expand_counts(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("12", 12),
        ("4000M", 4000 << 20),
        ("1.50G", 3 << 29),
        ("62.50G", 67108864000),
        ("2Gn", 2 << 30),
        ("3256K", 3256 << 10),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "M", "4 M", "4X", "-1", "1e3"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(QuantityError, match="is no size"):
        size_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00:00", 0),
        ("00:00.003", 0.003),
        ("01:02", 62),
        ("02:03:04", 7384),
        ("1-02:03:04", 93784),
        ("10-00:00:00", 864000),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "UNLIMITED", "1-02:03", "1:2:3:4"])
def test_no_durations(text: str) -> None:
    with pytest.raises(QuantityError, match="is no duration"):
        duration_s(text)


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_durations_as_slurm_writes_them(days: int, hours: int, minutes: int, seconds: int) -> None:
    text = f"{days}-{hours:02}:{minutes:02}:{seconds:02}" if days else f"{hours:02}:{minutes:02}:{seconds:02}"
    assert duration_s(text) == ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def test_tres() -> None:
    assert tres("") == {}
    assert tres("cpu=32,mem=16000M,node=4,billing=32,gres/tpu=16,gres/tpu:v5p=16") == {
        "cpu": 32,
        "mem": 16000 << 20,
        "node": 4,
        "billing": 32,
        "gres/tpu": 16,
        "gres/tpu:v5p": 16,
    }
    with pytest.raises(QuantityError, match="'cpu' in 'cpu' is no resource"):
        tres("cpu")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("(null)", ()),
        ("", ()),
        ("tpu:v5p:4", (Gres("tpu", "v5p", 4),)),
        ("gpu:4", (Gres("gpu", "", 4),)),
        ("gpu", (Gres("gpu", "", 1),)),
        ("gpu:a100", (Gres("gpu", "a100", 1),)),
        ("gres:tpu:4", (Gres("tpu", "", 4),)),
        ("gres/gpu:a100:8", (Gres("gpu", "a100", 8),)),
        ("gpu:a100:8(S:0-1),craynetwork:4", (Gres("gpu", "a100", 8), Gres("craynetwork", "", 4))),
        ("gpu:tesla:2(IDX:0,1),gpu:kepler:1(IDX:2)", (Gres("gpu", "tesla", 2), Gres("gpu", "kepler", 1))),
        ("shard:16(0/16)", (Gres("shard", "", 16),)),
    ],
)
def test_gres(text: str, wanted: tuple[Gres, ...]) -> None:
    assert gres_list(text) == wanted


@pytest.mark.parametrize("text", ["a:b:c:4", ":4", "gpu:4,"])
def test_no_gres(text: str) -> None:
    with pytest.raises(QuantityError, match="is no resource like"):
        gres_list(text)
