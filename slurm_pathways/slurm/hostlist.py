"""Node lists as Slurm writes them: ``n[1-3,07-09],rack[0-1]node[2-3],login``.

The rules are those of Slurm's parser: names are separated by commas or white space; a name may have several bracketed
parts; a bracket holds numbers and ranges ``low-high``, in the order in which they are wanted; the digits of ``low``
give the least width of all numbers of a range (``08-10`` is 08, 09, 10). There are no steps and no nested brackets.
"""

import re
from collections.abc import Iterable, Iterator

#: Slurm's own limit for one range, and ours for a whole list: a typing error must not fill the memory.
MAX_HOSTS = 65536
_SEPARATORS = ", \t\n"
#: Slurm reads numbers into 64 bits; longer digit strings are left as part of the name.
_MAX_DIGITS = 18
_RANGE = re.compile(r"(?P<low>[0-9]+)(?:-(?P<high>[0-9]+))?", re.ASCII)
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<digits>[0-9]+)", re.ASCII | re.DOTALL)


class HostlistError(ValueError):
    """A text is no node list; the message quotes the part that is wrong and says what is allowed."""


def expand(hostlist: str) -> tuple[str, ...]:
    """The host names of a list, in its order; names that stand there twice are there twice.

    Raises:
        HostlistError: brackets that do not match, ranges that are none, more than ``MAX_HOSTS`` hosts.
    """
    hosts: list[str] = []
    for item in _split(hostlist):
        hosts.extend(_expand_item(item, hostlist, MAX_HOSTS - len(hosts)))
    return tuple(hosts)


def compress(hosts: Iterable[str]) -> str:
    """A list that expands to exactly these hosts, in this order; neighbours with one prefix share a bracket.

    Raises:
        HostlistError: a name is empty or has a comma, bracket or white space.
    """
    items: list[str] = []
    prefix: str | None = None
    ranges: list[tuple[str, str]] = []

    def close() -> None:
        if prefix is None:
            return
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            items.append(prefix + ranges[0][0])
        else:
            written = ",".join(low if low == high else f"{low}-{high}" for low, high in ranges)
            items.append(f"{prefix}[{written}]")
        ranges.clear()

    for host in hosts:
        if not host or any(character in host for character in "[]" + _SEPARATORS):
            raise HostlistError(
                f"{host!r} is no host name: it must not be empty or have a comma, bracket or white space"
            )
        numbered = _NUMBERED.fullmatch(host)
        if numbered is None or len(numbered["digits"]) > _MAX_DIGITS:
            close()
            prefix = None
            items.append(host)
            continue
        if numbered["prefix"] != prefix:
            close()
            prefix = numbered["prefix"]
        digits = numbered["digits"]
        if ranges and digits == _successor(*ranges[-1]):
            ranges[-1] = (ranges[-1][0], digits)
        else:
            ranges.append((digits, digits))
    close()
    return ",".join(items)


def _successor(low: str, high: str) -> str:
    """The number after ``high`` as the range that begins with ``low`` writes it."""
    return f"{int(high) + 1:0{len(low)}d}"


def _split(hostlist: str) -> Iterator[str]:
    """The items between separators that stand outside brackets."""
    depth = 0
    start = 0
    for place, character in enumerate(hostlist + ","):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if depth not in (0, 1):
            raise HostlistError(
                f"{hostlist[start : place + 1]!r} in node list {hostlist!r}: brackets must match and may not be nested"
            )
        if depth == 0 and character in _SEPARATORS:
            if place > start:
                yield hostlist[start:place]
            start = place + 1
    if depth:
        raise HostlistError(f"{hostlist[start:]!r} in node list {hostlist!r}: a closing bracket is missing")


def _expand_item(item: str, hostlist: str, room: int) -> list[str]:
    """All names of one item: the product of its brackets, the last of which changes fastest."""
    names = [""]
    literal, *bracketed = item.split("[")
    names = [literal]
    for part in bracketed:
        inside, _, after = part.partition("]")
        numbers = _numbers(inside, hostlist, room)
        if len(names) * len(numbers) > room:
            raise HostlistError(f"node list {hostlist!r} has more than {MAX_HOSTS} hosts")
        names = [f"{name}{number}{after}" for name in names for number in numbers]
    if len(names) > room:
        raise HostlistError(f"node list {hostlist!r} has more than {MAX_HOSTS} hosts")
    return names


def _numbers(inside: str, hostlist: str, room: int) -> list[str]:
    numbers: list[str] = []
    for text in inside.split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise HostlistError(
                f"{text!r} in node list {hostlist!r} is no range: in brackets stand numbers and low-high, with commas"
            )
        low, high = int(match["low"]), int(match["high"] or match["low"])
        if low > high:
            raise HostlistError(
                f"{text!r} in node list {hostlist!r}: a range goes from the smaller to the larger number"
            )
        if high - low >= room - len(numbers):
            raise HostlistError(f"node list {hostlist!r} has more than {MAX_HOSTS} hosts")
        numbers.extend(f"{number:0{len(match['low'])}d}" for number in range(low, high + 1))
    return numbers
