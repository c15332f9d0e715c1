"""Sets of small numbers as bytes: bit ``n % 8`` of byte ``n // 8`` says whether ``n`` is in it."""

from collections.abc import Iterable


def to_bytes(mask: int) -> bytes:
    """The bitmap of an integer whose bit n says the same; as short as possible, so equal sets are equal bytes."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def bitmap_of(numbers: Iterable[int]) -> bytes:
    """The bitmap of these numbers."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return to_bytes(mask)


def members(bitmap: bytes) -> list[int]:
    """The numbers in a bitmap, ascending."""
    mask = int.from_bytes(bitmap, "little")
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found
