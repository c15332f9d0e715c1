"""Quantities as Slurm writes them: repeated counts, memory, durations, trackable resources, generic resources."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_COUNTS = re.compile(r"(?P<count>[0-9]+)(?:\(x(?P<times>[0-9]+)\))?", re.ASCII)
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>[KMGTP]?)[Bcn]?", re.ASCII)
_DURATION = re.compile(
    r"(?:(?:(?P<days>[0-9]+)-)?(?P<hours>[0-9]+):)?(?P<minutes>[0-9]+):(?P<seconds>[0-9]+(?:\.[0-9]+)?)", re.ASCII
)
#: The repeat count of one item is bounded, so that a wrong variable cannot fill the memory.
_MAX_TIMES = 65536


class QuantityError(ValueError):
    """A text is no quantity of the wanted kind."""


@dataclass(frozen=True, slots=True)
class Gres:
    """A generic resource: ``name``, ``type`` ("" when Slurm has none), ``count`` per node."""

    name: str
    type: str
    count: int


def expand_counts(text: str) -> tuple[int, ...]:
    """``16(x3),8`` as one number per node: 16, 16, 16, 8.

    Raises:
        QuantityError: it is no such list.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNTS.fullmatch(item)
        if match is None or not 1 <= int(match["times"] or 1) <= _MAX_TIMES:
            raise QuantityError(f"{text!r} is no list of counts like 16(x3),8")
        counts.extend([int(match["count"])] * int(match["times"] or 1))
    return tuple(counts)


def size_bytes(text: str) -> int:
    """``4000M``, ``1.50G`` or ``12345`` in bytes; ``c`` and ``n`` behind it (per CPU, per node) are dropped.

    Raises:
        QuantityError: it is no size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise QuantityError(f"{text!r} is no size like 4000M or 1.5G")
    return round(float(match["number"]) * _UNITS[match["unit"]])


def duration_s(text: str) -> float:
    """``[[days-]hours:]minutes:seconds[.fraction]`` in seconds.

    Raises:
        QuantityError: it is no duration.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise QuantityError(f"{text!r} is no duration like 1-02:03:04 or 02:03.456")
    days, hours, minutes = (int(match[part] or 0) for part in ("days", "hours", "minutes"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + float(match["seconds"])


def tres(text: str) -> Mapping[str, int]:
    """``cpu=8,mem=8000M,node=1,gres/tpu:v5p=4`` by name; sizes (mem) in bytes.

    Raises:
        QuantityError: it is no such list.
    """
    found: dict[str, int] = {}
    for item in text.split(",") if text else ():
        name, equals, value = item.rpartition("=")
        if not equals:
            raise QuantityError(f"{item!r} in {text!r} is no resource like cpu=8")
        found[name] = size_bytes(value)
    return found


def gres_list(text: str) -> tuple[Gres, ...]:
    """``gpu:a100:8(S:0-1),tpu:v5p:4`` or ``gres/gpu:2`` or ``(null)``; what stands in parentheses is dropped.

    Raises:
        QuantityError: it is no such list.
    """
    if text in ("", "(null)", "N/A", "none"):
        return ()
    found = []
    # Parentheses hold sockets and indices, commas among them.
    for item in re.sub(r"\([^()]*\)", "", text).split(","):
        name, *rest = re.sub(r"^gres[/:]", "", item).split(":")
        count_text = rest.pop() if rest and _SIZE.fullmatch(rest[-1]) else "1"
        if not name or len(rest) > 1:
            raise QuantityError(f"{item!r} in {text!r} is no resource like gpu:a100:8")
        found.append(Gres(name, rest[0] if rest else "", size_bytes(count_text)))
    return tuple(found)
