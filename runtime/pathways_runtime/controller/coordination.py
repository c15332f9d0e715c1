"""The coordination service of one world, in a process of its own.

When a coordination service ends, jaxlib aborts every process that is connected to it, within a fifth of a second. So
it lives neither in a worker nor in the controller but in this process, which does nothing else and is as small as
jaxlib allows.

    python -m pathways_runtime.controller.coordination --num-members 4 --lifeline-fd N --events-fd M

It says ``{"event": "listening", "address": "127.0.0.1:port"}`` once members may connect; with ``--host``, that host's
address instead of the loopback interface's.

This is the second place, beside ``worker.pjrt``, that calls jaxlib's private API: it must run without the rest of
JAX, and controller and worker do not import one another. jaxlib's service knows no authentication and no Unix
sockets. Other users of this machine can reach it, and of the network too when worlds span hosts; they could disturb the
forming of worlds, but neither read arrays nor run code through it (docs/security.md).
"""

import argparse
import os
import socket
import sys

from jaxlib import _jax

from pathways_runtime.transport.addresses import resolve
from pathways_runtime.transport.lifeline import EventWriter, die_with_parent

#: Silence after which the service takes a member for dead; must equal what ``worker.pjrt`` gives its clients. Long,
#: because it is the controller's heartbeat that finds dead hosts.
HEARTBEAT_TIMEOUT_S = 100
SHUTDOWN_TIMEOUT_S = 5
LOOPBACK = "127.0.0.1"


def reserve_port(host: str) -> socket.socket:
    """A socket bound to a free port of ``host``. gRPC binds the same port beside it; other users' processes cannot."""
    ip_address = resolve(host)
    reservation = socket.socket(socket.AF_INET6 if ":" in ip_address else socket.AF_INET)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reservation.bind((ip_address, 0))
    return reservation


def main() -> int:
    """Serve until the parent is gone or SIGTERM comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-members", type=int, required=True)
    parser.add_argument("--host", default=LOOPBACK, help="of the interface to listen on")
    parser.add_argument("--lifeline-fd", type=int, required=True)
    parser.add_argument("--events-fd", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    events = EventWriter(arguments.events_fd)
    with reserve_port(arguments.host) as reservation:
        ip_address, port = reservation.getsockname()[:2]
        address = f"[{ip_address}]:{port}" if ":" in ip_address else f"{ip_address}:{port}"
        # Recoverable: the loss of one member must not abort the others, whose arrays are still good.
        service = _jax.get_distributed_runtime_service(
            address,
            arguments.num_members,
            heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            recoverable=True,
        )
        events.write("listening", address=address)
        while os.read(arguments.lifeline_fd, 4096):
            pass
    # No orderly shutdown: it would wait for members, and whoever ends the service has ended them.
    del service
    return 0


if __name__ == "__main__":
    sys.exit(main())
