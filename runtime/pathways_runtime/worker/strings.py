"""Arrays of strings on a host. No device holds them: they are bytes, each shard as in a host buffer."""

from collections.abc import Iterable, Sequence

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.status import Code, Status, StatusError
from pathways_runtime.core.worker.arrays import LocalArray
from pathways_runtime.worker.buffers import HostArray


class Strings:
    """This host's shards of an array of strings, as the executor's core carries them around. Immutable."""

    __slots__ = ("devices", "shards")

    def __init__(self, devices: Sequence[DeviceId], shards: Iterable[HostArray]) -> None:
        self.devices = tuple(devices)
        self.shards = tuple(shards)

    def nbytes(self) -> int:
        """On this host."""
        return sum(shard.nbytes for shard in self.shards)


def strings_of(array: LocalArray) -> Strings:
    """An array's strings.

    Raises:
        StatusError: it has failed, or holds no strings.
    """
    value = array.value
    if not isinstance(value, Strings):
        raise StatusError(array.failure or Status(Code.INVALID_ARGUMENT, f"array {array.handle} holds no strings"))
    return value
