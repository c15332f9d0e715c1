"""Where the CPU devices of several executors meet to compute together: by private sockets, else by plain TCP."""

import logging
import os
from collections.abc import Callable, Sequence

from pathways_runtime.core.ids import HostIndex
from pathways_runtime.transport import addresses
from pathways_runtime.transport.tls_socket import Connection
from pathways_runtime.wire.messages import PeerAddress
from pathways_runtime.worker import private_sockets
from pathways_runtime.worker.private_sockets import OpenTunnel, PrivateSockets

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class Collectives:
    """One executor's part in them.

    A world's members must agree: all by private sockets, or none. So each says with its address whether it has some.

    Args:
        data_address: of the data plane, for executors of this host.
        open_tunnel: see there.
    """

    def __init__(self, platform: str, data_address: str, open_tunnel: OpenTunnel) -> None:
        self._is_on_cpu = platform == "cpu"
        self._has_sockets = self._is_on_cpu and private_sockets.is_preloaded()
        self._folder = private_sockets.folder_beside(data_address)
        self._open_tunnel = open_tunnel
        self._sockets: PrivateSockets | None = None
        self._has_warned = False

    def announce(self, data_address: str) -> str:
        """What peers are told of this executor."""
        return addresses.mark_private(data_address) if self._has_sockets else data_address

    def bind(self, host: HostIndex) -> None:
        """This executor stands behind ``host``, for good.

        Raises:
            OSError: see ``PrivateSockets``.
        """
        if self._has_sockets:
            self._sockets = PrivateSockets(self._folder, host, self._open_tunnel)

    def way_for(self, others: Sequence[PeerAddress], host_key: str, advertised: str | None) -> str:
        """The name that gloo is to listen at for a world.

        Args:
            others: its other members.
            host_key: of this host.
            advertised: where executors of other hosts reach this one; None: there are none.

        Raises:
            OSError: see ``PrivateSockets.lead_to``.
        """
        if not others or not self._is_on_cpu:
            return LOOPBACK
        without = [peer.name for peer in others if not addresses.without_mark(peer.data_address)[1]]
        if self._sockets is None or without:
            self._warn(without)
            is_one_host = {peer.host_key for peer in others} == {host_key}
            return LOOPBACK if advertised is None or is_one_host else advertised
        for peer in others:
            address, _ = addresses.without_mark(peer.data_address)
            is_here = peer.host_key == host_key
            self._sockets.lead_to(peer.host, private_sockets.folder_beside(address) if is_here else None)
        return self._sockets.own_stand_in

    def lose(self, host: HostIndex) -> None:
        """See ``PrivateSockets.lose``."""
        if self._sockets is not None:
            self._sockets.lose(host)

    def take_in(self, port: int) -> Callable[[Connection], None]:
        """See ``PrivateSockets.take_in``."""
        if self._sockets is None:
            raise ConnectionRefusedError("this executor's collectives have no private sockets")
        return self._sockets.take_in(port)

    def bytes_out(self) -> int:
        """What collectives have sent to other machines so far; 0 for what goes by plain TCP."""
        return 0 if self._sockets is None else self._sockets.bytes_out()

    def close(self) -> None:
        """See ``PrivateSockets.close``."""
        if self._sockets is not None:
            self._sockets.close()

    def _warn(self, without: Sequence[str]) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        reason = f"on {', '.join(without)}: see there"
        if not self._has_sockets:
            reason = private_sockets.why_not(os.environ) or f"{private_sockets.LIBRARY} could not be preloaded"
        logger.warning(
            "collectives between CPU devices of several hosts speak plain TCP, which other users of these hosts and of "
            "their network could disturb, read and change: %s",
            reason,
        )
