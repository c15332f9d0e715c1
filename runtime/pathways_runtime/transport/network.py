"""How a process takes part in connections between hosts: the job's credentials, and where others reach this host."""

import argparse
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pathways_runtime.transport import handshakes
from pathways_runtime.transport.addresses import TcpAddress, listen_tcp
from pathways_runtime.transport.credentials import Credentials
from pathways_runtime.transport.door import Door
from pathways_runtime.transport.handshakes import HandshakeFactory
from pathways_runtime.transport.tls_socket import Connection

#: Without an answer, before a peer's host is taken for lost.
_PROBES = 2

ENCRYPTIONS = ("tls", "none")


@dataclass(frozen=True, slots=True)
class Network:
    """What a process is given to speak with other hosts.

    Attributes:
        credentials: the job's.
        host: the name or IP address under which other hosts reach this one: that of the interface to use. None in a
            process where nobody connects from elsewhere.
        encrypts_data: whether the data plane encrypts. Control streams and session links always do.
        folder: of the credentials, for processes that this one starts.
        unreachable_timeout_s: for a process that others of this job connect to: a connection ends when the peer's host
            has not answered for so long. Its kernel answers also while the process is stopped or busy. None: the
            system's rule, which is hours.
    """

    credentials: Credentials
    host: str | None = None
    encrypts_data: bool = True
    folder: Path | None = None
    unreachable_timeout_s: float | None = None

    @property
    def any_port(self) -> str:
        """The address to listen at."""
        assert self.host is not None, "this process was not told under which name others reach it"
        return str(TcpAddress(self.host, 0))

    def accepting(self) -> HandshakeFactory:
        """Handshakes of control streams and session links."""
        return handshakes.tls_accepting(self.credentials)

    def connecting(self) -> HandshakeFactory:
        """See ``accepting``."""
        return handshakes.tls_connecting(self.credentials)

    def data_accepting(self) -> HandshakeFactory:
        """Handshakes of the data plane."""
        make = handshakes.tls_accepting if self.encrypts_data else handshakes.plain_accepting
        return make(self.credentials)

    def data_connecting(self) -> HandshakeFactory:
        """See ``data_accepting``."""
        make = handshakes.tls_connecting if self.encrypts_data else handshakes.plain_connecting
        return make(self.credentials)

    def as_options(self) -> list[str]:
        """``from_options``, for a process that this one starts and that has no part in the data plane.

        Empty where nobody connects from elsewhere.
        """
        if self.folder is None or self.host is None:
            return []
        return ["--credentials", str(self.folder), "--advertise", self.host]

    @classmethod
    def from_options(cls, credentials: Path | None, host: str | None, encryption: str = "tls") -> Self | None:
        """From a command line; None without credentials: nothing but Unix sockets then.

        Raises:
            CredentialsError: they cannot be loaded.
        """
        if credentials is None:
            return None
        return cls(Credentials.load(credentials), host, encryption != "none", credentials)


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--credentials`` and ``--advertise``, for ``Network.from_options``."""
    parser.add_argument(
        "--credentials", type=Path, metavar="DIR", help="folder of the job's credentials, which tcp: addresses need"
    )
    parser.add_argument("--advertise", metavar="HOST", help="name or address under which other hosts reach this one")


def add_encryption_option(parser: argparse.ArgumentParser) -> None:
    """``--data-plane-encryption``."""
    parser.add_argument(
        "--data-plane-encryption",
        choices=ENCRYPTIONS,
        default="tls",
        help="none: executors still prove to one another that they are of this job, then send arrays in plain text",
    )


def open_door(
    address: str,
    handshake: HandshakeFactory,
    on_connected: Callable[[Connection], None],
    advertise: str | None = None,
    unreachable_timeout_s: float | None = None,
) -> tuple[Door, str]:
    """A door at a TCP address, and the address to publish.

    Args:
        unreachable_timeout_s: see ``Network``.

    Raises:
        AddressError, OSError: see ``addresses.listen_tcp``.
    """
    listener, published = listen_tcp(address, advertise)
    if unreachable_timeout_s is not None:
        _probe_peers(listener, unreachable_timeout_s)
    return Door(listener, handshake, on_connected), published


def _probe_peers(listener: socket.socket, timeout_s: float) -> None:
    """Have the kernel ask peers that are silent whether they are there; what is accepted inherits it."""
    # Silence, then two questions without an answer. Not TCP_USER_TIMEOUT, which ends connections to peers that answer
    # but do not read.
    interval_s = max(1, round(timeout_s / (1 + _PROBES)))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, interval_s),
        (socket.TCP_KEEPINTVL, interval_s),
        (socket.TCP_KEEPCNT, _PROBES),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
