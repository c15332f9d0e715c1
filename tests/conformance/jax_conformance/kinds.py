"""Kinds of failures that plain JAX does not have, recognised by their first line, and what causes each."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """Failures of one cause.

    Attributes:
        pattern: found in the first line of such a failure, or in the test's id with ``in_id``.
        is_clients: whether JAX's client itself cannot do it, whatever the server does.
    """

    name: str
    pattern: str
    cause: str
    is_clients: bool
    in_id: bool = False

    def matches(self, test_id: str, message: str) -> bool:
        """Whether a failure is of this kind."""
        return re.search(self.pattern, test_id if self.in_id else message) is not None


UNSORTED = Kind("not sorted yet", "", "Not looked into.", is_clients=False)

#: The first that matches counts.
KINDS: tuple[Kind, ...] = (
    Kind(
        "host callbacks",
        "[Hh]ost callback|host_callback|HostCallback",
        "A form of callback that the client's plugin does not carry.",
        is_clients=False,
    ),
    Kind(
        "operations too new to be sent",
        "Failed to serialize StableHLO to plugin version",
        "JAX's client writes programs in a version of StableHLO some weeks old, so that servers can be older; what is "
        "newer (async collectives) it cannot write.",
        is_clients=True,
    ),
    Kind(
        "buffer protocol, dlpack",
        "Only local arrays are supported|__dlpack__|[Dd][Ll][Pp]ack",
        "JAX's client gives the memory of arrays of its own process only. Our plugin gives a copy: by DLPack, and as a "
        "buffer from Python 3.12 on, earlier ones have no way to. What is left calls jaxlib itself.",
        is_clients=True,
    ),
    Kind(
        "pointers of buffers",
        "implemented for a PjRt-compatible backend only",
        "unsafe_buffer_pointer asks for an address, which is one in another process.",
        is_clients=True,
    ),
    Kind(
        "memory statistics",
        "MemoryStats is only supported for addressable PjRt devices",
        "JAX's client does not ask the server.",
        is_clients=True,
    ),
    Kind(
        "executables taken apart",
        "not implemented for proxy|IFRT executable.*serializ|GetHloModules|hlo_modules|GetCompiledMemoryStats",
        "JAX's client does not ask the server for executables' modules, costs or serialized form.",
        is_clients=True,
    ),
    Kind(
        "donated arguments that had to be moved",
        "test_fully_replicated_donated_array_is_deleted",
        "Of an argument that lies elsewhere than its program needs it, plain JAX uses the shard that is in place and "
        "so deletes it; here it is copied and stays readable "
        "([why](decisions.md#what-the-clients-plugin-adds-to-arrays)).",
        is_clients=False,
        in_id=True,
    ),
    Kind(
        "what tokens are",
        "test_print_token_buffer_error",
        "Here they are empty arrays, which can be shown; plain JAX refuses to show a token.",
        is_clients=False,
        in_id=True,
    ),
    Kind(
        "how devices are written",
        "DeviceTest::test_(repr|str)",
        "str(device) says slice, host and coordinates.",
        is_clients=False,
        in_id=True,
    ),
)


def kind_of(test_id: str, message: str) -> Kind:
    """The first kind that a failure is of; ``UNSORTED`` when it is of none."""
    return next((kind for kind in KINDS if kind.matches(test_id, message)), UNSORTED)
