"""Names for sets of hosts on one connection, so that an operation's message does not grow with its hosts."""

from pathways_runtime.core.ids import HostIndex

#: Smaller sets are cheaper spelled out.
_SMALLEST_NAMED = 9
_MOST_CACHED = 4096


class HostNames:
    """The sender's side of ``wire.messages.NameHosts``."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[HostIndex, ...], int] = {}
        #: By ``id`` of a tuple that is kept here, because hashing a tuple costs as much as spelling it out.
        self._cache: dict[int, tuple[tuple[HostIndex, ...], int]] = {}

    def name(self, hosts: tuple[HostIndex, ...]) -> tuple[int, bool]:
        """A set's number, and whether it is new, so that NameHosts must go first. 0: spell the set out."""
        if len(hosts) < _SMALLEST_NAMED:
            return 0, False
        cached = self._cache.get(id(hosts))
        if cached is not None:
            return cached[1], False
        number = self._numbers.get(hosts)
        is_new = number is None
        if number is None:
            number = self._numbers[hosts] = len(self._numbers) + 1
        if len(self._cache) >= _MOST_CACHED:
            self._cache.clear()
        self._cache[id(hosts)] = (hosts, number)
        return number, is_new
