"""Which versions of the IFRT proxy protocol and of IFRT's SerDes are spoken."""

from typing import NamedTuple

from pathways_runtime.core.status import Code, error


class Versions(NamedTuple):
    """A protocol version and an IFRT SerDes version."""

    protocol: int
    serdes: int


#: Below, executions say how they went by other means (protocol), or programs cannot be serialized (SerDes).
OLDEST = Versions(protocol=24, serdes=2)
#: The newest that were tried. jaxlib 0.10 speaks protocol 16 to 25 and SerDes 0 to 3; 0.12 speaks 16 to 25 and 2 to 6,
#: where remap plans say what goes where by devices only (6).
NEWEST = Versions(protocol=25, serdes=6)


def negotiate(client_oldest: Versions, client_newest: Versions) -> Versions:
    """The newest versions that both sides speak.

    Raises:
        StatusError: FAILED_PRECONDITION, saying what either side speaks.
    """
    chosen = Versions(
        min(client_newest.protocol, NEWEST.protocol),
        min(client_newest.serdes, NEWEST.serdes),
    )
    if chosen.protocol < max(client_oldest.protocol, OLDEST.protocol):
        raise _mismatch(
            "IFRT proxy protocol", client_oldest.protocol, client_newest.protocol, OLDEST.protocol, NEWEST.protocol
        )
    if chosen.serdes < max(client_oldest.serdes, OLDEST.serdes):
        raise _mismatch("IFRT SerDes", client_oldest.serdes, client_newest.serdes, OLDEST.serdes, NEWEST.serdes)
    return chosen


def _mismatch(name: str, client_oldest: int, client_newest: int, oldest: int, newest: int) -> Exception:
    return error(
        Code.FAILED_PRECONDITION,
        f"{name}: the client's jaxlib speaks versions {client_oldest} to {client_newest}, this proxy {oldest} to "
        f"{newest}; use a jax that `slurm-pathways doctor` lists as supported",
    )
